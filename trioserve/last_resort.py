"""The end of the process in bounded time, whatever hangs."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable

logger = logging.getLogger("trioserve")


class LastResort:
    """Ends the process when it is not gone in time, from a thread that waits for nothing else.

    A thread inside the engine can't be stopped from outside: without this, one that never comes back would keep the
    process for ever. Nothing is freed; the system does that.

    Arguments:
        code: exit code then; asked in that moment.
        unfinished: tells what still holds the end up, for the log; any thread.
        flush: writes what is left of the log, in a tenth of a second.
    """

    def __init__(
        self, code: Callable[[], int], unfinished: Callable[[], Iterable[str]], flush: Callable[[], None]
    ) -> None:
        self._code = code
        self._unfinished = unfinished
        self._flush = flush
        self._condition = threading.Condition()
        self._deadline: float | None = None
        self._called_off = False

    def within(self, seconds: float) -> None:
        """Have the process gone within so many seconds; of several bounds the earliest counts."""
        due = time.monotonic() + seconds
        with self._condition:
            if self._deadline is None:
                threading.Thread(target=self._wait, name="trioserve-last-resort", daemon=True).start()
            self._deadline = due if self._deadline is None else min(self._deadline, due)
            self._condition.notify()

    def call_off(self) -> None:
        """The end has come by itself."""
        with self._condition:
            self._called_off = True
            self._condition.notify()

    @property
    def seconds_left(self) -> float:
        """How long the process may still take; endless where no bound was set."""
        return float("inf") if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def leave(self) -> None:
        """End the process now."""
        for what in list(self._unfinished()) or _busy_threads():
            logger.error("the end is forced; not done yet: %s", what)
        self._flush()
        os._exit(self._code())

    def _wait(self) -> None:
        with self._condition:
            while not self._called_off and self.seconds_left > 0:
                self._condition.wait(self.seconds_left)
            if self._called_off:
                return
        self.leave()


def _busy_threads() -> list[str]:
    """Trio names a worker thread by its function and task while it is at work, and by a number while it waits."""
    names = [thread.name for thread in threading.enumerate()]
    return [f"thread {name}" for name in names if " from " in name] or ["the event loop"]
