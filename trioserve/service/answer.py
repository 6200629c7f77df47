"""One answer on its way: a sequence's events become parts, with a count and times at the end."""

from __future__ import annotations

import logging
import time

from trioserve.engine.base import Failed, Finished, FinishReason, Likelihood, StepEvent, Token
from trioserve.errors import EngineError
from trioserve.runtime.job import Times
from trioserve.service.events import Done, Failure, Part, TextDelta, Timings, Usage

logger = logging.getLogger("trioserve.slot")


class Answer:
    """The answer to one prompt.

    Arguments:
        index: of the prompt in its request.
        prompt_tokens: of the prompt.
        times: of its sequence.
        slot: that works on it.
        arrived: when the request did, by ``time.perf_counter``.
    """

    def __init__(self, index: int, prompt_tokens: int, times: Times, slot: int, arrived: float) -> None:
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self._times = times
        self._slot = slot
        self._arrived = arrived
        self._likelihoods: list[Likelihood] = []  # of tokens whose text is held back

    def take(self, event: StepEvent) -> list[Part]:
        """Return what an event of the sequence is to the client."""
        if isinstance(event, Token):
            self.completion_tokens += 1
            if event.likelihood is not None:
                self._likelihoods.append(event.likelihood)
            return self._text(event.text) if event.text else []
        if isinstance(event, Finished):
            usage = Usage(self.prompt_tokens, self.completion_tokens, event.cached)
            # What was held back to the end is told, unless it was a stop string.
            rest = self._text(event.text) if event.text or self._cut_off(event) else []
            return [*rest, Done(event.reason, usage, self._timings(), self.index)]
        if isinstance(event, Failed):
            return [Failure(failure(event), self.index)]
        raise failure(event)

    def _text(self, text: str) -> list[Part]:
        likelihoods, self._likelihoods = tuple(self._likelihoods), []
        return [TextDelta(text, self.index, likelihoods)]

    def _cut_off(self, event: Finished) -> bool:
        return event.reason is FinishReason.LENGTH and bool(self._likelihoods)

    def _timings(self) -> Timings:
        now = time.perf_counter()
        begun = self._times.begun or now
        first = self._times.first or now
        ended = self._times.ended or now
        return Timings(self._slot, _ms(begun - self._arrived), _ms(first - begun), _ms(ended - first))


def failure(event: StepEvent) -> EngineError:
    """The error that an event is to the client where it is none of those that were hoped for."""
    if not isinstance(event, Failed):
        return EngineError(f"unexpected event {event!r}")
    logger.error("inference failed: %s", event.message)
    return EngineError("inference failed")


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
