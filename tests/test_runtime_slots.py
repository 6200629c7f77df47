"""Slots, leases and jobs: who works when, with how many threads, and how work ends early."""

import contextlib
import logging
import threading
from collections import Counter

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.engine.base import Failed, Finished, LoadOptions, SequenceRequest, SessionOptions, Token
from trioserve.errors import EngineError, ServerBusyError, ShuttingDownError, TrioserveError
from trioserve.runtime.batch_sessions import BatchSessions
from trioserve.runtime.cores import Cores, available_cores
from trioserve.runtime.job import BUFFERED_EVENTS, Job
from trioserve.runtime.pace import Pace, Paces
from trioserve.runtime.private_place import PrivatePlace
from trioserve.runtime.slot import Slot
from trioserve.runtime.solo import Solo
from trioserve.runtime.stall_watch import StallWatch
from trioserve.scheduling.admission import Ailment
from trioserve.testing import FakeSession, fake_answer


def sequence(prompt=b"prompt", tokens=5):
    return SequenceRequest(prompt=list(prompt), max_tokens=tokens)


@contextlib.asynccontextmanager
async def working(model, request):
    """A lease and a job at work in its slot."""
    lease = await model.admit(None)
    try:
        yield lease, lease.start(await lease.ready(), request)
    finally:
        lease.release()


async def read(job):
    """Everything to the end, as text."""
    text, ended = "", False
    while not ended:
        events = [event for _, event in await job.next_events()]
        text += "".join(event.text for event in events)
        ended = isinstance(events[-1], Finished)
    return text


async def read_to_error(job):
    """The text that came before the error, and the error."""
    text = ""
    while True:
        try:
            events = [event for _, event in await job.next_events()]
        except TrioserveError as error:
            return text, error
        for event in events:
            if isinstance(event, Failed):
                return text, EngineError(event.message)
            text += event.text


async def answer(model, request):
    async with working(model, request) as (_, job):
        return await read(job)


def sessions(model):
    return [slot.place.session for slot in model.pool.slots]


@pytest.fixture
def traffic(monkeypatch):
    """Counts the threads inside each session's ``step``, and the most that ever were inside."""
    lock, inside, most = threading.Lock(), Counter(), Counter()
    step = FakeSession.step

    def counted(self, threads):
        with lock:
            inside[self.name] += 1
            inside["all"] += 1
            for name in (self.name, "all"):
                most[name] = max(most[name], inside[name])
        try:
            return step(self, threads)
        finally:
            with lock:
                inside[self.name] -= 1
                inside["all"] -= 1

    monkeypatch.setattr(FakeSession, "step", counted)
    return most


# -- one lease, one slot, one thread


async def test_a_job_gives_the_sessions_answer(model_for):
    async with model_for() as model:
        assert await answer(model, sequence(b"hello", 7)) == fake_answer(b"hello", 7)


async def test_slots_work_side_by_side_and_the_next_request_waits(model_for, engine, eventually):
    engine.step_gate.shut()
    async with model_for(slots=2) as model, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(answer, model, sequence())
        await engine.step_gate.arrived(2)
        await wait_all_tasks_blocked()
        status = model.status()
        assert (status.active_slots, status.queued_requests) == (2, 1)
        assert [len(session.threads) for session in sessions(model)] == [1, 1]
        engine.step_gate.open()


async def test_there_are_never_more_threads_than_slots_nor_two_in_a_session(model_for, traffic):
    texts = {}

    async def ask(model, number):
        prompt = b"prompt %d" % number
        texts[number] = await answer(model, sequence(prompt, 20)) == fake_answer(prompt, 20)

    async with model_for(slots=3) as model, trio.open_nursery() as nursery:
        for number in range(30):
            nursery.start_soon(ask, model, number)
    assert list(texts.values()) == [True] * 30
    assert traffic["all"] <= 3
    assert {traffic[f"tiny[{index}]"] for index in range(3)} == {1}


async def test_many_slots_are_really_used_side_by_side(model_for, engine):
    engine.step_gate.shut()
    async with model_for(slots=16) as model, trio.open_nursery() as nursery:
        for _ in range(16):
            nursery.start_soon(answer, model, sequence())
        await engine.step_gate.arrived(16)
        assert all(session.threads for session in sessions(model))
        engine.step_gate.open()


async def test_a_lease_works_one_job_at_a_time_and_several_in_a_row(model_for, eventually):
    async with model_for() as model:
        async with working(model, sequence(b"first")) as (lease, job):
            with pytest.raises(RuntimeError, match="at work"):
                lease.start(model.pool, sequence())
            assert await read(job) == fake_answer(b"first", 5)
            await eventually(lambda: "held" in repr(lease))
            assert await read(lease.start(model.pool, sequence(b"second"))) == fake_answer(b"second", 5)
        with pytest.raises(RuntimeError, match="released"):
            lease.start(model.pool, sequence())


# -- threads


async def test_a_lone_request_gets_all_cores(model_for):
    async with model_for(slots=4) as model:
        await answer(model, sequence())
        assert sessions(model)[0].threads == [4] * 5


async def test_a_model_takes_no_more_cores_than_it_may(model_for):
    async with model_for(threads=3) as model:
        await answer(model, sequence())
        assert sessions(model)[0].threads == [3] * 5


async def test_a_prompt_takes_no_threads_that_would_be_held_up(model_for, monkeypatch):
    monkeypatch.setattr(Pace, "bound", lambda pace, limit: limit - 1)
    async with model_for() as model:
        await answer(model, sequence())
        assert sessions(model)[0].threads == [3, 4, 4, 4, 4]


async def test_cores_are_shared_among_the_busy_slots_from_step_to_step(model_for, engine, eventually):
    engine.step_gate.shut()
    async with model_for(slots=2) as model, working(model, sequence()) as (_, first):
        await engine.step_gate.arrived(1)
        async with working(model, sequence()):
            await engine.step_gate.arrived(2)
            alone, beside = sessions(model)
            assert (alone.threads, beside.threads) == ([4], [2])
            engine.step_gate.let(2)
            await engine.step_gate.arrived(4)
            assert sorted(alone.threads[1:] + beside.threads[1:]) == [2, 2]
        await eventually(lambda: model.status().active_slots == 1)
        before = len(alone.threads)
        engine.step_gate.open()
        await read(first)
        assert set(alone.threads[before:]) == {4}


def test_shares_never_exceed_the_cores_and_never_fall_to_zero():
    cores = Cores(4)
    assert cores.share() == 4
    with contextlib.ExitStack() as stack:
        shares = []
        for _ in range(6):
            stack.enter_context(cores.busy())
            shares.append((cores.share(), cores.share(2), cores.share(100)))
    assert shares == [(4, 2, 4), (2, 1, 2), (1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1)]
    assert cores.share() == 4


def test_without_a_number_all_cores_are_counted():
    assert Cores().total == available_cores() >= 1


# -- an early end, in each phase


async def test_requests_cancelled_in_the_queue_leave_at_once_and_generate_nothing(model_for, engine, eventually):
    engine.step_gate.shut()
    async with model_for() as model, working(model, sequence(b"first", 8)) as (lease, job):
        await engine.step_gate.arrived()
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(answer, model, sequence(b"gone"))
            await wait_all_tasks_blocked()
            assert model.status().queued_requests == 5
            nursery.cancel_scope.cancel()
        assert model.status().queued_requests == 0
        engine.step_gate.open()
        assert await read(job) == fake_answer(b"first", 8), "the active one is untouched"
        lease.release()
        await eventually(lambda: model.status().active_slots == 0)
        assert len(sessions(model)[0].threads) == 8


async def test_a_release_in_prefill_ends_the_step_and_frees_the_slot(model_for, engine, eventually):
    engine.step_gate.shut()
    async with model_for() as model:
        async with working(model, sequence()) as (_, job):
            await engine.step_gate.arrived()
        assert model.status().active_slots == 1, "the thread has not been joined yet"
        await eventually(lambda: model.status().active_slots == 0)
        assert job.done
        engine.step_gate.open()
        assert await answer(model, sequence(b"next")) == fake_answer(b"next", 5)


async def test_a_release_in_decode_ends_the_answer_and_frees_the_slot(model_for, engine, eventually):
    engine.step_gate.shut()
    async with model_for() as model:
        async with working(model, sequence(tokens=100)) as (_, job):
            engine.step_gate.let(3)
            await engine.step_gate.arrived(4)
            assert isinstance((await job.next_events())[0][1], Token)
        await eventually(lambda: model.status().active_slots == 0)
        assert len(sessions(model)[0].threads) == 4
        engine.step_gate.open()
        assert await answer(model, sequence(b"next")) == fake_answer(b"next", 5)


async def test_a_release_between_the_last_event_and_the_end_of_the_thread_leaves_the_slot_usable(model_for):
    async with model_for() as model:
        for number in range(50):
            prompt = b"%d" % number
            assert await answer(model, sequence(prompt, 2)) == fake_answer(prompt, 2)


async def test_a_cancelled_reader_frees_its_slot(model_for, engine, eventually):
    engine.step_gate.shut()
    async with model_for() as model:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer, model, sequence())
            await engine.step_gate.arrived()
            nursery.cancel_scope.cancel()
        await eventually(lambda: model.status().active_slots == 0)


async def test_one_release_touches_no_other_slot(model_for, engine, eventually):
    engine.step_gate.shut()
    async with model_for(slots=2) as model, working(model, sequence(b"stays", 9)) as (_, stays):
        async with working(model, sequence(b"goes", 9)):
            await engine.step_gate.arrived(2)
        await eventually(lambda: model.status().active_slots == 1)
        engine.step_gate.open()
        assert await read(stays) == fake_answer(b"stays", 9)


async def test_a_lease_is_given_back_only_after_the_thread_ended_and_the_session_was_reset(
    model_for, engine, eventually, monkeypatch
):
    monkeypatch.setattr(FakeSession, "interrupt", lambda self: None)  # a step that can't be cut short
    seen = []
    engine.step_gate.shut()
    async with model_for() as model, trio.open_nursery() as nursery:
        async with working(model, sequence()):
            await engine.step_gate.arrived()
        session = sessions(model)[0]
        take_back, resets = model.take_back, session.resets

        def watched(ticket):
            seen.append(session.resets)
            take_back(ticket)

        monkeypatch.setattr(model, "take_back", watched)
        nursery.start_soon(answer, model, sequence(b"next"))
        await wait_all_tasks_blocked()
        status = model.status()
        assert (status.active_slots, status.queued_requests, seen) == (1, 1, [])
        engine.step_gate.open()
    assert seen[0] == resets + 1


async def test_release_is_idempotent(model_for, eventually):
    async with model_for() as model, working(model, sequence()) as (lease, job):
        await read(job)
        lease.release()
        lease.release()
        await eventually(lambda: model.status().active_slots == 0)
        async with working(model, sequence()):
            lease.release()
            assert model.status().active_slots == 1, "the successor keeps the slot"


async def test_a_lease_without_a_job_goes_back_at_once(model_for):
    async with model_for() as model:
        lease = await model.admit(None)
        lease.release()
        assert model.status().active_slots == 0


# -- slow readers


async def test_a_slow_reader_pauses_only_its_own_slot_and_within_bounds(model_for, cores, eventually):
    tokens = 3 * BUFFERED_EVENTS
    async with model_for(slots=2) as model, working(model, sequence(b"slow", tokens)) as (_, slow):
        paused = sessions(model)[0]
        await eventually(lambda: slow.full and cores._busy == 0)
        assert await answer(model, sequence(b"quick", 50)) == fake_answer(b"quick", 50)
        await wait_all_tasks_blocked()
        assert len(paused.threads) == BUFFERED_EVENTS
        assert sessions(model)[1].threads[0] == 4, "a paused slot takes no cores"
        assert await read(slow) == fake_answer(b"slow", tokens)


async def test_after_each_look_a_slow_reader_gets_what_fits_and_no_more(model_for, eventually):
    tokens = 2 * BUFFERED_EVENTS + 10
    async with model_for() as model, working(model, sequence(b"slow", tokens)) as (_, slow):
        for seen in (1, 2):
            await eventually(lambda: slow.full)
            await wait_all_tasks_blocked()
            assert len(sessions(model)[0].threads) == seen * BUFFERED_EVENTS
            assert len(await slow.next_events()) == BUFFERED_EVENTS
        assert await read(slow) == fake_answer(b"slow", tokens)[2 * BUFFERED_EVENTS :]


async def test_a_release_while_paused_frees_the_slot(model_for, eventually):
    async with model_for() as model:
        async with working(model, sequence(tokens=3 * BUFFERED_EVENTS)) as (_, slow):
            await eventually(lambda: slow.full)
            await wait_all_tasks_blocked()
        await eventually(lambda: model.status().active_slots == 0)
        assert await answer(model, sequence(b"next")) == fake_answer(b"next", 5)


# -- failures


@pytest.mark.parametrize("fault", ["failing_step", "raising_step"])
async def test_a_fault_ends_that_request_after_its_events_and_nothing_else(
    model_for, engine, eventually, monkeypatch, fault
):
    monkeypatch.setattr(engine, fault, 3)
    engine.step_gate.shut()
    async with model_for(slots=2) as model, working(model, sequence(b"other", 2)) as (_, other):
        async with working(model, sequence(b"hit", 9)) as (_, hit):
            await engine.step_gate.arrived(2)
            engine.step_gate.open()
            text, error = await read_to_error(hit)
            assert (text, type(error)) == (fake_answer(b"hit", 2), EngineError)
        assert await read(other) == fake_answer(b"other", 2)
        await eventually(lambda: model.status().active_slots == 1)
        assert await answer(model, sequence(b"next", 9)) == fake_answer(b"next", 9), "the slot works again"


async def test_the_first_step_may_be_the_one_that_fails(model_for, engine, eventually):
    engine.raising_step = 1
    async with model_for() as model:
        with pytest.raises(EngineError):
            await answer(model, sequence())
        await eventually(lambda: model.status().active_slots == 0)
        assert await answer(model, sequence()) == fake_answer(b"prompt", 5)


async def test_a_prompt_that_the_session_refuses_fails_alone(model_for, eventually, monkeypatch):
    def refuse(self, request):
        raise RuntimeError("refused")

    async with model_for() as model:
        with monkeypatch.context() as patch:
            patch.setattr(FakeSession, "add", refuse)
            with pytest.raises(EngineError):
                await answer(model, sequence())
            await eventually(lambda: model.status().active_slots == 0)
        assert await answer(model, sequence()) == fake_answer(b"prompt", 5)


async def test_a_fault_is_logged_with_its_traceback_and_not_told_to_the_client(model_for, engine, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("trioserve"), "propagate", True)
    engine.raising_step = 1
    async with model_for() as model:
        with pytest.raises(EngineError) as caught:
            await answer(model, sequence())
    assert "told to raise" not in str(caught.value)
    (record,) = [record for record in caplog.records if record.name == "trioserve.slot"]
    assert "told to raise" in str(record.exc_info[1])


async def test_an_error_from_outside_comes_after_the_events_that_are_there(model_for, engine):
    engine.step_gate.shut()
    async with model_for() as model, working(model, sequence(tokens=9)) as (lease, job):
        engine.step_gate.let(2)
        await engine.step_gate.arrived(3)
        lease.fail(ShuttingDownError("over"))
        text, error = await read_to_error(job)
        assert (text, type(error)) == (fake_answer(b"prompt", 2), ShuttingDownError)


async def test_an_error_from_outside_is_not_put_off_by_events_that_come_after_it(model_for, engine):
    engine.step_gate.shut()
    async with model_for() as model, working(model, sequence(tokens=9)) as (lease, job):
        engine.step_gate.let(2)
        await engine.step_gate.arrived(3)
        lease.fail(ShuttingDownError("over"))
        assert len(await job.next_events()) == 2
        engine.step_gate.let(2)
        await engine.step_gate.arrived(5)
        with pytest.raises(ShuttingDownError):
            await job.next_events()


async def test_a_job_that_was_given_up_gives_no_more_events(model_for, engine):
    engine.step_gate.shut()
    async with model_for() as model, working(model, sequence()) as (lease, job):
        engine.step_gate.let(2)
        await engine.step_gate.arrived(3)
        lease.release()
        with pytest.raises(EngineError, match="given up"):
            await job.next_events()


# -- sessions that prove themselves


@pytest.fixture
def logged(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("trioserve"), "propagate", True)
    return caplog


async def cut_short(model, engine, eventually):
    """An answer that is given up in the middle."""
    engine.step_gate.shut()
    arrived = engine.step_gate.count
    async with working(model, sequence(b"cut", 9)):
        await engine.step_gate.arrived(arrived + 1)
    await eventually(lambda: model.status().active_slots == 0)
    engine.step_gate.open()


@pytest.mark.parametrize("how", ["cut", "failing_step", "raising_step", "finished"])
async def test_a_session_that_is_not_sound_after_its_reset_is_replaced(model_for, engine, eventually, logged, how):
    async with model_for(slots=2) as model:
        await model.ensure_loaded()
        (old, other), engine.failing_proofs = sessions(model), 2
        if how == "cut":
            await cut_short(model, engine, eventually)
        elif how == "finished":
            await answer(model, sequence())
        else:
            setattr(engine, how, 1)
            async with working(model, sequence()) as (_, job):
                assert isinstance((await read_to_error(job))[1], EngineError)
            setattr(engine, how, None)
        await eventually(lambda: model.status().active_slots == 0)
        fresh, same = sessions(model)
        assert (same, fresh.name, engine.closed) == (other, "tiny[2]", [old.name])
        assert await answer(model, sequence(b"next", 9)) == fake_answer(b"next", 9)
        assert fresh.threads
        assert "is replaced" in logged.text
        assert model.status().ailments == {}
    assert engine.closed == ["tiny[0]", "tiny[1]", "tiny[2]", "tiny"]


async def test_a_late_cancellation_is_no_failed_proof(model_for, engine, eventually):
    async with model_for() as model:
        await model.ensure_loaded()
        before, engine.failing_proofs = sessions(model), 1
        await cut_short(model, engine, eventually)
        assert (sessions(model), engine.failing_proofs, engine.closed) == (before, 0, [])


async def test_a_slot_without_a_session_is_leased_to_nobody_until_the_model_is_loaded_anew(
    model_for, engine, eventually, logged
):
    async with model_for(slots=2) as model:
        await model.ensure_loaded()
        engine.failing_proofs, engine.failing_session = 2, 2
        await cut_short(model, engine, eventually)
        assert model.status().ailments == {0: Ailment.BROKEN}
        assert "slot broken" in logged.text
        for _ in range(3):
            lease = await model.admit(0)
            assert lease.slot == 1
            with pytest.raises(ServerBusyError):
                await model.admit(0)
            lease.release()
        await model.unload(0)
        assert engine.closed == ["tiny[0]", "tiny[1]", "tiny"], "each of them once"
        assert model.status().ailments == {}
        leases = [await model.admit(0) for _ in range(2)]
        assert [lease.slot for lease in leases] == [0, 1]
        for lease in leases:
            lease.release()


async def test_a_lease_that_has_come_to_a_broken_slot_fails(model_for, engine, eventually):
    async with model_for() as model:
        async with working(model, sequence()) as (lease, job):
            engine.failing_proofs, engine.failing_session = 2, 1
            await read(job)
            await eventually(lambda: model.status().ailments)
            with pytest.raises(EngineError):
                await lease.start(model.pool, sequence()).next_events()
        with pytest.raises(ServerBusyError, match="1 are broken"):
            await model.admit(None)


async def test_a_batch_s_own_session_proves_nothing_about_the_slots(model_for, engine, eventually):
    async with model_for() as model:
        await model.ensure_loaded()
        before, engine.failing_proofs = sessions(model), 2
        lease = await model.admit(None)
        lease.start(model.pool, sequence(b"a"), sequence(b"b"))
        await eventually(lambda: "held" in repr(lease))
        lease.release()
        assert (sessions(model), engine.closed) == (before, ["tiny[1]"])


# -- the end of a slot


def lone_slot(engine, model_file):
    session = engine.load(model_file, LoadOptions()).open_session(SessionOptions())
    return alone(session, Cores(1))


def alone(session, cores):
    """A slot without a pool, whose batches have to do with its own session."""
    batches = BatchSessions(None, SessionOptions(), SessionOptions(), 1, lambda options: False)
    place = PrivatePlace(
        session, Solo(trio.CapacityLimiter(1), cores, 0, Paces(Pace(), Pace())), batches, {"model": "lone"}
    )
    return Slot(0, place, StallWatch("lone", 0, lambda slot, ailment: None))


async def test_a_slot_that_is_cancelled_finishes_its_job_first(engine, model_file):
    slot, idle = lone_slot(engine, model_file), trio.Event()
    engine.step_gate.shut()
    async with trio.open_nursery() as nursery:
        await nursery.start(slot.run)
        slot.submit(Job([sequence()], slot.interrupt), idle.set)
        await engine.step_gate.arrived()
        nursery.cancel_scope.cancel()
        assert not idle.is_set()
        engine.step_gate.open()
    assert idle.is_set()
    assert len(slot.place.session.threads) == 5


async def test_a_slot_that_is_cancelled_while_its_reader_is_slow_still_tells_when_it_is_idle(
    engine, model_file, eventually
):
    slot, idle = lone_slot(engine, model_file), trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(slot.run)
        job = Job([sequence(tokens=3 * BUFFERED_EVENTS)], slot.interrupt)
        slot.submit(job, idle.set)
        await eventually(lambda: job.full)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
        assert not idle.is_set()
        job.cancel()
    assert idle.is_set()


async def test_a_job_that_reaches_a_slot_on_its_way_out_is_not_lost(engine, model_file):
    slot, idle = lone_slot(engine, model_file), trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(slot.run)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        job = Job([sequence()], slot.interrupt)
        slot.submit(job, idle.set)
    assert idle.is_set()
    with pytest.raises(EngineError):
        await job.next_events()


async def test_a_lease_whose_slot_is_gone_fails_and_goes_back(model_for):
    async with model_for() as model:
        lease = await model.admit(None)
        pool = await lease.ready()
    job = lease.start(pool, sequence())
    with pytest.raises(EngineError):
        await job.next_events()
    lease.release()
    assert model.status().active_slots == 0


# -- threads that are worth it


class Prompting:
    """A session whose prompts take two steps: a whole piece, then a short one that gives the first token."""

    n_ctx = 100

    def __init__(self, clock):
        self._clock = clock
        self._whole = False
        self.threads = []

    def step(self, threads):
        self._whole = not self._whole
        self.threads.append(threads)
        self._clock["now"] += (0.4 if self._whole else 0.05) / threads
        return [] if self._whole else [Token(0, 1, "x")]


async def test_the_short_last_piece_of_a_prompt_is_no_proof_for_fewer_threads(monkeypatch):
    clock = {"now": 0.0}
    monkeypatch.setattr("trioserve.runtime.solo.time.perf_counter", lambda: clock["now"])
    session = Prompting(clock)
    solo = Solo(trio.CapacityLimiter(1), Cores(2), 0, Paces(Pace(), Pace()))
    for _ in range(100):
        job = Job([sequence()], lambda: None)
        job.feed(lambda work: 0, 1)
        solo._step(session, job)
        solo._step(session, job)
    assert session.threads.count(2) >= 190


async def test_an_interrupted_step_is_no_proof_for_fewer_threads(monkeypatch):
    clock = {"now": 0.0}
    monkeypatch.setattr("trioserve.runtime.solo.time.perf_counter", lambda: clock["now"])

    class Decoding(Prompting):
        def step(self, threads):
            self.threads.append(threads)
            clock["now"] += 0.02 / threads
            return [Token(0, 1, "x")]

    session = Decoding(clock)
    solo = Solo(trio.CapacityLimiter(1), Cores(2), 0, Paces(Pace(), Pace()))
    for _ in range(20):
        job = Job([sequence()], lambda: None)
        job.feed(lambda work: 0, 1)
        job.post([Token(0, 1, "x")])
        for _ in range(3):
            solo._step(session, job)
        job.cancel()
        session.step = lambda threads: session.threads.append(threads) or []  # returns at once
        solo._step(session, job)
        del session.step
    assert session.threads[-20:].count(2) >= 16
