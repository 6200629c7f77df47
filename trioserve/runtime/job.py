"""What a request has a slot do: one sequence, or the many of a batch, on their way through a worker thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from trioserve.engine.base import ENDINGS, StepEvent, Work
from trioserve.errors import EngineError, TrioserveError
from trioserve.origin import current_origin
from trioserve.runtime.bell import Bell

BUFFERED_EVENTS = 256
"""Events that may wait for a slow reader before its slot pauses."""


Told = tuple[int, StepEvent]
"""An event, after the index of its sequence in ``Job.works``. Its own ``sequence`` is the number in the session."""


@dataclass(slots=True)
class Times:
    """When a sequence was begun, gave its first and its latest token or vector, and ended; None until then.

    By ``time.perf_counter``; written by the worker.
    """

    begun: float | None = None
    first: float | None = None
    latest: float | None = None
    ended: float | None = None


class Job:
    """Carries the events of its sequences from a worker thread to the request's task, in order and bounded.

    A sequence is known by its index in ``works``, which its events are told with. The worker appends and nudges the
    event loop; nudges that are still under way are not repeated, so tokens that pile up while the loop is busy are
    handed over together. The worker never blocks: a full buffer makes it leave the engine, and the slot's task waits
    for room instead.

    Arguments:
        works: the sequences, at least one, begun in this order.
        interrupt: makes the session's running step return; safe to call from the event loop at any time.
        request_id: of the request, for the log.
    """

    def __init__(self, works: Sequence[Work], interrupt: Callable[[], None], request_id: str | None = None) -> None:
        self.request_id = request_id
        self.works = works
        self.times = [Times() for _ in works]
        self.origin = current_origin()
        self._interrupt = interrupt
        self._token = trio.lowlevel.current_trio_token()
        self._events: deque[Told] = deque()
        self._arrived = Bell()
        self._room = trio.Event()
        self._error: TrioserveError | None = None
        self._at_end = False  # the reader has got all that comes before the error
        self._cancelled = False  # written by the event loop, read by the worker
        self._over = False  # written by the worker before it leaves for good
        # The worker's own:
        self._begun = False
        self._next = 0
        self._indices: dict[int, int] = {}  # of the live sequences, by their numbers in the session
        self._without_token = 0
        self._posted: list[Told] = []
        self._last: Told | None = None

    # -- in the worker thread

    @property
    def wanted(self) -> bool:
        """Whether the worker should go on."""
        return not (self._cancelled or self._over)

    @property
    def full(self) -> bool:
        """Whether the reader is too far behind for more events."""
        return len(self._events) >= BUFFERED_EVENTS

    @property
    def prefilling(self) -> bool:
        """Whether some sequence that was begun has given nothing yet."""
        return self._without_token > 0

    def begin(self) -> bool:
        """Tell whether this is the worker's first visit, once."""
        first, self._begun = not self._begun, True
        return first

    def feed(self, add: Callable[[Work], int], capacity: int) -> None:
        """Begin as many of the sequences that wait as may live at once.

        Arguments:
            add: begins one and returns its number.
            capacity: how many may live.
        """
        while self._next < len(self.works) and len(self._indices) < capacity and self.wanted:
            index = self._next
            self._next += 1
            self._indices[add(self.works[index])] = index
            self._without_token += 1
            self.times[index].begun = time.perf_counter()

    def post(self, events: Sequence[StepEvent]) -> Sequence[int]:
        """Hand events over to the reader, and wake it.

        Returns:
            The numbers of the sequences that have ended.
        """
        if not events:
            return ()
        ended = self.take(events)
        self._token.run_sync_soon(self.nudge, idempotent=True)
        return ended

    def take(self, events: Sequence[StepEvent]) -> Sequence[int]:
        """Hand events over, at least one, to a reader whom the caller has ``nudge`` wake.

        Returns:
            The numbers of the sequences that have ended.
        """
        now = time.perf_counter()
        ended = []
        for event in events:
            number, index = event.sequence, self._indices[event.sequence]
            times = self.times[index]
            times.latest = now
            if times.first is None:
                times.first = now
                self._without_token -= 1
            if isinstance(event, ENDINGS):
                times.ended = now
                ended.append(number)
            self._posted.append((index, event))
        for number in ended:
            del self._indices[number]
        if not self._indices and self._next == len(self.works):
            # The end is told when the slot is idle, so that whoever acts upon it finds it so.
            self._over, self._last = True, self._posted.pop()
        self._events.extend(self._posted)
        self._posted.clear()
        return ended

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

    def nudge(self) -> None:
        """Have the reader look for events."""
        self._arrived.ring()

    def settle(self) -> None:
        """Tell the reader the end, now that the slot is idle."""
        if self._last is not None:
            self._events.append(self._last)
            self._arrived.ring()

    def fail(self, error: TrioserveError) -> None:
        """End the job with an error that the reader gets after the events that are already there."""
        self._error = self._error or error
        self._arrived.ring()

    # -- in the event loop, for the request

    def cancel(self) -> None:
        """Make the slot stop working on this job. Returns at once; the slot joins its thread later."""
        if not self._cancelled:
            # The order matters: a worker that lowers the session's flag looks at `wanted` afterwards.
            self._cancelled = True
            self._interrupt()
            self._room.set()
            self.fail(EngineError("the request was given up"))

    async def next_events(self) -> list[Told]:
        """Return all events that have arrived, waiting for at least one.

        Raises:
            TrioserveError: whatever the job was made to fail with.
        """
        while not (events := self.poll()):
            await self.wait()
        return events

    async def wait(self) -> None:
        """Return once there may be something for ``poll``. For one task."""
        await self._arrived.wait()

    def poll(self) -> list[Told]:
        """Return all events that have arrived since the last call, without waiting.

        Raises:
            TrioserveError: as ``next_events``.
        """
        if not self._events or self._cancelled or self._at_end:
            if self._error is not None:
                raise self._error
            return []
        events = list(self._events)
        # The worker may append meanwhile: only what was copied is removed.
        for _ in events:
            self._events.popleft()
        self._room.set()
        self._at_end = self._error is not None
        return events
