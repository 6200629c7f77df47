"""Tools and thoughts in OpenAI's responses: the prompt that they make, the items of answers, and wrong fields."""

from __future__ import annotations

import json

import pytest
from http_harness import CHAT, assert_error, running
from test_http_messages_tools import CHAT_CALLED, CHAT_TOOLS, TEMPLATE, answering
from test_http_responses_api import RESPONSES, SCHEMA
from test_http_tasks import events
from test_http_tools import ARGUMENTS, CALL, PARAMETERS

TOOLS = [
    {"type": "function", "name": "weather", "description": "Of a city.", "parameters": PARAMETERS, "strict": True},
    {"type": "function", "name": "time", "parameters": {"type": "object"}},
]
NAMED = {"type": "function", "name": "time"}


def body(**fields):
    return {"input": "hi", "tools": TOOLS, "max_output_tokens": 500, **fields}


async def asked(server, **fields):
    """The output of a response, and how it ended; both are the same in a stream."""
    whole = (await server.call(RESPONSES, body(**fields))).json
    told = events(await server.call(RESPONSES, body(**fields, stream=True)))
    assert [data["sequence_number"] for _, data in told] == list(range(len(told)))
    output, last = accumulated(told), told[-1][1]["response"]
    assert output == last["output"]
    assert without_ids(output) == without_ids(whole["output"])
    assert told[-1][0] == f"response.{whole['status']}"
    fresh = dict.fromkeys(("id", "created_at", "output"))
    assert {**last, **fresh} == {**whole, **fresh}
    return whole


def without_ids(output):
    return [{**item, "id": item["id"].partition("_")[0], "call_id": "call_id" in item} for item in output]


def accumulated(told):
    """The items that events make, put together as clients do it; sees to their order."""
    items, is_open = [], False
    for name, data in told:
        what = name.removeprefix("response.")
        if what == "output_item.added":
            assert (data["output_index"], is_open) == (len(items), False)
            assert data["item"]["status"] == "in_progress"
            items.append(data["item"])
            is_open = True
            continue
        if "output_index" not in data:
            continue
        item = items[-1]
        assert (data["output_index"], is_open) == (len(items) - 1, True)
        assert data.get("item_id", item["id"]) == item["id"]
        if what == "content_part.added":
            item["content"].append(data["part"])
        elif what == "function_call_arguments.delta":
            item["arguments"] += data["delta"]
        elif what == "function_call_arguments.done":
            assert (data["name"], data["arguments"]) == (item["name"], item["arguments"])
        elif what.endswith("_text.delta"):
            item["content"][0]["text"] += data["delta"]
        elif what.endswith("_text.done"):
            assert data["text"] == item["content"][0]["text"]
        elif what == "content_part.done":
            assert data["part"] == item["content"][0]
        else:
            assert what == "output_item.done"
            item["status"] = data["item"]["status"]
            assert data["item"] == item
            is_open = False
    assert not is_open
    return items


# Answers


async def test_a_call_is_an_item():
    async with answering(CALL) as server:
        told = await asked(server)
        streamed = events(await server.call(RESPONSES, body(stream=True)))
    (item,) = told["output"]
    assert (item["type"], item["status"], item["name"]) == ("function_call", "completed", "weather")
    assert item["arguments"] == ARGUMENTS
    assert (item["id"][:3], item["call_id"][:5]) == ("fc_", "call_")
    assert [name for name, _ in streamed] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_thoughts_words_and_several_calls():
    async with answering(f"<think>\nHm\n</think>\nLet me see.\n{CALL}\n{CALL}") as server:
        thoughts, words, *calls = (await asked(server))["output"]
        streamed = events(await server.call(RESPONSES, body(stream=True)))
    assert (thoughts["type"], thoughts["summary"]) == ("reasoning", [])
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "Hm"}]
    assert words["content"][0]["text"] == "Let me see."
    assert [item["name"] for item in calls] == ["weather", "weather"]
    assert len({item["call_id"] for item in calls}) == len({item["id"] for item in calls}) == 2
    names = [name.removeprefix("response.") for name, _ in streamed]
    first = names.index("reasoning_text.delta")
    assert names[first - 2 : first] == ["output_item.added", "content_part.added"]
    last = names.index("reasoning_text.done")
    assert names[last + 1 : last + 4] == ["content_part.done", "output_item.done", "output_item.added"]


async def test_one_call_where_several_are_not_wanted():
    async with answering(f"{CALL}\n{CALL}") as server:
        told = await asked(server, parallel_tool_calls=False)
    assert len(told["output"]) == 1
    assert told["parallel_tool_calls"] is False


@pytest.mark.parametrize("fields", [{"tools": []}, {"tools": None}, {"tool_choice": "none"}])
async def test_where_there_are_no_tools_calls_are_text(fields):
    async with answering(CALL) as server:
        (item,) = (await asked(server, **fields))["output"]
    assert item["content"][0]["text"] == CALL


@pytest.mark.parametrize("text", ["<thin", "<think></think>", ""])
async def test_an_answer_of_next_to_nothing_is_a_message(text):
    async with answering(text) as server:
        (item,) = (await asked(server, tools=None))["output"]
    assert item["content"][0]["text"] == (text if text == "<thin" else "")


async def test_a_call_that_is_cut_off_is_incomplete():
    async with answering(f"{CALL}\n{CALL}") as server:
        told = await asked(server, tool_choice="required", max_output_tokens=2 * len(CALL) - 20)
    assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    whole, cut = told["output"]
    assert (whole["status"], whole["arguments"]) == ("completed", ARGUMENTS)
    assert cut["status"] == "incomplete"
    assert ARGUMENTS.startswith(cut["arguments"])


async def test_what_was_asked_for_is_told_again():
    async with answering("Yes") as server:
        told = (await server.call(RESPONSES, body(tool_choice={**NAMED, "more": 1}))).json
        plain = (await server.call(RESPONSES, body(tools=None, tool_choice=None, parallel_tool_calls=None))).json
    assert told["tools"] == [TOOLS[0], {**TOOLS[1], "description": None, "strict": None}]
    assert told["tool_choice"] == NAMED
    assert (plain["tools"], plain["tool_choice"], plain["parallel_tool_calls"]) == ([], "auto", True)


# Prompts


def words(text):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def thoughts(text):
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


WEATHER = {"type": "function_call", "call_id": "toolu_1", "name": "weather", "arguments": '{"city": "Köln"}'}
TIME = {"type": "function_call", "call_id": "toolu_2", "name": "time", "arguments": "{}", "status": "completed"}
RESULTS = [
    {"type": "function_call_output", "call_id": "toolu_1", "output": "4 °"},
    {"type": "function_call_output", "call_id": "toolu_2", "output": [{"type": "input_text", "text": "noon"}]},
]
CHAT_RESULTS = [
    {"role": "tool", "tool_call_id": "toolu_1", "content": "4 °"},
    {"role": "tool", "tool_call_id": "toolu_2", "content": "noon"},
]
USER = {"role": "user", "content": "hi"}
CALLS = CHAT_CALLED["tool_calls"]
CHOICES = [
    (None, None),
    ("auto", "auto"),
    ("none", "none"),
    ("required", "required"),
    (NAMED, {"type": "function", "function": {"name": "time"}}),
]


@pytest.mark.parametrize("template", [TEMPLATE, None])
@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ([], []),
        ([thoughts("Hm"), words("Let me see."), WEATHER, TIME, *RESULTS], [CHAT_CALLED, *CHAT_RESULTS]),
        (
            [WEATHER, RESULTS[0], TIME, RESULTS[1]],
            [
                {"role": "assistant", "content": None, "tool_calls": CALLS[:1]},
                CHAT_RESULTS[0],
                {"role": "assistant", "content": None, "tool_calls": CALLS[1:]},
                CHAT_RESULTS[1],
            ],
        ),
        (
            [WEATHER, words("There."), RESULTS[0]],
            [{"role": "assistant", "content": "There.", "tool_calls": CALLS[:1]}, CHAT_RESULTS[0]],
        ),
        (
            [
                words("a"),
                words("b"),
                thoughts("c"),
                {"type": "reasoning", "summary": [], "encrypted_content": "x"},
                thoughts("d"),
                USER,
            ],
            [
                {"role": "assistant", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "assistant", "content": "", "reasoning_content": "cd"},
                USER,
            ],
        ),
    ],
)
async def test_the_prompt_is_that_of_the_chat(prompts, template, items, turns):
    async with running(models=[{"chat_template": template, "n_ctx": 8192}]) as server:
        for choice, chat_choice in CHOICES:
            chat = {"messages": [USER, *turns], "tools": CHAT_TOOLS, "tool_choice": chat_choice, "max_tokens": 8}
            given = body(input=[USER, *items], tool_choice=choice, max_output_tokens=8)
            for path, sent in ((CHAT, chat), (RESPONSES, given)):
                assert (await server.call(path, sent)).status == 200
            *_, expected, told = prompts
            assert told == expected
            assert chat_choice == "none" or "time" in expected


# Wrong fields


TOOL = {"type": "function", "name": "f"}
CALLED = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "a", "output": "b"}
HUGE = float("inf")  # spelled as a number
IMAGE = {"type": "input_image", "image_url": "a"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "name": "a" * 129}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "description": 5}]}, "tools[0].description"),
        ({"tools": [{**TOOL, "strict": 1}]}, "tools[0].strict"),
        ({"tools": [{**TOOL, "parameters": "{}"}]}, "tools[0].parameters"),
        ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
        ({"tools": [{**TOOL, "description": "\ud800"}]}, "tools"),
        ({"tools": [{**TOOL, "parameters": {"maximum": HUGE}}]}, "tools"),
        ({"tools": [], "text": {"format": {"type": "text", "more": HUGE}}}, "text.format"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.name"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}, "text.format"),
        ({"input": [{**CALLED, "type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{**CALLED, "type": ["message"]}]}, "input[0].type"),
        ({"input": [{**CALLED, "call_id": None}]}, "input[0].call_id"),
        ({"input": [{**CALLED, "name": 5}]}, "input[0].name"),
        ({"input": [{**CALLED, "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{**CALLED, "arguments": "\ud800"}]}, "input[0].arguments"),
        ({"input": [RESULT]}, "input[0].call_id"),
        ({"input": [CALLED, {**RESULT, "call_id": "b"}]}, "input[1].call_id"),
        ({"input": [CALLED, {**RESULT, "output": None}]}, "input[1].output"),
        ({"input": [CALLED, {**RESULT, "output": [IMAGE]}]}, "input[1].output[0].type"),
        ({"input": [{"type": "reasoning", "content": "a"}]}, "input[0].content"),
        ({"input": [{"type": "reasoning", "content": [IMAGE]}]}, "input[0].content[0].type"),
    ],
)
async def test_what_is_wrong_is_named(fields, param):
    async with running() as server:
        sent = json.dumps(body(**{"tools": [TOOL], **fields})).replace("Infinity", "1e999").encode()
        reply = await server.call(RESPONSES, sent)
        assert_error(reply, 400, "invalid_request_error", param=param)
        assert server.service.tally().active == 0


async def test_a_tool_of_the_server_is_refused_in_words():
    async with running() as server:
        reply = await server.call(RESPONSES, body(tools=[TOOL, {"type": "web_search"}]))
    assert reply.json["error"]["message"] == "tools[1].type: must be function; this server has no tools of its own"


async def test_parameters_that_cannot_be_honoured_are_named():
    bad = {"type": "function", "name": "x", "parameters": {"properties": {"refused": {}}}}
    async with answering(CALL) as server:
        reply = await server.call(RESPONSES, body(tools=[*TOOLS, bad], tool_choice="required"))
        assert_error(reply, 400, "invalid_request_error", param="tools[2].parameters")
        assert (await server.call(RESPONSES, body(tools=[*TOOLS, bad], tool_choice=NAMED))).status == 200
