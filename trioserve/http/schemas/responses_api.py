"""``POST /v1/responses``

Source of the format: OpenAI's documentation of the Responses API.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, WithJsonSchema, field_validator

from trioserve.engine.base import Constraint
from trioserve.http.schemas.base import INT64, HonestSchema, Schema, Text, encodable, usual
from trioserve.http.schemas.constraints import JSON_SCHEMA, parse_text_format
from trioserve.http.schemas.content import MAX_ITEMS, Json, content_schema, read_items, read_role, read_text, wrong
from trioserve.service import ChatPrompt

MAX_METADATA, MAX_NAME, MAX_VALUE = 16, 64, 512

_FORMAT_FIELD = "text.format"
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_ROLES = ("user", "assistant", "system", "developer")
_MESSAGE = {
    "type": "object",
    "properties": {
        "type": {"anyOf": [{"const": "message"}, {"type": "null"}]},
        "role": {"enum": list(_ROLES)},
        "content": content_schema(_TEXTS),
    },
    "required": ["role", "content"],
}
_INPUT = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MAX_ITEMS}],
}
_METADATA = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"maxLength": MAX_NAME},
            "additionalProperties": {"type": "string", "maxLength": MAX_VALUE},
            "maxProperties": MAX_METADATA,
        },
        {"type": "null"},
    ]
}
_FORMAT = {
    "anyOf": [
        {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]},
        {
            "type": "object",
            "properties": {"type": {"const": "json_object"}, "schema": JSON_SCHEMA},
            "required": ["type"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "schema": {"anyOf": [{"type": "object"}, {"type": "boolean"}]},
            },
            "required": ["type", "schema"],
        },
        {"type": "null"},
    ]
}


class TextOptions(Schema):
    """How the answer looks."""

    format: Annotated[Any, WithJsonSchema(_FORMAT)] = Field(
        None, description="The form of the answer: text, json_object, or json_schema with a schema."
    )
    verbosity: Literal["medium"] | None = Field(None, description="Only taken where it asks for nothing.")


def _off(value: bool | None) -> bool | None:
    if value:
        raise ValueError("is not supported with this value; leave it out")
    return value


class PromptCacheOptions(Schema):
    """How a prompt is kept. What is not named here is without effect."""

    prewarm: Annotated[bool | None, AfterValidator(_off), WithJsonSchema({"enum": [False, None]})] = Field(
        None, description="Only taken where it asks for nothing."
    )


class ResponsesRequest(HonestSchema):
    """Body of a request for a response."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "moderation": (),
        "context_management": ([],),
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "background": (False,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "include": ([], ["reasoning.encrypted_content"]),
        "truncation": ("disabled",),
        "reasoning": ({}, {"effort": "none"}),
        "top_logprobs": (0,),
    }
    ignored: ClassVar[Mapping[str, str]] = {
        "user": "nobody is told apart by it",
        "safety_identifier": "nobody is told apart by it",
        "store": "nothing is ever stored",
        "service_tier": "there is one class of service",
        "access_programs": "there are no such programs",
        "background_options": "nothing is done in the background",
        "image": "there are no images",
        "max_tool_calls": "there are no built-in tools, whose calls it counts",
        "parallel_tool_calls": "there are no calls",
        "stream_options": "nothing is obfuscated",
        "prompt_cache_key": "a request goes where most of its prompt is kept anyway",
        "prompt_cache_retention": "what a slot keeps lasts until the slot needs the room",
    }
    defaults: ClassVar[Mapping[str, object]] = usual("stream", "temperature", "top_p")
    prompt_field: ClassVar[str] = "input"
    stops: ClassVar[tuple[str, ...]] = ()

    model: Text | None = Field(None, description="Id of a registered model; may be left out where there is one only.")
    input: Annotated[Any, WithJsonSchema(_INPUT)] = Field(
        description="What the user says, or a list of messages, each with text or a list of text parts."
    )
    instructions: Text | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(None, ge=1, lt=INT64, description="Most tokens of the answer.")
    temperature: float | None = Field(None, ge=0, le=2, description="Randomness; 0 is greedy.")
    top_p: float | None = Field(None, ge=0, le=1, description="Nucleus: the share of probability that is kept.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it grows.")
    text: TextOptions | None = Field(None, description="How the answer looks.")
    metadata: Annotated[Any, WithJsonSchema(_METADATA)] = Field(
        None, description="Up to 16 texts by name, told again in the answer."
    )
    prompt_cache_options: PromptCacheOptions | None = Field(
        None, description="What a slot keeps lasts until the slot needs the room."
    )
    busy_timeout_ms: int | None = Field(
        None, ge=0, lt=2**31, description="Wait for a slot, in milliseconds; may only shorten the server's."
    )

    @classmethod
    def parse(cls, body: Mapping[str, object]) -> Self:
        """Validate a decoded JSON object; also refuse what this server can't honour."""
        parsed = super().parse(body)
        parsed.form  # noqa: B018 - read here, so that what is wrong with it is told here
        return parsed

    @field_validator("input")
    @classmethod
    def _read_input(cls, value: Any) -> list[Json]:
        if isinstance(value, str):
            return [{"role": "user", "content": read_text(value, "input", _TEXTS)}]
        if not isinstance(value, list):
            raise wrong("input", "must be a string or a list of messages")
        return read_items(value, "input", _item)

    @field_validator("metadata")
    @classmethod
    def _read_metadata(cls, value: Any) -> Any:
        if value is None or (isinstance(value, dict) and len(value) <= MAX_METADATA and _are_metadata(value)):
            return value
        raise ValueError(
            f"must be an object of up to {MAX_METADATA} texts, with names of up to {MAX_NAME} characters and values of "
            f"up to {MAX_VALUE}"
        )

    @property
    def prompt(self) -> ChatPrompt:
        """The input as the chat template takes it."""
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return ChatPrompt([*instructions, *self.input])

    @cached_property
    def form(self) -> tuple[str, Constraint] | None:
        """The field that gives the answer a form, and what it says."""
        if self.text is None or self.text.format is None:
            return None
        constraint = parse_text_format(self.text.format, _FORMAT_FIELD)
        return None if constraint is None else (_FORMAT_FIELD, constraint)

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_output_tokens

    @property
    def sampling(self) -> Mapping[str, object]:
        """How tokens are chosen, where it is given."""
        return {"temperature": self.temperature, "top_p": self.top_p}


def _are_metadata(value: dict[str, Any]) -> bool:
    """Whether all of it are texts of the right lengths; raises ValueError at lone surrogates."""
    return all(
        len(encodable(name)) <= MAX_NAME and isinstance(text, str) and len(encodable(text)) <= MAX_VALUE
        for name, text in value.items()
    )


def _item(item: Mapping[str, Any], path: str) -> Json:
    kind = item.get("type")
    if kind not in ("message", None):
        raise wrong(f"{path}.type", "must be message; this server keeps no items and knows no other kinds of them")
    return {"role": read_role(item, path, _ROLES), "content": read_text(item.get("content"), f"{path}.content", _TEXTS)}
