"""What has happened since the start, in numbers. Counted in the event loop, at the very transitions; pure.

Counts, and the book of requests that they are about, change in one step, so whoever reads both without an await sees
one consistent moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from trioserve.runtime.observer import LoadOutcome, UnloadReason
from trioserve.scheduling.lifecycle import RequestPhase

QUEUE_SECONDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
DURATION_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)

OUTCOMES = (RequestPhase.FINISHED, RequestPhase.FAILED, RequestPhase.CANCELLED, RequestPhase.REJECTED)
PHASES = (RequestPhase.QUEUED, RequestPhase.LOADING, RequestPhase.PREFILL, RequestPhase.DECODE)


class Histogram:
    """How often a value fell into which range.

    Arguments:
        bounds: upper ends of the ranges, each included, ascending. One more range has what is beyond them.
    """

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.total = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, as often as it was met."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self._counts)

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """For each bound, and infinity at the end: how many values were not above it."""
        yield from zip((*self._bounds, float("inf")), accumulate(self._counts), strict=True)


@dataclass(slots=True)
class ModelMetrics:
    """What one model has done. All times are in seconds.

    Attributes:
        prompt_tokens: of the prompts that were begun.
        cached_tokens: those of them that were there already, in answers that ended.
        completion_tokens: that were handed to those who asked.
        queue_wait: from a request's entry until it got a slot.
        first_token: from a request's entry to the first token of its answer.
        token_gap: between two tokens of one answer, as they are made.
        duration: of the requests that finished, from entry to end.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_wait: Histogram = field(default_factory=lambda: Histogram(QUEUE_SECONDS))
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_SECONDS))
    token_gap: Histogram = field(default_factory=lambda: Histogram(GAP_SECONDS))
    duration: Histogram = field(default_factory=lambda: Histogram(DURATION_SECONDS))


class Metrics:
    """Keeps count for one service. It is the ``Observer`` of its models.

    Attributes:
        models: by their ids.
        accepted: requests that were entered in the book or turned away there, by route and model.
        ended: those that have ended, by route, model and outcome.
        rejects: by reason.
        cancels: by the phase in which they came.
        loads: by model and outcome.
        unloads: by model and reason.
        responses: of HTTP, by route and status.
    """

    def __init__(self) -> None:
        self.models: dict[str, ModelMetrics] = {}
        self.accepted: Counter[tuple[str, str]] = Counter()
        self.ended: Counter[tuple[str, str, RequestPhase]] = Counter()
        self.rejects: Counter[str] = Counter()
        self.cancels: Counter[RequestPhase] = Counter()
        self.loads: Counter[tuple[str, LoadOutcome]] = Counter()
        self.unloads: Counter[tuple[str, UnloadReason]] = Counter()
        self.responses: Counter[tuple[str, int]] = Counter()

    def of(self, model: str) -> ModelMetrics:
        """The counts of one model."""
        found = self.models.get(model)
        if found is None:
            found = self.models[model] = ModelMetrics()
        return found

    def outcomes(self, outcome: RequestPhase) -> int:
        """How many requests have ended like that."""
        return sum(count for (_, _, ended), count in self.ended.items() if ended is outcome)

    def loaded(self, model: str, outcome: LoadOutcome) -> None:
        """See ``Observer``."""
        self.loads[model, outcome] += 1

    def unloaded(self, model: str, reason: UnloadReason) -> None:
        """See ``Observer``."""
        self.unloads[model, reason] += 1
