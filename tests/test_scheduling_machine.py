"""Admission against an independent reading of its rules, over random histories."""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trioserve.errors import ServerBusyError
from trioserve.scheduling.admission import Admission, Ailment, Kind, Ticket

WAITS = st.sampled_from([None, None, 0, 1, 2, 5])
KINDS = st.sampled_from([Kind.REQUEST, Kind.REQUEST, Kind.REQUEST, Kind.MANAGER])


class Reference:
    """The rules in plain lists: ``line`` is who waits, ``inside`` who was let in and since when."""

    def __init__(self, slots, max_queued):
        self.slots, self.max_queued = slots, max_queued
        self.line = []
        self.inside = {}
        self.stalled, self.broken = set(), set()

    def managers(self, tickets):
        return [ticket for ticket in tickets if ticket.kind is Kind.MANAGER]

    def requests(self, tickets):
        return [ticket for ticket in tickets if ticket.kind is Kind.REQUEST]

    def has_room(self, kind):
        if kind is Kind.MANAGER:
            return not self.inside
        taken = {ticket.slot for ticket in self.inside}
        return not self.managers(self.inside) and len(taken | self.broken) < self.slots

    def in_vain(self):
        if len(self.stalled | self.broken) < self.slots:
            return False
        return bool(self.stalled) or not self.managers([*self.inside, *self.line])

    def rejects(self, ticket, now):
        if not self.line and self.has_room(ticket.kind):
            return False
        if ticket.kind is Kind.REQUEST and self.in_vain():
            return True
        if ticket.kind is Kind.MANAGER and ticket.wait is not None and self.stalled:
            return True
        if ticket.wait == 0:
            return True
        if ticket.kind is Kind.REQUEST and len(self.requests(self.line)) >= self.max_queued:
            return True
        return ticket.wait is not None and self.hopeless(ticket, now)

    def hopeless(self, ticket, now):
        if ticket.kind is Kind.MANAGER:
            return any(now - since >= ticket.wait for since in self.inside.values())
        leases = [self.inside[lease] for lease in self.requests(self.inside)]
        return leases != [] and min(now - since for since in leases) >= ticket.wait

    def let_in(self, now):
        entered = []
        while self.line and self.has_room(self.line[0].kind):
            ticket = self.line.pop(0)
            self.inside[ticket] = now
            entered.append(ticket)
        return entered

    def turned_away(self):
        if not self.in_vain():
            return []
        refused = self.requests(self.line)
        self.line = self.managers(self.line)
        return refused


class AdmissionMachine(RuleBasedStateMachine):
    """Arrivals, releases, withdrawals and time, in any order; the gate's habit of assigning after each is kept."""

    @initialize(slots=st.integers(1, 4), max_queued=st.sampled_from([0, 1, 3, 100]))
    def open(self, slots, max_queued):
        self.now = 0.0
        self.admission = Admission(slots, max_queued)
        self.reference = Reference(slots, max_queued)
        self.accepted = []  # in order of arrival, less those that gave up while they waited
        self.granted = []
        self.gone = []

    @rule(kind=KINDS, wait=WAITS)
    def arrive(self, kind, wait):
        ticket = Ticket(kind, wait)
        before = self.admission.statistics()
        rejects = self.reference.rejects(ticket, self.now)
        try:
            self.admission.enter(ticket, self.now)
        except ServerBusyError:
            assert rejects
            assert self.admission.statistics() == before
            assert not ticket.granted
        else:
            assert not rejects
            self.accepted.append(ticket)
            self.reference.line.append(ticket)
        self.assign()
        assert wait != 0 or rejects or ticket.granted

    @precondition(lambda self: self.reference.inside)
    @rule(data=st.data())
    def release(self, data):
        ticket = data.draw(st.sampled_from(list(self.reference.inside)))
        self.recover(ticket)
        self.admission.release(ticket)
        self.leave(ticket)

    @precondition(lambda self: self.reference.requests(self.reference.inside))
    @rule(data=st.data())
    def stall(self, data):
        slot = data.draw(st.sampled_from(self.reference.requests(list(self.reference.inside)))).slot
        self.admission.mark(slot, Ailment.STALLED)
        self.reference.stalled.add(slot)
        self.assign()

    @precondition(lambda self: self.reference.requests(self.reference.inside))
    @rule(data=st.data())
    def break_down(self, data):
        ticket = data.draw(st.sampled_from(self.reference.requests(list(self.reference.inside))))
        self.recover(ticket)
        self.admission.mark(ticket.slot, Ailment.BROKEN)
        self.reference.broken.add(ticket.slot)
        self.admission.release(ticket)
        self.leave(ticket)

    @precondition(lambda self: self.reference.managers(self.reference.inside))
    @rule()
    def replace_all(self):
        self.admission.renew()
        self.reference.broken.clear()
        self.assign()

    @precondition(lambda self: self.reference.inside)
    @rule(data=st.data())
    def withdraw_granted(self, data):
        ticket = data.draw(st.sampled_from(list(self.reference.inside)))
        self.recover(ticket)
        self.admission.withdraw(ticket)
        self.leave(ticket)

    @precondition(lambda self: self.reference.line)
    @rule(data=st.data())
    def withdraw_queued(self, data):
        ticket = data.draw(st.sampled_from(self.reference.line))
        self.admission.withdraw(ticket)
        self.reference.line.remove(ticket)
        self.accepted.remove(ticket)
        self.gone.append(ticket)
        self.assign()

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def withdraw_gone(self, data):
        self.admission.withdraw(data.draw(st.sampled_from(self.gone)))
        self.assign()

    @precondition(lambda self: self.gone or self.reference.line)
    @rule(data=st.data())
    def release_what_holds_nothing(self, data):
        ticket = data.draw(st.sampled_from(self.gone + self.reference.line))
        try:
            self.admission.release(ticket)
        except RuntimeError:
            self.assign()
        else:
            raise AssertionError("a release of nothing went through")

    @precondition(lambda self: self.reference.managers(self.reference.inside))
    @rule(slots=st.integers(1, 4), max_queued=st.sampled_from([0, 1, 3, 100]))
    def resize(self, slots, max_queued):
        self.admission.renew()
        self.reference.broken.clear()
        self.admission.resize(slots, max_queued)
        self.reference.slots, self.reference.max_queued = slots, max_queued
        self.assign()

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 5.0]))
    def wait(self, seconds):
        self.now += seconds
        self.assign()

    def recover(self, ticket):
        """A slot comes back before its lease does."""
        if ticket.slot in self.reference.stalled:
            self.admission.mark(ticket.slot, None)
            self.reference.stalled.remove(ticket.slot)
            self.assign()

    def leave(self, ticket):
        del self.reference.inside[ticket]
        self.gone.append(ticket)
        assert not ticket.granted
        self.assign()

    def assign(self):
        settled = self.admission.assign(self.now)
        grants, refused = self.reference.let_in(self.now), self.reference.turned_away()
        assert settled == grants + refused
        assert all(ticket.refusal for ticket in refused)
        self.accepted = [ticket for ticket in self.accepted if ticket not in refused]
        self.gone += refused
        assert all(ticket.since == self.now for ticket in grants)
        self.granted += grants
        assert self.admission.assign(self.now) == [], "a second look finds nothing more to grant"

    @invariant()
    def leases_fit_into_the_slots(self):
        leases = self.reference.requests(self.reference.inside)
        slots = [ticket.slot for ticket in leases]
        assert len(slots) <= self.reference.slots
        assert len(set(slots)) == len(slots)
        assert not self.reference.broken & set(slots)
        assert all(0 <= slot < self.reference.slots for slot in slots)

    @invariant()
    def a_manager_is_alone(self):
        managers = self.reference.managers(self.reference.inside)
        assert not managers or list(self.reference.inside) == managers[:1]
        assert self.admission.statistics().exclusive == bool(managers)

    @invariant()
    def grants_follow_arrivals(self):
        assert self.granted == self.accepted[: len(self.granted)]

    @invariant()
    def tickets_know_where_they_stand(self):
        assert all(ticket.granted for ticket in self.reference.inside)
        assert not any(ticket.granted for ticket in self.reference.line + self.gone)

    @invariant()
    def the_counters_add_up(self):
        statistics, reference = self.admission.statistics(), self.reference
        assert statistics.slots == reference.slots
        assert statistics.active == len(reference.requests(reference.inside))
        assert statistics.queued == len(reference.requests(reference.line))
        assert statistics.waiting_managers == len(reference.managers(reference.line))
        assert set(self.admission.ailments()) == reference.stalled | reference.broken
        assert self.admission.idle == (not reference.inside and not reference.line)
        held = len(reference.inside) + len(reference.line)
        assert held == statistics.active + statistics.queued + statistics.waiting_managers + statistics.exclusive


AdmissionMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAdmission = AdmissionMachine.TestCase
