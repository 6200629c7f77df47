"""First come, first served: who gets which slot of one model, and when.

``Admission`` is a synchronous decider. The caller tells it what happened (an arrival, a release, a withdrawal) together
with the present time, and carries out the grants that ``assign`` returns. Rules:

- One queue, in order of arrival, for requests and management operations alike.
- A request takes one free slot; a management operation takes the whole model, once every lease is back.
- Whoever stands behind a waiting management operation waits too, even when slots are free: neither side starves.
- A grant is recorded in the very step that made it possible, so no newcomer can slip in before it is carried out.
- Where every slot is out of order nobody waits for one: newcomers and whoever queues are turned away.

No step takes longer for a longer queue, wherever in it a ticket stands; but for the one that turns all of it away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from trioserve.errors import BusyReason, ServerBusyError
from trioserve.scheduling.statistics import AdmissionStatistics


class Kind(Enum):
    """What a ticket asks for: one slot, or the whole model."""

    REQUEST = "request"
    MANAGER = "manager"


class Ailment(StrEnum):
    """Why a slot can't serve: its thread doesn't come back, or it has no session that could be trusted."""

    STALLED = "stalled"
    BROKEN = "broken"


@dataclass(eq=False, slots=True)
class Ticket:
    """One caller's place, from its arrival to its release.

    Attributes:
        kind: one slot or the whole model.
        wait: seconds that the caller may wait for admission; None is without bound, 0 is not at all.
        choose: asked at the grant which of the free slots, in rising order, suits best. When a ticket is granted does
            not depend on it.
        slot: index of the granted slot; None while queued, and for managers.
        since: time of the grant in seconds; None while queued.
        refusal: why it was turned away while it was queued; None where it was not.
    """

    kind: Kind = Kind.REQUEST
    wait: float | None = None
    choose: Callable[[Sequence[int]], int] = min
    slot: int | None = field(default=None, init=False)
    since: float | None = field(default=None, init=False)
    refusal: str | None = field(default=None, init=False)

    @property
    def granted(self) -> bool:
        """Whether the ticket holds what it asked for."""
        return self.since is not None


class Admission:
    """The queue and the leases of one model.

    Arguments:
        slots: how many requests may hold a slot at once.
        max_queued: how many requests may wait; one more is turned away.
    """

    def __init__(self, slots: int, max_queued: int) -> None:
        self._slots = slots
        self._max_queued = max_queued
        # Ordered, and left from the middle in one step: neither a list, nor a dict, whose head is searched for.
        self._queue: OrderedDict[Ticket, None] = OrderedDict()
        self._waiting_managers = 0  # how many of the queued tickets are managers', so that counting costs nothing
        self._leases: dict[int, Ticket] = {}
        self._ailments: dict[int, Ailment] = {}
        self._exclusive: Ticket | None = None

    def __repr__(self) -> str:
        return f"<Admission {self.statistics()}>"

    def resize(self, slots: int, max_queued: int) -> None:
        """Change the bounds. Only the holder of the whole model may do so.

        Raises:
            RuntimeError: nobody holds the whole model.
        """
        if self._exclusive is None:
            raise RuntimeError("the slot count may only change while the whole model is held")
        self._slots, self._max_queued = slots, max_queued

    def check(self, ticket: Ticket, now: float) -> None:
        """Do nothing where ``enter`` would take a newcomer in; raise what it would raise where it would not."""
        if not self._admissible_now(ticket):
            self._refuse_hopeless(ticket, now)

    def enter(self, ticket: Ticket, now: float) -> None:
        """Put a newcomer at the end of the queue, or turn it away.

        The caller runs ``assign`` next. A ticket that is turned away leaves no trace.

        Arguments:
            ticket: a fresh ticket.
            now: the present time in seconds, on the same clock as every other call.

        Raises:
            ServerBusyError: it may not wait as long as it would have to, or the queue is full.
        """
        self.check(ticket, now)
        self._queue[ticket] = None
        self._waiting_managers += ticket.kind is Kind.MANAGER

    def assign(self, now: float) -> list[Ticket]:
        """Grant what can be granted, in order of arrival, and turn away whoever would wait in vain.

        Returns:
            The tickets settled in this step. One that was granted has its ``since`` set, and its ``slot``; one that was
            turned away, its ``refusal``.
        """
        settled = []
        while self._queue and self._fits(ticket := next(iter(self._queue))):
            self._leave(ticket)
            self._grant(ticket, now)
            settled.append(ticket)
        if self._out_of_order:
            settled += self._turn_away()
        return settled

    def withdraw(self, ticket: Ticket) -> None:
        """Take a ticket back, wherever it stands: queued, granted, or gone already.

        The caller runs ``assign`` next, since whoever stood behind it may go on.
        """
        if ticket.granted:
            self.release(ticket)
        elif ticket in self._queue:
            self._leave(ticket)

    def release(self, ticket: Ticket) -> None:
        """Return what was granted. The caller runs ``assign`` next.

        Raises:
            RuntimeError: the ticket holds nothing, for example since it was released before.
        """
        if ticket.kind is Kind.MANAGER:
            if self._exclusive is not ticket:
                raise RuntimeError("released a management ticket that does not hold the model")
            self._exclusive = None
        else:
            if ticket.slot is None or self._leases.get(ticket.slot) is not ticket:
                raise RuntimeError("released a ticket that holds no slot")
            del self._leases[ticket.slot]
        ticket.slot = ticket.since = None

    def mark(self, slot: int, ailment: Ailment | None) -> None:
        """Note what ails a slot, or that nothing does any more. The caller runs ``assign`` next.

        A stalled slot stays leased until it is released; a broken one is granted to nobody.
        """
        self._ailments.pop(slot, None)
        if ailment is not None:
            self._ailments[slot] = ailment

    def renew(self) -> None:
        """Note that all slots are gone, and the next ones in order. The caller runs ``assign`` next."""
        self._ailments.clear()

    def statistics(self) -> AdmissionStatistics:
        """Return one consistent moment of queue and leases."""
        return AdmissionStatistics(
            slots=self._slots,
            active=len(self._leases),
            queued=self._queued_requests,
            waiting_managers=self._waiting_managers,
            exclusive=self._exclusive is not None,
        )

    def leases(self) -> dict[int, float]:
        """Return the leased slots, and the time since which each is."""
        return {slot: ticket.since for slot, ticket in sorted(self._leases.items()) if ticket.since is not None}

    def ailments(self) -> dict[int, Ailment]:
        """Return the slots that can't serve."""
        return dict(sorted(self._ailments.items()))

    @property
    def idle(self) -> bool:
        """Whether nobody holds anything and nobody waits."""
        return not self._leases and not self._queue and self._exclusive is None

    @property
    def _queued_requests(self) -> int:
        return len(self._queue) - self._waiting_managers

    def _leave(self, ticket: Ticket) -> None:
        del self._queue[ticket]
        self._waiting_managers -= ticket.kind is Kind.MANAGER

    def _grant(self, ticket: Ticket, now: float) -> None:
        ticket.since = now
        if ticket.kind is Kind.MANAGER:
            self._exclusive = ticket
        else:
            ticket.slot = ticket.choose(self._free_slots())
            self._leases[ticket.slot] = ticket

    def _free_slots(self) -> list[int]:
        broken = {slot for slot, ailment in self._ailments.items() if ailment is Ailment.BROKEN}
        return [slot for slot in range(self._slots) if slot not in self._leases and slot not in broken]

    def _fits(self, ticket: Ticket) -> bool:
        """Whether the head of the queue can be granted this instant."""
        if self._exclusive is not None:
            return False
        if ticket.kind is Kind.MANAGER:
            return not self._leases
        return bool(self._free_slots())

    @property
    def _out_of_order(self) -> bool:
        """Whether no slot can be expected to come free: all of them ail, and no manager is about to replace them.

        While one of them is stalled, a manager can't do that either.
        """
        if len(self._ailments) < self._slots:
            return False
        managed = self._exclusive is not None or self._waiting_managers > 0
        return self._stalled > 0 or not managed

    @property
    def _stalled(self) -> int:
        return sum(ailment is Ailment.STALLED for ailment in self._ailments.values())

    def _turn_away(self) -> list[Ticket]:
        """Take all requests out of the queue."""
        refused = [ticket for ticket in self._queue if ticket.kind is Kind.REQUEST]
        for ticket in refused:
            self._leave(ticket)
            ticket.refusal = self._complaint()
        return refused

    def _complaint(self) -> str:
        broken = len(self._ailments) - self._stalled
        return f"no slot of the model can serve: {self._stalled} are stalled and {broken} are broken"

    def _admissible_now(self, newcomer: Ticket) -> bool:
        return not self._queue and self._fits(newcomer)

    def _refuse_hopeless(self, newcomer: Ticket, now: float) -> None:
        """Raise where the newcomer's wait is known to be in vain."""
        if newcomer.kind is Kind.REQUEST and self._out_of_order:
            raise ServerBusyError(self._complaint(), BusyReason.OUT_OF_ORDER)
        if newcomer.kind is Kind.MANAGER and newcomer.wait is not None and self._stalled:
            # Without a bound a manager waits even so: the end of the process is one.
            raise ServerBusyError(
                f"{self._stalled} slots of the model are stalled and can't be waited for", BusyReason.OUT_OF_ORDER
            )
        if newcomer.wait == 0:
            raise ServerBusyError(
                "no slot is free and the request may not wait (busy_timeout_ms is 0)", BusyReason.NO_WAIT
            )
        if newcomer.kind is Kind.REQUEST and self._queued_requests >= self._max_queued:
            raise ServerBusyError(
                f"the queue is full: {self._max_queued} requests wait already (max_queued_requests)",
                BusyReason.QUEUE_FULL,
            )
        if newcomer.wait is not None and self._overdue(newcomer.kind, newcomer.wait, now):
            raise ServerBusyError(
                f"whatever stands in the way has been running for {newcomer.wait * 1000:.0f} ms or more, "
                "as long as the request may wait (busy_timeout_ms)",
                BusyReason.OVERDUE,
            )

    def _overdue(self, kind: Kind, wait: float, now: float) -> bool:
        """Whether what blocks a newcomer has been held for as long as it may wait already.

        For a request that is every occupied slot: one healthy slot gives hope. A manager needs them all, so for it any
        lease or a running management operation is enough.
        """
        if kind is Kind.MANAGER:
            holders = [*self._leases.values(), *([self._exclusive] if self._exclusive else [])]
            return any(self._age(holder, now) >= wait for holder in holders)
        return bool(self._leases) and all(self._age(holder, now) >= wait for holder in self._leases.values())

    @staticmethod
    def _age(holder: Ticket, now: float) -> float:
        assert holder.since is not None, "only granted tickets are held"
        return now - holder.since


def effective_wait(*bounds_ms: int | None) -> float | None:
    """Combine the layers of ``busy_timeout_ms`` (server, model, request): the smallest one counts.

    Arguments:
        bounds_ms: milliseconds; None is no bound from that layer.

    Returns:
        Seconds, or None where no layer sets a bound.
    """
    given = [bound for bound in bounds_ms if bound is not None]
    return min(given) / 1000 if given else None
