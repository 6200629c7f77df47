"""A gate for worker threads, worked from the event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable

import trio

_SAFETY_SECONDS = 30


class ThreadGate:
    """Lets threads through one at a time, all, or none; tells how many have arrived.

    Arguments:
        is_open: let everybody through until ``shut``.
    """

    def __init__(self, *, is_open: bool = True) -> None:
        self._condition = threading.Condition()
        self._open = is_open
        self._permits = 0
        self._arrived = 0

    def open(self) -> None:
        """Let everybody through."""
        with self._condition:
            self._open = True
            self._condition.notify_all()

    def shut(self) -> None:
        """Let nobody through."""
        with self._condition:
            self._open, self._permits = False, 0

    def let(self, count: int = 1) -> None:
        """Let so many through."""
        with self._condition:
            self._permits += count
            self._condition.notify_all()

    def wake(self) -> None:
        """Make waiting threads look at their way out again."""
        with self._condition:
            self._condition.notify_all()

    def wait(self, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Block a worker thread until it is let through.

        Returns:
            False when it was given up instead.
        """
        with self._condition:
            self._arrived += 1
            self._condition.notify_all()
            passed = self._condition.wait_for(
                lambda: self._open or self._permits > 0 or given_up(), timeout=_SAFETY_SECONDS
            )
            if not passed:
                raise TimeoutError("nobody opened the gate")
            if given_up():
                return False
            if not self._open:
                self._permits -= 1
            return True

    @property
    def count(self) -> int:
        """How many threads have come so far."""
        with self._condition:
            return self._arrived

    async def arrived(self, count: int = 1) -> None:
        """Return once so many threads have come to the gate, ever."""

        def wait() -> bool:
            with self._condition:
                return self._condition.wait_for(lambda: self._arrived >= count, timeout=_SAFETY_SECONDS)

        if not await trio.to_thread.run_sync(wait, limiter=trio.CapacityLimiter(1)):
            raise TimeoutError(f"{self._arrived} of {count} threads came to the gate")
