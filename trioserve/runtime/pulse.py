"""What a slot's worker thread is doing at this moment, as others see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar, TypeVarTuple

import trio

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Call(NamedTuple):
    """A call into the engine that has not come back.

    Attributes:
        doing: what it is for, in words that follow the slot's name.
        since: when it began, in seconds on Trio's clock.
    """

    doing: str
    since: float


class Pulse:
    """Notes each call into the engine while it lasts. Written by the one thread that is inside, read by any.

    Made in the event loop, whose clock it reads in the worker too: both of Trio's clocks can be read in any thread.
    """

    def __init__(self) -> None:
        self._clock = trio.lowlevel.current_clock()
        self.under_way: Call | None = None

    def call(self, doing: str, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Make a call and have it noted until it returns.

        Arguments:
            doing: what it is for.
            function: what to call, with what follows.
        """
        self.under_way = Call(doing, self._clock.current_time())
        try:
            return function(*args)
        finally:
            self.under_way = None

    def __str__(self) -> str:
        call = self.under_way
        if call is None:
            return "outside the engine"
        return f"{call.doing} for {self._clock.current_time() - call.since:.1f} s"
