"""``POST /v1/completions``"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, field_validator

from trioserve.http.schemas.base import GenerationFields, encodable
from trioserve.service import TextPrompt, TokenPrompt

MAX_PROMPTS = 2048


class CompletionRequest(GenerationFields):
    """Body of a text completion."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **GenerationFields.neutral,
        "logprobs": (),
        "echo": (False,),
        "suffix": ("",),
    }

    prompt: Any = Field(
        description="Text or token ids, or a list of such prompts: they are decoded together and answered by index."
    )

    @field_validator("prompt")
    @classmethod
    def _prompts(cls, value: Any) -> Sequence[TextPrompt | TokenPrompt]:
        if not isinstance(value, list) or not value or _is_tokens(value):
            return (_prompt(value),)
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"holds {len(value)} prompts, at most {MAX_PROMPTS} are allowed")
        return [_prompt(item) for item in value]


def _prompt(value: Any) -> TextPrompt | TokenPrompt:
    if isinstance(value, str):
        return TextPrompt(encodable(value))
    if _is_tokens(value):
        return TokenPrompt(value)
    raise ValueError("must be a string or a non-empty list of token ids, or a list of such prompts")


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
