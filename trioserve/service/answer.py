"""One answer on its way: a sequence's events become parts, with a count and times at the end."""

from __future__ import annotations

import logging
import time

from trioserve.engine.base import Failed, Finished, FinishReason, Likelihood, StepEvent, Token
from trioserve.errors import EngineError, InvalidRequestError, TrioserveError
from trioserve.runtime.job import Times
from trioserve.service.events import Done, Failure, Part, TextDelta, Timings, Usage
from trioserve.service.metrics import Histogram

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
        self._fresh = 0  # tokens since the last measurement of their gaps
        self._measured: float | None = None  # up to when gaps were measured

    @property
    def times(self) -> Times:
        """When what happened."""
        return self._times

    @property
    def first_token_seconds(self) -> float:
        """From the request's arrival to the first token, which has come."""
        return (self._times.first or self._arrived) - self._arrived

    def take(self, event: StepEvent) -> list[Part]:
        """Return what an event of the sequence is to the client."""
        if isinstance(event, Token):
            self.completion_tokens += 1
            self._fresh += 1
            if event.likelihood is not None:
                self._likelihoods.append(event.likelihood)
            return self._text(event.text) if event.text else []
        if isinstance(event, Finished):
            usage = Usage(self.prompt_tokens, self.completion_tokens, event.cached)
            # What was held back to the end is told, unless it was a stop string.
            rest = self._text(event.text) if event.text or self._cut_off(event) else []
            return [*rest, Done(event.reason, usage, self._timings(), self.index, event.stop)]
        if isinstance(event, Failed):
            return [Failure(failure(event), self.index)]
        raise failure(event)

    def measure_gaps(self, gaps: Histogram) -> None:
        """Observe how far the tokens were apart that came since the last time, in one go.

        By the worker's clock: a client that reads slowly makes no gap, unless it is so slow that the worker pauses.
        """
        fresh, self._fresh = self._fresh, 0
        if fresh and self._measured is None:
            self._measured = self._times.first
            fresh -= 1
        if fresh and self._measured is not None and self._times.latest is not None:
            gaps.observe((self._times.latest - self._measured) / fresh, fresh)
            self._measured = self._times.latest

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
        return Timings(
            self._slot, milliseconds(begun - self._arrived), milliseconds(first - begun), milliseconds(ended - first)
        )


def failure(event: StepEvent) -> TrioserveError:
    """The error that an event is to the client where it is none of those that were hoped for."""
    if not isinstance(event, Failed):
        return EngineError(f"unexpected event {event!r}")
    if event.unanswerable:
        return InvalidRequestError(f"the answer can't go on: {event.message}")
    logger.error("inference failed: %s", event.message)
    return EngineError("inference failed")


def milliseconds(seconds: float) -> float:
    """Seconds in milliseconds, to a tenth."""
    return round(1000 * seconds, 1)
