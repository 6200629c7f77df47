"""The isolated arrangement: a session that one slot has to itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from trioserve.engine.base import Session
from trioserve.engine.prefix import Kept
from trioserve.runtime.batch_sessions import BatchSessions
from trioserve.runtime.job import Job
from trioserve.runtime.pulse import Pulse
from trioserve.runtime.solo import Solo

logger = logging.getLogger("trioserve.slot")


class PrivatePlace:
    """``runtime.place.Place`` with a session of its own; a batch gets one with more room for as long as it lasts.

    Arguments:
        session: owned by this place alone.
        solo: works in it.
        batches: where a batch gets a session that takes more sequences, and the place a new one.
        label: model and slot, for the log.

    Attributes:
        session: the one that it has at present.
    """

    def __init__(self, session: Session, solo: Solo, batches: BatchSessions, label: Mapping[str, object]) -> None:
        self.session = session
        self.broken = False
        self._solo = solo
        self._batches = batches
        self._label = label
        self._at_work = session

    @property
    def pulse(self) -> Pulse:
        """Of its worker thread."""
        return self._solo.pulse

    @property
    def history(self) -> Kept:
        """What the session has kept."""
        return self.session.history

    def interrupt(self) -> None:
        """Make a running step return soon."""
        self._at_work.interrupt()

    async def work(self, job: Job) -> None:
        """Work on a job, and have the session prove itself after it."""
        if len(job.works) > self.session.max_sequences and not job.done:
            async with self._solo.batch_session(self._batches, job) as extra:
                if extra is not None:
                    await self._work_in(extra, job)
                    return
        try:
            await self._solo.work(self.session, job)
        finally:
            if not self._solo.proven:
                await self._replace_session()

    async def _work_in(self, extra: Session, job: Job) -> None:
        self._at_work = extra
        try:
            await self._solo.work(extra, job)
        finally:
            self._at_work = self.session

    async def _replace_session(self) -> None:
        """Put a new session in the place of one that did not prove itself. Without one the place is broken."""
        logger.error("a session is not sound after its reset, and is replaced", extra={"fields": self._label})
        try:
            await self._solo.call("freeing its session", self.session.close)
            self.session = self._at_work = await self._solo.call("making a session", self._batches.replacement)
        except Exception:
            logger.exception("slot broken: it could not get another session", extra={"fields": self._label})
            self.broken = True
