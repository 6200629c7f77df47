"""What a generation gives, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

from trioserve.engine.base import FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens in and out. Both counts are of the model's own tokens; the one that ends an answer isn't counted."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is complete."""

    finish_reason: FinishReason
    usage: Usage


Part = TextDelta | Done
