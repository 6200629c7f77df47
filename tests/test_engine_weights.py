"""Loading: what is read from a file, what is refused and why, and that all of it is given back."""

import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import (
    BOS,
    EOS,
    FIRST_BYTE,
    TEMPLATE,
    UNKNOWN,
    answer,
    asking,
    growth,
    loaded,
    opened,
    process_memory,
    tiny_encoder,
    tiny_encoder_decoder,
    tiny_model,
)

from trioserve.engine.base import LoadFailure, LoadOptions, SessionOptions
from trioserve.engine.llama import LlamaEngine
from trioserve.engine.llama.vocabulary import Vocabulary

MIB = 1 << 20
SPACE_MARK = "▁"  # the tokenizer's own sign for a space, which it reads as one


@pytest.fixture(scope="module")
def weights():
    with loaded(tiny_model()) as tiny:
        yield tiny


@pytest.fixture(scope="module")
def vocabulary(weights):
    return weights._vocabulary


@pytest.fixture
def damaged(tmp_path):
    """Write a changed copy of a good file."""

    def write(change):
        path = tmp_path / "damaged.gguf"
        path.write_bytes(change(tiny_model().read_bytes()))
        return path

    return write


def reason_of(path):
    with pytest.raises(LoadFailure) as failure:
        LlamaEngine().load(path, LoadOptions())
    return str(failure.value)


def wide(**fields):
    """A file of about 9 MiB: one that is not freed shows."""
    return tiny_model(dim=256, ff=1024, layers=2, **fields)


# --- what a file says ---


def test_metadata_is_read_from_the_file():
    path = tiny_model(n_ctx_train=384, template=TEMPLATE)
    with loaded(path) as weights:
        assert weights.n_ctx_train == 384
        assert weights.chat_template == TEMPLATE
        assert (weights.bos, weights.bos_text, weights.eos_text) == (BOS, "<s>", "</s>")
        assert "llama" in weights.name
        assert 0 < weights.size < path.stat().st_size
        assert weights.max_sessions > 1


def test_the_vocabulary_has_the_size_of_the_file(weights):
    assert weights.vocab_size == len(weights._vocabulary._pieces) > 300


def test_a_file_without_a_template_has_none(weights):
    assert weights.chat_template is None


def test_quantised_weights_are_smaller(weights):
    with loaded(tiny_model(quantised=True)) as quantised:
        assert quantised.size < weights.size / 2


@pytest.mark.parametrize("options", [{"mmap": False}, {"mmap": True}, {"gpu_layers": -1}, {"mlock": True}])
def test_answers_do_not_depend_on_how_a_file_is_read(weights, options):
    request = asking([BOS, 300, 301, 302])
    with loaded(tiny_model(), **options) as others, opened(others) as other, opened(weights) as session:
        assert answer(other, request).tokens == answer(session, request).tokens


@pytest.mark.parametrize("mmap", [False, True])
def test_a_file_is_mapped_where_asked_for_and_read_elsewhere(mmap):
    path = wide()
    with loaded(path, mmap=mmap):
        assert (str(path) in Path("/proc/self/maps").read_text()) == mmap


@pytest.mark.parametrize("mmap", [False, True])
def test_weights_are_locked_in_memory_where_asked_for(mmap):
    path = tiny_model()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < 2 * path.stat().st_size:
        pytest.skip("this process may not lock so much memory")
    with loaded(path, mmap=mmap):
        before = process_memory("VmLck")
    with loaded(path, mmap=mmap, mlock=True) as locked:
        assert process_memory("VmLck") - before > locked.size / 2


# --- tokens ---


@given(st.text().filter(lambda text: SPACE_MARK not in text))
@settings(deadline=None)
def test_pieces_of_a_text_are_its_bytes(weights, vocabulary, text):
    tokens = weights.tokenize(text, special=False, add_bos=False)
    assert b"".join(map(vocabulary.piece, tokens)) == text.encode()


def test_byte_tokens_are_their_bytes(vocabulary):
    assert b"".join(vocabulary.piece(FIRST_BYTE + byte) for byte in range(256)) == bytes(range(256))


def test_every_piece_of_the_vocabulary_is_bytes_and_only_specials_have_none(weights, vocabulary):
    empty = [token for token in range(weights.vocab_size) if vocabulary.piece(token) == b""]
    assert set(empty) <= {UNKNOWN, BOS, EOS}
    assert {BOS, EOS} <= set(empty)
    assert all(isinstance(vocabulary.piece(token), bytes) for token in range(weights.vocab_size))


def test_pieces_are_the_same_when_asked_again(weights, vocabulary):
    tokens = range(weights.vocab_size)
    assert [vocabulary.piece(token) for token in tokens] == [vocabulary.piece(token) for token in tokens]


def test_special_tokens_are_read_where_asked_for_and_are_plain_text_elsewhere(weights):
    read = weights.tokenize("<s>a</s>", special=True, add_bos=False)
    plain = weights.tokenize("<s>a</s>", special=False, add_bos=False)
    assert (read[0], read[-1]) == (BOS, EOS)
    assert not {BOS, EOS} & set(plain)


@pytest.mark.parametrize("text", ["", "the", "\x00"])
def test_the_first_token_is_put_in_front_where_it_is_asked_for_and_wanted(weights, text):
    bare = weights.tokenize(text, special=False, add_bos=False)
    assert weights.tokenize(text, special=False, add_bos=True) == [BOS, *bare]
    with loaded(tiny_model(add_bos=False)) as without:
        assert without.tokenize(text, special=False, add_bos=True) == bare


def test_an_empty_text_has_no_tokens(weights):
    assert weights.tokenize("", special=True, add_bos=False) == []


def test_long_texts_are_tokenized_whole(weights, vocabulary):
    text = "the 한국 🙂 漢\n" * 20_000
    tokens = weights.tokenize(text, special=False, add_bos=False)
    assert b"".join(map(vocabulary.piece, tokens)) == text.encode()


def test_texts_are_tokenized_in_many_threads_at_once(weights):
    texts = ["the bad nite " * n for n in range(40)]
    alone = [weights.tokenize(text, special=True, add_bos=True) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(weights.tokenize, text, special=True, add_bos=True) for text in texts * 5]
        assert [job.result() for job in jobs] == alone * 5


def test_end_tokens_are_those_that_end_generation(weights, vocabulary):
    assert vocabulary.end_tokens == [EOS]
    with loaded(tiny_model(eos=300)) as other:
        assert 300 in Vocabulary(other._model).end_tokens


# --- what is refused ---


@pytest.mark.parametrize("keep", [0.2, 0.6, 0.99])
def test_a_truncated_file_is_refused_with_a_reason(damaged, keep):
    reason = reason_of(damaged(lambda data: data[: int(len(data) * keep)]))
    assert "damaged.gguf" in reason or "file bounds" in reason


def test_a_header_with_rubbish_behind_it_is_refused_with_a_reason(damaged):
    assert "failed to read" in reason_of(damaged(lambda data: data[:8] + b"\xff" * 64))


@pytest.mark.parametrize("length", [0, 3, 4, 8])
def test_a_file_that_ends_in_its_header_is_refused_with_a_reason(damaged, length):
    assert "damaged.gguf" in reason_of(damaged(lambda data: data[:length]))


def test_another_kind_of_file_is_refused_with_a_reason(damaged):
    assert "magic" in reason_of(damaged(lambda data: b"PK\3\4" + data[4:]))


def test_a_missing_file_is_refused_with_a_reason(tmp_path):
    assert "nowhere.gguf" in reason_of(tmp_path / "nowhere.gguf")


def test_an_unknown_architecture_is_refused_by_name():
    assert "'lama'" in reason_of(tiny_model(architecture="lama"))


def test_a_model_without_a_vocabulary_is_refused():
    assert reason_of(tiny_model(vocabulary=False)) == "the file has no vocabulary"


def test_a_model_with_an_encoder_is_refused():
    assert "encoder" in reason_of(tiny_encoder_decoder())


def test_a_model_that_only_embeds_opens_no_session():
    with loaded(tiny_encoder()) as weights, pytest.raises(LoadFailure, match="give it task"):
        weights.open_session(SessionOptions(n_ctx=128))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_dtype": "q8_0", "flash_attention": False}, "flash_attn"),
        ({"kv_dtype": "q8_0"}, "block size"),  # heads of 16 are half a block
    ],
)
def test_a_session_that_cannot_be_made_says_why(weights, options, reason):
    with pytest.raises(LoadFailure, match=reason):
        weights.open_session(SessionOptions(n_ctx=128, **options))


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_every_type_of_cache_answers(kv_dtype):
    with loaded(tiny_model(heads=2)) as weights, opened(weights, kv_dtype=kv_dtype) as session:
        assert len(answer(session, asking([BOS, 300, 301], 8, ignore_eos=True)).tokens) == 8


def test_loads_that_fail_at_once_have_each_their_own_reason(damaged):
    together = threading.Barrier(2)

    def fail(path):
        together.wait()
        return reason_of(path)

    truncated = damaged(lambda data: data[:-1000])
    for _ in range(10):
        with ThreadPoolExecutor(2) as pool:
            bounds, unknown = pool.map(fail, [truncated, tiny_model(architecture="lama")])
        assert "file bounds" in bounds
        assert "file bounds" not in unknown


def test_the_library_writes_nothing_to_the_terminal(damaged, capfd):
    with loaded(tiny_model()) as weights, opened(weights) as session:
        answer(session, asking([BOS, 300]))
        answer(session, asking([BOS, -1]))
    reason_of(damaged(lambda data: data[:-1000]))
    with loaded(tiny_encoder()) as weights, pytest.raises(LoadFailure):
        weights.open_session(SessionOptions(n_ctx=128))
    assert capfd.readouterr() == ("", "")


# --- progress, and giving back ---


@pytest.mark.parametrize("mmap", [False, True])
def test_progress_rises_to_one(mmap):
    told = []
    LlamaEngine().load(wide(), LoadOptions(mmap=mmap), lambda fraction: told.append(fraction) or True).close()
    assert told == sorted(told)
    assert told[0] >= 0
    assert told[-1] == 1


def test_progress_comes_in_the_thread_that_loads():
    threads = set()
    LlamaEngine().load(tiny_model(), LoadOptions(), lambda _: threads.add(threading.get_ident()) or True).close()
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("after", [0.0, 0.3])
def test_a_load_is_given_up_when_progress_says_so(after):
    told = []

    def give_up(fraction):
        told.append(fraction)
        return fraction < after

    with pytest.raises(LoadFailure):
        LlamaEngine().load(wide(), LoadOptions(mmap=False), give_up)
    assert after <= told[-1] < 1
    assert all(fraction < after for fraction in told[:-1])


def test_closing_twice_is_closing_once():
    weights = LlamaEngine().load(tiny_model(), LoadOptions())
    session = weights.open_session(SessionOptions(n_ctx=128))
    for closable in (session, session, weights, weights):
        closable.close()


@pytest.mark.parametrize(("mmap", "kind"), [(False, "RssAnon"), (True, "RssFile")])
def test_closed_weights_give_their_memory_back(mmap, kind):
    path = wide()

    def load_and_close():
        LlamaEngine().load(path, LoadOptions(mmap=mmap)).close()

    assert growth(load_and_close, 20, kind) < path.stat().st_size


def test_refused_models_give_their_memory_back():
    path = wide(vocabulary=False)
    assert growth(lambda: reason_of(path), 20, "RssAnon", "RssFile") < path.stat().st_size


def test_loads_that_are_given_up_give_their_memory_back():
    path = wide()

    def give_up():
        with pytest.raises(LoadFailure):
            LlamaEngine().load(path, LoadOptions(mmap=False), lambda fraction: fraction < 0.5)

    assert growth(give_up, 20, "RssAnon") < path.stat().st_size


def test_closed_sessions_give_their_memory_back(weights):
    def open_and_close():
        with opened(weights, n_ctx=4096) as session:
            answer(session, asking([BOS, 300]))

    one_cache = 4096 * 2 * 2 * 64 * 2  # tokens, layers, K and V, dim, bytes
    assert growth(open_and_close, 20, "RssAnon") < 4 * one_cache


def test_refused_sessions_give_their_memory_back():
    with loaded(tiny_encoder()) as weights:

        def refuse():
            with pytest.raises(LoadFailure):
                weights.open_session(SessionOptions(n_ctx=256))

        assert growth(refuse, 40, "RssAnon") < 4 * MIB


@pytest.mark.parametrize(("given", "gap"), [((300, 301, 302), (300, 301, 302)), ((300, 301), None), ((), None)])
def test_tokens_for_filling_gaps(given, gap):
    with loaded(tiny_model(gap=given)) as weights:
        assert weights.gap == gap


def test_pieces_of_special_tokens_are_told():
    with loaded(tiny_model()) as weights:
        assert weights.piece(BOS) == b"<s>"
        assert b"".join(map(weights.piece, weights.tokenize("the é", special=False, add_bos=False))) == "the é".encode()
