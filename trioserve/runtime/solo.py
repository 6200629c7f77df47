"""Working one job in a session that nobody else uses meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar, TypeVarTuple

import trio

from trioserve.engine.base import Session, StepEvent
from trioserve.runtime.batch_sessions import BatchSessions
from trioserve.runtime.cores import Cores
from trioserve.runtime.job import Job
from trioserve.runtime.pace import Paces
from trioserve.runtime.pulse import Pulse

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Solo:
    """Steps a session for one job at a time, in worker threads.

    Arguments:
        limiter: the model's own.
        cores: where it asks for its share of threads.
        threads: cores that the model may use; 0 is all.
        paces: of the model.

    Attributes:
        pulse: of its worker thread.
        proven: whether the session of the latest job was found in order after it.
    """

    def __init__(self, limiter: trio.CapacityLimiter, cores: Cores, threads: int, paces: Paces) -> None:
        self.pulse = Pulse()
        self.proven = True
        self._limiter = limiter
        self._cores = cores
        self._threads = threads
        self._paces = paces

    async def call(self, doing: str, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call the engine in a worker thread; see ``Pulse.call``."""
        return await trio.to_thread.run_sync(self.pulse.call, doing, function, *args, limiter=self._limiter)

    @contextlib.asynccontextmanager
    async def batch_session(self, batches: BatchSessions, job: Job) -> AsyncIterator[Session | None]:
        """Have a session for a batch for the length of the block; None where there is no memory for one."""
        extra = await self.call("making a session for a batch", batches.open, job.works)
        try:
            yield extra
        finally:
            if extra is not None:
                await self.call("freeing a batch's session", extra.close)

    async def work(self, session: Session, job: Job) -> None:
        """Work on a job until it is over or cancelled.

        Raises:
            Exception: whatever the engine raised; nothing of the job is left in the session.
        """
        over = False
        while not over:
            await job.wait_for_room()
            with self._cores.busy():
                over = await trio.to_thread.run_sync(self._decode, session, job, limiter=self._limiter)

    def _decode(self, session: Session, job: Job) -> bool:
        """Step the session until all sequences have ended, the job is cancelled, or its reader is too far behind.

        Returns:
            Whether that was all, and the session is in order. Where it raises it was all, too.
        """
        call = self.pulse.call
        self.proven = False
        try:
            if job.begin():
                # First of all: this also lowers a flag that was raised after the previous job's last step.
                call("resetting its session", session.reset)
            while job.wanted and not job.full:
                job.feed(lambda work: call("taking a prompt in", session.add, work), session.max_sequences)
                for ended in job.post(self._step(session, job)):
                    call("removing a sequence", session.remove, ended)
        except BaseException:
            job.abandon()
            call("clearing its session", session.clear)  # what it has kept may be what went wrong
            raise
        finally:
            if over := not job.wanted:
                self._end(session)
        return over

    def _end(self, session: Session) -> None:
        """End all work in a session, and have it prove that nothing is left but what it says it has kept.

        Twice at most: a cancellation, of which each job has one, may raise the flag between the one and the other.
        """
        for _ in range(2):
            self.pulse.call("resetting its session", session.reset)
            if self.pulse.call("looking at its session", session.is_sound):
                self.proven = True
                return

    def _step(self, session: Session, job: Job) -> Sequence[StepEvent]:
        """Take one step, with as many threads as are its share and worth having."""
        prefilling = job.prefilling
        threads = self._cores.share(self._threads)
        if prefilling:  # a short prompt is over before there is anything to compare
            pace, threads = self._paces.prefill, self._paces.decode.bound(threads)
        else:
            pace = self._paces.decode
        threads = pace.threads(threads)
        began = time.perf_counter()
        events = self.pulse.call("evaluating a step", session.step, threads)
        # The last piece of a prompt is of any length, and an interrupted step of none: they prove nothing.
        if job.wanted and not (prefilling and events):
            pace.note(threads, time.perf_counter() - began)
        return events
