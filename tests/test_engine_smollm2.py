"""A real model: its answers have sense, its text is whole, and its weights are there once."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import GREEDY, answer, asking, loaded, opened, process_memory, smollm2

from trioserve.engine.base import FinishReason, SessionOptions
from trioserve.engine.sampling import Sampling

MIB = 1 << 20


@pytest.fixture(scope="module")
def weights():
    with loaded(smollm2()) as real:
        yield real


@pytest.fixture(scope="module")
def session(weights):
    with opened(weights, n_ctx=512) as only:
        yield only


def chat(weights, text):
    turns = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return weights.tokenize(turns, special=True, add_bos=True)


def bytes_of(weights, tokens):
    return b"".join(map(weights._vocabulary.piece, tokens))


def test_the_capital_of_france(weights, session):
    got = answer(session, asking(chat(weights, "What is the capital of France?"), 24), threads=2)
    assert got.text == "The capital of France is Paris."
    assert got.reason is FinishReason.STOP


def test_metadata(weights):
    assert weights.n_ctx_train == 8192
    assert (weights.bos_text, weights.eos_text) == ("<|im_start|>", "<|im_end|>")
    assert "<|im_start|>" in weights.chat_template
    assert weights.vocab_size == 49152


def test_this_model_wants_no_first_token(weights):
    assert weights.tokenize("", special=True, add_bos=True) == []
    assert weights.tokenize("Hi", special=True, add_bos=True) == weights.tokenize("Hi", special=True, add_bos=False)


@pytest.fixture(scope="module")
def single_bytes(weights):
    """The bytes that have a token of their own; this vocabulary lacks a few control characters."""
    pieces = map(weights._vocabulary.piece, range(weights.vocab_size))
    return {piece[0] for piece in pieces if len(piece) == 1}


@given(st.text())
@settings(deadline=None)
def test_pieces_of_a_text_are_its_bytes_but_for_those_without_a_token(weights, single_bytes, text):
    tokens = weights.tokenize(text, special=False, add_bos=False)
    assert bytes_of(weights, tokens) == bytes(byte for byte in text.encode() if byte in single_bytes)


def test_all_bytes_of_printable_text_have_a_token(single_bytes):
    assert {*range(0x20, 0x7F), *b"\n\r\t", *range(0x80, 0xC0), *range(0xC2, 0xF1)} <= single_bytes


@pytest.mark.parametrize("text", ["안녕하세요 세계", "👩‍👩‍👧‍👦 family 🏳️‍🌈", "naïve 漢字 ﷽"])
def test_characters_of_many_tokens_come_out_whole(weights, session, text):
    """A prompt that shows the text three times is answered with more of it, byte by byte, at every temperature."""
    prompt = weights.tokenize(f"{text}\n" * 3, special=False, add_bos=False)
    got = answer(session, asking(prompt, len(prompt) // 3, ignore_eos=True))
    assert len(got.tokens) > len(text.split())
    assert got.text == bytes_of(weights, got.tokens).decode("utf-8", "ignore")
    assert "\N{REPLACEMENT CHARACTER}" not in got.text
    assert any(char in got.text for char in text if not char.isascii())


def test_hot_answers_are_text_whatever_bytes_they_are_of(weights, session):
    for seed in range(5):
        sampling = Sampling(temperature=2.0, top_k=0, min_p=0.0, seed=seed)
        got = answer(session, asking([1], 30, sampling, ignore_eos=True))
        whole = bytes_of(weights, got.tokens).decode("utf-8", "replace")
        assert got.text.encode()  # no lone surrogates
        assert whole.startswith(got.text)
        assert len(whole) - len(got.text) <= 3  # the bytes of a character that the end cut off


def test_seeds_under_threads_and_chunks_give_one_answer(weights):
    """The sampled answer, not only the greedy one, is a function of the request alone."""
    sampling = dataclasses.replace(GREEDY, temperature=1.0, seed=42)
    request = asking(chat(weights, "Tell me about rivers. " * 10), 5, sampling, ignore_eos=True)
    answers = []
    for threads, chunk in ((1, 512), (2, 64), (1, 25)):
        with opened(weights, n_ctx=512, n_ubatch=chunk) as session:
            answers.append(answer(session, request, threads=threads).tokens)
    assert answers[1:] == answers[:1] * 2


def test_sessions_share_the_weights(weights):
    before = process_memory("RssAnon")
    sessions = [weights.open_session(SessionOptions(n_ctx=512)) for _ in range(4)]
    try:
        for session in sessions:
            answer(session, asking(chat(weights, "Hi"), 2))
        assert process_memory("RssAnon") - before < weights.size  # of four sessions together
        assert weights.size > 80 * MIB
    finally:
        for session in sessions:
            session.close()
