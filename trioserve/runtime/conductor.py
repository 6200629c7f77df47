"""The fused arrangement: one session whose sequences are the slots of a model, stepped for all of them together."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar, TypeVarTuple

import trio

from trioserve.engine.base import Failed, Session, StepEvent, Work
from trioserve.errors import EngineError
from trioserve.runtime.batch_sessions import BatchSessions
from trioserve.runtime.bell import Bell
from trioserve.runtime.cores import Cores
from trioserve.runtime.job import Job
from trioserve.runtime.pace import Pace
from trioserve.runtime.pulse import Pulse

logger = logging.getLogger("trioserve.slot")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Part:
    """One job's part in what a conductor plays.

    Arguments:
        job: whose it is.

    Attributes:
        paused: it waits until its reader has caught up. Set by the worker, cleared by the event loop.
        ended: nothing of it is left in the session. Written by the worker.
        error: what ended it, where that was not the job itself.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.paused = False
        self.ended = False
        self.error: Exception | None = None
        self._token = trio.lowlevel.current_trio_token()
        self._changed = Bell()

    # -- in the worker thread

    def pause(self) -> None:
        """Let the others go on without it."""
        self.paused = True
        self.tell()

    def end(self, error: Exception | None = None) -> None:
        """Note that nothing of it is left."""
        self.ended, self.error = True, error
        self.tell()

    def tell(self) -> None:
        """Have whoever waits look again. Any thread."""
        self._token.run_sync_soon(self._changed.ring)

    # -- in the event loop

    async def wait_changed(self) -> None:
        """Return once it was paused or has ended."""
        await self._changed.wait()


class Conductor:
    """Steps one session in a worker thread for as long as any slot has a job for it.

    Jobs join and leave between steps. A job that is cancelled leaves after the step that is under way, which no other
    job is made to repeat; only where nobody wants it any more is a step cut short.

    Arguments:
        session: with one sequence for each slot; owned by this conductor alone.
        limiter: the model's own.
        cores: where it asks for its share of threads.
        threads: cores that the model may use; 0 is all.
        batches: where it gets a new session when this one has failed.
        label: of the model, for the log.

    Attributes:
        session: the one that it has at present.
        pulse: of its worker thread.
        broken: it has no session that can be trusted, and can't get one.
        broke: set when that has happened.
    """

    def __init__(
        self,
        session: Session,
        limiter: trio.CapacityLimiter,
        cores: Cores,
        threads: int,
        batches: BatchSessions,
        label: Mapping[str, object],
    ) -> None:
        self.session = session
        self.pulse = Pulse()
        self.broken = False
        self.broke = trio.Event()
        self._limiter = limiter
        self._cores = cores
        self._threads = threads
        self._batches = batches
        self._label = label
        self._token = trio.lowlevel.current_trio_token()
        self._closed = False
        self._wanted = trio.Event()
        self._jobs: set[Job] = set()  # those that take part or are about to; the event loop's own
        self._newcomers: deque[Part] = deque()  # appended to by the event loop, emptied by the worker
        # The worker's own while it is at work:
        self._parts: list[Part] = []
        self._owners: dict[int, Part] = {}  # of the live sequences, by their numbers in the session
        self._suspect = False  # the session has failed, or something was left in it
        self._paces: dict[int, Pace] = {}  # by how many sequences decode
        self._pace = Pace()  # the one of these that was asked last
        self._flagged = False  # the session's interrupt flag is up

    # -- in the event loop

    async def play(self, job: Job) -> None:
        """Have a job take part until it is over or cancelled. Not to be cancelled.

        Raises:
            Exception: whatever ended it otherwise.
        """
        if self.broken or self._closed:
            raise EngineError("the slot has ended")
        part = Part(job)
        self._newcomers.append(part)
        self._jobs.add(job)
        self.wake()
        while not part.ended:
            await part.wait_changed()
            if part.paused and not part.ended:
                await job.wait_for_room()
                part.paused = False
                self.wake()
        self._jobs.remove(job)
        if part.error is not None:
            raise part.error

    def wake(self) -> None:
        """Have it look for what has changed."""
        self._wanted.set()

    def interrupt(self) -> None:
        """Have it see soon that a job is wanted no more."""
        if not any(job.wanted for job in self._jobs):
            # In this order: whoever lowers the flag takes the note first, so that no flag stays up unnoted.
            self.session.interrupt()
            self._flagged = True
        self.wake()

    async def run(
        self,
        attend: Callable[[], contextlib.AbstractContextManager[None]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Play whatever comes, until cancelled. Cancellation takes effect while nothing is played.

        Arguments:
            attend: entered for as long as something is played.
        """
        task_status.started()
        try:
            while True:
                await self._wanted.wait()
                # As in a slot: what has begun is waited for, and a job is ended by its own `cancel`.
                with trio.CancelScope(shield=True), attend():
                    await self._play_on()
        finally:
            self._closed = True
            while self._newcomers:
                self._newcomers.popleft().end(EngineError("the slot has ended"))

    async def _play_on(self) -> None:
        """Play until no job takes part."""
        while self._parts or self._newcomers:
            if not self._newcomers:
                await self._wanted.wait()
            self._wanted = trio.Event()
            try:
                with self._cores.busy():
                    await trio.to_thread.run_sync(self._play, limiter=self._limiter)
            except Exception:
                # Whatever it was, the lack of a thread too: nobody may be left waiting for the end of his part.
                logger.exception("a step of all slots failed", extra={"fields": self._label})
                self._end_all()
            if self._suspect:
                await self._replace_session()
        self._wanted = trio.Event()

    async def _replace_session(self) -> None:
        """Put a new session in the place of one that has failed, while no job takes part."""
        logger.error("the slots' session can't be trusted any more, and is replaced", extra={"fields": self._label})
        try:
            await self._call("freeing its session", self.session.close)
            self.session = await self._call("making a session", self._batches.replacement)
            self._suspect = False
        except Exception:
            logger.exception("slots broken: they could not get another session", extra={"fields": self._label})
            self.broken = True
            self.broke.set()
            while self._newcomers:
                self._newcomers.popleft().end(EngineError("the slot has ended"))

    async def _call(self, doing: str, function: Callable[[*Ts], T], *args: *Ts) -> T:
        return await trio.to_thread.run_sync(self.pulse.call, doing, function, *args, limiter=self._limiter)

    # -- in the worker thread

    def _play(self) -> None:
        """Step until no job is left, or all that are left wait for their readers."""
        self._let_go()
        while not self._suspect:
            self._let_in()
            self._begin()
            if all(part.paused for part in self._parts):
                return
            self._hand_out(self._step())
            self._let_go()

    def _let_in(self) -> None:
        """Have the newcomers take part."""
        while self._newcomers:
            part = self._newcomers.popleft()
            part.job.begin()
            self._parts.append(part)

    def _let_go(self) -> None:
        """End the parts of jobs that are over or cancelled."""
        if self._flagged:
            # Before anything else: the job for which it was raised had been cancelled before, which is seen below.
            self._flagged = False
            self.pulse.call("resuming its session", self.session.resume)
        unwanted = [part for part in self._parts if not part.job.wanted]
        for part in reversed(unwanted):  # the latest first, who may wait for what an earlier one evaluates
            self._remove([number for number, owner in self._owners.items() if owner is part])
        if unwanted and not self._is_in_order():
            self._end_all()
            return
        for part in unwanted:
            self._parts.remove(part)
            part.end()

    def _is_in_order(self) -> bool:
        """Have the session prove itself. A second time after a flag, which a cancellation may have raised meanwhile."""
        for _ in range(2):
            if self.pulse.call("looking at its session", self.session.is_sound, len(self._owners)):
                return True
            self.pulse.call("resuming its session", self.session.resume)
        return False

    def _begin(self) -> None:
        """Begin the sequences of jobs that have none."""
        for part in list(self._parts):
            try:
                part.job.feed(partial(self._add, part), 1)
            except Exception as error:
                # The session did not take this one in, and holds nothing of it.
                self._parts.remove(part)
                part.job.abandon()
                part.end(error)

    def _add(self, part: Part, work: Work) -> int:
        number = self.pulse.call("taking a prompt in", self.session.add, work)
        self._owners[number] = part
        return number

    def _step(self) -> Sequence[StepEvent]:
        """Take one step, with as many threads as are its share and, where all do the same, worth having."""
        held = [number for number, part in self._owners.items() if part.paused]
        threads = self._cores.share(self._threads)
        alike = not any(part.job.prefilling for part in self._parts)
        if alike:
            self._pace = self._paces.setdefault(len(self._owners) - len(held), Pace())
            threads = self._pace.threads(threads)
        else:
            threads = self._pace.bound(threads)
        began = time.perf_counter()
        events = self.pulse.call("evaluating a step", self.session.step, threads, held)
        if alike and events:
            self._pace.note(threads, time.perf_counter() - began)
        return events

    def _hand_out(self, events: Sequence[StepEvent]) -> None:
        """Give each job its events, and let go of the sequences that have ended."""
        each: dict[Part, list[StepEvent]] = {}
        for event in events:
            each.setdefault(self._owners[event.sequence], []).append(event)
        for part, its_events in each.items():
            self._remove(part.job.take(its_events))
            if part.job.full and part.job.wanted:
                part.pause()
        if each:  # all readers at once: each call of the event loop from a thread is a system call
            self._token.run_sync_soon(_nudge, [part.job for part in each])
        if not self._owners and any(isinstance(event, Failed) and not event.alone for event in events):
            self._suspect = True  # a step that failed for all of them
            self._end_all()

    def _remove(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            del self._owners[number]
            self.pulse.call("removing a sequence", self.session.remove, number)

    def _end_all(self) -> None:
        """End everything, and have the session replaced."""
        self._suspect = True
        parts, self._parts = self._parts, []
        self._owners.clear()
        for part in parts:
            error = EngineError("inference failed") if part.job.wanted else None
            part.job.abandon()
            part.end(error)


def _nudge(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.nudge()
