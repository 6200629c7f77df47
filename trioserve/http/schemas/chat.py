"""``POST /v1/chat/completions``"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, field_validator

from trioserve.chat import ToolUse
from trioserve.errors import InvalidRequestError
from trioserve.http.schemas.base import INT64, MAX_LOGPROBS, GenerationFields, Schema, encodable
from trioserve.http.schemas.tools import CHAT, CHAT_CHOICE, parse_tools, read_choice
from trioserve.service import ChatPrompt

MAX_MESSAGES = 16_384

# What templates get of parts is their texts; chat.messages has the last word.
_PARTS = [
    {"type": "object", "properties": {"type": {"const": kind}, kind: {"type": "string"}}, "required": ["type", kind]}
    for kind in ("text", "refusal")
]
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": _PARTS}}, {"type": "null"}]}


class Message(Schema):
    """One message of a conversation. Fields that aren't named here go to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    role: Annotated[str, Field(min_length=1), AfterValidator(encodable)] = Field(
        description="system, user, assistant, or what the template knows."
    )
    content: Annotated[Any, WithJsonSchema(_CONTENT)] = Field(None, description="Text, or a list of text parts.")

    @field_validator("content")
    @classmethod
    def _text_or_parts(cls, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(part, dict) for part in value):
            return value
        raise ValueError("must be a string or a list of parts")


class ChatCompletionRequest(GenerationFields):
    """Body of a chat completion."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **GenerationFields.neutral,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "audio": (),
        "modalities": (["text"],),
        "web_search_options": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "moderation": (),
        "chat_template_kwargs": ({},),
    }
    ignored: ClassVar[Mapping[str, str]] = {
        **GenerationFields.ignored,
        "metadata": "nothing is stored that it could be attached to",
        "store": "nothing is ever stored",
        "service_tier": "there is one class of service",
        "safety_identifier": "nobody is told apart by it",
        "prediction": "it is a hint for speed, and answers are computed without it",
        "prompt_cache_key": "a request goes where most of its prompt is kept anyway",
        "prompt_cache_options": "what a slot keeps lasts until the slot needs the room",
        "prompt_cache_retention": "what a slot keeps lasts until the slot needs the room",
    }
    defaults: ClassVar[Mapping[str, object]] = {
        **GenerationFields.defaults,
        "logprobs": False,
        "top_logprobs": 0,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning_format": "auto",
    }

    messages: Annotated[
        list[Message], Field(min_length=1, max_length=MAX_MESSAGES, description="The conversation so far.")
    ]
    logprobs: bool | None = Field(None, description="Tell how likely each token of the answer was.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="How many of the most likely tokens to tell at each place."
    )
    max_completion_tokens: int | None = Field(None, ge=1, lt=INT64, description="The same as max_tokens, newer name.")
    tools: Annotated[Any, WithJsonSchema(CHAT.field)] = Field(None, description="Functions that the answer may call.")
    tool_choice: Annotated[Any, WithJsonSchema(CHAT_CHOICE)] = Field(
        None, description="Whether it calls one: none, auto, required, or the one that is named."
    )
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls in one answer; true by default.")
    reasoning_format: Literal["auto", "deepseek", "none"] | None = Field(
        None, description="Where thoughts go: into reasoning_content, or, with none, into the content as they are."
    )

    @classmethod
    def parse(cls, body: Mapping[str, object]) -> Self:
        """Validate a decoded JSON object; also refuse two different limits."""
        parsed = super().parse(body)
        old, new = parsed.max_tokens, parsed.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidRequestError(
                f"max_tokens is {old} and max_completion_tokens is {new}: give one of them",
                param="max_completion_tokens",
            )
        if parsed.top_logprobs and not parsed.logprobs:
            raise InvalidRequestError("top_logprobs is given, but logprobs is not true", param="top_logprobs")
        if parsed.tool_use is not None and parsed.form is not None:
            name, _ = parsed.form
            raise InvalidRequestError(f"{name} and tools are both given: an answer has one form", param=name)
        return parsed

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """Which tools the answer may call."""
        choice = read_choice(self.tool_choice, CHAT, parallel=self.parallel_tool_calls is not False)
        return parse_tools(self.tools, choice, CHAT)

    @property
    def shows_reasoning(self) -> bool:
        """Whether thoughts are told apart from what is said."""
        return self.reasoning_format != "none"

    @property
    def prompts(self) -> Sequence[ChatPrompt]:
        """The conversation."""
        return (ChatPrompt([message.model_dump(exclude_unset=True) for message in self.messages], self.tool_use),)

    @property
    def reported(self) -> int | None:
        """How many of the most likely tokens to report at each place; None reports nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer, by either name."""
        return self.max_completion_tokens or self.max_tokens
