"""The document tells of every route, and tells the truth: real answers conform to it, and so do generated calls."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from collections import Counter

import h11
import jsonschema
import pytest
import requests
import schemathesis
import trio
from http_harness import CHAT, COMPLETIONS, chat, completion, running, until
from hypothesis import settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    unsupported_method,
)

from trioserve.config import Config, ModelConfig
from trioserve.engine.base import Likelihood, TokenLogprob
from trioserve.http.app import create_app
from trioserve.http.document import document
from trioserve.http.operation import Operation
from trioserve.http.render import ChatShape, CompletionShape, token_logprobs
from trioserve.http.schemas.chat import ChatCompletionRequest
from trioserve.http.schemas.completions import CompletionRequest
from trioserve.http.schemas.management import UnloadAllRequest, UnloadModelsRequest, UnloadRequest
from trioserve.http.schemas.messages import CountTokensRequest, MessagesRequest
from trioserve.http.schemas.responses_api import ResponsesRequest
from trioserve.http.schemas.tasks import BatchTaskRequest
from trioserve.service import open_service
from trioserve.testing import FakeEngine

UNLOAD, LOAD = "/v1/models/unload", "/v1/models/load"
TOKENIZE, DETOKENIZE, TEMPLATE = "/tokenize", "/detokenize", "/apply-template"
INPUT_TOKENS = "/v1/chat/completions/input_tokens"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
RUN, STREAM, BATCH = "/v1/tasks/run", "/v1/tasks/stream", "/v1/tasks/batch"


async def application():
    async with open_service(Config(), engine=FakeEngine()) as service:
        return create_app(service)._app


APP = trio.run(application)
DOCUMENT = document(APP)
SCHEMAS = DOCUMENT["components"]["schemas"]


def operation_of(path, method="post"):
    return DOCUMENT["paths"][path][method]


# Every route


@pytest.mark.parametrize("rule", list(APP.url_map.iter_rules()), ids=str)
def test_every_route_says_what_it_does(rule):
    operation = Operation.of(APP.view_functions[rule.endpoint])
    assert operation is not None, "its handler needs an Operation beside it"
    assert rule.arguments == set(operation.parameters)


def test_a_route_that_says_nothing_is_named():
    async def silent():
        """Has no operation."""

    app = trio.run(application)
    app.add_url_rule("/silent", view_func=silent)
    with pytest.raises(LookupError, match="/silent"):
        document(app)


def test_the_document_is_valid_openapi():
    schemathesis.openapi.from_dict(DOCUMENT).validate()
    assert DOCUMENT["openapi"].startswith("3.1.")


def test_every_reference_leads_somewhere():
    for reference in references(DOCUMENT):
        found = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
        assert found


def references(value):
    if isinstance(value, dict):
        yield from [value["$ref"]] if "$ref" in value else []
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from references(item)


def test_every_schema_is_used_and_says_what_it_is():
    used = {reference.removeprefix("#/components/schemas/") for reference in references(DOCUMENT)}
    assert set(SCHEMAS) <= used
    assert all(schema["description"] for schema in SCHEMAS.values())


def test_statuses_are_told():
    told = {
        (path, method): set(map(int, operation["responses"]))
        for path, item in DOCUMENT["paths"].items()
        for method, operation in item.items()
    }
    public = {200, 405, 500}
    reading = {*public, 401}
    body = {*reading, 400, 408, 413, 415}
    assert told[CHAT, "post"] == told[COMPLETIONS, "post"] == {*body, 404, 503}
    assert told[LOAD, "post"] == {*body, 403, 503}
    assert told[UNLOAD, "post"] == {*body, 403, 404, 503}
    assert told["/v1/models/{model_id}", "get"] == {*reading, 404}
    assert told["/health/ready", "get"] == {*public, 503}
    assert told["/health/live", "get"] == public
    assert told["/openapi.json", "get"] == told["/v1/models", "get"] == reading


def test_names_of_operations_differ():
    names = [operation["operationId"] for item in DOCUMENT["paths"].values() for operation in item.values()]
    assert len(set(names)) == len(names)


# Every field


@pytest.mark.parametrize(
    "model",
    [
        ChatCompletionRequest,
        CompletionRequest,
        ResponsesRequest,
        MessagesRequest,
        CountTokensRequest,
        BatchTaskRequest,
        UnloadRequest,
        UnloadModelsRequest,
        UnloadAllRequest,
    ],
)
def test_the_fields_of_bodies_are_those_of_the_schemas(model):
    properties = SCHEMAS[model.__name__]["properties"]
    assert set(properties) == {*model.model_fields, *getattr(model, "neutral", ()), *getattr(model, "ignored", ())}
    assert all(described.get("description") for described in properties.values())


def test_the_fields_of_a_load_are_those_of_the_table():
    schema = SCHEMAS["LoadRequest"]
    assert set(schema["properties"]) == set(ModelConfig.model_fields)
    assert schema["additionalProperties"] is False
    assert "required" not in schema
    assert schema["properties"]["slots"]["anyOf"] == [
        {"maximum": 16, "minimum": 1, "type": "integer"},
        {"type": "null"},
    ]
    assert schema["properties"]["lora"]["anyOf"][0]["items"]["anyOf"][1]["required"] == ["path"]
    assert all(described["description"] for described in schema["properties"].values())


FUNCTION = {"type": "function", "name": "f"}
CALLED = [
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "b"},
]
USER = {"role": "user", "content": "a"}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b", "is_error": False}]}
ACCEPTED = [
    (CHAT, {"messages": [{"role": "user", "content": "a"}]}, True),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": "b"}]}, True),
    (CHAT, {"messages": [{"role": "assistant"}]}, True),
    (CHAT, {"messages": [{"role": "user", "content": 1}]}, False),
    (CHAT, {"messages": [{"role": "user", "content": ["a"]}]}, False),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, False),
    (CHAT, {"messages": []}, False),
    (CHAT, {}, False),
    (CHAT, {"messages": [{"role": "user"}], "tools": [{"type": "function", "function": {"name": "f"}}]}, True),
    (CHAT, {"messages": [{"role": "user"}], "tools": [{"type": "function"}]}, False),
    (CHAT, {"messages": [{"role": "user"}], "tools": [{"type": "function", "function": {"name": "a b"}}]}, False),
    (CHAT, {"messages": [{"role": "user"}], "tools": [], "tool_choice": "auto"}, True),
    (CHAT, {"messages": [{"role": "user"}], "tool_choice": "any"}, False),
    (RESPONSES, {"input": "a", "tools": [{"type": "function", "name": "f", "strict": True}]}, True),
    (RESPONSES, {"input": "a", "tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}}, True),
    (RESPONSES, {"input": "a", "tools": [FUNCTION], "tool_choice": {"type": "function"}}, False),
    (RESPONSES, {"input": "a", "tools": [{"name": "f"}]}, False),
    (RESPONSES, {"input": "a", "tools": [{**FUNCTION, "parameters": {"type": "array"}}]}, False),
    (RESPONSES, {"input": "a", "tools": [{**FUNCTION, "name": "a" * 129}]}, False),
    (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}, False),
    (RESPONSES, {"input": "a", "tool_choice": "any"}, False),
    (RESPONSES, {"input": CALLED}, True),
    (RESPONSES, {"input": [{**CALLED[0], "arguments": {}}]}, False),
    (RESPONSES, {"input": [*CALLED[:1], {**CALLED[1], "output": [{"type": "input_text", "text": "a"}]}]}, True),
    (RESPONSES, {"input": [*CALLED[:1], {**CALLED[1], "output": [{"type": "output_text", "text": "a"}]}]}, False),
    (RESPONSES, {"input": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]}]}, True),
    (RESPONSES, {"input": [{"type": "reasoning", "summary": []}]}, True),
    (RESPONSES, {"input": [{"type": "reasoning", "content": [{"type": "output_text", "text": "a"}]}]}, False),
    (MESSAGES, {"messages": [USER], "max_tokens": 1, "tools": [{"name": "f", "input_schema": {}}]}, True),
    (MESSAGES, {"messages": [USER], "max_tokens": 1, "tools": [{"name": "f"}]}, False),
    (
        MESSAGES,
        {"messages": [USER], "max_tokens": 1, "tools": [{"type": "custom", "name": "f", "input_schema": {}}]},
        True,
    ),
    (
        MESSAGES,
        {"messages": [USER], "max_tokens": 1, "tools": [{"type": "bash", "name": "f", "input_schema": {}}]},
        False,
    ),
    (
        MESSAGES,
        {"messages": [USER], "max_tokens": 1, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        True,
    ),
    (MESSAGES, {"messages": [USER], "max_tokens": 1, "tool_choice": {"type": "required"}}, False),
    (MESSAGES, {"messages": [USER], "max_tokens": 1, "tool_choice": "auto"}, False),
    (COUNT, {"messages": [USER, USE, RESULT]}, True),
    (COUNT, {"messages": [USER, {**USE, "role": "user"}]}, False),
    (COUNT, {"messages": [USER, {**RESULT, "role": "assistant"}]}, False),
    (COUNT, {"messages": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]}]}, True),
    (
        COUNT,
        {"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
        False,
    ),
    (COMPLETIONS, {"prompt": "a"}, True),
    (COMPLETIONS, {"prompt": [1, 2]}, True),
    (COMPLETIONS, {"prompt": ["a"]}, True),
    (COMPLETIONS, {"prompt": [[1, 2]]}, True),
    (COMPLETIONS, {"prompt": []}, False),
    (COMPLETIONS, {"prompt": [[]]}, False),
    (COMPLETIONS, {"prompt": ["a", [1]]}, True),
    (COMPLETIONS, {"prompt": ["a", 1]}, False),
    (COMPLETIONS, {"prompt": ["a"] * 2049}, False),
    (RUN, {"prompt": "a"}, True),
    (RUN, {"messages": [{"role": "user", "content": "a"}]}, True),
    (RUN, {}, False),
    (BATCH, {"requests": [{"prompt": "a"}]}, True),
    (BATCH, {"requests": []}, False),
    (COMPLETIONS, {"prompt": [-1]}, False),
    (COMPLETIONS, {"prompt": None}, False),
    (COMPLETIONS, {"prompt": "a", "stop": "b"}, True),
    (COMPLETIONS, {"prompt": "a", "stop": ["b"] * 16}, True),
    (COMPLETIONS, {"prompt": "a", "stop": ["b"] * 17}, False),
    (COMPLETIONS, {"prompt": "a", "stop": ""}, False),
    (COMPLETIONS, {"prompt": "a", "n": 2, "echo": False, "logit_bias": {}, "typical_p": 1.0}, True),
    (COMPLETIONS, {"prompt": "a", "echo": True}, True),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": -100, "6": False}}, True),
    (COMPLETIONS, {"prompt": "a", "logit_bias": [[5, 1.5], [6, False]]}, True),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"a": 1}}, False),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 101}}, False),
    (COMPLETIONS, {"prompt": "a", "logit_bias": [[-5, 1]]}, False),
    (COMPLETIONS, {"prompt": "a", "logit_bias": 5}, False),
    (COMPLETIONS, {"prompt": "a", "n": True}, False),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, False),
    (COMPLETIONS, {"prompt": "a", "max_tokens": None, "nobody": "knows"}, True),
]


async def test_the_document_and_the_server_accept_the_same():
    async with running() as server:
        for path, body, accepted in ACCEPTED:
            schema = operation_of(path)["requestBody"]["content"]["application/json"]["schema"]
            assert valid(schema, body) is accepted, body
            assert (await server.call(path, body)).status == (200 if accepted else 400), body


def valid(schema, value):
    return jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]}).is_valid(value)


# Answers


def conforms(reply, path, method, status):
    """See that a reply is one of those that the document tells of."""
    assert reply.status == status, reply
    told = operation_of(path, method)["responses"][str(status)]
    media_type = reply.headers["content-type"].partition(";")[0]
    assert set(told["headers"]) <= set(reply.headers)
    if media_type == "text/event-stream":
        lines = [line.removeprefix("data: ") for line in reply.body.decode().splitlines() if line.startswith("data: ")]
        values = [json.loads(line) for line in lines if line != "[DONE]"]
        assert ("[DONE]" in told["content"][media_type]["schema"]["description"]) or lines[-1] != "[DONE]"
        schema = told["content"][media_type]["x-itemSchema"]
    else:
        values, schema = [reply.json], told["content"][media_type]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]})
    for value in values:
        validator.validate(value)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [{}, {"stream_options": {"include_usage": True}}, {"max_tokens": 1}, {"n": 2}, {"timings_per_token": True}],
)
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat), (COMPLETIONS, completion)])
async def test_generations_are_as_described(path, body, stream, fields):
    async with running() as server:
        conforms(await server.call(path, body(stream=stream, **fields)), path, "post", 200)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failing", [None, 3])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"input": "hi", "max_output_tokens": 4, "metadata": {"a": "b"}}),
        (MESSAGES, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
        (COUNT, {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_the_other_apis_are_as_described(path, body, stream, failing):
    engine = FakeEngine()
    engine.failing_step = failing
    async with running(engine) as server:
        fails = failing and path != COUNT and not stream
        conforms(await server.call(path, {**body, "stream": stream}), path, "post", 500 if fails else 200)
        conforms(await server.call(path, {**body, "model": "nobody"}), path, "post", 404)
        conforms(await server.call(path, {**body, "tools": [{}]}), path, "post", 400)
        conforms(await server.call(path, b"{}", headers=[("content-type", "text/plain")]), path, "post", 415)
        conforms(await server.call(path, method="DELETE"), path, "post", 405)


LIKELIHOODS = [
    Likelihood(TokenLogprob(1, b"\xc3", -0.5), (TokenLogprob(1, b"\xc3", -0.5), TokenLogprob(2, b"b", -9.5)))
]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ChatChoice", ChatShape.choice("a", "stop", 0, LIKELIHOODS)),
        ("ChatChunkChoice", ChatShape.piece("a", 0, LIKELIHOODS)),
        ("TextChoice", CompletionShape.choice("a", "stop", 0, LIKELIHOODS)),
        ("TextChunkChoice", CompletionShape.piece("a", 0, LIKELIHOODS)),
        ("TaskDelta", {"type": "task.delta", "id": "a", "text": "a", "logprobs": token_logprobs(LIKELIHOODS)}),
    ],
)
def test_likelihoods_are_as_described(name, value):
    assert "logprob" in json.dumps(value)
    assert valid({"$ref": f"#/components/schemas/{name}"}, value)


CALLS = '{"tool_calls": [{"name": "f", "arguments": {}}, {"name": "f", "arguments": {"a": 1}}]}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [CALLS, "<think>Well</think>Yes", "<think>Well</think>" + CALLS, CALLS[:50]])
async def test_calls_and_thoughts_are_as_described(text, stream):
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with running(FakeEngine(answer_text=text)) as server:
        reply = await server.call(CHAT, chat(stream=stream, tools=tools, max_tokens=200))
        assert (b'"tool_calls":[' in reply.body) is ("tool_calls" in text)
        assert (b'"reasoning_content"' in reply.body) is ("think" in text)
        conforms(reply, CHAT, "post", 200)
        reply = await server.call(
            RESPONSES, {"input": "a", "tools": [FUNCTION], "tool_choice": "auto", "stream": stream}
        )
        assert (b'"function_call"' in reply.body) is ("tool_calls" in text)
        assert (b'"reasoning_text"' in reply.body) is ("think" in text)
        conforms(reply, RESPONSES, "post", 200)
        tools = [{"name": "f", "input_schema": {}}]
        reply = await server.call(MESSAGES, {"messages": [USER], "tools": tools, "max_tokens": 200, "stream": stream})
        assert (b'"tool_use"' in reply.body) is ("tool_calls" in text)
        assert (b'"thinking"' in reply.body) is ("think" in text)
        conforms(reply, MESSAGES, "post", 200)


async def test_tasks_are_as_described():
    async with running() as server:
        conforms(await server.call(RUN, completion()), RUN, "post", 200)
        conforms(await server.call(STREAM, chat()), STREAM, "post", 200)
        reply = await server.call(BATCH, {"requests": [completion(), chat(), completion(max_tokens=0), 5]})
        assert reply.body.count(b'"result"') == reply.body.count(b'"error"') == 2
        conforms(reply, BATCH, "post", 200)
        conforms(await server.call(BATCH, {"requests": []}), BATCH, "post", 400)
        conforms(await server.call(COMPLETIONS, completion(["a", "b"])), COMPLETIONS, "post", 200)
        conforms(await server.call(COMPLETIONS, completion(["a", "b"], stream=True)), COMPLETIONS, "post", 200)


async def test_texts_and_tokens_are_as_described():
    async with running() as server:
        for path, body in [
            (TOKENIZE, {"content": "é"}),
            (TOKENIZE, {"content": "é", "with_pieces": True}),
            (DETOKENIZE, {"tokens": [65]}),
            (TEMPLATE, chat()),
            (INPUT_TOKENS, chat()),
        ]:
            conforms(await server.call(path, body), path, "post", 200)
            conforms(await server.call(path, {**body, "model": "nobody"}), path, "post", 404)
            conforms(await server.call(path, {}), path, "post", 400)


async def test_status_is_as_described():
    engine = FakeEngine()
    engine.step_gate.shut()
    models = [{"id": "a", "slots": 2}, {"id": "b", "lazy": True}]
    async with running(engine, models=models) as server, await server.connect() as busy:
        await busy.send(COMPLETIONS, completion(model="a"))
        await engine.step_gate.arrived()
        for path in ("/v1/models", "/v1/slots", "/health", "/health/ready", "/health/live", "/openapi.json"):
            conforms(await server.call(path), path, "get", 200)
        conforms(await server.call("/v1/models/b"), "/v1/models/{model_id}", "get", 200)
        conforms(await server.call("/v1/models/c"), "/v1/models/{model_id}", "get", 404)
        conforms(await server.call("/v1/slots", method="PUT"), "/v1/slots", "get", 405)
        engine.step_gate.open()
        await busy.reply()


async def test_management_is_as_described():
    async with running(management=True) as server:
        for path, body in [
            (LOAD, {"id": "fake", "slots": 2}),
            (UNLOAD, {"id": "fake"}),
            ("/v1/tasks/unload_models", {"model_ids": ["fake", "nobody"]}),
            ("/v1/tasks/unload_all_models", {}),
        ]:
            conforms(await server.call(path, body), path, "post", 200)
            conforms(await server.call(path, {"busy_timeout_ms": -1}), path, "post", 400)
        conforms(await server.call(UNLOAD, {"id": "nobody"}), UNLOAD, "post", 404)
    async with running() as server:
        conforms(await server.call(UNLOAD, {"id": "fake"}), UNLOAD, "post", 403)


async def test_keys_are_as_described():
    async with running(management=True, api_keys=("a" * 32,), admin_keys=("b" * 32,)) as server:
        conforms(await server.call("/openapi.json"), "/openapi.json", "get", 401)
        conforms(await server.call("/health"), "/health", "get", 200)
        key = [("authorization", "Bearer " + "a" * 32)]
        conforms(await server.call("/openapi.json", headers=key), "/openapi.json", "get", 200)
        conforms(await server.call(UNLOAD, {"id": "fake"}, headers=key), UNLOAD, "post", 403)


async def test_errors_are_as_described(monkeypatch):
    monkeypatch.setattr("trioserve.http.app.BODY_TIMEOUT_SECONDS", 0.05)
    engine = FakeEngine()
    engine.failing_loads, engine.failing_step = 1, 3
    async with running(engine, max_request_body_bytes=1000, models=[{"lazy": True, "n_ctx": 100}]) as server:
        plain = [("content-type", "text/plain")]
        for body, headers, status in [
            (completion(), [], 503),
            (completion(), [], 500),
            (completion(max_tokens=0), [], 400),
            (completion("x" * 200), [], 400),
            (completion(model="nobody"), [], 404),
            (completion("x" * 1000), [], 413),
            (completion(), plain, 415),
        ]:
            conforms(await server.call(COMPLETIONS, body, headers=headers), COMPLETIONS, "post", status)
        conforms(await server.call(COMPLETIONS, method="DELETE"), COMPLETIONS, "post", 405)
        async with await server.connect() as slow:
            head = h11.Request(method="POST", target=COMPLETIONS, headers=[("host", "a"), ("content-length", "9")])
            await slow.stream.send_all(slow.http.send(head))
            conforms(await slow.reply(), COMPLETIONS, "post", 408)


async def test_a_stream_that_fails_is_as_described():
    engine = FakeEngine()
    engine.failing_step = 3
    async with running(engine) as server:
        reply = await server.call(CHAT, chat(stream=True))
        assert "error" in json.loads(reply.events[-1])
        conforms(reply, CHAT, "post", 200)


async def test_a_drain_is_as_described():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server, await server.connect() as busy:
        await busy.send(COMPLETIONS, completion())
        await engine.step_gate.arrived()
        server.stop.set()
        await until(lambda: server.service.phase == "draining")
        conforms(await server.call(CHAT, chat()), CHAT, "post", 503)
        conforms(await server.call("/health"), "/health", "get", 503)
        reply = await server.call("/openapi.json")
        assert reply.json == DOCUMENT
        conforms(reply, "/openapi.json", "get", 200)
        engine.step_gate.open()
        await busy.reply()


# Generated calls


def with_known_models():
    """The document for a server whose models are known, so that fewer calls end at an unknown one."""
    narrowed = copy.deepcopy(DOCUMENT)
    schemas = narrowed["components"]["schemas"]
    for name in (
        *("ChatCompletionRequest", "CompletionRequest", "BatchTaskRequest", "TokenizeRequest", "DetokenizeRequest"),
        *("ResponsesRequest", "MessagesRequest", "CountTokensRequest"),
    ):
        schemas[name]["properties"]["model"] = {"enum": ["fake", None]}
    for name in ("LoadRequest", "UnloadRequest"):
        schemas[name]["properties"]["id"] = {"enum": ["fake"]}
    for name in ("path", "lora"):
        schemas["LoadRequest"]["properties"].pop(name)
    for parameter in narrowed["paths"]["/v1/models/{model_id}"]["get"]["parameters"][1:]:
        parameter["schema"] = {"enum": ["fake"]}
    return narrowed


# Bodies of single tasks, and those about prompts, are those of completions, which is enough of them.
GENERATED = schemathesis.openapi.from_dict(with_known_models()).exclude(path=[RUN, STREAM, TEMPLATE, INPUT_TOKENS])
# No schema can say these: they depend on the model or on several fields at once, or 1.0 passes for an integer there.
BEYOND_SCHEMAS = (
    "all answers that are made are returned",
    "logprobs is not true",
    "echo and logprobs",
    "this model has no tokens for filling",
    "prompts times",
    "beginning-of-sequence",
    "flash attention",
    "give one of them",
    "integer",
    "list of token ids",
    "model's",
    "n_batch",
    "n_ctx",
    "path: is required",
    "can't be honoured",
    "an answer has one form",
    "asks for a tool",
    "is none of the tools",
    "is of no",
    "lone surrogates",
    "finite numbers",
    "but this is a request to",
)


@contextlib.contextmanager
def served():
    """A server in a thread of its own, and its address."""
    up, told = threading.Event(), {}

    async def serve():
        async with running(management=True, models=[{"n_ctx": 256}]) as server:
            told["url"] = f"http://127.0.0.1:{server.port}"
            told["token"], told["stop"] = trio.lowlevel.current_trio_token(), trio.Event()
            up.set()
            await told["stop"].wait()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    try:
        assert up.wait(20)
        yield told["url"]
    finally:
        trio.from_thread.run_sync(told["stop"].set, trio_token=told["token"])
        thread.join()


@pytest.fixture(scope="module")
def url():
    with served() as url:
        yield url


@pytest.fixture(scope="module")
def session():
    with requests.Session() as session:
        session.trust_env = False
        yield session


@pytest.fixture(scope="module")
def answers():
    """How often each operation answered with each status; in the end, that each was reached with something good."""
    counts = Counter()
    yield counts
    assert all(counts[path, 200] for path, _ in list(counts)), counts


@GENERATED.parametrize()
@settings(derandomize=True, max_examples=10, database=None)
def test_generated_calls_are_answered_as_described(case, url, session, answers):
    response = case.call(base_url=url, session=session)
    answers[case.path, response.status_code] += 1
    also_a_model = [allow_header_conformance, unsupported_method] if case.path in {LOAD, UNLOAD} else []
    ours = [not_a_server_error, positive_data_acceptance]  # told in other words below
    if case.path == BATCH:  # each of its requests gets its own error
        ours.append(negative_data_rejection)
    if response.status_code == 413:  # a list that breaks its bound by length can also be too many bytes
        ours.append(negative_data_rejection)
    case.validate_response(response, excluded_checks=[*ours, *also_a_model])
    assert response.headers["x-request-id"]
    if response.status_code >= 500:
        assert {"server_busy", "overloaded_error"} & set(response.json()["error"].values())
    assert "Traceback" not in response.text
    if response.status_code == 400 and case.meta.generation.mode is GenerationMode.POSITIVE:
        message = response.json()["error"]["message"]
        assert any(words in message for words in BEYOND_SCHEMAS), message
