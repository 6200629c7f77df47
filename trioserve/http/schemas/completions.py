"""``POST /v1/completions``"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator

from trioserve.http.schemas.base import GenerationFields, encodable
from trioserve.service import TextPrompt, TokenPrompt


class CompletionRequest(GenerationFields):
    """Body of a text completion."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **GenerationFields.neutral,
        "logprobs": (),
        "echo": (False,),
        "suffix": ("",),
    }

    prompt: Any = Field(description="Text or token ids; a list of one of either is that one.")

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, value: Any) -> TextPrompt | TokenPrompt:
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
            value = value[0]
        if isinstance(value, str):
            return TextPrompt(encodable(value))
        if isinstance(value, list) and value and all(type(token) is int for token in value):
            return TokenPrompt(value)
        if isinstance(value, list) and len(value) > 1 and all(isinstance(item, (str, list)) for item in value):
            raise ValueError(f"holds {len(value)} prompts; this server takes one in a request")
        raise ValueError("must be a string or a non-empty list of token ids")
