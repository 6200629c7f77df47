"""The async shell around ``Admission``: callers wait here until their ticket is granted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import trio

from trioserve.errors import ServerBusyError
from trioserve.scheduling.admission import Admission, Ticket
from trioserve.scheduling.statistics import AdmissionStatistics


class Gate:
    """Where callers of one model wait for their turn.

    Arguments:
        admission: the decider; this gate is its only user.
        on_idle: called whenever nobody is left who holds or waits for anything, however the last one went.
    """

    def __init__(self, admission: Admission, on_idle: Callable[[], None] = lambda: None) -> None:
        self._admission = admission
        self._on_idle = on_idle
        self._waiting: dict[Ticket, trio.Event] = {}

    def check(self, ticket: Ticket) -> None:
        """See that a ticket would not be turned away if it entered now.

        Raises:
            ServerBusyError: it would.
        """
        self._admission.check(ticket, trio.current_time())

    def enter(self, ticket: Ticket) -> None:
        """Take a place in the queue, at once. ``granted`` or ``withdraw`` follows.

        Raises:
            ServerBusyError: turned away on arrival.
        """
        self._admission.enter(ticket, trio.current_time())
        self._waiting[ticket] = trio.Event()
        self._assign()

    async def granted(self, ticket: Ticket) -> None:
        """Wait until a ticket that has entered is granted. Not a checkpoint when it is granted already.

        Cancellation, at any moment, takes the ticket back and lets the next ones move up.

        Raises:
            ServerBusyError: not granted within the ticket's wait.
        """
        event = self._waiting[ticket]
        try:
            if not ticket.granted:
                with trio.move_on_after(math.inf if ticket.wait is None else ticket.wait):
                    await event.wait()
            if not ticket.granted:
                assert ticket.wait is not None, "only a bounded wait ends without a grant"
                raise ServerBusyError(f"no slot came free within {ticket.wait * 1000:.0f} ms (busy_timeout_ms)")
        except BaseException:
            self.withdraw(ticket)
            raise
        finally:
            self._waiting.pop(ticket, None)

    async def pass_through(self, ticket: Ticket) -> None:
        """Enter and wait for the grant; see ``enter`` and ``granted`` for the errors."""
        self.enter(ticket)
        await self.granted(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """Take a ticket back, wherever it stands; those behind it move up."""
        self._waiting.pop(ticket, None)
        self._admission.withdraw(ticket)
        self._assign()

    def release(self, ticket: Ticket) -> None:
        """Return what was granted; the next in the queue get it in this same step.

        Raises:
            RuntimeError: the ticket holds nothing.
        """
        self._admission.release(ticket)
        self._assign()

    def resize(self, slots: int, max_queued: int) -> None:
        """Change the bounds while the whole model is held."""
        self._admission.resize(slots, max_queued)

    def statistics(self) -> AdmissionStatistics:
        """Return one consistent moment of queue and leases."""
        return self._admission.statistics()

    def leases(self) -> Mapping[int, float]:
        """Return the leased slots, and since when each is."""
        return self._admission.leases()

    @property
    def idle(self) -> bool:
        """Whether nobody holds anything and nobody waits."""
        return self._admission.idle

    def _assign(self) -> None:
        for ticket in self._admission.assign(trio.current_time()):
            event = self._waiting.get(ticket)
            if event is not None:
                event.set()
        if self._admission.idle:
            self._on_idle()
