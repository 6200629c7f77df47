"""Texts, tokens and prompts over a real socket."""

from __future__ import annotations

import threading

import pytest
from http_harness import CHAT, COMPLETIONS, assert_error, chat, completion, running, until
from tiny_models import smollm2

from trioserve.chat import CHATML_TEMPLATE
from trioserve.engine.llama import LlamaEngine
from trioserve.http import text
from trioserve.service import reading
from trioserve.testing import FakeEngine
from trioserve.testing.fake_engine import END, FakeSession, FakeWeights

TOKENIZE, DETOKENIZE, TEMPLATE = "/tokenize", "/detokenize", "/apply-template"
INPUT_TOKENS = "/v1/chat/completions/input_tokens"
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
ALL = [
    (TOKENIZE, {"content": "text"}),
    (DETOKENIZE, {"tokens": [1, 2]}),
    (TEMPLATE, chat()),
    (INPUT_TOKENS, chat()),
]


def good(reply):
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "application/json"
    return reply.json


# What is told


async def test_tokens_of_a_text():
    async with running() as server:
        assert good(await server.call(TOKENIZE, {"content": "aé"})) == {"tokens": [97, 0xC3, 0xA9]}
        assert good(await server.call(TOKENIZE, {"content": ""})) == {"tokens": []}


async def test_pieces_are_texts_or_else_bytes():
    async with running() as server:
        told = good(await server.call(TOKENIZE, {"content": "aé", "with_pieces": True}))
    assert told["tokens"] == [
        {"id": 97, "piece": "a"},
        {"id": 0xC3, "piece": [0xC3]},
        {"id": 0xA9, "piece": [0xA9]},
    ]


@pytest.mark.parametrize(
    ("fields", "special", "add_bos"),
    [
        ({}, True, False),
        ({"add_special": None, "parse_special": None}, True, False),
        ({"add_special": True}, True, True),
        ({"parse_special": False}, False, False),
    ],
)
async def test_what_is_asked_of_the_tokenizer(monkeypatch, fields, special, add_bos):
    asked = []
    monkeypatch.setattr(FakeWeights, "tokenize", lambda self, text, **how: asked.append(how) or [1])
    async with running() as server:
        good(await server.call(TOKENIZE, {"content": "text", **fields}))
    assert asked == [{"special": special, "add_bos": add_bos}]


async def test_the_text_of_tokens():
    async with running() as server:
        assert good(await server.call(DETOKENIZE, {"tokens": [97, 0xC3, 0xA9, END]})) == {"content": "aé<end>"}
        assert good(await server.call(DETOKENIZE, {"tokens": [0xC3]})) == {"content": "\ufffd"}
        assert good(await server.call(DETOKENIZE, {"tokens": []})) == {"content": ""}


async def test_the_prompt_of_a_conversation_and_its_length():
    async with running(models=[{"chat_template": CHATML_TEMPLATE}]) as server:
        assert good(await server.call(TEMPLATE, chat())) == {"prompt": PROMPT}
        counted = good(await server.call(INPUT_TOKENS, chat()))
        usage = good(await server.call(CHAT, chat()))["usage"]
    assert counted == {"object": "response.input_tokens", "input_tokens": len(PROMPT)}
    assert usage["prompt_tokens"] == len(PROMPT)


async def test_tools_are_told_and_counted():
    body = chat(tools=[{"type": "function", "function": {"name": "get_weather"}}])
    async with running(models=[{"chat_template": CHATML_TEMPLATE}]) as server:
        prompt = good(await server.call(TEMPLATE, body))["prompt"]
        counted = good(await server.call(INPUT_TOKENS, body))["input_tokens"]
        usage = good(await server.call(CHAT, body))["usage"]
    assert "get_weather" in prompt
    assert counted == usage["prompt_tokens"] == len(prompt)


async def test_a_prompt_that_fits_no_context_is_counted():
    async with running(models=[{"n_ctx": 16}]) as server:
        assert good(await server.call(INPUT_TOKENS, chat("x" * 1000)))["input_tokens"] > 1000


async def test_large_answers_are_written_off_the_event_loop_and_look_the_same(monkeypatch):
    monkeypatch.setattr(text, "_INLINE_TOKENS", 3)
    threads, items = set(), text._items
    monkeypatch.setattr(text, "_items", lambda *given: threads.add(threading.get_ident()) or items(*given))
    async with running() as server:
        small = good(await server.call(TOKENIZE, {"content": "abc", "with_pieces": True}))
        assert threads == {threading.get_ident()}
        threads.clear()
        large = good(await server.call(TOKENIZE, {"content": "abcabca", "with_pieces": True}))
        assert threads
        assert threading.get_ident() not in threads
    assert large["tokens"] == [*small["tokens"], *small["tokens"], small["tokens"][0]]


# Which model, and when


@pytest.mark.parametrize(("path", "body"), ALL)
async def test_a_busy_model_answers_and_no_slot_is_taken(path, body):
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server, await server.connect() as busy:
        await busy.send(COMPLETIONS, completion())
        await engine.step_gate.arrived()
        good(await server.call(path, {**body, "busy_timeout_ms": 0}))
        engine.step_gate.open()
        good(await busy.reply())
        await server.free()
        assert server.service.tally().finished == 2


@pytest.mark.parametrize(("path", "body"), ALL)
async def test_an_unloaded_model_is_loaded_and_its_slot_is_free_again(path, body):
    async with running(models=[{"lazy": True}]) as server:
        good(await server.call(path, body))
        await server.free()
        assert server.status().loaded
        assert server.engine.loads == 1
        assert server.service.tally().finished == 1


@pytest.mark.parametrize(("path", "body"), ALL)
async def test_a_load_that_fails_is_told_and_holds_nothing(path, body):
    engine = FakeEngine()
    engine.failing_loads = 1
    async with running(engine, models=[{"lazy": True}]) as server:
        assert_error(await server.call(path, body), 503, "model_load_failed")
        await server.free()
        assert server.service.tally().failed == 1
        good(await server.call(path, body))


async def test_the_wait_for_an_unloaded_model_is_bounded():
    engine = FakeEngine()
    engine.load_gate.shut()
    async with running(engine, models=[{"lazy": True}]) as server, await server.connect() as first:
        await first.send(*ALL[0])
        await engine.load_gate.arrived()
        body = {"content": "text", "busy_timeout_ms": 0}
        assert_error(await server.call(TOKENIZE, body), 503, "server_busy")
        engine.load_gate.open()
        good(await first.reply())


async def test_a_model_that_embeds_has_tokens_and_no_conversations():
    async with running(models=[{"task": "embed"}]) as server:
        good(await server.call(*ALL[0]))
        good(await server.call(*ALL[1]))
        for path, body in ALL[2:]:
            assert_error(await server.call(path, body), 400, "invalid_request_error", code="wrong_task", param="model")


async def test_weights_stay_until_they_are_read(monkeypatch):
    begun, go_on, closing, close = threading.Event(), threading.Event(), threading.Event(), FakeSession.close
    early = []

    def tokenize(self, text, **how):
        begun.set()
        assert go_on.wait(20)
        early.append(closing.wait(0.3))  # nothing tells that something will not happen
        return [1]

    monkeypatch.setattr(FakeWeights, "tokenize", tokenize)
    monkeypatch.setattr(FakeSession, "close", lambda self: closing.set() or close(self))
    async with running(management=True) as server, await server.connect() as first, await server.connect() as other:
        await first.send(*ALL[0])
        await until(begun.is_set)
        await other.send("/v1/models/unload", {"id": "fake"})
        await until(lambda: server.status().state == "unloading")
        go_on.set()
        assert good(await first.reply()) == {"tokens": [1]}
        good(await other.reply())
    assert early == [False]
    assert closing.is_set()


async def test_a_drain_takes_none():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server, await server.connect() as first, await server.connect() as late:
        await first.send(COMPLETIONS, completion())
        await engine.step_gate.arrived()
        server.stop.set()
        await until(lambda: server.service.phase.value == "draining")
        assert_error(await late.call(*ALL[0]), 503, "shutting_down")
        engine.step_gate.open()
        good(await first.reply())


# What is refused


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (TOKENIZE, {}, "content", "is required"),
        (TOKENIZE, {"content": None}, "content", "must be a string"),
        (TOKENIZE, {"content": ["a"]}, "content", "must be a string"),
        (TOKENIZE, {"content": "\ud800"}, "content", "lone surrogates"),
        (TOKENIZE, {"content": "a", "with_pieces": 1}, "with_pieces", "true or false"),
        (TOKENIZE, {"content": "x" * 101}, "content", "has 101 characters, at most 100"),
        (DETOKENIZE, {}, "tokens", "is required"),
        (DETOKENIZE, {"tokens": "a"}, "tokens", "must be a list"),
        (DETOKENIZE, {"tokens": [1, -1]}, "tokens[1]", "0 or more"),
        (DETOKENIZE, {"tokens": [1, True]}, "tokens[1]", "must be an integer"),
        (DETOKENIZE, {"tokens": [1, 300]}, "tokens", "tokens[1] is 300, but this model's tokens go from 0 to 256"),
        (TEMPLATE, {"messages": []}, "messages", "1 or more items"),
        (TEMPLATE, chat(functions=[{}]), "functions", "not supported"),
        (INPUT_TOKENS, chat("x" * 101), "messages", "at most 100"),
        (INPUT_TOKENS, chat(top_p=2), "top_p", "1 or less"),
    ],
)
async def test_what_is_wrong_with_a_request(monkeypatch, path, body, param, words):
    monkeypatch.setattr(reading, "MAX_CHARACTERS", 100)
    async with running() as server:
        error = assert_error(await server.call(path, body), 400, "invalid_request_error", param=param)
        assert words in error["message"]
        await server.free()
        assert server.service.tally().rejected == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [TEMPLATE, INPUT_TOKENS, CHAT])
async def test_a_template_that_refuses(path, stream):
    """It says so at once, though the one slot is busy."""
    engine = FakeEngine()
    engine.step_gate.shut()
    template = "{{ raise_exception('no') }}"
    async with running(engine, models=[{"chat_template": template}]) as server, await server.connect() as busy:
        await busy.send(COMPLETIONS, completion())
        await engine.step_gate.arrived()
        reply = await server.call(path, chat(stream=stream))
        error = assert_error(reply, 400, "invalid_request_error", code="chat_template_error", param="messages")
        assert error["message"].endswith(": no")
        engine.step_gate.open()
        assert (await busy.reply()).status == 200
        assert_error(await server.call(path, {**chat(), "model": "nobody"}), 404, "model_not_found")


# With a real model


async def test_a_real_model_tells_what_it_would_be_asked():
    body = chat("What is a lease?", max_tokens=1)
    async with running(LlamaEngine(), models=[{"path": smollm2(), "n_ctx": 256, "lazy": True}]) as server:
        assert good(await server.call(TOKENIZE, {"content": "A lease"})) == {"tokens": [49, 23745]}
        assert good(await server.call(DETOKENIZE, {"tokens": [49, 23745, 2]})) == {"content": "A lease<|im_end|>"}
        prompt = good(await server.call(TEMPLATE, body))["prompt"]
        tokens = good(await server.call(TOKENIZE, {"content": prompt}))["tokens"]
        counted = good(await server.call(INPUT_TOKENS, body))["input_tokens"]
        echoed = good(await server.call(COMPLETIONS, completion(tokens, max_tokens=1, echo=True)))
    assert prompt.endswith("What is a lease?<|im_end|>\n<|im_start|>assistant\n")
    assert counted == len(tokens) == echoed["usage"]["prompt_tokens"] == 35
    assert echoed["choices"][0]["text"].startswith(prompt)
