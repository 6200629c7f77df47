"""Waiting at the gate: bounded waits and cancellation, on virtual time."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.errors import ServerBusyError
from trioserve.runtime.gate import Gate
from trioserve.scheduling.admission import Admission, Ailment, Kind, Ticket
from trioserve.scheduling.statistics import AdmissionStatistics


@pytest.fixture
def gate():
    return Gate(Admission(slots=1, max_queued=8))


class Caller:
    """A task that passes the gate, in a cancel scope of its own."""

    def __init__(self, gate, kind=Kind.REQUEST, wait=None):
        self.gate = gate
        self.ticket = Ticket(kind, wait)
        self.scope = trio.CancelScope()
        self.passed_at = self.rejected_at = None

    async def __call__(self):
        with self.scope:
            try:
                await self.gate.pass_through(self.ticket)
            except ServerBusyError:
                self.rejected_at = trio.current_time()
            else:
                self.passed_at = trio.current_time()

    def leave(self):
        self.gate.release(self.ticket)


@pytest.fixture
async def arrive(gate, nursery):
    """Start a caller and let it come to rest."""

    async def start(kind=Kind.REQUEST, wait=None):
        caller = Caller(gate, kind, wait)
        nursery.start_soon(caller)
        await wait_all_tasks_blocked()
        return caller

    return start


async def test_a_free_slot_is_granted_without_a_checkpoint(gate):
    with trio.testing.assert_no_checkpoints():
        await gate.pass_through(Ticket())
    assert gate.statistics().active == 1


async def test_a_rejection_on_arrival_is_immediate(gate):
    await gate.pass_through(Ticket())
    with trio.testing.assert_no_checkpoints(), pytest.raises(ServerBusyError):
        await gate.pass_through(Ticket(wait=0))


async def test_callers_pass_in_the_order_of_their_arrival(gate, arrive, autojump_clock):
    callers = [await arrive() for _ in range(5)]
    passed = []
    for _ in callers:
        passed += [caller for caller in callers if caller.passed_at is not None and caller not in passed]
        passed[-1].leave()
        await wait_all_tasks_blocked()
    assert passed == callers
    assert gate.idle


async def test_a_bounded_wait_is_rejected_at_its_time_and_leaves_no_trace(gate, arrive, autojump_clock):
    holder = await arrive()
    started = trio.current_time()
    before = gate.statistics()
    with pytest.raises(ServerBusyError, match="250 ms"):
        await gate.pass_through(Ticket(wait=0.25))
    assert trio.current_time() - started == pytest.approx(0.25)
    assert gate.statistics() == before
    holder.leave()
    assert gate.idle


async def test_an_unbounded_wait_lasts(gate, arrive, autojump_clock):
    holder, waiting = await arrive(), await arrive()
    await trio.sleep(1e6)
    assert waiting.passed_at is None
    holder.leave()
    await wait_all_tasks_blocked()
    assert waiting.passed_at == trio.current_time()


async def test_a_wait_that_runs_out_does_not_hold_up_those_behind_it(gate, arrive, autojump_clock):
    holder = await arrive()
    impatient, patient = await arrive(wait=1), await arrive()
    await trio.sleep(2)
    assert impatient.rejected_at is not None
    holder.leave()
    await wait_all_tasks_blocked()
    assert patient.passed_at is not None
    assert gate.statistics() == AdmissionStatistics(slots=1, active=1, queued=0, waiting_managers=0, exclusive=False)


async def test_cancellation_while_queued_lets_the_next_one_move_up(gate, arrive):
    holder, given_up, following = await arrive(), await arrive(), await arrive()
    given_up.scope.cancel()
    await wait_all_tasks_blocked()
    assert gate.statistics().queued == 1
    holder.leave()
    await wait_all_tasks_blocked()
    assert given_up.passed_at is None
    assert following.passed_at is not None


async def test_a_caller_cancelled_in_the_tick_of_its_grant_passes_and_can_give_back(gate, arrive):
    """The grant came first: the caller goes on, as its next checkpoint will tell it of the cancellation."""
    holder, waiting, following = await arrive(), await arrive(), await arrive()
    holder.leave()
    waiting.scope.cancel()
    await wait_all_tasks_blocked()
    assert waiting.passed_at is not None
    assert following.passed_at is None
    waiting.leave()
    await wait_all_tasks_blocked()
    assert following.passed_at is not None
    following.leave()
    assert gate.idle


async def test_a_caller_cancelled_right_before_its_grant_hands_the_slot_on(gate, arrive):
    """The cancellation came first: the grant reaches a task that is on its way out, and must not be lost with it."""
    holder, waiting, following = await arrive(), await arrive(), await arrive()
    waiting.scope.cancel()
    holder.leave()
    await wait_all_tasks_blocked()
    assert waiting.passed_at is None
    assert not waiting.ticket.granted
    assert following.passed_at is not None
    following.leave()
    assert gate.idle


async def test_a_manager_that_is_cancelled_wakes_those_it_held_back(arrive):
    gate = Gate(Admission(slots=2, max_queued=8))
    await gate.pass_through(Ticket())
    async with trio.open_nursery() as nursery:
        unload, behind = Caller(gate, Kind.MANAGER), Caller(gate)
        nursery.start_soon(unload)
        await wait_all_tasks_blocked()
        nursery.start_soon(behind)
        await wait_all_tasks_blocked()
        assert behind.passed_at is None
        unload.scope.cancel()
    assert behind.passed_at is not None
    assert gate.statistics().waiting_managers == 0


async def test_a_manager_whose_wait_runs_out_wakes_those_it_held_back(autojump_clock):
    gate = Gate(Admission(slots=2, max_queued=8))
    await gate.pass_through(Ticket())
    async with trio.open_nursery() as nursery:
        unload, behind = Caller(gate, Kind.MANAGER, wait=3), Caller(gate)
        nursery.start_soon(unload)
        await wait_all_tasks_blocked()
        nursery.start_soon(behind)
    assert unload.rejected_at == pytest.approx(behind.passed_at)
    assert gate.statistics().active == 2


async def test_a_grant_at_the_very_moment_at_which_the_wait_ends_is_one_or_the_other(gate, arrive, autojump_clock):
    holder = await arrive()
    waiting, following = await arrive(wait=5), await arrive()
    await trio.sleep_until(trio.current_time() + 5)
    holder.leave()
    await wait_all_tasks_blocked()
    outcomes = [waiting.passed_at is not None, waiting.rejected_at is not None]
    assert outcomes.count(True) == 1
    assert waiting.ticket.granted == (waiting.passed_at is not None)
    if waiting.ticket.granted:
        waiting.leave()
        await wait_all_tasks_blocked()
    assert following.passed_at is not None
    following.leave()
    assert gate.idle


@pytest.mark.parametrize("first", ["grant", "deadline"])
async def test_grant_and_deadline_in_one_tick_lose_no_slot(gate, arrive, autojump_clock, first):
    holder = await arrive()
    waiting, following = await arrive(wait=5), await arrive()
    grant, expire = holder.leave, lambda: autojump_clock.jump(5)
    for step in (grant, expire) if first == "grant" else (expire, grant):
        step()
    await wait_all_tasks_blocked()
    # Trio looks at its deadlines between ticks, so in both orders the grant is there when the wait ends.
    assert waiting.ticket.granted == (waiting.passed_at is not None)
    assert (waiting.passed_at is None) != (waiting.rejected_at is None)
    if waiting.ticket.granted:
        waiting.leave()
    await wait_all_tasks_blocked()
    assert following.passed_at is not None
    assert gate.statistics().active == 1


async def test_releasing_twice_is_an_error(gate):
    ticket = Ticket()
    await gate.pass_through(ticket)
    gate.release(ticket)
    with pytest.raises(RuntimeError):
        gate.release(ticket)


async def test_a_resize_under_exclusivity_lets_more_through_at_once(gate, arrive):
    unload = await arrive(Kind.MANAGER)
    waiting = [await arrive() for _ in range(3)]
    gate.resize(2, 8)
    unload.leave()
    await wait_all_tasks_blocked()
    assert [caller.passed_at is not None for caller in waiting] == [True, True, False]
    waiting[0].leave()


# -- idleness


async def test_whoever_goes_last_makes_it_idle_however_it_goes():
    told = []
    gate = Gate(Admission(slots=1, max_queued=8), lambda: told.append(gate.idle))
    holder, waiter = Ticket(), Ticket()
    await gate.pass_through(holder)
    gate.enter(waiter)
    gate.release(holder)
    assert (waiter.granted, told) == (True, []), "it has passed on"
    gate.withdraw(waiter)
    assert told == [True]
    await gate.pass_through(last := Ticket())
    gate.release(last)
    assert told == [True, True]


async def test_whoever_waits_for_slots_that_stall_is_told_at_once(gate, arrive, autojump_clock):
    holder = await arrive()
    waiting, unbounded = await arrive(wait=5), await arrive()
    await trio.sleep(1)
    gate.mark(0, Ailment.STALLED)
    await wait_all_tasks_blocked()
    assert (waiting.rejected_at, unbounded.rejected_at) == (trio.current_time(),) * 2
    assert (gate.statistics().queued, dict(gate.ailments())) == (0, {0: Ailment.STALLED})
    gate.mark(0, None)
    waiting = await arrive()
    holder.leave()
    await wait_all_tasks_blocked()
    assert waiting.passed_at is not None
