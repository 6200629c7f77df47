"""``POST /v1/chat/completions``"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, ConfigDict, Field, field_validator

from trioserve.errors import InvalidRequestError
from trioserve.http.schemas.base import INT64, GenerationFields, Schema, encodable

MAX_MESSAGES = 16_384


class Message(Schema):
    """One message of a conversation. Fields that aren't named here go to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    role: Annotated[str, Field(min_length=1), AfterValidator(encodable)] = Field(
        description="system, user, assistant, or what the template knows."
    )
    content: Any = Field(None, description="Text, or a list of text parts.")

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
        "logprobs": (False,),
        "top_logprobs": (0,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "audio": (),
        "modalities": (["text"],),
        "web_search_options": (),
        "reasoning_effort": ("none",),
    }

    messages: Annotated[
        list[Message], Field(min_length=1, max_length=MAX_MESSAGES, description="The conversation so far.")
    ]
    max_completion_tokens: int | None = Field(None, ge=1, lt=INT64, description="The same as max_tokens, newer name.")

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
        return parsed

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer, by either name."""
        return self.max_completion_tokens or self.max_tokens
