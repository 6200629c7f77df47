"""Where the time of an answer went, over a real socket."""

from __future__ import annotations

import json

import pytest
from http_harness import CHAT, COMPLETIONS, chat, completion, running, sse_events

from trioserve.engine.base import FinishReason
from trioserve.http import render
from trioserve.service import Done, Timings, Usage

BOTH = pytest.mark.parametrize(("path", "body"), [(CHAT, chat), (COMPLETIONS, completion)])


def ended(prompt, completion, cached, prefill, decode):
    return Done(FinishReason.STOP, Usage(prompt, completion, cached), Timings(0, 1.0, prefill, decode))


def test_what_is_told_of_one_answer():
    assert render.timings([ended(110, 9, 10, 200.0, 400.0)]) == {
        "cache_n": 10,
        "prompt_n": 100,
        "prompt_ms": 200.0,
        "prompt_per_token_ms": 2.0,
        "prompt_per_second": 500.0,
        "predicted_n": 9,
        "predicted_ms": 400.0,
        "predicted_per_token_ms": 50.0,
        "predicted_per_second": 20.0,
    }


def test_several_answers_have_all_tokens_and_the_longest_times():
    told = render.timings([ended(10, 3, 0, 100.0, 300.0), ended(20, 4, 5, 50.0, 500.0)])
    assert (told["cache_n"], told["prompt_n"], told["predicted_n"]) == (5, 25, 7)
    assert (told["prompt_ms"], told["predicted_ms"]) == (100.0, 500.0)
    assert told["predicted_per_second"] == 10.0


@pytest.mark.parametrize("tokens", [0, 1])
def test_where_there_is_nothing_to_measure_rates_are_zero(tokens):
    told = render.timings([ended(5, tokens, 5, 0.0, 0.0)])
    assert {value for name, value in told.items() if "_per_" in name} == {0.0}


@BOTH
async def test_whole_answers_have_them_where_they_are_asked_for(path, body):
    async with running() as server:
        told = (await server.call(path, body(timings_per_token=True))).json
        for fields in ({}, {"timings_per_token": False}, {"timings_per_token": None}):
            assert "timings" not in (await server.call(path, body(**fields))).json
    assert told["timings"]["prompt_n"] == told["usage"]["prompt_tokens"]
    assert told["timings"]["predicted_n"] == 8


@BOTH
async def test_in_a_stream_the_end_of_each_answer_has_them(path, body):
    async with running() as server:
        more = {"stream": True, "n": 2, "stream_options": {"include_usage": True}}
        reply = await server.call(path, body(timings_per_token=True, **more))
        plain = await server.call(path, body(**more))
    *chunks, done = sse_events(reply.body)
    assert done == "[DONE]"
    *chunks, usage = map(json.loads, chunks)
    assert "timings" not in usage
    for chunk in chunks:
        assert ("timings" in chunk) is (chunk["choices"][0]["finish_reason"] is not None)
    assert [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk] == [8, 8]
    assert b"timings" not in plain.body
