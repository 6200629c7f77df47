"""Tools and thoughts in Anthropic's messages: the prompt that they make, the blocks of answers, and wrong fields."""

from __future__ import annotations

import contextlib
import json
import sys

import pytest
from http_harness import CHAT, running
from test_http_messages import COUNT, MESSAGES, assert_error
from test_http_tasks import events
from test_http_tools import ARGUMENTS, CALL, HERMES, PARAMETERS

from trioserve.http.messages import read_input
from trioserve.testing import FakeEngine

TOOLS = [
    {
        "name": "weather",
        "description": "Of a city.",
        "input_schema": PARAMETERS,
        "cache_control": {"type": "ephemeral"},
    },
    {"type": "custom", "name": "time", "input_schema": {"type": "object"}},
]
CHAT_TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}},
]
TEXT = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{{ tools | tojson if tools else '' }}<tool_call>{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{{ m.reasoning_content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}{{ m.tool_call_id }}\n{% endfor %}"
)


def body(**fields):
    return {"messages": TEXT, "max_tokens": 500, "tools": TOOLS, **fields}


@contextlib.asynccontextmanager
async def answering(text, template=HERMES):
    async with running(FakeEngine(answer_text=text), models=[{"chat_template": template, "n_ctx": 4096}]) as server:
        yield server


async def asked(server, **fields):
    """A whole answer, which says the same in a stream."""
    whole = (await server.call(MESSAGES, body(**fields))).json
    told = events(await server.call(MESSAGES, body(**fields, stream=True)))
    streamed = accumulated(told)
    assert without_ids(streamed["content"]) == without_ids(whole["content"])
    assert {**whole, "content": None, "id": None} == {**streamed, "content": None, "id": None}
    return whole


def without_ids(content):
    return [{**block, "id": block.get("id", "")[:6]} for block in content]


def accumulated(told):
    """The message that events make, put together as clients do it."""
    names = [name for name, _ in told]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    message, inputs, is_open = told[0][1]["message"], {}, False
    for name, data in told:
        if name == "content_block_start":
            assert (data["index"], is_open) == (len(message["content"]), False)
            message["content"].append(data["content_block"])
            is_open = True
        elif name == "content_block_delta":
            assert (data["index"], is_open) == (len(message["content"]) - 1, True)
            block, delta = message["content"][-1], data["delta"]
            key = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}[
                delta["type"]
            ]
            if key == "partial_json":
                assert block["type"] == "tool_use"
                inputs[data["index"]] = inputs.get(data["index"], "") + delta[key]
            else:
                block[key] += delta[key]
        elif name == "content_block_stop":
            assert (data["index"], is_open) == (len(message["content"]) - 1, True)
            is_open = False
        elif name == "message_delta":
            message |= {**data["delta"], "usage": data["usage"]}
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    assert not is_open
    return message


# Answers


async def test_a_call_is_a_block():
    async with answering(CALL) as server:
        told = await asked(server)
    (block,) = told["content"]
    assert block == {"type": "tool_use", "id": block["id"], "name": "weather", "input": json.loads(ARGUMENTS)}
    assert block["id"].startswith("toolu_")
    assert (told["stop_reason"], told["stop_sequence"]) == ("tool_use", None)


async def test_thoughts_words_and_several_calls():
    async with answering(f"<think>\nHm\n</think>\nLet me see.\n{CALL}\n{CALL}") as server:
        thoughts, words, *calls = (await asked(server))["content"]
    assert thoughts == {"type": "thinking", "thinking": "Hm", "signature": ""}
    assert words == {"type": "text", "text": "Let me see."}
    assert [block["name"] for block in calls] == ["weather", "weather"]
    assert len({block["id"] for block in calls}) == 2


async def test_one_call_where_several_are_not_wanted():
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    async with answering(f"{CALL}\n{CALL}") as server:
        assert len((await asked(server, tool_choice=choice))["content"]) == 1


@pytest.mark.parametrize("fields", [{"tools": []}, {"tools": None}, {"tool_choice": {"type": "none"}}])
async def test_where_there_are_no_tools_calls_are_text(fields):
    async with answering(CALL) as server:
        told = await asked(server, **fields)
    assert (told["content"], told["stop_reason"]) == ([{"type": "text", "text": CALL}], "end_turn")


@pytest.mark.parametrize("text", ["<thin", "<think></think>", ""])
async def test_an_answer_of_next_to_nothing_is_a_block_of_text(text):
    async with answering(text) as server:
        (block,) = (await asked(server, tools=None))["content"]
    assert block == {"type": "text", "text": text if text == "<thin" else ""}


async def test_thoughts_that_the_template_has_opened():
    async with answering("Hm</think>Yes", "{{ messages[0].content }}<think>\n") as server:
        content = (await asked(server, tools=None))["content"]
    assert [block["type"] for block in content] == ["thinking", "text"]


async def test_a_call_that_is_cut_off_has_no_input():
    cut = body(tool_choice={"type": "any"}, max_tokens=len(CALL) - 20)
    async with answering(CALL) as server:
        told = (await server.call(MESSAGES, cut)).json
        streamed = events(await server.call(MESSAGES, {**cut, "stream": True}))
    assert told["stop_reason"] == streamed[-2][1]["delta"]["stop_reason"] == "max_tokens"
    assert [(block["name"], block["input"]) for block in told["content"]] == [("weather", {})]
    pieces = [data["delta"]["partial_json"] for name, data in streamed if name == "content_block_delta"]
    assert ARGUMENTS.startswith("".join(pieces))


async def test_a_stop_string_is_told_before_a_call():
    async with answering(CALL) as server:
        told = (await server.call(MESSAGES, body(tool_choice={"type": "any"}, stop_sequences=["Bonn"]))).json
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "Bonn")


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"a": {"b": [1, 2.5, "é"]}}', {"a": {"b": [1, 2.5, "é"]}}),
        ('{"a": 1e999, "b": -1e999}', {"a": sys.float_info.max, "b": -sys.float_info.max}),
        ('{"a": ' + "9" * 5000 + "}", {"a": sys.float_info.max}),
        ('{"a": ', {}),
        ("", {}),
        ("[1]", {}),
        ('{"a":' * 100_000, {}),
    ],
)
def test_arguments_are_what_json_can_spell(arguments, given):
    assert read_input(arguments) == given


# Prompts


CALLED = [
    {"type": "text", "text": "Let me "},
    {"type": "thinking", "thinking": "Hm", "signature": "abc"},
    {"type": "text", "text": "see."},
    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Köln"}},
    {"type": "tool_use", "id": "toolu_2", "name": "time", "input": {}},
]
RESULTS = [
    {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "text", "text": "4 "}, {"type": "text", "text": "°"}],
    },
    {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no clock", "is_error": True},
    {"type": "text", "text": "And "},
    {"type": "text", "text": "now?"},
]
CHAT_CALLED = {
    "role": "assistant",
    "content": "Let me see.",
    "reasoning_content": "Hm",
    "tool_calls": [
        {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}},
        {"id": "toolu_2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    ],
}
CHAT_RESULTS = [
    {"role": "tool", "tool_call_id": "toolu_1", "content": "4 °"},
    {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no clock"},
    {"role": "user", "content": "And now?"},
]
CHOICES = [
    (None, None),
    ({"type": "auto"}, "auto"),
    ({"type": "none"}, "none"),
    ({"type": "any"}, "required"),
    ({"type": "tool", "name": "time"}, {"type": "function", "function": {"name": "time"}}),
]
ONLY_CALL = {"role": "assistant", "content": [CALLED[3]]}
CHAT_ONLY_CALL = {"role": "assistant", "content": None, "tool_calls": CHAT_CALLED["tool_calls"][:1]}


@pytest.mark.parametrize("template", [TEMPLATE, None])
@pytest.mark.parametrize(
    ("turns", "chat_turns"),
    [
        ([], []),
        (
            [{"role": "assistant", "content": CALLED}, {"role": "user", "content": RESULTS}],
            [CHAT_CALLED, *CHAT_RESULTS],
        ),
        (
            [ONLY_CALL, {"role": "user", "content": [RESULTS[2], {"type": "tool_result", "tool_use_id": "toolu_1"}]}],
            [
                CHAT_ONLY_CALL,
                {"role": "user", "content": "And "},
                {"role": "tool", "tool_call_id": "toolu_1", "content": ""},
            ],
        ),
        (
            [{"role": "assistant", "content": []}, {"role": "user", "content": []}],
            [
                {"role": "assistant", "content": ""},
                {"role": "user", "content": ""},
            ],
        ),
    ],
)
async def test_the_prompt_is_that_of_the_chat(prompts, template, turns, chat_turns):
    async with running(models=[{"chat_template": template, "n_ctx": 8192}]) as server:
        for choice, chat_choice in CHOICES:
            chat = {"messages": [*TEXT, *chat_turns], "tools": CHAT_TOOLS, "tool_choice": chat_choice, "max_tokens": 8}
            given = {"messages": [*TEXT, *turns], "tools": TOOLS, "tool_choice": choice}
            for path, sent in ((CHAT, chat), (MESSAGES, {**given, "max_tokens": 8}), (COUNT, given)):
                assert (await server.call(path, sent)).status == 200
            *_, expected, asked, counted = prompts
            assert asked == counted == expected
            assert chat_choice == "none" or "time" in expected


# Wrong fields


TOOL = {"name": "f", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
HUGE = float("inf")  # spelled as a number
IMAGE = {"type": "image", "source": {"type": "url", "url": "a"}}


def said(*blocks):
    return {"messages": [*TEXT, {"role": "assistant", "content": list(blocks)}]}


def answered(**fields):
    return {"messages": [*said(USE)["messages"], {"role": "user", "content": [{**RESULT, **fields}]}]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": 5}, "tools: must be a list"),
        ({"tools": [5]}, "tools[0]: must be an object"),
        ({"tools": [TOOL] * 129}, "tools: must have 128 items or fewer"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type: must be custom"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name: must be 1 to 128 letters"),
        ({"tools": [{**TOOL, "name": "a" * 129}]}, "tools[0].name: "),
        ({"tools": [{**TOOL, "description": 5}]}, "tools[0].description: "),
        ({"tools": [{**TOOL, "strict": "yes"}]}, "tools[0].strict: "),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema: must be a JSON Schema"),
        ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type: must be object"),
        ({"tools": [{**TOOL, "description": "\ud800"}]}, "tools: must not contain lone surrogates"),
        ({"tool_choice": "auto"}, "tool_choice: must be an object with the type auto, any, tool or none"),
        ({"tool_choice": {"type": "required"}}, "tool_choice: must be an object with the type"),
        ({"tool_choice": {"type": ["any"]}}, "tool_choice: must be an object with the type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: must be a string"),
        ({"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name: is none of the tools"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice.disable_parallel_tool_use: "),
        ({"tool_choice": {"type": "any"}, "tools": []}, "tool_choice: asks for a tool, but tools holds none"),
        (said(IMAGE), "messages[1].content[0].type: is image; this server takes text only, here as text, tool_use"),
        (said(RESULT), "messages[1].content[0].type: is tool_result"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type: is tool_use"),
        (said({"type": "redacted_thinking", "data": "a"}), "messages[1].content[0].type: is redacted_thinking"),
        (said({**USE, "id": 5}), "messages[1].content[0].id: must be a string"),
        (said({**USE, "name": None}), "messages[1].content[0].name: must be a string"),
        (said({**USE, "input": "{}"}), "messages[1].content[0].input: must be an object"),
        (said({**USE, "input": {"a": HUGE}}), "messages[1].content[0].input: must hold finite numbers only"),
        (said({**USE, "input": {"a": "\ud800"}}), "messages[1].content[0].input: must not contain lone surrogates"),
        (said({**USE, "name": "\ud800"}), "messages[1].content[0].name: must not contain lone surrogates"),
        (said({"type": "thinking"}), "messages[1].content[0].thinking: must be a string"),
        (
            {"messages": [{"role": "user", "content": [RESULT]}]},
            "messages[0].content[0].tool_use_id: is of no tool_use",
        ),
        (answered(tool_use_id="b"), "messages[2].content[0].tool_use_id: is of no tool_use before it"),
        (answered(content=5), "messages[2].content[0].content: must be a string or a list of parts"),
        (answered(content=[IMAGE]), "messages[2].content[0].content[0].type: is image"),
        (answered(is_error="no"), "messages[2].content[0].is_error: must be true or false"),
    ],
)
async def test_what_is_wrong_is_named(fields, message):
    sent = json.dumps(body(**{"tools": [TOOL], **fields})).replace("Infinity", "1e999").encode()
    async with running() as server:
        for route in (MESSAGES, COUNT):
            reply = await server.call(route, sent)
            assert assert_error(reply, 400, "invalid_request_error").startswith(message)
        assert server.service.tally().active == 0


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "time"}])
async def test_parameters_that_cannot_be_honoured_are_named(choice):
    bad = {"name": "x", "input_schema": {"properties": {"refused": {}}}}
    async with answering(CALL) as server:
        reply = await server.call(MESSAGES, body(tools=[*TOOLS, bad], tool_choice=choice))
        if choice["type"] == "any":
            said = assert_error(reply, 400, "invalid_request_error")
            assert said.startswith("tools[2].input_schema can't be honoured")
        else:  # it can't be called
            assert reply.status == 200
