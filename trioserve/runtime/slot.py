"""A slot: the task that serves one lease at a time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping

import trio

from trioserve.errors import EngineError
from trioserve.origin import as_origin
from trioserve.runtime.job import Job
from trioserve.runtime.place import Place
from trioserve.runtime.pulse import Pulse
from trioserve.runtime.stall_watch import StallWatch

logger = logging.getLogger("trioserve.slot")


class Slot:
    """Has jobs worked in its place, one after another.

    Arguments:
        index: its number in the pool.
        place: this slot's alone.
        watch: looks after the slot while it works.
    """

    def __init__(self, index: int, place: Place, watch: StallWatch) -> None:
        self.index = index
        self.place = place
        self._watch = watch
        self._job: Job | None = None
        self._used_at = 0.0
        self._send, self._receive = trio.open_memory_channel[tuple[Job, Callable[[], None]]](1)

    @property
    def pulse(self) -> Pulse:
        """Of the worker thread of its place."""
        return self.place.pulse

    def submit(self, job: Job, on_idle: Callable[[], None]) -> None:
        """Give the slot its next job. The holder of the slot's lease does so, when the slot is idle.

        Arguments:
            job: what to do.
            on_idle: called in the event loop once the thread has ended and the session is clean.
        """
        if self.place.broken:
            _refuse(job, on_idle)
            return
        try:
            self._send.send_nowait((job, on_idle))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            _refuse(job, on_idle)

    @property
    def kept_since(self) -> float:
        """When the slot was last used, on Trio's clock; 0 where its place has kept nothing for it."""
        return self._used_at if self.place.history else 0

    def interrupt(self) -> None:
        """See to it soon that a job is wanted no more. For the event loop, at any time; never waits."""
        self.place.interrupt()

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
                    # A place is free only when nothing of the job is left there: nothing may cut the wait for that
                    # short. A job is ended by its own `cancel`, which the lease calls.
                    with trio.CancelScope(shield=True), as_origin(job.origin), self._watch.attending(self):
                        self._job = job
                        await self._work(job)
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
            await self.place.work(job)
        except EngineError as error:
            job.fail(error)  # told in the log by whoever raised it
        except Exception:
            # The root of all inference: whatever it raised ends this request and nothing else.
            logger.exception("slot failed", extra={"fields": self.names})
            job.fail(EngineError("inference failed"))
        if self.place.broken:
            self._watch.note_broken(self)


def _refuse(job: Job, on_idle: Callable[[], None]) -> None:
    job.fail(EngineError("the slot has ended"))
    on_idle()
