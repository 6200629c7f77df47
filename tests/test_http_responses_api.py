"""OpenAI's responses over a real socket: shapes, numbers and order of events, and wrong fields."""

from __future__ import annotations

import json

import pytest
from http_harness import assert_error, running
from test_http_tasks import events

from trioserve.testing import FakeEngine

RESPONSES = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def body(given="hi", **fields):
    return {"input": given, "max_output_tokens": 8, **fields}


def said(response):
    """The text of a whole response."""
    ((item),) = response["output"]
    ((part),) = item["content"]
    return part["text"]


async def test_a_whole_response():
    metadata = {"kind": "test"}
    async with running() as server:
        reply = await server.call(RESPONSES, body(metadata=metadata, store=True, user="a", temperature=0.5))
    told = reply.json
    assert (reply.status, told["object"], told["model"]) == (200, "response", "fake")
    assert told["id"].startswith("resp_")
    assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert told["output"][0]["status"] == "incomplete"
    assert len(said(told)) == 8
    assert (told["metadata"], told["store"], told["temperature"], told["top_p"]) == (metadata, False, 0.5, 1)
    assert (told["max_output_tokens"], told["instructions"]) == (8, None)
    usage = told["usage"]
    assert usage["output_tokens"] == 8
    assert usage["total_tokens"] == usage["input_tokens"] + 8


async def test_a_response_that_the_model_ends():
    async with running(FakeEngine(answer_tokens=3)) as server:
        told = (await server.call(RESPONSES, body())).json
    assert (told["status"], told["incomplete_details"], told["output"][0]["status"]) == ("completed", None, "completed")


@pytest.mark.parametrize(("tokens", "status"), [(None, "incomplete"), (3, "completed")])
async def test_the_order_of_events(tokens, status):
    async with running(FakeEngine(answer_tokens=tokens)) as server:
        whole = (await server.call(RESPONSES, body(max_output_tokens=4))).json
        told = events(await server.call(RESPONSES, body(max_output_tokens=4, stream=True)))
    assert all(name == data["type"] for name, data in told)
    assert [data["sequence_number"] for _, data in told] == list(range(len(told)))
    assert [name for name, _ in told] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * (tokens or 4),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{status}",
    ]
    first, last = told[0][1]["response"], told[-1][1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert told[2][1]["item"]["content"] == []
    assert told[3][1]["part"]["text"] == ""
    text = "".join(data["delta"] for name, data in told if name.endswith("delta"))
    assert text == said(whole) == said(last) == told[-4][1]["text"] == told[-3][1]["part"]["text"]
    assert told[-2][1]["item"] == last["output"][0]
    assert {data.get("item_id", last["output"][0]["id"]) for _, data in told} == {last["output"][0]["id"]}
    fresh = ("id", "created_at", "output")
    assert {**last, **dict.fromkeys(fresh)} == {**whole, **dict.fromkeys(fresh)}


async def test_the_prompt_is_that_of_the_chat():
    """A text, messages of texts and of parts, and instructions make what a chat completion makes of them."""

    async def chat(*turns):
        messages = [{"role": role, "content": content} for role, content in turns]
        told = (await server.call("/v1/chat/completions", {"messages": messages, "max_tokens": 8})).json
        return told["choices"][0]["message"]["content"]

    parts = [{"type": "input_text", "text": "one "}, {"type": "input_text", "text": "two"}]
    earlier = {
        "id": "msg_1",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "three", "annotations": [], "logprobs": []}],
    }
    async with running() as server:
        assert said((await server.call(RESPONSES, body("one"))).json) == await chat(("user", "one"))
        told = (await server.call(RESPONSES, body([{"role": "user", "content": parts}], instructions="Be brief."))).json
        assert said(told) == await chat(("system", "Be brief."), ("user", "one two"))
        assert told["instructions"] == "Be brief."
        turns = [{"role": "user", "content": "one"}, earlier, {"type": "message", "role": "developer", "content": "x"}]
        told = (await server.call(RESPONSES, body(turns))).json
        assert said(told) == await chat(("user", "one"), ("assistant", "three"), ("system", "x"))


@pytest.mark.parametrize(
    "form",
    [
        None,
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "name": "a", "strict": True, "schema": SCHEMA},
    ],
)
async def test_forms_are_taken_and_told(form):
    async with running() as server:
        reply = await server.call(RESPONSES, body(text={"format": form, "verbosity": "medium"}))
    assert reply.status == 200
    assert reply.json["text"] == {"format": form or {"type": "text"}}


IMAGE = {"type": "input_image", "image_url": "a"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": "\ud800"}, "input"),
        ({"input": ["a"]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stream": "yes"}, "stream"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(number): "a" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"prompt_cache_options": {"ttl": "30m", "prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"moderation": {"model": "a"}}, "moderation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"const": "refused"}}}}, "text.format"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"input": "x" * 5000}, "input"),
    ],
)
async def test_what_is_wrong_is_named(fields, param):
    async with running() as server:
        assert_error(
            await server.call(RESPONSES, body(**{"given": "hi", **fields})), 400, "invalid_request_error", param=param
        )
        assert server.service.tally().active == 0


async def test_what_asks_for_nothing_is_taken():
    fields = {
        "tools": [],
        "tool_choice": "auto",
        "include": ["reasoning.encrypted_content"],
        "truncation": "disabled",
        "reasoning": {"effort": "none"},
        "background": False,
        "previous_response_id": None,
    }
    async with running() as server:
        assert (await server.call(RESPONSES, body(**fields))).status == 200


async def test_a_stream_that_fails_ends_with_one_error():
    engine = FakeEngine()
    engine.failing_step = 3
    async with running(engine) as server:
        told = events(await server.call(RESPONSES, body(stream=True)))
    name, error = told[-1]
    assert name == error["type"] == "error"
    assert error["sequence_number"] == len(told) - 1
    assert (error["code"], error["message"], error["param"]) == ("internal_error", "inference failed", None)
    assert error["error"] == {
        "message": "inference failed",
        "type": "internal_error",
        "param": None,
        "code": "internal_error",
    }
    assert [name for name, _ in told].count("error") == 1


async def test_a_stream_that_a_drain_cuts_off_says_so():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine, drain_timeout_ms=0) as server, await server.connect() as client:
        await client.send(RESPONSES, body(stream=True))
        await client.head()
        await engine.step_gate.arrived()
        server.stop.set()
        *_, last = (await client.rest()).decode().strip().split("\n\n")
        name, data = last.split("\n")
        assert name == "event: error"
        assert json.loads(data.removeprefix("data: "))["code"] == "shutting_down"
        engine.step_gate.open()
