"""docs/api.md tells every field as the schemas have it, and knows every field of the official clients."""

from __future__ import annotations

import copy
import re
import typing

import anthropic.types as anthropic_types
import anthropic.types.beta as anthropic_beta
import api_page
import openai.types as openai_types
import openai.types.chat as openai_chat
import openai.types.responses as openai_responses
import pytest
from anthropic.types import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming, MessageCreateParamsStreaming
from api_page import CHAT, COMMON, COMPLETIONS, UNWRITTEN, UPSTREAM
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from pydantic import BaseModel
from test_http_openapi import DOCUMENT

from trioserve.http.schemas.chat import ChatCompletionRequest
from trioserve.http.schemas.completions import CompletionRequest
from trioserve.http.schemas.embeddings import EmbeddingsRequest
from trioserve.http.schemas.messages import CountTokensRequest, MessagesRequest
from trioserve.http.schemas.responses_api import ResponsesRequest

PAGE = api_page.PAGE.read_text("utf-8")
WRITTEN = api_page.written(PAGE)
# Parameters of Anthropic's client that it sends as headers.
HEADERS = {"betas", "user_profile_id", "workspace_id"}
RESPONSES, EMBEDDINGS = "POST /v1/responses", "POST /v1/embeddings"
MESSAGES, COUNT = "POST /v1/messages", "POST /v1/messages/count_tokens"
CLIENTS = [
    (CHAT, ChatCompletionRequest, chat_params.CompletionCreateParamsNonStreaming),
    (CHAT, ChatCompletionRequest, chat_params.CompletionCreateParamsStreaming),
    (COMPLETIONS, CompletionRequest, openai_types.completion_create_params.CompletionCreateParamsNonStreaming),
    (COMPLETIONS, CompletionRequest, openai_types.completion_create_params.CompletionCreateParamsStreaming),
    (EMBEDDINGS, EmbeddingsRequest, openai_types.EmbeddingCreateParams),
    (RESPONSES, ResponsesRequest, response_params.ResponseCreateParamsNonStreaming),
    (RESPONSES, ResponsesRequest, response_params.ResponseCreateParamsStreaming),
    (MESSAGES, MessagesRequest, MessageCreateParamsNonStreaming),
    (MESSAGES, MessagesRequest, MessageCreateParamsStreaming),
    (MESSAGES, MessagesRequest, anthropic_beta.message_create_params.MessageCreateParamsNonStreaming),
    (COUNT, CountTokensRequest, MessageCountTokensParams),
    (COUNT, CountTokensRequest, anthropic_beta.MessageCountTokensParams),
]


def test_the_columns_of_the_schemas_are_those_of_the_page():
    assert api_page.rewritten(PAGE, DOCUMENT) == PAGE, "nox -s api_page writes them anew"


def test_people_have_written_their_columns():
    for heading, rows in WRITTEN.items():
        columns = 2 if heading in UPSTREAM else 0
        for field, cells in rows.items():
            assert len(cells) == columns, (heading, field)
            assert UNWRITTEN not in cells, (heading, field)


def test_every_route_has_a_row():
    routes = [f"{method.upper()} {path}" for path, operations in DOCUMENT["paths"].items() for method in operations]
    table = PAGE.partition("## Routes\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(f"`{route}`" for route in routes)


def test_every_body_is_told_somewhere():
    """By a table of its own, or where a route is named whose body is the same."""
    for path, operations in DOCUMENT["paths"].items():
        if "requestBody" in operations.get("post", {}):
            assert f"POST {path}" in WRITTEN or f"`POST {path}`" in PAGE.partition("## Answers to ")[2], path


@pytest.mark.parametrize(("heading", "schema", "params"), CLIENTS, ids=lambda value: getattr(value, "__module__", ""))
def test_every_field_of_the_official_clients_is_declared_refused_or_ignored_knowingly(heading, schema, params):
    fields = set(typing.get_type_hints(params)) - HEADERS
    assert len(fields) >= 5
    known = {*schema.model_fields, *schema.neutral, *schema.ignored}
    assert fields <= known, "new in this version of the client: is it honoured, refused, or without effect, and why?"
    rows = {*WRITTEN[heading], *(WRITTEN[COMMON] if heading in {CHAT, COMPLETIONS} else ())}
    assert fields <= rows


@pytest.mark.parametrize("schema", {schema for _, schema, _ in CLIENTS}, ids=lambda schema: schema.__name__)
def test_a_field_is_one_of_declared_refused_and_ignored(schema):
    kinds = [*schema.model_fields, *schema.neutral, *schema.ignored]
    assert len(kinds) == len(set(kinds))


# Answers

ANSWERS = {
    "chat.completion": ("ChatCompletion", openai_chat.ChatCompletion),
    "chat.completion.chunk": ("ChatCompletionChunk", openai_chat.ChatCompletionChunk),
    "text_completion": ("TextCompletion", openai_types.Completion),
    "response": ("ResponseObject", openai_responses.Response),
    "message": ("MessageObject", anthropic_types.Message),
    "list": ("EmbeddingList", openai_types.CreateEmbeddingResponse),
    "model": ("Model", openai_types.Model),
}
# What stands in these differs from part to part, is what was sent, or is null here.
INSIDES = r"(output|content|instructions|tools)\[\]\.|(tool_choice|text\.format|error)\.|.*\.refusal\[\]\."


def fields_of_client(model, prefix="", depth=5):
    """The names of all fields of a client's answer, spelled as on the page."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for inner, mark in models_in(field.annotation) if depth else ():
            yield from fields_of_client(inner, f"{prefix}{name}{mark}.", depth - 1)


def models_in(annotation, mark=""):
    """The models in an annotation, and the mark of those in lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(annotation, mark)]
    mark = "[]" if typing.get_origin(annotation) is list else mark
    return [found for inner in typing.get_args(annotation) for found in models_in(inner, mark)]


def only_in(some, others):
    """What the others lack, without what stands inside something that they lack altogether."""
    lacking = {name for name in some - others if not re.match(INSIDES, name)}
    return {name for name in lacking if not any(name.startswith((f"{other}.", f"{other}[].")) for other in lacking)}


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_answers_have_and_lack_is_told(answer):
    name, model = ANSWERS[answer]
    ours, theirs = api_page.fields_of(DOCUMENT, name), set(fields_of_client(model))
    table = PAGE.partition("## Fields of answers\n")[2]
    row = re.search(rf"^\| `{re.escape(answer)}` \| (.*) \| (.*) \|$", table, re.MULTILINE)
    there, here = (set(re.findall(r"`(.+?)`", cell)) for cell in row.groups())
    assert only_in(theirs, ours) <= there, "new in this version of the client"
    assert only_in(ours, theirs) <= here
    assert here <= ours
    assert there.isdisjoint(ours)


# The generator


def test_a_new_field_is_asked_for_and_what_people_wrote_stays():
    told = copy.deepcopy(DOCUMENT)
    properties = told["components"]["schemas"]["EmbeddingsRequest"]["properties"]
    properties["new"] = {"type": "boolean", "description": "A new one."}
    properties["dimensions"]["anyOf"][0]["minimum"] = 7
    del properties["user"]
    page = api_page.rewritten(PAGE, told)
    rows = api_page.written(page)[EMBEDDINGS]
    assert "| `new` | boolean | none | A new one. | ? | ? |\n" in page
    assert "| `dimensions` | integer, 7 to below 2^31 |" in page
    assert rows["dimensions"] == WRITTEN[EMBEDDINGS]["dimensions"]
    assert "user" not in rows
    assert {**api_page.written(page), EMBEDDINGS: 0} == {**WRITTEN, EMBEDDINGS: 0}


def test_a_new_route_gets_a_table():
    told = copy.deepcopy(DOCUMENT)
    told["components"]["schemas"]["New"] = {
        "properties": {"a": {"type": "string", "maxLength": 5, "description": "A | B."}},
        "required": ["a"],
    }
    schema = {"$ref": "#/components/schemas/New"}
    told["paths"]["/new"] = {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}
    page = api_page.rewritten(PAGE, told)
    assert page.endswith(
        "\n### POST /new\n\n| field | type, range | default | here |\n|---|---|---|---|\n"
        "| `a` | text, up to 5 characters | required | A \\| B. |\n"
    )
    assert api_page.rewritten(page, told) == page


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({}, "anything"),
        ({"type": "integer", "minimum": 1, "maximum": 5}, "integer, 1 to 5"),
        ({"type": "number", "exclusiveMinimum": 0}, "number, above 0"),
        ({"type": "number", "maximum": 0.5}, "number, 0.5 or less"),
        ({"type": "integer", "minimum": -(2**63), "exclusiveMaximum": 2**63}, "integer, -2^63 to below 2^63"),
        ({"type": "array"}, "list"),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}, "list of 2: integer"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "null"}]}, "text or list"),
        ({"enum": [1, True, None]}, "`1`, `true`"),
        ({"enum": [None]}, "nothing"),
        ({"const": "a"}, '`"a"`'),
    ],
)
def test_types_in_words(schema, words):
    assert api_page.type_of(schema) == words
