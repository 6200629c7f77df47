"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``

Source of the format: Anthropic's documentation of the Messages API.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, WithJsonSchema, field_validator

from trioserve.chat import ToolUse
from trioserve.engine.base import Constraint
from trioserve.http.schemas.base import INT64, MAX_STOP_CHARACTERS, MAX_STOPS, HonestSchema, Text, usual
from trioserve.http.schemas.content import Json, content_schema, read_text
from trioserve.http.schemas.tools import MESSAGES, MESSAGES_CHOICE, parse_tools, read_messages_choice
from trioserve.http.schemas.turns_messages import MESSAGES as TURNS
from trioserve.http.schemas.turns_messages import TEXTS, read_messages
from trioserve.service import ChatPrompt

_SYSTEM = {"anyOf": [*content_schema(TEXTS)["anyOf"], {"type": "null"}]}
_STOP = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class Conversation(HonestSchema):
    """A conversation, as both routes take it."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "thinking": ({"type": "disabled"}, {"type": "adaptive"}),
        "output_config": ({},),
        "output_format": (),
        "container": (),
        "mcp_servers": ([],),
        "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    }
    ignored: ClassVar[Mapping[str, str]] = {
        "cache_control": "a slot keeps every prompt",
        "speed": "there is one class of service",
        "billing_policy": "nobody is billed",
    }

    model: Text | None = Field(None, description="Id of a registered model; may be left out where there is one only.")
    system: Annotated[Any, WithJsonSchema(_SYSTEM)] = Field(
        None, description="What comes before the conversation: text, or a list of text blocks."
    )
    messages: Annotated[Any, WithJsonSchema(TURNS)] = Field(
        description="The conversation so far: user and assistant, each with text or a list of blocks."
    )
    tools: Annotated[Any, WithJsonSchema(MESSAGES.field)] = Field(
        None, description="Functions that the answer may call."
    )
    tool_choice: Annotated[Any, WithJsonSchema(MESSAGES_CHOICE)] = Field(
        None, description="Whether it calls one: none, auto, any, or the tool that is named; and whether just one."
    )
    busy_timeout_ms: int | None = Field(
        None, ge=0, lt=2**31, description="Wait for a slot, in milliseconds; may only shorten the server's."
    )

    @classmethod
    def parse(cls, body: Mapping[str, object]) -> Self:
        """Validate a decoded JSON object; also refuse what this server can't honour."""
        parsed = super().parse(body)
        parsed.tool_use  # noqa: B018 - read here, so that what is wrong with it is told here
        return parsed

    @field_validator("system")
    @classmethod
    def _read_system(cls, value: Any) -> str | None:
        return None if value is None else read_text(value, "system", TEXTS)

    @field_validator("messages")
    @classmethod
    def _read_messages(cls, value: Any) -> list[Json]:
        return read_messages(value)

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """Which tools the answer may call."""
        return parse_tools(self.tools, read_messages_choice(self.tool_choice), MESSAGES)

    @property
    def prompt(self) -> ChatPrompt:
        """The conversation as the chat template takes it."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return ChatPrompt([*system, *self.messages], self.tool_use)


class CountTokensRequest(Conversation):
    """Body of a request to count tokens."""

    ignored: ClassVar[Mapping[str, str]] = {
        **Conversation.ignored,
        "compaction": "the tokens of the conversation are counted as it stands",
    }


class MessagesRequest(Conversation):
    """Body of a request for the next message."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {**Conversation.neutral, "compaction": (), "thread": ()}
    ignored: ClassVar[Mapping[str, str]] = {
        **Conversation.ignored,
        "metadata": "nobody is told apart by it",
        "service_tier": "there is one class of service",
        "inference_geo": "the answer is made where the server is",
        "diagnostics": "usage tells how much of the prompt was kept",
        "fallbacks": "no model of this server declines",
        "fallback_credit_token": "nobody is billed",
    }
    defaults: ClassVar[Mapping[str, object]] = usual("stream", "temperature", "top_p", "top_k")
    prompt_field: ClassVar[str] = "messages"
    form: ClassVar[tuple[str, Constraint] | None] = None

    max_tokens: int = Field(ge=1, lt=INT64, description="Most tokens of the answer.")
    stop_sequences: Annotated[list[_STOP], Field(max_length=MAX_STOPS)] | None = Field(
        None, description="Strings that end the answer and don't appear in it."
    )
    temperature: float | None = Field(None, ge=0, le=1, description="Randomness; 0 is greedy.")
    top_p: float | None = Field(None, ge=0, le=1, description="Nucleus: the share of probability that is kept.")
    top_k: int | None = Field(None, ge=0, lt=2**31, description="Most likely tokens that are kept; 0 is all.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it grows.")

    @property
    def limit(self) -> int:
        """Most tokens of the answer."""
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return tuple(self.stop_sequences or ())

    @property
    def sampling(self) -> Mapping[str, object]:
        """How tokens are chosen, where it is given."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
