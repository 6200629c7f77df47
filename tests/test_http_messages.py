"""Anthropic's messages over a real socket: shapes, order of events, wrong fields, and errors in Anthropic's shape."""

from __future__ import annotations

import json

import pytest
from http_harness import running, until
from test_http_tasks import events

from trioserve.http.dialect import ANTHROPIC, OPENAI, dialect_of
from trioserve.testing import FakeEngine, fake_answer

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TEXT = [{"role": "user", "content": "hi"}]


def body(**fields):
    return {"messages": TEXT, "max_tokens": 8, **fields}


def answer(prompt, tokens=8):
    return fake_answer(prompt.encode(), tokens)


def assert_error(reply, status, kind):
    """See that a reply is an error in Anthropic's shape; return its message."""
    assert (reply.status, reply.headers["content-type"]) == (status, "application/json"), reply
    assert list(reply.json) == ["type", "error"]
    assert reply.json["type"] == "error"
    assert list(reply.json["error"]) == ["type", "message"]
    assert reply.json["error"]["type"] == kind
    return reply.json["error"]["message"]


async def prompt_of(server, **fields):
    """The text that the fake engine was given as a prompt, which is what it answers to."""
    reply = await server.call(MESSAGES, body(**fields))
    assert reply.status == 200, reply
    return reply.json


async def test_a_whole_message():
    async with running() as server:
        told = (await server.call(MESSAGES, body(max_tokens=4))).json
        count = (await server.call(COUNT, {"messages": TEXT})).json
    assert told["id"].startswith("msg_")
    ((block),) = told["content"]
    assert block["type"] == "text"
    assert len(block["text"]) == 4
    assert {name: told[name] for name in ("type", "role", "model", "stop_reason", "stop_sequence")} == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "stop_reason": "max_tokens",
        "stop_sequence": None,
    }
    assert told["usage"] == {
        "input_tokens": count["input_tokens"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 4,
    }


async def test_the_order_of_events():
    async with running() as server:
        whole = (await server.call(MESSAGES, body(max_tokens=3))).json
        reply = await server.call(MESSAGES, body(max_tokens=3, stream=True))
    told = events(reply)
    assert all(name == data["type"] for name, data in told)
    assert [name for name, _ in told] == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    begun, ended = told[0][1]["message"], told[-2][1]
    assert (begun["content"], begun["stop_reason"]) == ([], None)
    assert begun["usage"] == {**whole["usage"], "output_tokens": 0}
    assert (
        "".join(data["delta"]["text"] for name, data in told if name == "content_block_delta")
        == (whole["content"][0]["text"])
    )
    assert ended["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert ended["usage"] == whole["usage"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_string_is_told(stream):
    async with running() as server:
        text = (await server.call(MESSAGES, body())).json["content"][0]["text"]
        reply = await server.call(MESSAGES, body(stop_sequences=["nowhere", text[4:6]], stream=stream))
    if stream:
        told = events(reply)
        ending, got = told[-2][1]["delta"], "".join(d["delta"]["text"] for n, d in told if n == "content_block_delta")
    else:
        ending, got = reply.json, reply.json["content"][0]["text"]
    assert got == text[: text.index(text[4:6])]
    assert (ending["stop_reason"], ending["stop_sequence"]) == ("stop_sequence", text[4:6])


async def test_an_answer_that_the_model_ends():
    engine = FakeEngine()
    engine.answer_tokens = 2
    async with running(engine) as server:
        told = (await server.call(MESSAGES, body())).json
    assert (told["stop_reason"], told["stop_sequence"]) == ("end_turn", None)


async def test_the_prompt_is_that_of_the_chat():
    """Text or blocks, the system's place, and what a chat completion would have made of it."""
    chat = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one two"},
            {"role": "assistant", "content": "three"},
        ],
        "max_tokens": 8,
    }
    blocks = [{"type": "text", "text": "one "}, {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}]
    turns = [{"role": "user", "content": blocks}, {"role": "assistant", "content": "three"}]
    async with running() as server:
        expected = (await server.call("/v1/chat/completions", chat)).json
        for system in ("Be brief.", [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]):
            told = (await server.call(MESSAGES, body(system=system, messages=turns))).json
            assert told["content"][0]["text"] == expected["choices"][0]["message"]["content"]
            count = (await server.call(COUNT, {"system": system, "messages": turns})).json
            assert count == {"input_tokens": expected["usage"]["prompt_tokens"]}


IMAGE = {"type": "image", "source": {"type": "url", "url": "a"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"messages": None}, "messages: "),
        ({"messages": "hi"}, "messages: "),
        ({"messages": []}, "messages: "),
        ({"messages": ["hi"]}, "messages[0]: "),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role: must be user or assistant"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role: "),
        ({"messages": [{"role": "user"}]}, "messages[0].content: "),
        ({"messages": [*TEXT, {"role": "user", "content": 5}]}, "messages[1].content: "),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]: "),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type: "),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text: "),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type: is image; this server"),
        (
            {"messages": [{"role": "user", "content": "\ud800"}]},
            "messages[0].content: must not contain lone surrogates",
        ),
        ({"system": 5}, "system: "),
        ({"system": [IMAGE]}, "system[0].type: is image"),
        ({"stop_sequences": "a"}, "stop_sequences: "),
        ({"stop_sequences": [""]}, "stop_sequences[0]: "),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences: "),
        ({"temperature": 1.5}, "temperature: must be 1 or less"),
        ({"top_p": -1}, "top_p: "),
        ({"top_k": -1}, "top_k: "),
        ({"stream": 1}, "stream: "),
        ({"compaction": {"type": "compaction"}}, "compaction is not supported"),
        ({"thread": {"type": "create"}}, "thread is not supported"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management is not supported"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is not supported"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "the prompt has "),
    ],
)
async def test_what_is_wrong_is_named(fields, message):
    async with running() as server:
        said = assert_error(await server.call(MESSAGES, body(**fields)), 400, "invalid_request_error")
        assert said.startswith(message)
        assert server.service.tally().active == 0


async def test_what_asks_for_nothing_is_taken():
    fields = {"tools": [], "metadata": {"user_id": "a"}, "thinking": {"type": "adaptive"}, "top_k": 0, "temperature": 1}
    fields["context_management"] = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    async with running() as server:
        reply = await server.call(MESSAGES, body(**fields), headers=[("anthropic-version", "2023-06-01")])
    assert reply.status == 200


# Errors from everywhere


async def test_errors_of_the_path_have_its_shape():
    async with running(max_request_body_bytes=1000, api_keys=("a" * 32,)) as server:
        key = [("x-api-key", "a" * 32)]
        assert_error(await server.call(MESSAGES, body()), 401, "authentication_error")
        assert_error(await server.call("/v1/messages/batches", {}), 401, "authentication_error")
        assert (await server.call(MESSAGES, body(), headers=key)).status == 200
        assert_error(await server.call(MESSAGES, body(model="nobody"), headers=key), 404, "not_found_error")
        assert_error(await server.call("/v1/messages/batches", {}, headers=key), 404, "not_found_error")
        assert_error(await server.call(MESSAGES, headers=key), 405, "invalid_request_error")
        assert_error(await server.call(MESSAGES, b"x" * 2000, headers=key), 413, "request_too_large")
        plain = [*key, ("content-type", "text/plain")]
        assert_error(await server.call(COUNT, b"{}", headers=plain), 415, "invalid_request_error")
        assert_error(await server.call(MESSAGES, b"{", headers=key), 400, "invalid_request_error")
        assert "error" in (await server.call("/v1/messagesx", {}, headers=key)).json["error"]["type"]


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/messages", ANTHROPIC),
        ("/v1/messages/", ANTHROPIC),
        ("/v1/messages/count_tokens", ANTHROPIC),
        ("/v1/messagesx", OPENAI),
        ("/v1/chat/completions", OPENAI),
        ("/", OPENAI),
        ("", OPENAI),
    ],
)
def test_the_path_tells_the_shape(path, dialect):
    assert dialect_of(path) is dialect


async def test_a_busy_server_is_overloaded():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine, models=[{"slots": 1}]) as server, await server.connect() as busy:
        await busy.send(MESSAGES, body())
        await engine.step_gate.arrived()
        reply = await server.call(MESSAGES, body(busy_timeout_ms=0))
        assert_error(reply, 503, "overloaded_error")
        assert reply.headers["retry-after"] == "1"
        assert (await server.call(COUNT, {"messages": TEXT})).status == 200  # needs no slot
        server.stop.set()
        await until(lambda: server.service.phase == "draining")
        assert_error(await server.call(COUNT, {"messages": TEXT}), 503, "overloaded_error")
        engine.step_gate.open()
        assert (await busy.reply()).status == 200


async def test_a_failure_inside_is_an_api_error():
    engine = FakeEngine()
    engine.failing_step = 3
    async with running(engine) as server:
        assert_error(await server.call(MESSAGES, body()), 500, "api_error")


async def test_a_stream_that_fails_ends_with_one_error():
    engine = FakeEngine()
    engine.failing_step = 3
    async with running(engine) as server:
        told = events(await server.call(MESSAGES, body(stream=True)))
    error = {"type": "error", "error": {"type": "api_error", "message": "inference failed"}}
    assert told[-1] == ("error", error)
    assert [name for name, _ in told].count("error") == 1
    assert "message_stop" not in [name for name, _ in told]


async def test_a_stream_that_a_drain_cuts_off_says_so():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine, drain_timeout_ms=0) as server, await server.connect() as client:
        await client.send(MESSAGES, body(stream=True))
        await client.head()
        await engine.step_gate.arrived()
        server.stop.set()
        said = (await client.rest()).decode()
        *_, last = [block for block in said.split("\n\n") if block]
        name, data = last.split("\n")
        assert name == "event: error"
        assert json.loads(data.removeprefix("data: "))["error"]["type"] == "overloaded_error"
        engine.step_gate.open()


# Counting


async def test_counting_loads_a_model_and_leaves_its_slot_free():
    async with running(models=[{"lazy": True, "slots": 1}]) as server:
        first = (await server.call(COUNT, {"messages": TEXT})).json
        assert server.status().loaded
        assert (await server.call(COUNT, {"messages": TEXT})).json == first
        await server.free()
        assert (await server.call(MESSAGES, body())).json["usage"]["input_tokens"] == first["input_tokens"]
        tally = server.service.tally()
        assert (tally.failed, tally.cancelled) == (0, 0)


async def test_counting_takes_what_does_not_fit_and_refuses_what_never_could():
    async with running(models=[{"n_ctx": 256}]) as server:
        beyond = [{"role": "user", "content": "x" * 1000}]
        assert (await server.call(COUNT, {"messages": beyond})).json["input_tokens"] > 1000
        assert "at least" in assert_error(
            await server.call(COUNT, {"messages": [{"role": "user", "content": "x" * 300_000}]}),
            400,
            "invalid_request_error",
        )


async def test_a_load_that_fails_is_told_to_who_counts():
    engine = FakeEngine()
    engine.failing_loads = 1
    async with running(engine, models=[{"lazy": True}]) as server:
        assert_error(await server.call(COUNT, {"messages": TEXT}), 503, "overloaded_error")
        await server.free()
        assert server.service.tally().failed == 1
        assert (await server.call(COUNT, {"messages": TEXT})).status == 200
        assert_error(await server.call(COUNT, {"messages": TEXT, "model": "nobody"}), 404, "not_found_error")
        assert_error(await server.call(COUNT, {"messages": TEXT, "tools": [{}]}), 400, "invalid_request_error")


async def test_who_leaves_while_a_count_waits_for_a_load_leaves_nothing():
    engine = FakeEngine()
    engine.load_gate.shut()
    async with running(engine, models=[{"lazy": True}]) as server:
        client = await server.connect()
        await client.send(COUNT, {"messages": TEXT})
        await engine.load_gate.arrived()
        await client.close("reset")
        engine.load_gate.open()
        await server.free()
        assert server.service.tally().cancelled == 1


async def test_silence_is_filled_with_pings():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine, sse_ping_interval_ms=50) as server, await server.connect() as client:
        await client.send(MESSAGES, body(stream=True))
        await client.head()
        await engine.step_gate.arrived()
        said = b""
        while said.count(b"event: ping") < 2:
            said += bytes((await client.event()).data)
        assert b": keep-alive" not in said
        engine.step_gate.open()
        await client.rest()
