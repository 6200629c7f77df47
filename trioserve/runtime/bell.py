"""What one task waits for again and again."""

from __future__ import annotations

import trio


class Bell:
    """Wakes one waiter. A ring that nobody waits for is kept for the next wait; several of those are one.

    For waits that end with every token of every stream: a ``trio.Event`` made anew for each of them does the same and
    costs more.
    """

    def __init__(self) -> None:
        self._rung = False
        self._waiter: trio.lowlevel.Task | None = None

    def ring(self) -> None:
        """Wake the waiter, or the next one."""
        if self._waiter is None:
            self._rung = True
        else:
            task, self._waiter = self._waiter, None
            trio.lowlevel.reschedule(task)

    async def wait(self) -> None:
        """Return once it was rung since the last wait. For one task at a time."""
        if self._rung:
            await trio.lowlevel.checkpoint()
            self._rung = False
            return
        assert self._waiter is None, "a bell has one waiter"
        self._waiter = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._give_up)

    def _give_up(self, _: object) -> trio.lowlevel.Abort:
        self._waiter = None
        return trio.lowlevel.Abort.SUCCEEDED
