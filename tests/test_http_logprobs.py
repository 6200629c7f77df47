"""Logarithms of probability in the shapes of chat and text completions, with a tiny real model."""

from __future__ import annotations

import contextlib
import math

import pytest
from http_harness import CHAT, COMPLETIONS, running
from tiny_models import smollm2

from trioserve.engine.llama import LlamaEngine


@contextlib.asynccontextmanager
async def serving():
    async with running(LlamaEngine(), models=[{"path": str(smollm2()), "n_ctx": 256, "threads": 1}]) as server:
        yield server


CHAT_BODY = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 6, "temperature": 0}
TEXT_BODY = {"prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}


def check(entry, top):
    assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
    assert -9999 <= entry["logprob"] <= 0
    assert len(entry["top_logprobs"]) == top
    assert [set(other) for other in entry["top_logprobs"]] == [{"token", "logprob", "bytes"}] * top
    if top:
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"], "greedy takes the most likely one"
        assert sum(math.exp(other["logprob"]) for other in entry["top_logprobs"]) <= 1.000001


@pytest.mark.parametrize("top", [0, 4])
async def test_a_chat_tells_how_likely_its_tokens_were(top):
    async with serving() as server:
        body = {**CHAT_BODY, "logprobs": True, "top_logprobs": top}
        whole = (await server.call(CHAT, body)).json["choices"][0]
        streamed = await server.call(CHAT, {**body, "stream": True})
        plain = (await server.call(CHAT, CHAT_BODY)).json["choices"][0]
    content = whole["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == whole["message"]["content"]
    for entry in content:
        check(entry, top)
    pieces = [chunk["choices"][0] for chunk in streamed.chunks]
    in_chunks = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
    assert in_chunks == content
    for piece in pieces:
        if piece["logprobs"]:
            assert "".join(entry["token"] for entry in piece["logprobs"]["content"]) == piece["delta"]["content"]
    assert plain["message"] == whole["message"]
    assert plain["logprobs"] is None


@pytest.mark.parametrize("top", [0, 3])
async def test_a_completion_tells_how_likely_its_tokens_were(top):
    async with serving() as server:
        choice = (await server.call(COMPLETIONS, {**TEXT_BODY, "logprobs": top})).json["choices"][0]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["top_logprobs"]) == len(told["text_offset"])
    for token, logprob, others, offset in zip(*told.values(), strict=True):
        assert choice["text"][offset:].startswith(token)
        assert len(others) == top
        if top:
            assert others[token] == logprob == max(others.values())


async def test_tokens_of_a_stop_string_are_not_told():
    async with serving() as server:
        free = (await server.call(COMPLETIONS, {**TEXT_BODY, "max_tokens": 20})).json["choices"][0]["text"]
        stop = free[8:12]
        body = {**TEXT_BODY, "max_tokens": 20, "stop": [stop], "logprobs": 0}
        choice = (await server.call(COMPLETIONS, body)).json["choices"][0]
    assert choice["text"] == free[: free.index(stop)]
    assert stop not in "".join(choice["logprobs"]["tokens"][:-1])


async def test_a_bias_is_honoured_and_an_unknown_token_refused():
    async with serving() as server:
        free = (await server.call(COMPLETIONS, {**TEXT_BODY, "logprobs": 0})).json["choices"][0]
        (token,) = (await server.call(COMPLETIONS, {**TEXT_BODY, "logprobs": 1, "max_tokens": 1})).json["choices"]
        refused = await server.call(COMPLETIONS, {**TEXT_BODY, "logit_bias": {"99999999": 1}})
        biased = (await server.call(COMPLETIONS, {**TEXT_BODY, "logit_bias": {"100": 100}})).json["choices"][0]
    assert token["logprobs"]["tokens"] == free["logprobs"]["tokens"][:1]
    assert refused.status == 400
    assert refused.json["error"]["param"] == "logit_bias"
    assert len(set(biased["text"])) < len(set(free["text"]))
