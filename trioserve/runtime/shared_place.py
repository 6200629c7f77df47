"""A slot's part of the fused arrangement: a sequence of the session that all slots of a model share."""

from __future__ import annotations

from trioserve.engine.base import Session
from trioserve.engine.prefix import Kept
from trioserve.runtime.batch_sessions import BatchSessions
from trioserve.runtime.conductor import Conductor
from trioserve.runtime.job import Job
from trioserve.runtime.pulse import Pulse
from trioserve.runtime.solo import Solo


class SharedPlace:
    """``runtime.place.Place`` in a shared session. A batch gets a session of its own for as long as it lasts.

    Arguments:
        conductor: steps the shared session.
        solo: works in a batch's session.
        batches: where a batch gets its session.
    """

    def __init__(self, conductor: Conductor, solo: Solo, batches: BatchSessions) -> None:
        self._conductor = conductor
        self._solo = solo
        self._batches = batches
        self._apart = False  # its job is a batch and has nothing to do with the shared session
        self._extra: Session | None = None

    @property
    def pulse(self) -> Pulse:
        """Of the thread that works for this slot."""
        return self._solo.pulse if self._apart else self._conductor.pulse

    @property
    def broken(self) -> bool:
        """Whether the conductor is."""
        return self._conductor.broken

    @property
    def history(self) -> Kept:
        """Nothing: what earlier sequences have left is there for every slot."""
        return Kept()

    def interrupt(self) -> None:
        """See to it soon that the job is wanted no more."""
        if self._extra is not None:
            self._extra.interrupt()
        else:
            self._conductor.interrupt()

    async def work(self, job: Job) -> None:
        """Work on a job."""
        if len(job.works) == 1 or job.done or not await self._work_apart(job):
            await self._conductor.play(job)

    async def _work_apart(self, job: Job) -> bool:
        """Work on a batch in a session of its own. False where there is no memory for one."""
        self._apart = True
        try:
            async with self._solo.batch_session(self._batches, job) as extra:
                if extra is not None:
                    await self._work_in(extra, job)
        finally:
            self._apart = False
        return extra is not None

    async def _work_in(self, extra: Session, job: Job) -> None:
        self._extra = extra
        try:
            await self._solo.work(extra, job)
        finally:
            self._extra = None
