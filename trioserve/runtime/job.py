"""One prompt on its way through a slot: what the worker thread puts in, and what the request takes out."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import trio

from trioserve.engine.base import Failed, Finished, SequenceRequest, StepEvent, Token
from trioserve.errors import EngineError, TrioserveError

logger = logging.getLogger("trioserve.slot")

BUFFERED_EVENTS = 256
"""Events that may wait for a slow reader before its slot pauses."""


class Job:
    """Carries a sequence's events from a worker thread to the request's task, in order and bounded.

    The worker appends and nudges the event loop; nudges that are still under way are not repeated, so tokens that pile
    up while the loop is busy are handed over together. The worker never blocks: a full buffer makes it leave the
    engine, and the slot's task waits for room instead.

    Arguments:
        request: the sequence.
        interrupt: makes the session's running step return; safe to call from the event loop at any time.
    """

    def __init__(self, request: SequenceRequest, interrupt: Callable[[], None]) -> None:
        self.request = request
        self._interrupt = interrupt
        self._token = trio.lowlevel.current_trio_token()
        self._events: deque[StepEvent] = deque()
        self._arrived = trio.Event()
        self._room = trio.Event()
        self._error: TrioserveError | None = None
        self._at_end = False  # the reader has got all that comes before the error
        self._cancelled = False  # written by the event loop, read by the worker
        self._over = False  # written by the worker before it leaves for good
        self.started_at: float | None = None
        self.first_token_at: float | None = None

    # -- in the worker thread

    @property
    def wanted(self) -> bool:
        """Whether the worker should go on."""
        return not (self._cancelled or self._over)

    @property
    def full(self) -> bool:
        """Whether the reader is too far behind for more events."""
        return len(self._events) >= BUFFERED_EVENTS

    def begin(self) -> None:
        """Note the time at which a slot took the job up."""
        self.started_at = self.started_at or time.perf_counter()

    def post(self, events: Sequence[StepEvent]) -> None:
        """Hand events over to the reader."""
        if not events:
            return
        if self.first_token_at is None and isinstance(events[0], Token):
            self.first_token_at = time.perf_counter()
        self._over = self._over or isinstance(events[-1], (Finished, Failed))
        self._events.extend(events)
        self._token.run_sync_soon(self._nudge, idempotent=True)

    def abandon(self) -> None:
        """Note that the worker will not go on, whatever the reader expects."""
        self._over = True

    # -- in the event loop, for the slot

    @property
    def done(self) -> bool:
        """Whether the slot has nothing left to do for this job."""
        return self._over or self._cancelled

    async def wait_for_room(self) -> None:
        """Return once the reader has caught up, or the job is cancelled."""
        while self.full and not self._cancelled:
            self._room = trio.Event()
            await self._room.wait()

    def fail(self, error: TrioserveError) -> None:
        """End the job with an error that the reader gets after the events that are already there."""
        self._error = self._error or error
        self._arrived.set()

    # -- in the event loop, for the request

    def cancel(self) -> None:
        """Make the slot stop working on this job. Returns at once; the slot joins its thread later."""
        if not self._cancelled:
            # The order matters: a worker that lowers the session's flag looks at `wanted` afterwards.
            self._cancelled = True
            self._interrupt()
            self._room.set()
            self.fail(EngineError("the request was given up"))

    async def next_events(self) -> list[StepEvent]:
        """Return all events that have arrived, waiting for at least one.

        Raises:
            EngineError: the sequence could not go on.
            TrioserveError: whatever the job was made to fail with.
        """
        while not self._events or self._cancelled or self._at_end:
            if self._error is not None:
                raise self._error
            self._arrived = trio.Event()
            await self._arrived.wait()
        events = list(self._events)
        # The worker may append meanwhile: only what was copied is removed.
        for _ in events:
            self._events.popleft()
        self._room.set()
        self._at_end = self._error is not None
        return self._checked(events)

    def _checked(self, events: list[StepEvent]) -> list[StepEvent]:
        """Turn a failure among the events into the error that follows them."""
        last = events[-1]
        if isinstance(last, Failed):
            logger.error("inference failed: %s", last.message)
            self._error = self._error or EngineError("inference failed")
            events.pop()
            if not events:
                raise self._error
        return events

    def _nudge(self) -> None:
        self._arrived.set()
