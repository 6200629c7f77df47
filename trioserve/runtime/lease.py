"""A lease: the right of one request to one slot, from its admission until its last byte is on its way."""

from __future__ import annotations

from typing import Protocol

from trioserve.engine.base import Work
from trioserve.errors import TrioserveError
from trioserve.runtime.job import Job
from trioserve.runtime.pool import Pool
from trioserve.scheduling.admission import Ticket


class Lessor(Protocol):
    """Whose slots are leased: a model, as its leases see it."""

    @property
    def id(self) -> str:
        """What requests call it."""
        ...

    async def ensure_loaded(self) -> Pool:
        """Return the pool, loading it first where that has to be."""
        ...

    def take_back(self, ticket: Ticket) -> None:
        """Pass a slot on to whoever is next."""
        ...


class Lease:
    """Made by ``Model.admit``; whoever gets it sees to it that ``release`` is called on every path.

    Arguments:
        model: whose slot it is.
        ticket: granted.
    """

    def __init__(self, model: Lessor, ticket: Ticket) -> None:
        assert ticket.slot is not None, "a lease is made from a granted ticket"
        self.slot: int = ticket.slot
        self._model = model
        self._ticket = ticket
        self._job: Job | None = None
        self._at_work = False
        self._released = False

    def __repr__(self) -> str:
        state = "released" if self._released else "at work" if self._at_work else "held"
        return f"<Lease of slot {self.slot} of {self._model.id!r}: {state}>"

    async def ready(self) -> Pool:
        """Return the model's pool, loading it or waiting for a load that is under way.

        Raises:
            ModelLoadError: that load failed.
            InvalidModelError: the file or its options are wrong.
        """
        return await self._model.ensure_loaded()

    def start(self, pool: Pool, *works: Work, request_id: str | None = None) -> Job:
        """Let the slot work on a sequence, or on several as a batch.

        Arguments:
            pool: what ``ready`` returned.
            works: the sequences; the lease takes one job at a time.
            request_id: of the request, for the log.
        """
        if self._released or self._at_work:
            raise RuntimeError(f"{self!r} cannot start a job")
        slot = pool.slots[self.slot]
        self._job = Job(works, slot.interrupt, request_id)
        self._at_work = True
        slot.submit(self._job, self._on_idle)
        return self._job

    def fail(self, error: TrioserveError) -> None:
        """Make a job that is under way fail with this error."""
        if self._job is not None:
            self._job.fail(error)

    def release(self) -> None:
        """Give the slot back. Idempotent, never waits, safe in a cancelled task.

        A job that is still at work is stopped first; the slot passes to the next request once its thread has ended and
        its session is clean.
        """
        if self._released:
            return
        self._released = True
        if self._at_work:
            assert self._job is not None, "only a job is at work"
            self._job.cancel()
        else:
            self._model.take_back(self._ticket)

    def _on_idle(self) -> None:
        self._at_work = False
        if self._released:
            self._model.take_back(self._ticket)
