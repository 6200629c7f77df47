"""From token pieces to text: whole characters only, and never a stop string, however the text is cut."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trioserve.engine.text import StopScanner, TextAssembler

CJK = "機械は夢を見る。"
EMOJI = "a👩‍👩‍👧‍👦b🏳️‍🌈c"  # joined by U+200D
KOREAN = "안녕하세요, 세계!"
COMBINED = "e\u0301 n\u0303"  # letters and their marks are characters of their own
TEXTS = [CJK, EMOJI, KOREAN, COMBINED, "plain", "ß € 𐍈"]


def assemble(pieces, stops=()):
    """Feed pieces until a stop string is met, and return what was sent for each, the flush last."""
    assembler = TextAssembler(stops)
    sent = []
    for piece in pieces:
        sent.append(assembler.feed(piece))
        if assembler.stopped:
            break
    sent.append(assembler.flush())
    return sent


def scan(pieces, stops):
    scanner = StopScanner(stops)
    sent = []
    for piece in pieces:
        sent.append(scanner.feed(piece))
        if scanner.matched is not None:
            return "".join(sent), scanner.matched
    return "".join([*sent, scanner.flush()]), None


def first_stop(text, stops):
    """The contract, spelled out: start and text of the stop that is complete first, the longest one of equals."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return end - len(stop), stop
    return None


def expected(text, stops):
    found = first_stop(text, stops)
    return (text, None) if found is None else (text[: found[0]], found[1])


def cut(whole, borders):
    places = [0, *sorted({border % (len(whole) + 1) for border in borders}), len(whole)]
    return [whole[start:end] for start, end in itertools.pairwise(places)]


# -- characters


@pytest.mark.parametrize("text", TEXTS)
def test_text_cut_at_any_byte_comes_out_whole(text):
    data = text.encode()
    for border in range(len(data) + 1):
        sent = assemble([data[:border], data[border:]])
        assert "".join(sent) == text
        assert "\ufffd" not in sent[0]


@pytest.mark.parametrize("text", TEXTS)
def test_text_that_comes_byte_by_byte_comes_out_in_whole_characters(text):
    sent = assemble(bytes([byte]) for byte in text.encode())
    assert [piece for piece in sent if piece] == list(text)


def test_a_character_appears_with_its_last_byte():
    assembler = TextAssembler()
    assert [assembler.feed(bytes([byte])) for byte in "한".encode()] == ["", "", "한"]


@pytest.mark.parametrize("data", [b"\xff", b"\x80", b"\xc0\xaf", b"\xed\xa0\x80", b"\xe4\xb8A", b"a\xf0\x9fb"])
def test_bytes_that_cannot_be_utf8_become_replacement_characters(data):
    for border in range(len(data) + 1):
        text = "".join(assemble([data[:border], data[border:], b"end"]))
        assert text == (data + b"end").decode("utf-8", "replace")
        assert "\ufffd" in text
        assert text.endswith("end")


@pytest.mark.parametrize("character", ["ß", "한", "👧"])
def test_a_character_that_the_end_cut_off_is_dropped(character):
    data = character.encode()
    for length in range(1, len(data)):
        assert "".join(assemble([b"ok", data[:length]])) == "ok"


@given(st.binary(max_size=40), st.lists(st.integers(0, 1000), max_size=8))
@example(b"\xf0\x9f\x91\xf0", [1, 2, 3])
def test_any_bytes_decode_the_same_however_they_are_cut(data, borders):
    pieces = cut(data, borders)
    whole = (data + b"|").decode("utf-8", "replace")
    assert "".join(assemble([*pieces, b"|"])) == whole
    # Without anything behind it, an incomplete last character is dropped and not replaced.
    assert whole.startswith("".join(assemble(pieces)))


# -- stop strings


def test_a_stop_string_across_pieces_never_appears():
    assert assemble([b"one E", b"N", b"D two"], ["END"]) == ["one ", "", "", ""]


def test_a_stop_string_in_the_middle_of_a_piece_ends_the_text_there():
    assembler = TextAssembler(["\n"])
    assert assembler.feed(b"first\nsecond") == "first"
    assert assembler.stopped
    assert assembler.stop == "\n"
    assert assembler.flush() == ""


def test_what_only_looked_like_a_stop_is_sent_once_it_is_known():
    assert assemble([b"E", b"N", b"TER"], ["END"]) == ["", "", "ENTER", ""]


def test_a_beginning_of_a_stop_at_the_end_of_the_answer_is_flushed():
    assembler = TextAssembler(["END"])
    assert assembler.feed(b"the EN") == "the "
    assert assembler.flush() == "EN"
    assert assembler.flush() == ""
    assert assembler.stop is None


def test_text_before_a_stop_string_is_not_lost():
    assert scan(["a", "b", "c", "\n"], ["\n"]) == ("abc", "\n")


@pytest.mark.parametrize(
    ("stops", "text", "result"),
    [
        (["bc", "abcd"], "xabcd", ("xa", "bc")),  # complete first wins
        (["cd", "abcd"], "xabcd", ("x", "abcd")),  # of two complete at once the longer
        (["abcd", "cd"], "xabcd", ("x", "abcd")),  # whatever their order
        (["aab"], "aaab", ("a", "aab")),  # a stop that begins inside a false start
        (["abab"], "ababab", ("", "abab")),
        (["b", "a"], "cab", ("c", "a")),
        (["x"], "x", ("", "x")),
        (["안녕"], "말: 안녕하세요", ("말: ", "안녕")),
    ],
)
def test_which_stop_wins_depends_on_the_text_alone(stops, text, result):
    for size in range(1, len(text) + 1):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert scan(pieces, stops) == result


def test_a_stop_of_characters_of_several_bytes_is_found_between_bytes():
    data = "前👧後".encode()
    assert "".join(assemble([bytes([byte]) for byte in data], ["👧"])) == "前"


def test_without_stops_nothing_is_held_back():
    assert assemble([b"a", b"b"]) == ["a", "b", ""]


ALPHABET = st.sampled_from("aab\n한👧")  # few letters: beginnings of stops are common
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3)
BORDERS = st.lists(st.integers(0, 1000), max_size=12)


@given(st.text(ALPHABET, max_size=30), STOPS, BORDERS)
def test_the_text_sent_is_what_stands_before_the_first_complete_stop(text, stops, borders):
    assert scan(cut(text, borders), stops) == expected(text, stops)


@given(st.text(ALPHABET, max_size=30), STOPS, BORDERS)
def test_bytes_cut_anywhere_give_the_same_text_without_a_stop_in_it(text, stops, borders):
    sent = "".join(assemble(cut(text.encode(), borders), stops))
    assert sent == expected(text, stops)[0]
    assert not any(stop in sent for stop in stops)


@given(st.text(ALPHABET, max_size=30), STOPS, BORDERS)
def test_what_was_sent_is_always_a_prefix_of_the_final_text(text, stops, borders):
    final = expected(text, stops)[0]
    sent = ""
    for piece in assemble(cut(text.encode(), borders), stops):
        sent += piece
        assert final.startswith(sent)
    assert sent == final


@given(st.text(ALPHABET, max_size=30), STOPS, BORDERS)
def test_no_more_is_held_back_than_could_become_a_stop(text, stops, borders):
    scanner, fed, sent = StopScanner(stops), "", ""
    for piece in cut(text, borders):
        fed, sent = fed + piece, sent + scanner.feed(piece)
        if scanner.matched is not None:
            return
        held = fed[len(sent) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
