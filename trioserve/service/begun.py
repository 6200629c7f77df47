"""A request whose work a slot has begun: what generations and embeddings have in common."""

from __future__ import annotations

from dataclasses import dataclass

from trioserve.runtime.job import Job
from trioserve.service.ledger import Record
from trioserve.service.prepare import Prepared


@dataclass(frozen=True, slots=True)
class Begun:
    """What the service hands to whoever turns the job's events into an answer.

    Attributes:
        model: id of the model at work.
        record: of the request.
        prepared: the sequences of the job, and what could not be honoured.
        job: at work in a slot; None where nothing could be honoured.
    """

    model: str
    record: Record
    prepared: Prepared
    job: Job | None
