"""The async shell around ``Admission``: callers wait here until their ticket is granted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import trio

from trioserve.errors import BusyReason, ServerBusyError
from trioserve.scheduling.admission import Admission, Ailment, Ticket
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
            ServerBusyError: not granted within the ticket's wait, or no slot can be granted any more.
        """
        event = self._waiting[ticket]
        try:
            if not ticket.granted and ticket.refusal is None:
                with trio.move_on_after(math.inf if ticket.wait is None else ticket.wait):
                    await event.wait()
            if ticket.refusal is not None:
                raise ServerBusyError(ticket.refusal, BusyReason.OUT_OF_ORDER)
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

    def mark(self, slot: int, ailment: Ailment | None) -> None:
        """Note what ails a slot, or that nothing does any more; those who would wait in vain hear of it."""
        self._admission.mark(slot, ailment)
        self._assign()

    def renew(self) -> None:
        """Note that all slots are gone, and the next ones in order."""
        self._admission.renew()
        self._assign()

    def ailments(self) -> Mapping[int, Ailment]:
        """Return the slots that can't serve, and why."""
        return self._admission.ailments()

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
