"""A slot: the task that owns one session and serves one lease at a time."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence

import trio

from trioserve.engine.base import Session, StepEvent
from trioserve.errors import EngineError
from trioserve.origin import as_origin
from trioserve.runtime.batch_sessions import BatchSessions
from trioserve.runtime.cores import Cores
from trioserve.runtime.job import Job
from trioserve.runtime.pace import Pace

logger = logging.getLogger("trioserve.slot")


class Slot:
    """Works jobs on its session, one after another, in worker threads.

    Arguments:
        index: its number in the pool.
        session: owned by this slot alone.
        limiter: the model's own; its total is the slot count.
        cores: where the slot asks for its share of threads.
        threads: cores that the model may use; 0 is all.
        batches: where a batch gets a session that takes more sequences than the slot's own.
    """

    def __init__(
        self,
        index: int,
        session: Session,
        limiter: trio.CapacityLimiter,
        cores: Cores,
        threads: int,
        batches: BatchSessions,
    ) -> None:
        self.index = index
        self.session = session
        self._limiter = limiter
        self._cores = cores
        self._threads = threads
        self._batches = batches
        self._at_work = session
        self._used_at = 0.0
        self._prefill_pace = Pace()
        self._decode_pace = Pace()
        self._send, self._receive = trio.open_memory_channel[tuple[Job, Callable[[], None]]](1)

    def submit(self, job: Job, on_idle: Callable[[], None]) -> None:
        """Give the slot its next job. The holder of the slot's lease does so, when the slot is idle.

        Arguments:
            job: what to do.
            on_idle: called in the event loop once the thread has ended and the session is clean.
        """
        try:
            self._send.send_nowait((job, on_idle))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            _refuse(job, on_idle)

    @property
    def kept_since(self) -> float:
        """When the slot was last used, on Trio's clock; 0 where its session has kept nothing."""
        return self._used_at if self.session.history else 0

    def interrupt(self) -> None:
        """Make a running step return soon. For the event loop, at any time; never waits."""
        self._at_work.interrupt()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Cancellation takes effect between jobs, never inside one."""
        task_status.started()
        with self._send, self._receive:
            try:
                async for job, on_idle in self._receive:
                    # A session is free only when its thread has ended: nothing may cut the wait for it short. A job
                    # is ended by its own `cancel`, which the lease calls.
                    with trio.CancelScope(shield=True), as_origin(job.origin):
                        await self._work(job)
                    self._used_at = trio.current_time()
                    job.settle()
                    on_idle()
            finally:
                # A job that came in the very moment of the cancellation: its lease would never come back.
                with contextlib.suppress(trio.WouldBlock, trio.EndOfChannel):
                    _refuse(*self._receive.receive_nowait())

    async def _work(self, job: Job) -> None:
        try:
            async with self._session_for(job) as session:
                while True:
                    with self._cores.busy():
                        await trio.to_thread.run_sync(self._decode, session, job, limiter=self._limiter)
                    if job.done:
                        return
                    await job.wait_for_room()
        except Exception:
            # The root of all inference: whatever it raised ends this request and nothing else.
            logger.exception("slot %d failed", self.index)
            job.fail(EngineError("inference failed"))

    @contextlib.asynccontextmanager
    async def _session_for(self, job: Job) -> AsyncIterator[Session]:
        """The slot's own session, or for the length of the block one with room for more of a batch at once."""
        extra = None
        if len(job.works) > self.session.max_sequences and not job.done:
            extra = await trio.to_thread.run_sync(self._batches.open, job.works, limiter=self._limiter)
        if extra is None:
            yield self.session
            return
        self._at_work = extra
        try:
            yield extra
        finally:
            self._at_work = self.session
            await trio.to_thread.run_sync(extra.close, limiter=self._limiter)

    def _decode(self, session: Session, job: Job) -> None:
        """Step the session until all sequences have ended, the job is cancelled, or its reader is too far behind."""
        if job.begin():
            # First of all: this also lowers a flag that was raised after the previous job's last step.
            session.reset()
        try:
            while job.wanted and not job.full:
                job.feed(session.add, session.max_sequences)
                for ended in job.post(self._step(session, job)):
                    session.remove(ended)
        except BaseException:
            job.abandon()
            session.clear()  # what it has kept may be what went wrong
            raise
        finally:
            if not job.wanted:
                session.reset()

    def _step(self, session: Session, job: Job) -> Sequence[StepEvent]:
        """Take one step, with as many threads as are its share and worth having."""
        prefilling = job.prefilling
        pace = self._prefill_pace if prefilling else self._decode_pace
        threads = pace.threads(self._cores.share(self._threads))
        began = time.perf_counter()
        events = session.step(threads)
        # The last piece of a prompt is of any length, and an interrupted step of none: they prove nothing.
        if job.wanted and not (prefilling and events):
            pace.note(time.perf_counter() - began)
        return events


def _refuse(job: Job, on_idle: Callable[[], None]) -> None:
    job.fail(EngineError("the slot has ended"))
    on_idle()
