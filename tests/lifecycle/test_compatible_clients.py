"""The official clients of OpenAI's responses and of Anthropic's messages against the real daemon."""

from __future__ import annotations

import json

import anthropic
import jsonschema
import openai as openai_package
import pytest

from .client import CALL_SECONDS, http, openai, wait_idle

QUESTION = "Count from one to ten."
ASKING = "What is the weather in Paris?"
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
GREEDY = {"temperature": 0}  # not every version of Anthropic's client has a parameter for it


@pytest.fixture
def responses(shared):
    with openai(shared.url) as client:
        yield client.responses


@pytest.fixture
def claude(shared):
    with anthropic.Anthropic(
        base_url=shared.url,
        api_key="none",
        http_client=anthropic.DefaultHttpxClient(trust_env=False),
        max_retries=0,
        timeout=CALL_SECONDS,
    ) as client:
        yield client.messages


def chat_answer(server, **fields):
    """What a chat completion says, and what it costs."""
    with http(server.url) as client:
        told = client.post("/v1/chat/completions", json={"temperature": 0, "cache_prompt": False, **fields}).json()
    return told["choices"][0]["message"]["content"], told["usage"]


# OpenAI


def test_a_response(responses, shared):
    made = responses.create(model="smollm2", input=QUESTION, temperature=0, max_output_tokens=24, metadata={"a": "b"})
    text, usage = chat_answer(shared, messages=[{"role": "user", "content": QUESTION}], max_tokens=24)
    assert made.output_text == text
    assert (made.status, made.metadata) == ("incomplete", {"a": "b"})
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.usage.input_tokens == usage["prompt_tokens"]
    assert made.usage.output_tokens == usage["completion_tokens"] == 24


def test_a_response_goes_on_with_what_was_said(responses):
    """The output of one response is input of the next, as clients without a store do it."""
    turns = [{"role": "user", "content": QUESTION}]
    first = responses.create(model="smollm2", input=turns, temperature=0, max_output_tokens=8)
    turns += [item.model_dump() for item in first.output]
    turns.append({"role": "user", "content": [{"type": "input_text", "text": "Go on."}]})
    second = responses.create(
        model="smollm2", input=turns, instructions="Be brief.", temperature=0, max_output_tokens=8
    )
    assert second.output_text
    assert second.usage.input_tokens > first.usage.total_tokens


def test_events_of_a_response(responses):
    asked = {"model": "smollm2", "input": QUESTION, "temperature": 0, "max_output_tokens": 12}
    whole = responses.create(**asked)
    events = list(responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text


def test_the_helper_for_streams_of_responses(responses):
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "city", "strict": True, "schema": schema}
    with responses.stream(
        model="smollm2", input="Name a city, as JSON.", text={"format": form}, temperature=0, max_output_tokens=40
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed"
    assert "".join(pieces) == final.output_text
    assert json.loads(final.output_text)["city"] in {"Rome", "Paris"}


def test_errors_of_responses(responses):
    with pytest.raises(openai_package.BadRequestError) as caught:
        responses.create(model="smollm2", input="a", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai_package.BadRequestError) as caught:
        responses.create(model="smollm2", input="a", tools=[{"type": "web_search"}])
    assert caught.value.param == "tools[0].type"
    with pytest.raises(openai_package.NotFoundError):
        responses.create(model="nobody", input="a")


FUNCTIONS = [
    {"type": "function", "name": "weather", "description": "Of a city.", "parameters": PARAMETERS, "strict": True},
    {"type": "function", "name": "time", "description": "What time it is.", "parameters": {"type": "object"}},
]
CALLING = {"model": "smollm2", "tools": FUNCTIONS, "temperature": 0, "max_output_tokens": 100}


def after_the_call(server, name, arguments):
    """Tokens of the prompt that a chat completion makes of the question, a call and its result."""
    call = {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [
        {"role": "user", "content": ASKING},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "Rainy."},
    ]
    return chat_answer(server, messages=messages, max_tokens=1)[1]["prompt_tokens"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_response_calls_a_tool_and_goes_on_with_its_result(responses, shared, choice):
    turns = [{"role": "user", "content": ASKING}]
    made = responses.create(input=turns, tool_choice=choice, parallel_tool_calls=False, **CALLING)
    (call,) = made.output
    assert (made.status, call.type, call.status) == ("completed", "function_call", "completed")
    assert call.name == "weather"
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    turns += [item.model_dump() for item in made.output]
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "Rainy."})
    second = responses.create(input=turns, tool_choice="none", **{**CALLING, "max_output_tokens": 8})
    assert second.output_text
    assert second.usage.input_tokens == after_the_call(shared, call.name, call.arguments)


def test_the_helper_for_streams_of_responses_accumulates_calls(responses):
    asked = {"input": ASKING, "tool_choice": "required", **CALLING}
    whole = responses.create(**asked)
    pieces, snapshots, done = {}, {}, []
    with responses.stream(**asked) as stream:
        for event in stream:
            if event.type == "response.function_call_arguments.delta":
                pieces[event.output_index] = pieces.get(event.output_index, "") + event.delta
                snapshots[event.output_index] = event.snapshot
            elif event.type == "response.output_item.done":
                done.append(event.item.arguments)
        final = stream.get_final_response()
    told = [(item.name, item.arguments) for item in final.output]
    assert told == [(item.name, item.arguments) for item in whole.output]
    assert list(pieces.values()) == list(snapshots.values()) == done == [arguments for _, arguments in told]
    assert [item.parsed_arguments for item in final.output] == [json.loads(arguments) for arguments in done]


# Anthropic


def test_a_message(claude, shared):
    turns = [{"role": "user", "content": QUESTION}]
    made = claude.create(model="smollm2", system="Be brief.", messages=turns, max_tokens=4, extra_body=GREEDY)
    text, usage = chat_answer(shared, messages=[{"role": "system", "content": "Be brief."}, *turns], max_tokens=4)
    ((block),) = made.content
    assert (made.type, block.type, block.text) == ("message", "text", text)
    assert made.stop_reason == "max_tokens"
    assert made.usage.input_tokens + made.usage.cache_read_input_tokens == usage["prompt_tokens"]
    assert made.usage.output_tokens == 4
    counted = claude.count_tokens(model="smollm2", system="Be brief.", messages=turns)
    assert counted.input_tokens == usage["prompt_tokens"]


def test_the_helper_for_streams_of_messages(claude):
    turns = [{"role": "user", "content": QUESTION}]
    asked = {"model": "smollm2", "messages": turns, "max_tokens": 24, "extra_body": GREEDY}
    whole = claude.create(**asked)
    stop = whole.content[0].text[10:14]
    with claude.stream(**asked, stop_sequences=[stop]) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == final.content[0].text == whole.content[0].text.partition(stop)[0]
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)
    assert final.usage.output_tokens > 0
    kinds = [event.type for event in claude.create(**asked, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


TOOLS = [
    {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
    for function in FUNCTIONS
]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_message_calls_a_tool_and_goes_on_with_its_result(claude, shared, choice):
    turns = [{"role": "user", "content": ASKING}]
    asked = {"model": "smollm2", "tools": TOOLS, "max_tokens": 100, "extra_body": GREEDY}
    choice = {**choice, "disable_parallel_tool_use": True}
    made = claude.create(messages=turns, tool_choice=choice, **asked)
    (call,) = made.content
    assert (made.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
    jsonschema.validate(call.input, PARAMETERS)
    counted = claude.count_tokens(model="smollm2", messages=turns, tools=TOOLS, tool_choice=choice)
    assert counted.input_tokens == made.usage.input_tokens + made.usage.cache_read_input_tokens
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rainy."}
    turns += [{"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    second = claude.create(messages=turns, tool_choice={"type": "none"}, **{**asked, "max_tokens": 8})
    assert [block.type for block in second.content] == ["text"]
    prompt_tokens = second.usage.input_tokens + second.usage.cache_read_input_tokens
    assert prompt_tokens == after_the_call(shared, call.name, json.dumps(call.input))


def test_the_helper_for_streams_of_messages_accumulates_calls(claude):
    turns = [{"role": "user", "content": ASKING}]
    asked = {"model": "smollm2", "messages": turns, "tools": TOOLS, "max_tokens": 100, "extra_body": GREEDY}
    asked["tool_choice"] = {"type": "any"}
    whole = claude.create(**asked)
    pieces, snapshot = "", None
    with claude.stream(**asked) as stream:
        for event in stream:
            if event.type == "input_json" and event.snapshot is not None:
                pieces, snapshot = pieces + event.partial_json, event.snapshot
        final = stream.get_final_message()
    told = [(block.name, block.input) for block in final.content]
    assert told == [(block.name, block.input) for block in whole.content]
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert snapshot == told[-1][1]
    assert pieces.endswith(json.dumps(snapshot))


def test_errors_of_messages(claude):
    turns = [{"role": "user", "content": "a"}]
    image = {"type": "image", "source": {"type": "url", "url": "http://localhost/a.png"}}
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        claude.create(model="nobody", messages=turns, max_tokens=4)
    with pytest.raises(anthropic.BadRequestError, match="this server takes text only"):
        claude.create(model="smollm2", messages=[{"role": "user", "content": [image]}], max_tokens=4)
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].type: must be custom"):
        claude.create(model="smollm2", messages=turns, max_tokens=4, tools=[{"name": "bash", "type": "bash_20250124"}])


def test_who_leaves_a_stream_frees_its_slot(claude, responses, shared):
    asked = {"model": "smollm2", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 1000}
    with claude.stream(**asked) as stream:
        next(iter(stream.text_stream))
    with responses.create(model="smollm2", input=QUESTION, stream=True) as stream:
        next(event for event in stream if event.type == "response.output_text.delta")
    with http(shared.url) as client:
        wait_idle(client)
