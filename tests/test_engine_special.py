"""A text that is cut has the tokens of the whole."""

import random

import pytest
from tiny_models import loaded, smollm2, tiny_encoder, tiny_model

from trioserve.engine.llama import vocabulary
from trioserve.engine.llama.special import LARGE_PART, Cutter, Special


def special(text, *, plain=False, strips_left=False, strips_right=False):
    return Special(text, plain, strips_left, strips_right)


def parts(data, *specials, read=True):
    found = Cutter(specials).parts(data, special=read)
    assert b"".join(found) == data
    return found


def test_a_text_is_cut_behind_its_special_tokens():
    found = parts(b"a<s>" * 3 * LARGE_PART, special(b"<s>"))
    assert found == [b"a<s>" * LARGE_PART] * 3


@pytest.mark.parametrize("data", [b"", b"a", b"<s>" * LARGE_PART, b"<s>" * (LARGE_PART - 1) + b"a"])
def test_what_is_not_cut(data):
    assert parts(data, special(b"<s>")) == [data]


def test_special_tokens_that_are_not_read_are_no_place_to_cut():
    data = b"a<s><u>" * 2 * LARGE_PART
    assert len(parts(data, special(b"<s>"), read=False)) == 1
    assert parts(data, special(b"<s>"), special(b"<u>", plain=True), read=False) == [b"a<s><u>" * LARGE_PART] * 2


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (b"aaa ", [b"aa"]),  # which of the two is found?
        (b"abc ", [b"ab", b"bc"]),
        (b"abcd ", [b"ab", b"bcd"]),
    ],
)
def test_special_tokens_that_share_characters_are_no_place_to_cut(data, texts):
    assert len(parts(data * 2 * LARGE_PART, *map(special, texts))) == 1


def test_one_that_holds_others_is():
    data = b"x<s><t>" * 2 * LARGE_PART
    assert parts(data, special(b"<s>"), special(b"<t>"), special(b"<s><t>")) == [b"x<s><t>" * LARGE_PART] * 2


def test_white_space_goes_with_the_token_that_drops_it():
    data = b"<s> \na" * 2 * LARGE_PART
    cut = b"<s> \na" * (LARGE_PART - 1) + b"<s> \n"
    assert parts(data, special(b"<s>", strips_right=True))[0] == cut
    assert parts(data, special(b"<s>"))[0] == cut[:-2]


def test_white_space_that_a_neighbour_may_drop_is_no_place_to_cut():
    data = b"a\n\n" * 2 * LARGE_PART
    assert len(parts(data, special(b"\n\n", plain=True))) == 2
    assert len(parts(data, special(b"\n\n", plain=True), special(b"<s>", strips_left=True))) == 1


@pytest.fixture(scope="module", params=["bpe", "spm", "bert", "bert with an end"])
def tokenizer(request):
    paths = {
        "bpe": smollm2,
        "spm": tiny_model,
        "bert": tiny_encoder,
        "bert with an end": lambda: tiny_encoder(add_eos=True),
    }
    with loaded(paths[request.param]()) as weights:
        yield weights._vocabulary


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("add_bos", [True, False])
def test_real_tokenizers_see_no_difference(monkeypatch, tokenizer, read, add_bos):
    monkeypatch.setattr(vocabulary, "_LONG_BYTES", 0)
    rng = random.Random(5)
    words = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<", "|>", " ", "\n", "a", "the", "é", "<s", ">"]
    cut = 0
    for count in [0, 1, 10, 500, 500, 1000]:
        text = "".join(rng.choices(words, k=count))
        cut += len(tokenizer._cutter.parts(text.encode(), special=read)) > 1
        whole = tokenizer._tokenize(text.encode(), special=read, add_bos=add_bos)
        assert tokenizer.tokenize(text, special=read, add_bos=add_bos) == whole
    assert cut == (3 if read else 0)
