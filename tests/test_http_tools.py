"""Tool calls and thoughts over HTTP: with answers that a fake was told to give, and enforced on a real model."""

from __future__ import annotations

import contextlib
import json

import chat_families
import httpx
import jsonschema
import openai
import pytest
import trio
from http_harness import CHAT, assert_error, chat, running
from tiny_models import smollm2

from trioserve.chat import CHATML_TEMPLATE
from trioserve.engine.llama import LlamaEngine
from trioserve.testing import FakeEngine

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time"}},
]
HERMES = "{{ tools }}<tool_call>{% for m in messages %}{{ m.content }}{% endfor %}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
ARGUMENTS = '{"city": "Bonn"}'


@contextlib.asynccontextmanager
async def answering(text, template=HERMES):
    async with running(FakeEngine(answer_text=text), models=[{"chat_template": template, "n_ctx": 4096}]) as server:
        yield server


async def asked(server, **fields):
    """The one choice of an answer, which says the same in a stream."""
    body = {"tools": TOOLS, "max_tokens": 500, **fields}
    whole = (await server.call(CHAT, chat(**body))).json["choices"][0]
    chunks = (await server.call(CHAT, chat(**body, stream=True))).chunks
    assert streamed(chunks) == (without_ids(whole["message"]), whole["finish_reason"])
    return whole


def without_ids(message):
    calls = [{**call["function"], "id": bool(call["id"])} for call in message.get("tool_calls", [])]
    return {"content": message["content"] or "", "reasoning": message.get("reasoning_content", ""), "calls": calls}


def streamed(chunks):
    """What chunks say, put together as clients do it."""
    told, calls, reason = {"content": "", "reasoning": ""}, {}, None
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert reason is None, "nothing follows the reason"
        delta, reason = choice["delta"], choice["finish_reason"]
        told["content"] += delta.get("content", "")
        told["reasoning"] += delta.get("reasoning_content", "")
        for piece in delta.get("tool_calls", []):
            call = calls.setdefault(piece["index"], {"name": "", "arguments": "", "id": bool(piece.get("id"))})
            call["name"] += piece["function"].get("name", "")
            call["arguments"] += piece["function"]["arguments"]
    assert list(calls) == list(range(len(calls)))
    return {**told, "calls": list(calls.values())}, reason


async def test_a_call_is_told_as_one():
    async with answering(CALL) as server:
        choice = await asked(server)
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}


async def test_words_thoughts_and_several_calls():
    async with answering(f"<think>\nHm\n</think>\nLet me see.\n{CALL}\n{CALL}") as server:
        message = (await asked(server))["message"]
        as_it_is = (await asked(server, reasoning_format="none"))["message"]
    assert message["reasoning_content"] == "Hm"
    assert message["content"] == "Let me see."
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert as_it_is["content"] == "<think>\nHm\n</think>\nLet me see."
    assert "reasoning_content" not in as_it_is


SHOWN = (
    "{{ tools }}{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}</tool_call>{% endfor %}]{% endfor %}"
)
SPOKEN = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"


@pytest.mark.parametrize("template", [SHOWN, SPOKEN], ids=["the template shows calls", "it knows none"])
async def test_an_answer_with_everything_in_it_is_taken_as_an_earlier_turn(template):
    """Thoughts, words and calls at once, as they came; what follows may be a result, a word, or nothing."""
    async with answering(f"<think>Hm</think>Let me see.\n{CALL}\n{CALL}") as server:
        said = (await asked(server))["message"]
    assert (said["reasoning_content"], said["content"], len(said["tool_calls"])) == ("Hm", "Let me see.", 2)
    result = {"role": "tool", "tool_call_id": said["tool_calls"][1]["id"], "content": "Sunny"}
    async with answering("Take a hat.", template) as server:
        for after in ([], [result], [result, {"role": "user", "content": "And now?"}]):
            messages = [{"role": "user", "content": "hi"}, said, *after]
            told = await asked(server, messages=messages)
            assert told["message"]["content"] == "Take a hat."
            prompt = (await server.call("/apply-template", {"messages": messages, "tools": TOOLS})).json["prompt"]
            assert "Let me see." in prompt
            assert prompt.count("Bonn") == 2
            assert prompt.count("Sunny") == len(after[:1])


GENERIC_CALLS = (
    '{"tool_calls": [{"name": "weather", "arguments": {"city": "Bonn"}}, {"name": "time", "arguments": {}}]}'
)
SAID = {
    "qwen3": f"<think>\nHm\n</think>\nLet me see.\n{CALL}\n{CALL}",
    "hermes3": f"Let me see.\n{CALL}\n{CALL}",
    "llama3.1": '{"name": "weather", "parameters": {"city": "Bonn"}}; {"name": "time", "parameters": {}}',
    "mistral v3": '[{"name": "weather", "arguments": {"city": "Bonn"}}, {"name": "time", "arguments": {}}]',
    "gemma3": GENERIC_CALLS,
    "mistral v1": GENERIC_CALLS,
}


@pytest.mark.parametrize("family", SAID)
async def test_an_answer_may_be_sent_back_as_it_came(family):
    async with answering(SAID[family], chat_families.FAMILIES[family]) as server:
        message = (await asked(server))["message"]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "Fine"} for call in message["tool_calls"]]
        assert len(results) == 2
        turns = [*chat()["messages"], message, *results]
        for history in (turns, [*turns, {"role": "assistant", "content": "Fine."}, *chat()["messages"]]):
            reply = await server.call(CHAT, chat(messages=history, tools=TOOLS, max_tokens=500))
            assert reply.status == 200, reply


async def test_each_of_several_answers_has_its_calls():
    async with answering(CALL) as server:
        choices = (await server.call(CHAT, chat(tools=TOOLS, max_tokens=500, n=3))).json["choices"]
        chunks = (await server.call(CHAT, chat(tools=TOOLS, max_tokens=500, n=3, stream=True))).chunks
    assert [choice["message"]["tool_calls"][0]["function"]["arguments"] for choice in choices] == [ARGUMENTS] * 3
    for index in range(3):
        mine = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert streamed(mine)[0]["calls"][0]["arguments"] == ARGUMENTS
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3


@pytest.mark.parametrize("fields", [{"tools": []}, {"tool_choice": "none"}])
async def test_where_there_are_no_tools_calls_are_text(fields):
    async with answering(CALL) as server:
        choice = await asked(server, **fields)
    assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_what_is_no_call_is_told_as_text():
    async with answering("<tool_call>no JSON</tool_call>") as server:
        choice = await asked(server)
    assert choice["message"]["content"] == "<tool_call>no JSON</tool_call>"
    assert choice["finish_reason"] == "stop"


async def test_a_call_that_is_cut_off_says_length():
    async with answering(CALL) as server:
        choice = await asked(server, tool_choice="required", max_tokens=len(CALL) - 20)
    assert choice["finish_reason"] == "length"
    assert ARGUMENTS.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


async def test_thoughts_that_the_template_has_opened():
    async with answering("Hm</think>Yes", "{{ messages[0].content }}<think>\n") as server:
        message = (await asked(server, tools=None))["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm", "Yes")


async def test_an_answer_that_is_all_held_back_still_ends():
    async with answering("<thin") as server:
        assert (await asked(server))["message"]["content"] == "<thin"
    async with answering("<think></think>") as server:
        assert (await asked(server))["message"]["content"] == ""


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
async def test_parameters_that_cannot_be_honoured_are_named(choice):
    bad = {"type": "function", "function": {"name": "x", "parameters": {"properties": {"refused": {}}}}}
    async with answering(CALL) as server:
        reply = await server.call(CHAT, chat(tools=[*TOOLS, bad], tool_choice=choice))
        if choice == "required":
            assert_error(reply, 400, "invalid_request_error", param="tools[2].function.parameters")
        else:  # it can't be called
            assert reply.status == 200


# On a real model


@contextlib.asynccontextmanager
async def real():
    async with running(LlamaEngine(), models=[{"path": str(smollm2()), "n_ctx": 1024, "threads": 1}]) as server:
        yield server


ASKING = {
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": TOOLS,
    "max_tokens": 120,
    "temperature": 0,
}
MODEL = "SmolLM2-135M-Instruct.Q4_1"
NAMED = {"type": "function", "function": {"name": "weather"}}


async def test_required_calls_are_calls_with_valid_arguments():
    async with real() as server:
        for fields in ({"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": NAMED}):
            choice = (await server.call(CHAT, {**ASKING, **fields})).json["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "weather"
            jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)
        bad = {"type": "function", "function": {"name": "x", "parameters": {"properties": {"a": {"not": {}}}}}}
        refused = await server.call(CHAT, {**ASKING, "tools": [*TOOLS, bad]})
        error = assert_error(refused, 400, "invalid_request_error", param="tools[2].function.parameters")
        assert "not" in error["message"]


async def test_a_call_that_was_not_required_is_whole_and_valid():
    broken = '<tool_call>\n{"name": "clock", "arguments": {"zone": 5, }\n</tool_call>'
    turns = [{"role": "user", "content": "Ask."}, {"role": "assistant", "content": broken}]
    body = {**ASKING, "messages": [*turns, *turns, *turns, turns[0]], "tools": TOOLS[:1], "max_tokens": 60}
    template = "{# tools <tool_call> #}" + CHATML_TEMPLATE
    models = [{"path": str(smollm2()), "n_ctx": 1024, "threads": 1, "chat_template": template}]
    async with running(LlamaEngine(), models=models) as server:
        (choice,) = (await server.call(CHAT, body)).json["choices"]
        free = (await server.call(CHAT, {**body, "tool_choice": "none"})).json["choices"][0]
    assert free["message"]["content"] == broken
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)


async def test_the_client_of_openai_accumulates_a_streamed_call():
    async with real() as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        choice = await trio.to_thread.run_sync(accumulated, url)
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
        # The answer goes back with its result, as it came.
        said = choice.message.model_dump(include={"role", "content", "tool_calls"})
        result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}
        body = {**ASKING, "messages": [*ASKING["messages"], said, result], "max_tokens": 5}
        assert (await server.call(CHAT, body)).status == 200


def accumulated(url):
    with (
        httpx.Client(trust_env=False) as transport,
        openai.OpenAI(base_url=url, api_key="none", http_client=transport, max_retries=0) as client,
        client.chat.completions.stream(model=MODEL, tool_choice=NAMED, **ASKING) as stream,
    ):
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (choice,) = final.choices
    return choice
