"""Prompts that are told before their answers, and texts that follow them, over a real socket."""

from __future__ import annotations

import json

import pytest
from http_harness import COMPLETIONS, PROMPT, assert_error, chat, completion, expected, running, sse_events

from trioserve.engine.base import GapTokens
from trioserve.testing import FakeEngine

GAP = GapTokens(1, 2, 3)


def with_gap():
    """An engine whose models fill gaps."""
    engine = FakeEngine()
    engine.gap = GAP
    return engine


def filled(before, after, tokens=8):
    """What the fake says between two texts."""
    return expected(f"\1{before}\2{after}\3", tokens)


def texts(reply):
    assert reply.status == 200, reply.body
    return [choice["text"] for choice in reply.json["choices"]]


# Echo


@pytest.mark.parametrize("prompt", [PROMPT, list(PROMPT.encode())], ids=["text", "tokens"])
async def test_the_prompt_comes_before_the_answer(prompt):
    async with running() as server:
        reply = await server.call(COMPLETIONS, completion(prompt, echo=True))
        plain = await server.call(COMPLETIONS, completion(prompt))
    assert texts(reply) == [PROMPT + expected()]
    assert reply.json["usage"] == plain.json["usage"]


async def test_in_a_stream_it_is_the_first_chunk():
    async with running() as server:
        reply = await server.call(COMPLETIONS, completion(echo=True, stream=True))
    *chunks, done = sse_events(reply.body)
    pieces = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks]
    assert done == "[DONE]"
    assert (pieces[0], "".join(pieces[1:])) == (PROMPT, expected())


async def test_each_of_several_prompts_comes_before_its_answers():
    async with running() as server:
        reply = await server.call(COMPLETIONS, completion(["a", [0xC3], "b"], echo=True, n=2))
    told = texts(reply)
    assert told[:2] == ["a" + expected("a")] * 2
    assert told[4:] == ["b" + expected("b")] * 2
    assert all(text.startswith("\ufffd") and len(text) == 9 for text in told[2:4])


async def test_an_echo_of_an_item_of_a_batch():
    async with running() as server:
        body = {"requests": [completion(max_tokens=0), completion("a", echo=True), completion("b")]}
        reply = await server.call("/v1/tasks/batch", body)
    lines = [line for line in reply.body.decode().splitlines() if line.startswith("data: ")]
    results = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    told = {item["index"]: item["result"]["text"] for item in results if "result" in item}
    assert told == {1: "a" + expected("a"), 2: expected("b")}


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"logprobs": 0}, "echo"), ({"max_tokens": 0}, "max_tokens"), ({"echo": 1}, "echo")],
)
async def test_what_an_echo_can_not_be(fields, param):
    async with running() as server:
        reply = await server.call(COMPLETIONS, completion(**{"echo": True, **fields}))
        assert_error(reply, 400, "invalid_request_error", param=param)


async def test_a_conversation_has_none():
    async with running() as server:
        reply = await server.call("/v1/tasks/run", chat(echo=True))
        plain = await server.call("/v1/tasks/run", chat())
    assert reply.json["text"] == plain.json["text"]


# Suffix


@pytest.mark.parametrize("prompt", ["def f(", list(b"def f(")], ids=["text", "tokens"])
async def test_a_gap_is_filled(prompt):
    async with running(with_gap()) as server:
        reply = await server.call(COMPLETIONS, completion(prompt, suffix="):"))
        assert texts(reply) == [filled("def f(", "):")]
        assert reply.json["usage"]["prompt_tokens"] == len("def f(") + len("):") + 3
        assert texts(await server.call(COMPLETIONS, completion("", suffix="):"))) == [filled("", "):")]


async def test_an_echo_is_what_comes_before_the_gap():
    async with running(with_gap()) as server:
        reply = await server.call(COMPLETIONS, completion("a", suffix="b", echo=True))
    assert texts(reply) == ["a" + filled("a", "b")]


async def test_a_model_without_the_tokens_refuses():
    async with running() as server:
        reply = await server.call(COMPLETIONS, completion(suffix="b"))
        error = assert_error(reply, 400, "invalid_request_error", param="suffix")
        assert "no tokens for filling" in error["message"]
        assert texts(await server.call(COMPLETIONS, completion(suffix=""))) == [expected()]


@pytest.mark.parametrize("length", [100, 300_000])
async def test_a_suffix_counts_as_the_prompt_does(length):
    async with running(with_gap(), models=[{"n_ctx": 100}]) as server:
        reply = await server.call(COMPLETIONS, completion(suffix="x" * length))
        assert_error(reply, 400, "invalid_request_error", code="context_length_exceeded", param="prompt")
