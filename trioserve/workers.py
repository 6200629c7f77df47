"""Worker threads by purpose: one kind of work never waits for threads that another kind has taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import trio

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class Workers:
    """So many threads for one purpose in each run of Trio.

    Trio's own limiter has threads for everybody in the program: for name look-ups and files of the program that a
    service is embedded in, and for whatever of that hangs.

    Arguments:
        purpose: of the threads, for whoever looks at the run.
        total: how many of them work at a time.
    """

    def __init__(self, purpose: str, total: int) -> None:
        self._total = total
        self._limiter = trio.lowlevel.RunVar[trio.CapacityLimiter](f"trioserve_{purpose}")

    async def run(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Call a function in one of the threads, and wait for its end, also where the caller is cancelled."""
        return await trio.to_thread.run_sync(function, *arguments, limiter=self._of_this_run())

    def _of_this_run(self) -> trio.CapacityLimiter:
        try:
            return self._limiter.get()
        except LookupError:
            limiter = trio.CapacityLimiter(self._total)
            self._limiter.set(limiter)
            return limiter
