"""What a generation gives, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

from trioserve.engine.base import FinishReason, Likelihood
from trioserve.errors import TrioserveError


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens in and out, counted in the model's own; the one that ends an answer isn't counted.

    Attributes:
        prompt_tokens: of the prompt.
        completion_tokens: of the answer.
        cached_tokens: those of the prompt that were there already, of an earlier one or one at work beside it.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class Timings:
    """Where an answer came from, and where its time went.

    Attributes:
        slot: number of the slot that gave it.
        queue_ms: from the request's arrival until its prompt was begun.
        prefill_ms: from there to the first token.
        decode_ms: from there to the end.
    """

    slot: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer to one prompt of the request.

    Attributes:
        text: never empty, except at the end of an answer that was cut off inside a character.
        index: of the prompt.
        likelihoods: of the tokens that the text is made of, where they were asked for.
    """

    text: str
    index: int = 0
    likelihoods: tuple[Likelihood, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to one prompt of the request is complete.

    Attributes:
        finish_reason: why.
        usage: tokens of prompt and answer.
        timings: where its time went.
        index: of the prompt.
        stop: the stop string that ended it, where one did.
    """

    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    index: int = 0
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """One prompt of a batch got no answer, or not all of it; the others go on."""

    error: TrioserveError
    index: int


Part = TextDelta | Done | Failure
