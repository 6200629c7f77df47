"""A request whose work a slot has begun: what generations and embeddings have in common."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trioserve.runtime.job import Job, Times
from trioserve.service.answer import milliseconds
from trioserve.service.ledger import Record
from trioserve.service.metrics import ModelMetrics
from trioserve.service.prepare import Prepared


@dataclass(frozen=True, slots=True)
class Begun:
    """What the service hands to whoever turns the job's events into an answer.

    Attributes:
        model: id of the model at work.
        record: of the request.
        prepared: the sequences of the job, and what could not be honoured.
        job: at work in a slot; None where nothing could be honoured.
        metrics: of the model.
    """

    model: str
    record: Record
    prepared: Prepared
    job: Job | None
    metrics: ModelMetrics


def known_times(times: Sequence[Times]) -> Mapping[str, object]:
    """Fields for the log: the time from the first sequence's beginning to the first token, and from there to the end.

    Of an answer that was broken off, as far as it came.
    """
    begun = [each.begun for each in times if each.begun is not None]
    if not begun:
        return {}
    now = time.perf_counter()
    first = min((each.first for each in times if each.first is not None), default=None)
    ended = max(now if each.ended is None else each.ended for each in times)
    fields = {"prefill_ms": milliseconds((now if first is None else first) - min(begun))}
    if first is not None:
        fields["decode_ms"] = milliseconds(ended - first)
    return fields
