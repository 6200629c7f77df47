"""The official clients of OpenAI's responses and of Anthropic's messages against the real daemon."""

from __future__ import annotations

import json

import anthropic
import openai as openai_package
import pytest

from .client import CALL_SECONDS, http, openai, wait_idle

QUESTION = "Count from one to ten."
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
    with pytest.raises(openai_package.NotFoundError):
        responses.create(model="nobody", input="a")


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


def test_errors_of_messages(claude):
    turns = [{"role": "user", "content": "a"}]
    image = {"type": "image", "source": {"type": "url", "url": "http://localhost/a.png"}}
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        claude.create(model="nobody", messages=turns, max_tokens=4)
    with pytest.raises(anthropic.BadRequestError, match="this route takes text only"):
        claude.create(model="smollm2", messages=[{"role": "user", "content": [image]}], max_tokens=4)
    with pytest.raises(anthropic.BadRequestError, match="tools is not supported"):
        claude.create(
            model="smollm2", messages=turns, max_tokens=4, tools=[{"name": "a", "input_schema": {"type": "object"}}]
        )


def test_who_leaves_a_stream_frees_its_slot(claude, responses, shared):
    asked = {"model": "smollm2", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 1000}
    with claude.stream(**asked) as stream:
        next(iter(stream.text_stream))
    with responses.create(model="smollm2", input=QUESTION, stream=True) as stream:
        next(event for event in stream if event.type == "response.output_text.delta")
    with http(shared.url) as client:
        wait_idle(client)
