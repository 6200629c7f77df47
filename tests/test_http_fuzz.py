"""Every field of every body, with whatever does not belong there."""

from __future__ import annotations

import json
import typing

import pytest
from http_harness import CHAT, COMPLETIONS, assert_error, chat, completion, expected, running
from pydantic import BaseModel

from trioserve.http.operation import Operation
from trioserve.http.schemas.base import GenerationFields
from trioserve.http.schemas.chat import ChatCompletionRequest
from trioserve.http.schemas.completions import CompletionRequest
from trioserve.http.schemas.embeddings import EmbeddingsRequest
from trioserve.http.schemas.management import LoadRequest, UnloadAllRequest, UnloadModelsRequest, UnloadRequest
from trioserve.http.schemas.messages import CountTokensRequest, MessagesRequest
from trioserve.http.schemas.responses_api import ResponsesRequest
from trioserve.http.schemas.tasks import BatchTaskRequest
from trioserve.http.schemas.text import DetokenizeRequest, TokenizeRequest

RUN, STREAM, BATCH = "/v1/tasks/run", "/v1/tasks/stream", "/v1/tasks/batch"
EMBEDDINGS = "/v1/embeddings"
TOKENIZE, DETOKENIZE, TEMPLATE = "/tokenize", "/detokenize", "/apply-template"
INPUT_TOKENS = "/v1/chat/completions/input_tokens"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
LOAD, UNLOAD = "/v1/models/load", "/v1/models/unload"
UNLOAD_MODELS, UNLOAD_ALL = "/v1/tasks/unload_models", "/v1/tasks/unload_all_models"
BODIES = {
    CHAT: (ChatCompletionRequest, chat()),
    COMPLETIONS: (CompletionRequest, completion()),
    RUN: (CompletionRequest, completion()),
    STREAM: (ChatCompletionRequest, chat()),
    BATCH: (BatchTaskRequest, {"requests": [completion()]}),
    RESPONSES: (ResponsesRequest, {"input": "hi", "max_output_tokens": 8}),
    MESSAGES: (MessagesRequest, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}),
    COUNT: (CountTokensRequest, {"messages": [{"role": "user", "content": "hi"}]}),
    EMBEDDINGS: (EmbeddingsRequest, {"input": "text"}),
    TOKENIZE: (TokenizeRequest, {"content": "text"}),
    DETOKENIZE: (DetokenizeRequest, {"tokens": [1, 2]}),
    TEMPLATE: (ChatCompletionRequest, chat()),
    INPUT_TOKENS: (ChatCompletionRequest, chat()),
    LOAD: (LoadRequest, {"id": "fake", "busy_timeout_ms": 30_000, "keep_alive_ms": 0}),
    UNLOAD: (UnloadRequest, {"id": "fake"}),
    UNLOAD_MODELS: (UnloadModelsRequest, {"model_ids": ["fake"]}),
    UNLOAD_ALL: (UnloadAllRequest, {}),
}
# Of the fields that are only taken where they ask for nothing, all of which are checked by one line.
ALSO_TRIED = {"functions"}
# JSON as it stands in the body, by what it is.
HOSTILE = {
    "null": b"null",
    "true": b"true",
    "a text": b'"text"',
    "no text": b'""',
    "a number as text": b'"1"',
    "zero": b"0",
    "one": b"1",
    "negative": b"-7",
    "a fraction": b"0.5",
    "beyond 32 bits": str(2**31).encode(),
    "beyond 64 bits": str(2**63).encode(),
    "400 digits": b"1" + b"0" * 400,
    "100,000 digits": b"9" * 100_000,
    "NaN": b"NaN",
    "Infinity": b"-Infinity",
    "1e999": b"1e999",
    "1e308": b"1e308",
    "a list": b"[]",
    "a list of lists": b"[[], [[]]]",
    "a list of nulls": b"[null]",
    "a list of numbers": b"[1, 2.5, -1]",
    "an object": b"{}",
    "an object of anything": b'{"": {"type": []}, "type": null}',
    "a lone surrogate": rb'"\ud800"',
    "a lone surrogate in a list": rb'["\udfff"]',
    "a lone surrogate as a key": rb'{"\udbff": 1}',
    "NUL": rb'"a\u0000b"',
    "long text": json.dumps("x" * 100_000).encode(),
    "10,000 texts": json.dumps(["x"] * 10_000).encode(),
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "200 lists": b"[" * 200 + b"]" * 200,
}

# What is tried inside of fields: one of each kind, and what is hard to encode.
INSIDE = ["null", "true", "a text", "a fraction", "a list of lists", "an object of anything", "200 lists", "1e308"] + [
    name for name in HOSTILE if "surrogate" in name
]


async def test_no_route_with_a_body_is_left_out():
    async with running() as server:
        app = server.app._app
        handlers = {rule.rule: app.view_functions[rule.endpoint] for rule in app.url_map.iter_rules()}
    assert {path for path, handler in handlers.items() if Operation.of(handler).body is not None} == set(BODIES)


def fields_of(model, path=()):
    """Paths of all fields of a schema, of the schemas inside it, and of what it only takes where it asks for nothing.

    Arguments:
        model: the schema.
        path: of the place where it stands: names, and numbers in lists.
    """
    for name, info in model.model_fields.items():
        yield (*path, name)
        for inner, in_list in nested(info.annotation):
            yield from fields_of(inner, (*path, name, 0) if in_list else (*path, name))
    yield from ((*path, name) for name in getattr(model, "neutral", ()) if name in ALSO_TRIED)


def nested(annotation, in_list=False):
    """The schemas in an annotation, and whether they stand in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(annotation, in_list)]
    in_list = typing.get_origin(annotation) is list
    return [found for inner in typing.get_args(annotation) for found in nested(inner, in_list)]


def spoiled(body, path, raw):
    """A body as bytes, with raw JSON at one place."""
    whole = place = json.loads(json.dumps(body))
    *way, last = path
    for step in way:
        place = place[step] if isinstance(step, int) else place.setdefault(step, {})
    place[last] = "\ue000"
    return json.dumps(whole, ensure_ascii=False).encode().replace('"\ue000"'.encode(), raw)


def spelled(path):
    """A path as errors spell it."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)[1:]


FIELDS = [(route, path) for route, (model, _) in BODIES.items() for path in fields_of(model)]


def test_the_walk_reaches_what_is_nested():
    assert (CHAT, ("messages", 0, "content")) in FIELDS
    assert (CHAT, ("stream_options", "include_usage")) in FIELDS
    assert (CHAT, ("tools",)) in FIELDS
    assert (LOAD, ("n_ctx",)) in FIELDS


@pytest.mark.parametrize("route", BODIES)
async def test_whatever_a_field_holds_is_taken_or_refused_by_name(route):
    model, body = BODIES[route]
    task = "embed" if route == EMBEDDINGS else "generate"
    async with (
        running(management=True, models=[{"n_ctx": 256, "task": task}]) as server,
        await server.connect() as client,
    ):
        for path in fields_of(model):
            if route in {RUN, STREAM, TEMPLATE, INPUT_TOKENS} and path[0] in GenerationFields.model_fields:
                continue  # tried where they come from
            for name, raw in HOSTILE.items():
                await server.free()  # some of these may not wait
                reply = await client.call(route, spoiled(body, path, raw))
                judge(reply, path, name)
        assert (await client.call(route, body)).status == 200
        sane = {"id": "fake", "slots": 1, "busy_timeout_ms": 30_000, "task": "generate"}
        assert (await client.call(LOAD, sane)).status == 200
        assert (await client.call(COMPLETIONS, completion())).text == expected()
        await server.free()
        assert server.service.tally().failed == 0


# What stands inside of fields that the walk above takes for one value.
TURNS = {
    RESPONSES: {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "d"}]},
        ],
        "tools": [
            {"type": "function", "name": "f", "description": "a", "parameters": {"type": "object"}, "strict": True}
        ],
        "tool_choice": {"type": "function", "name": "f"},
        "max_output_tokens": 8,
    },
    MESSAGES: {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "b", "signature": ""},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [{"type": "text", "text": "d"}],
                        "is_error": True,
                    }
                ],
            },
        ],
        "tools": [{"type": "custom", "name": "f", "description": "a", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "max_tokens": 8,
    },
}


def places(value, path=()):
    """Paths of everything inside of a value."""
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        yield (*path, step)
        yield from places(inner, (*path, step))


@pytest.mark.parametrize("route", TURNS)
async def test_whatever_stands_inside_of_turns_and_tools_is_taken_or_refused_by_name(route):
    body = TURNS[route]
    async with running(models=[{"n_ctx": 1024}]) as server, await server.connect() as client:
        assert (await client.call(route, body)).status == 200
        for path in places(body):
            for name in INSIDE:
                await server.free()
                reply = await client.call(route, spoiled(body, path, HOSTILE[name]))
                # A tool by another name is missed where it is chosen.
                missed = b"tool_choice.name: is none of the tools" in reply.body
                judge(reply, ("tool_choice",) if missed else path[:1], name)
        await server.free()
        assert server.service.tally().failed == 0


def judge(reply, path, name):
    """See that a reply is good, or an error that names the field (or the place in the body, where that was no JSON)."""
    where = (path, name, reply)
    assert reply.status in {200, 400, 404}, where
    if reply.status == 200:
        return
    if "type" in reply.json:  # Anthropic's shape has no field and no code
        error = {"param": None, "code": None, **reply.json["error"]}
        assert error["type"] == ("not_found_error" if reply.status == 404 else "invalid_request_error"), where
    else:
        error = assert_error(reply, reply.status, "model_not_found" if reply.status == 404 else "invalid_request_error")
    assert len(error["message"]) < 1000, where
    if error["message"].startswith("the body is "):
        assert error["param"] is None, where
    elif path[0] in {"system", "instructions"} and error["message"].startswith("the prompt has "):
        assert name == "long text", where  # it is the prompt's beginning
    elif path == ("id",) and error["param"] == "path":  # a load of another model, which needs a file
        assert error["message"] == "path: is required", where
    else:
        named = path[0] if error["code"] == "context_length_exceeded" else spelled(path)
        assert (error["param"] or "").startswith(named) or named in error["message"], where
