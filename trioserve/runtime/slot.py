"""A slot: the task that owns one session and serves one lease at a time."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TypeVar, TypeVarTuple

import trio

from trioserve.engine.base import Session, StepEvent
from trioserve.errors import EngineError
from trioserve.origin import as_origin
from trioserve.runtime.batch_sessions import BatchSessions
from trioserve.runtime.cores import Cores
from trioserve.runtime.job import Job
from trioserve.runtime.pace import Pace
from trioserve.runtime.pulse import Pulse
from trioserve.runtime.stall_watch import StallWatch

logger = logging.getLogger("trioserve.slot")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Slot:
    """Works jobs on its session, one after another, in worker threads.

    Arguments:
        index: its number in the pool.
        session: owned by this slot alone.
        limiter: the model's own; its total is the slot count.
        cores: where the slot asks for its share of threads.
        threads: cores that the model may use; 0 is all.
        batches: where a batch gets a session that takes more sequences than the slot's own, and the slot a new one.
        watch: looks after the slot while it works.

    Attributes:
        pulse: of its worker thread.
        broken: it has no session that can be trusted, and can't get one.
    """

    def __init__(
        self,
        index: int,
        session: Session,
        limiter: trio.CapacityLimiter,
        cores: Cores,
        threads: int,
        batches: BatchSessions,
        watch: StallWatch,
    ) -> None:
        self.index = index
        self.session = session
        self._limiter = limiter
        self._cores = cores
        self._threads = threads
        self._batches = batches
        self._watch = watch
        self.pulse = Pulse()
        self.broken = False
        self._job: Job | None = None
        self._proven = True
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
        if self.broken:
            _refuse(job, on_idle)
            return
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

    @property
    def names(self) -> Mapping[str, object]:
        """Model, slot and request, as fields of the log."""
        names: dict[str, object] = {"model": self._watch.model_id, "slot": self.index}
        if self._job is not None and self._job.request_id is not None:
            names["request_id"] = self._job.request_id
        return names

    def note_stall(self) -> None:
        """Give the request up whose step does not come back. The slot is kept until its thread has ended."""
        if self._job is not None:
            self._job.fail(EngineError("the slot doesn't answer: inference has stalled"))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Cancellation takes effect between jobs, never inside one."""
        task_status.started()
        with self._send, self._receive:
            try:
                async for job, on_idle in self._receive:
                    # A session is free only when its thread has ended: nothing may cut the wait for it short. A job
                    # is ended by its own `cancel`, which the lease calls.
                    with trio.CancelScope(shield=True), as_origin(job.origin), self._watch.attending(self):
                        self._job = job
                        await self._work(job)
                        if not self._proven:
                            await self._replace_session()
                        self._job = None
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
                over = False
                while not over:
                    await job.wait_for_room()
                    with self._cores.busy():
                        over = await trio.to_thread.run_sync(self._decode, session, job, limiter=self._limiter)
        except Exception:
            # The root of all inference: whatever it raised ends this request and nothing else.
            logger.exception("slot failed", extra={"fields": self.names})
            job.fail(EngineError("inference failed"))

    @contextlib.asynccontextmanager
    async def _session_for(self, job: Job) -> AsyncIterator[Session]:
        """The slot's own session, or for the length of the block one with room for more of a batch at once."""
        extra = None
        if len(job.works) > self.session.max_sequences and not job.done:
            extra = await self._call("making a session for a batch", self._batches.open, job.works)
        if extra is None:
            yield self.session
            return
        self._at_work = extra
        try:
            yield extra
        finally:
            self._at_work = self.session
            await self._call("freeing a batch's session", extra.close)

    async def _replace_session(self) -> None:
        """Put a new session in the place of one that did not prove itself. Without one the slot is broken."""
        logger.error("a session is not sound after its reset, and is replaced", extra={"fields": self.names})
        try:
            await self._call("freeing its session", self.session.close)
            self.session = self._at_work = await self._call("making a session", self._batches.replacement)
            self._proven = True
        except Exception:
            logger.exception("slot broken: it could not get another session", extra={"fields": self.names})
            self.broken = True
            self._watch.note_broken(self)

    async def _call(self, doing: str, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call the engine in a worker thread."""
        return await trio.to_thread.run_sync(self.pulse.call, doing, function, *args, limiter=self._limiter)

    def _decode(self, session: Session, job: Job) -> bool:
        """Step the session until all sequences have ended, the job is cancelled, or its reader is too far behind.

        Returns:
            Whether that was all, and the session is in order. Where it raises it was all, too.
        """
        call = self.pulse.call
        if session is self.session:
            self._proven = False
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
                self._proven = True
                return

    def _step(self, session: Session, job: Job) -> Sequence[StepEvent]:
        """Take one step, with as many threads as are its share and worth having."""
        prefilling = job.prefilling
        pace = self._prefill_pace if prefilling else self._decode_pace
        threads = pace.threads(self._cores.share(self._threads))
        began = time.perf_counter()
        events = self.pulse.call("evaluating a step", session.step, threads)
        # The last piece of a prompt is of any length, and an interrupted step of none: they prove nothing.
        if job.wanted and not (prefilling and events):
            pace.note(time.perf_counter() - began)
        return events


def _refuse(job: Job, on_idle: Callable[[], None]) -> None:
    job.fail(EngineError("the slot has ended"))
    on_idle()
