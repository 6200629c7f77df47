"""Sharing the machine's cores among whatever decodes at the moment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def available_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Cores:
    """Counts the sessions that are inside the engine, over all models, and says how many threads each may take.

    A lone session gets all cores; side by side they get equal shares and never more threads than there are cores, as
    long as there are no more sessions than cores. The count changes in the event loop only; worker threads read it
    before each step, so a step that has begun keeps its threads.

    Arguments:
        total: cores of the machine.
    """

    def __init__(self, total: int | None = None) -> None:
        self.total = total or available_cores()
        self._busy = 0

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Count one session as busy."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    def share(self, wanted: int = 0) -> int:
        """Threads for one busy session.

        Arguments:
            wanted: cores that its model may use altogether; 0 is all.
        """
        return max(1, min(wanted or self.total, self.total) // max(1, self._busy))
