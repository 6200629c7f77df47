"""Who gets which slot: the decider as plain functions, on a clock that the tests set."""

import itertools
import sys

import pytest

from trioserve.errors import ServerBusyError
from trioserve.scheduling.admission import Admission, Ailment, Kind, Ticket, effective_wait
from trioserve.scheduling.statistics import AdmissionStatistics


def request(wait=None):
    return Ticket(Kind.REQUEST, wait)


def manager(wait=None):
    return Ticket(Kind.MANAGER, wait)


def enter(admission, ticket, now=0.0):
    """What the gate does with an arrival. Returns the ticket."""
    admission.enter(ticket, now)
    admission.assign(now)
    return ticket


def enter_all(admission, *tickets, now=0.0):
    for ticket in tickets:
        enter(admission, ticket, now)


def release(admission, ticket, now=0.0):
    """Returns the tickets that this release let in."""
    admission.release(ticket)
    return admission.assign(now)


def withdraw(admission, ticket, now=0.0):
    admission.withdraw(ticket)
    return admission.assign(now)


def assert_turned_away(admission, ticket, now=0.0):
    """Rejected at once, and without a trace."""
    before = admission.statistics()
    with pytest.raises(ServerBusyError):
        admission.enter(ticket, now)
    assert admission.statistics() == before
    assert admission.assign(now) == []
    assert not ticket.granted


@pytest.fixture
def one():
    return Admission(slots=1, max_queued=8)


@pytest.fixture
def two():
    return Admission(slots=2, max_queued=8)


# -- order


def test_spare_slots_take_the_next_requests_at_once(two):
    first, second, third = request(), request(), request()
    enter_all(two, first, second, third)
    assert [first.slot, second.slot, third.slot] == [0, 1, None]
    assert [first.granted, second.granted, third.granted] == [True, True, False]


def test_requests_are_served_in_the_order_of_their_arrival(one):
    tickets = [enter(one, request()) for _ in range(6)]
    for holder, successor in itertools.pairwise(tickets):
        assert release(one, holder) == [successor]


def test_a_slot_that_comes_free_in_the_middle_goes_to_the_head_of_the_queue():
    admission = Admission(slots=3, max_queued=8)
    first, second, third, fourth = (enter(admission, request()) for _ in range(4))
    assert release(admission, second) == [fourth]
    assert fourth.slot == 1
    assert [first.slot, third.slot] == [0, 2]


def test_several_slots_that_came_free_are_granted_in_one_step(two):
    holders = [enter(two, request()) for _ in range(2)]
    waiting = [enter(two, request()) for _ in range(3)]
    for holder in holders:
        two.release(holder)
    assert two.assign(7.0) == waiting[:2]
    assert [ticket.since for ticket in waiting] == [7.0, 7.0, None]


def test_a_newcomer_cannot_slip_in_before_a_grant_is_carried_out(one):
    holder, waiting = enter(one, request()), enter(one, request())
    assert release(one, holder) == [waiting]
    assert not enter(one, request()).granted


def test_a_newcomer_does_not_overtake_the_queue_between_release_and_assign(one):
    holder, waiting = enter(one, request()), enter(one, request())
    one.release(holder)
    newcomer = request(wait=0)
    with pytest.raises(ServerBusyError):
        one.enter(newcomer, 0.0)
    assert one.assign(0.0) == [waiting]


# -- managers


def test_a_manager_takes_an_idle_model_whole(two):
    unload = enter(two, manager())
    assert unload.granted
    assert unload.slot is None
    assert not enter(two, request()).granted


def test_requests_behind_a_waiting_manager_wait_though_slots_are_free(two):
    holder, unload, later = enter(two, request()), enter(two, manager()), enter(two, request())
    assert not unload.granted
    assert not later.granted
    assert two.statistics().active == 1
    assert release(two, holder) == [unload]
    assert release(two, unload) == [later]


def test_requests_that_queued_before_a_manager_run_before_it(one):
    holder, earlier, unload, later = (
        enter(one, request()),
        enter(one, request()),
        enter(one, manager()),
        enter(one, request()),
    )
    assert release(one, holder) == [earlier]
    assert release(one, earlier) == [unload]
    assert release(one, unload) == [later]


def test_a_manager_waits_for_every_lease(two):
    first, second, unload = enter(two, request()), enter(two, request()), enter(two, manager())
    assert release(two, first) == []
    assert release(two, second) == [unload]


def test_managers_run_one_at_a_time_in_their_own_order(two):
    first, second, third = (enter(two, manager()) for _ in range(3))
    assert [first.granted, second.granted, third.granted] == [True, False, False]
    assert release(two, first) == [second]
    assert release(two, second) == [third]


def test_neither_side_starves_where_both_keep_coming(two):
    kinds = [request, manager] * 5
    tickets = [enter(two, make()) for make in kinds]
    served = []
    while held := [ticket for ticket in tickets if ticket.granted]:
        served += held
        for ticket in held:
            two.release(ticket)
        two.assign(0.0)
    assert served == tickets


def test_a_manager_ends_a_step_of_grants(two):
    unload = enter(two, manager())
    first, second, other, last = (
        enter(two, request()),
        enter(two, request()),
        enter(two, manager()),
        enter(two, request()),
    )
    assert release(two, unload) == [first, second]
    assert [other.granted, last.granted] == [False, False]


# -- no wait at all


@pytest.mark.parametrize("make", [request, manager])
def test_who_may_not_wait_gets_in_where_there_is_room(one, make):
    assert enter(one, make(wait=0)).granted


@pytest.mark.parametrize("make", [request, manager])
@pytest.mark.parametrize("holder", [request, manager])
def test_who_may_not_wait_is_turned_away_where_there_is_none(one, make, holder):
    enter(one, holder())
    assert_turned_away(one, make(wait=0))


def test_who_may_not_wait_does_not_pass_a_waiting_manager_to_a_free_slot(two):
    enter_all(two, request(), manager())
    assert_turned_away(two, request(wait=0))


def test_a_manager_that_may_not_wait_is_turned_away_by_one_lease_of_many(two):
    enter(two, request())
    assert_turned_away(two, manager(wait=0))


# -- overdue


def test_a_request_is_turned_away_when_every_lease_is_overdue(two):
    enter_all(two, request(), request())
    assert_turned_away(two, request(wait=5), now=5.0)


def test_a_lease_is_overdue_at_the_very_moment_and_not_before(one):
    enter(one, request(), now=1.0)
    enter(one, request(wait=5), now=5.999)
    assert_turned_away(one, request(wait=5), now=6.0)


def test_one_healthy_lease_is_enough_to_wait(two):
    enter(two, request(), now=0.0)
    enter(two, request(), now=3.0)
    waiting = enter(two, request(wait=5), now=6.0)
    assert two.statistics().queued == 1
    assert not waiting.granted


def test_overdue_is_judged_by_the_newcomers_own_wait(one):
    enter(one, request())
    assert_turned_away(one, request(wait=5), now=10.0)
    enter(one, request(wait=11), now=10.0)
    enter(one, request(wait=None), now=10.0)
    assert one.statistics().queued == 2


def test_the_age_of_a_lease_counts_from_its_grant_and_not_from_its_arrival(one):
    holder, waiting = enter(one, request(), now=0.0), enter(one, request(), now=0.0)
    release(one, holder, now=9.0)
    assert waiting.since == 9.0
    enter(one, request(wait=5), now=10.0)
    assert one.statistics().queued == 1


def test_overdue_leases_turn_a_request_away_behind_a_waiting_manager_with_spare_slots(two):
    enter_all(two, request(), manager())
    assert two.statistics().active == 1
    assert_turned_away(two, request(wait=5), now=5.0)


def test_a_healthy_lease_lets_a_request_wait_behind_a_waiting_manager(two):
    enter_all(two, request(), manager())
    enter(two, request(wait=5), now=4.0)
    assert two.statistics().queued == 1


def test_a_spare_slot_is_taken_whatever_the_age_of_the_others(two):
    enter(two, request(), now=0.0)
    assert enter(two, request(wait=5), now=100.0).granted


def test_a_long_exclusive_operation_alone_does_not_turn_requests_away(one):
    enter(one, manager(), now=0.0)
    enter(one, request(wait=5), now=100.0)
    assert one.statistics().queued == 1


def test_a_manager_is_turned_away_by_one_overdue_lease(two):
    enter(two, request(), now=0.0)
    enter(two, request(), now=9.0)
    assert_turned_away(two, manager(wait=5), now=10.0)


def test_a_manager_waits_for_healthy_leases(two):
    enter_all(two, request(), request(), now=6.0)
    enter(two, manager(wait=5), now=10.0)
    assert two.statistics().waiting_managers == 1


def test_a_manager_is_turned_away_by_an_overdue_exclusive_operation(one):
    enter(one, manager(), now=0.0)
    enter(one, manager(wait=5), now=4.0)
    assert_turned_away(one, manager(wait=5), now=5.0)


def test_an_unbounded_manager_waits_for_the_most_overdue_lease(one):
    holder = enter(one, request(), now=0.0)
    unload = enter(one, manager(), now=1e9)
    assert release(one, holder, now=1e9) == [unload]


# -- the length of the queue


def test_a_full_queue_turns_requests_away():
    admission = Admission(slots=1, max_queued=2)
    enter_all(admission, request(), request(), request())
    assert_turned_away(admission, request())


def test_without_a_queue_requests_get_a_slot_or_nothing():
    admission = Admission(slots=2, max_queued=0)
    first, _ = enter(admission, request()), enter(admission, request())
    assert_turned_away(admission, request())
    assert release(admission, first) == []
    assert enter(admission, request()).granted


def test_managers_neither_fill_the_queue_nor_are_bounded_by_it():
    admission = Admission(slots=1, max_queued=1)
    enter_all(admission, request(), manager(), manager(), manager())
    enter(admission, request())
    assert_turned_away(admission, request())
    enter(admission, manager())
    assert admission.statistics() == AdmissionStatistics(
        slots=1, active=1, queued=1, waiting_managers=4, exclusive=False
    )


def test_a_withdrawal_makes_room_in_the_queue():
    admission = Admission(slots=1, max_queued=1)
    enter(admission, request())
    waiting = enter(admission, request())
    withdraw(admission, waiting)
    enter(admission, request())
    assert admission.statistics().queued == 1


# -- withdrawal and release


def test_withdrawing_a_queued_request_leaves_the_others_in_order(one):
    holder, first, second, third = (enter(one, request()) for _ in range(4))
    assert withdraw(one, second) == []
    assert release(one, holder) == [first]
    assert release(one, first) == [third]


def test_withdrawing_a_granted_request_hands_its_slot_on(one):
    holder, waiting = enter(one, request()), enter(one, request())
    assert withdraw(one, holder) == [waiting]
    assert not holder.granted
    assert holder.slot is None
    assert waiting.slot == 0


def test_a_manager_that_gives_up_wakes_those_behind_it(two):
    enter(two, request())
    unload, first, second = enter(two, manager(wait=5)), enter(two, request()), enter(two, request())
    assert withdraw(two, unload) == [first]
    assert not second.granted
    assert two.statistics().waiting_managers == 0


def test_a_manager_that_gives_up_behind_another_one_wakes_nobody(two):
    enter(two, request())
    first, second, later = enter(two, manager()), enter(two, manager()), enter(two, request())
    assert withdraw(two, second) == []
    assert withdraw(two, first) == [later]


def test_withdrawing_a_manager_that_holds_the_model_lets_the_next_ones_in(two):
    unload = enter(two, manager())
    waiting = [enter(two, request()), enter(two, request())]
    assert withdraw(two, unload) == waiting


@pytest.mark.parametrize("make", [request, manager])
def test_withdrawing_twice_has_no_effect(one, make):
    holder = enter(one, make())
    withdraw(one, holder)
    successor = enter(one, request())
    assert withdraw(one, holder) == []
    assert successor.granted
    assert one.statistics().active == 1


def test_withdrawing_a_stranger_has_no_effect(one):
    enter_all(one, request(), request())
    before = one.statistics()
    one.withdraw(request())
    one.withdraw(manager())
    assert one.statistics() == before


@pytest.mark.parametrize("make", [request, manager])
def test_releasing_twice_is_an_error_and_changes_nothing(one, make):
    holder = enter(one, make())
    one.release(holder)
    with pytest.raises(RuntimeError, match="released"):
        one.release(holder)
    assert one.idle


def test_releasing_twice_does_not_free_the_successors_slot(one):
    holder, waiting = enter(one, request()), enter(one, request())
    release(one, holder)
    with pytest.raises(RuntimeError, match="holds no slot"):
        one.release(holder)
    assert waiting.slot == 0
    assert one.statistics().active == 1


@pytest.mark.parametrize("make", [request, manager])
def test_releasing_what_still_waits_is_an_error(one, make):
    enter(one, request())
    waiting = enter(one, make())
    with pytest.raises(RuntimeError, match="released"):
        one.release(waiting)
    assert one.statistics().queued + one.statistics().waiting_managers == 1


# -- resizing


def test_the_slot_count_changes_only_while_the_whole_model_is_held(one):
    with pytest.raises(RuntimeError, match="whole model"):
        one.resize(4, 8)
    enter(one, request())
    enter(one, manager())  # waits: that is not enough
    with pytest.raises(RuntimeError, match="whole model"):
        one.resize(4, 8)
    assert one.statistics().slots == 1


def test_after_a_resize_the_queue_sees_the_new_bounds(one):
    unload = enter(one, manager())
    waiting = [enter(one, request()) for _ in range(4)]
    one.resize(3, 1)
    assert_turned_away(one, request())
    assert release(one, unload) == waiting[:3]
    assert [ticket.slot for ticket in waiting] == [0, 1, 2, None]


# -- statistics


def test_statistics_tell_slots_leases_queue_and_managers_apart(two):
    enter_all(two, request(), request(), request(), manager(), request())
    assert two.statistics() == AdmissionStatistics(slots=2, active=2, queued=2, waiting_managers=1, exclusive=False)
    assert not two.idle


def test_statistics_show_an_exclusive_operation(two):
    enter_all(two, manager(), request())
    assert two.statistics() == AdmissionStatistics(slots=2, active=0, queued=1, waiting_managers=0, exclusive=True)
    assert not two.idle


def test_everything_returned_is_idle(two):
    tickets = [enter(two, make()) for make in (request, manager, request)]
    for ticket in tickets:
        withdraw(two, ticket)
    assert two.idle
    assert two.statistics() == AdmissionStatistics(slots=2, active=0, queued=0, waiting_managers=0, exclusive=False)


def test_the_repr_tells_the_state(one):
    enter(one, request())
    assert "active=1" in repr(one)


# -- effort


class Compared(Ticket):
    """A ticket that runs code when it is compared: whoever searches a queue does that."""

    __hash__ = Ticket.__hash__

    def __eq__(self, other):
        return self is other


def effort(operation):
    """Lines of Python that an operation runs."""
    lines = 0

    def trace(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        operation()
    finally:
        sys.settrace(before)
    return lines


def turned_away(admission):
    with pytest.raises(ServerBusyError):
        admission.enter(Compared(wait=0), 0.0)


EFFORTS = {
    "enter": lambda admission, holder, line: enter(admission, Compared()),
    "turn away": lambda admission, holder, line: turned_away(admission),
    "withdraw the first": lambda admission, holder, line: withdraw(admission, line[0]),
    "withdraw from the middle": lambda admission, holder, line: withdraw(admission, line[len(line) // 2]),
    "withdraw the last": lambda admission, holder, line: withdraw(admission, line[-1]),
    "withdraw a stranger": lambda admission, holder, line: withdraw(admission, Compared()),
    "release and grant": lambda admission, holder, line: release(admission, holder),
    "count": lambda admission, holder, line: admission.statistics(),
}


@pytest.mark.parametrize("operation", EFFORTS)
def test_a_longer_queue_makes_no_step_longer(operation):
    def at(waiters):
        admission = Admission(slots=1, max_queued=waiters + 1)
        holder, *line = (enter(admission, Compared()) for _ in range(waiters + 1))
        return effort(lambda: EFFORTS[operation](admission, holder, line))

    assert at(10) == at(1_000) == at(10_000) > 0


# -- the layers of the busy timeout


@pytest.mark.parametrize(
    ("server", "model", "request_ms", "seconds"),
    [
        (None, None, None, None),
        (300_000, None, None, 300.0),
        (None, 2_000, None, 2.0),
        (None, None, 1_500, 1.5),
        (300_000, 2_000, None, 2.0),
        (300_000, 2_000, 500, 0.5),  # a request may shorten its wait
        (300_000, 2_000, 9_000, 2.0),  # and never lengthen it
        (1_000, 2_000, None, 1.0),
        (300_000, 0, 9_000, 0.0),
        (0, None, 9_000, 0.0),
        (300_000, 2_000, 0, 0.0),
        (None, 0, None, 0.0),
    ],
)
def test_the_smallest_bound_given_is_the_effective_one(server, model, request_ms, seconds):
    assert effective_wait(server, model, request_ms) == seconds


def test_no_layer_at_all_is_no_bound():
    assert effective_wait() is None


def test_a_ticket_chooses_among_the_free_slots_and_not_when_it_is_granted():
    admission = Admission(4, 10)
    asked = []

    def last(free):
        asked.append(list(free))
        return free[-1]

    tickets = [Ticket(choose=last), Ticket(), Ticket(choose=last), Ticket(choose=last), Ticket(choose=last)]
    for ticket in tickets:
        admission.enter(ticket, 0.0)
        admission.assign(0.0)
    assert [ticket.slot for ticket in tickets] == [3, 0, 2, 1, None]
    assert asked == [[0, 1, 2, 3], [1, 2], [1]]
    admission.release(tickets[0])
    assert admission.assign(1.0) == [tickets[4]]
    assert tickets[4].slot == 3


# -- slots that can't serve


def mark(admission, ailment, *slots, now=0.0):
    """Returns the tickets that this settled."""
    for slot in slots:
        admission.mark(slot, ailment)
    return admission.assign(now)


def test_one_stalled_slot_leaves_hope(two):
    enter_all(two, request(), request())
    assert mark(two, Ailment.STALLED, 0) == []
    waiting = enter(two, request())
    assert (waiting.granted, waiting.refusal, two.statistics().queued) == (False, None, 1)


@pytest.mark.parametrize("wait", [None, 0, 5])
def test_newcomers_are_turned_away_where_every_slot_has_stalled(two, wait):
    enter_all(two, request(), request())
    mark(two, Ailment.STALLED, 0, 1)
    with pytest.raises(ServerBusyError, match="2 are stalled"):
        two.enter(request(wait), 0.0)
    assert_turned_away(two, request(wait))


def test_requests_that_wait_hear_of_it_when_the_last_slot_stalls(two):
    enter_all(two, request(), request())
    waiting = [enter(two, request()) for _ in range(2)]
    assert mark(two, Ailment.STALLED, 0) == []
    assert mark(two, Ailment.STALLED, 1) == waiting
    assert all("stalled" in ticket.refusal and not ticket.granted for ticket in waiting)
    assert two.statistics() == AdmissionStatistics(slots=2, active=2, queued=0, waiting_managers=0, exclusive=False)
    assert two.assign(0.0) == []


def test_a_slot_that_recovers_serves_again(one):
    stuck = enter(one, request())
    mark(one, Ailment.STALLED, 0)
    assert_turned_away(one, request())
    assert mark(one, None, 0) == []
    waiting = enter(one, request())
    assert release(one, stuck) == [waiting]


def test_a_bounded_manager_does_not_wait_for_a_stalled_slot_and_an_unbounded_one_does(two):
    stuck = enter(two, request())
    mark(two, Ailment.STALLED, 0)
    assert_turned_away(two, manager(5))
    patient = enter(two, manager())
    mark(two, None, 0)
    assert release(two, stuck) == [patient]


def test_whoever_queues_behind_a_manager_that_waits_for_stalled_slots_hears_of_it_too(one):
    enter(one, request())
    enter(one, manager())
    behind = enter(one, request())
    assert mark(one, Ailment.STALLED, 0) == [behind]
    assert one.statistics().waiting_managers == 1
    assert_turned_away(one, request())


def test_a_broken_slot_is_granted_to_nobody(two):
    mark(two, Ailment.BROKEN, 0)
    first = enter(two, request())
    waiting = enter(two, request())
    assert (first.slot, waiting.granted) == (1, False)
    assert release(two, first) == [waiting]
    assert (waiting.slot, two.ailments()) == (1, {0: Ailment.BROKEN})


def test_where_all_are_broken_or_stalled_nobody_waits(two):
    stuck = enter(two, request())
    mark(two, Ailment.BROKEN, 1)
    waiting = enter(two, request())
    assert mark(two, Ailment.STALLED, stuck.slot) == [waiting]
    assert waiting.refusal.endswith("1 are stalled and 1 are broken")


def test_broken_slots_hold_up_no_manager_and_are_as_new_when_they_were_replaced(one):
    mark(one, Ailment.BROKEN, 0)
    assert_turned_away(one, request())
    unload = enter(one, manager(0))
    assert unload.granted
    behind = enter(one, request())
    assert not behind.granted
    one.renew()
    assert release(one, unload) == [behind]


def test_a_manager_that_replaced_nothing_leaves_no_hope_behind(one):
    mark(one, Ailment.BROKEN, 0)
    unload = enter(one, manager())
    behind = enter(one, request())
    assert release(one, unload) == [behind]
    assert behind.refusal
