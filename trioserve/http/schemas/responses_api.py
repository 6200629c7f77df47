"""``POST /v1/responses``

Source of the format: OpenAI's documentation of the Responses API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, WithJsonSchema, field_validator

from trioserve.chat import ToolUse
from trioserve.engine.base import Constraint
from trioserve.errors import InvalidRequestError
from trioserve.http.schemas.base import INT64, HonestSchema, Schema, Text, encodable, usual
from trioserve.http.schemas.constraints import JSON_SCHEMA, parse_text_format
from trioserve.http.schemas.content import Json
from trioserve.http.schemas.tools import RESPONSES, RESPONSES_CHOICE, parse_tools, read_choice
from trioserve.http.schemas.turns_responses import INPUT, read_input
from trioserve.service import ChatPrompt

MAX_METADATA, MAX_NAME, MAX_VALUE = 16, 64, 512

_FORMAT_FIELD = "text.format"
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

    @field_validator("format")
    @classmethod
    def _can_be_told_again(cls, value: Any) -> Any:
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise ValueError("must hold finite numbers only") from None
        except RecursionError:
            raise ValueError("is nested too deeply") from None
        return value


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
        "stream_options": "nothing is obfuscated",
        "prompt_cache_key": "a request goes where most of its prompt is kept anyway",
        "prompt_cache_retention": "what a slot keeps lasts until the slot needs the room",
    }
    defaults: ClassVar[Mapping[str, object]] = usual("stream", "temperature", "top_p")
    prompt_field: ClassVar[str] = "input"
    stops: ClassVar[tuple[str, ...]] = ()

    model: Text | None = Field(None, description="Id of a registered model; may be left out where there is one only.")
    input: Annotated[Any, WithJsonSchema(INPUT)] = Field(
        description="What the user says, or a list of messages, thoughts, calls and their results."
    )
    instructions: Text | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(None, ge=1, lt=INT64, description="Most tokens of the answer.")
    temperature: float | None = Field(None, ge=0, le=2, description="Randomness; 0 is greedy.")
    top_p: float | None = Field(None, ge=0, le=1, description="Nucleus: the share of probability that is kept.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it grows.")
    text: TextOptions | None = Field(None, description="How the answer looks.")
    tools: Annotated[Any, WithJsonSchema(RESPONSES.field)] = Field(
        None, description="Functions that the answer may call."
    )
    tool_choice: Annotated[Any, WithJsonSchema(RESPONSES_CHOICE)] = Field(
        None, description="Whether it calls one: none, auto, required, or the one that is named."
    )
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls in one answer; true by default.")
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
        form, tool_use = parsed.form, parsed.tool_use  # read here, so that what is wrong with them is told here
        if form is not None and tool_use is not None:
            raise InvalidRequestError(
                f"{_FORMAT_FIELD} and tools are both given: an answer has one form", param=_FORMAT_FIELD
            )
        return parsed

    @field_validator("input")
    @classmethod
    def _read_input(cls, value: Any) -> list[Json]:
        return read_input(value)

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
        return ChatPrompt([*instructions, *self.input], self.tool_use)

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """Which tools the answer may call."""
        choice = read_choice(self.tool_choice, RESPONSES, parallel=self.parallel_tool_calls is not False)
        return parse_tools(self.tools, choice, RESPONSES)

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
