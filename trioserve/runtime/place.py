"""Where a slot's jobs are worked: in a session of its own, or in one that it shares with the other slots."""

from __future__ import annotations

from typing import Protocol

from trioserve.engine.prefix import Kept
from trioserve.runtime.job import Job
from trioserve.runtime.pulse import Pulse


class Place(Protocol):
    """A slot's part of the engine.

    Attributes:
        pulse: of the thread that works in it.
        broken: it has no session that can be trusted, and can't get one.
    """

    @property
    def pulse(self) -> Pulse:
        """See above."""
        ...

    @property
    def broken(self) -> bool:
        """See above."""
        ...

    @property
    def history(self) -> Kept:
        """Tokens that this slot's next sequence may begin with at no cost, and no other slot's. While it is idle."""
        ...

    async def work(self, job: Job) -> None:
        """Work on a job until it is over or cancelled, and leave nothing of it behind. Not to be cancelled.

        Raises:
            Exception: whatever ended it otherwise.
        """
        ...

    def interrupt(self) -> None:
        """See to it soon that the job is wanted no more. For the event loop, at any time; never waits."""
        ...
