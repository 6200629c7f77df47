"""Slots that share one session: who takes part in its steps, who leaves, and what becomes of all when it fails."""

import contextlib
import random
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.engine.base import Failed, Finished, SequenceRequest
from trioserve.errors import EngineError, ServerBusyError, TrioserveError
from trioserve.runtime.job import BUFFERED_EVENTS
from trioserve.runtime.pace import Pace
from trioserve.scheduling.admission import Ailment
from trioserve.testing import FakeSession, fake_answer

TIMEOUT = 5.0  # seconds until a call counts as stalled


@pytest.fixture
def fused(model_for):
    """Open a model whose slots share a session."""
    return partial(model_for, execution="fused")


@pytest.fixture
def interrupts(monkeypatch):
    """The sessions that were interrupted, by name."""
    seen, interrupt = [], FakeSession.interrupt

    def noted(self):
        seen.append(self.name)
        interrupt(self)

    monkeypatch.setattr(FakeSession, "interrupt", noted)
    return seen


@pytest.fixture
def crowds(monkeypatch):
    """For each step of a shared session, how many sequences took part in it."""
    sizes, step = [], FakeSession.step

    def noted(self, threads, held=()):
        sizes.append(len([number for number in self._live if number not in held]))
        return step(self, threads, held)

    monkeypatch.setattr(FakeSession, "step", noted)
    return sizes


def sequence(prompt=b"prompt", tokens=5):
    return SequenceRequest(prompt=list(prompt), max_tokens=tokens)


@contextlib.asynccontextmanager
async def working(model, *works):
    """A lease and a job at work in its slot."""
    lease = await model.admit(None)
    try:
        yield lease, lease.start(await lease.ready(), *works)
    finally:
        lease.release()


async def read(job):
    """Everything to the end, as text."""
    text, ended = "", False
    while not ended:
        events = [event for _, event in await job.next_events()]
        if isinstance(events[-1], Failed):
            raise EngineError(events[-1].message)
        text += "".join(event.text for event in events)
        ended = isinstance(events[-1], Finished)
    return text


async def answer(model, request):
    async with working(model, request) as (_, job):
        return await read(job)


async def fails(model, request, errors):
    try:
        await answer(model, request)
    except TrioserveError as error:
        errors.append(error)


def sessions_of(model):
    return model.pool.weights.sessions


# -- taking part


async def test_the_slots_are_sequences_of_one_session(fused, crowds, engine):
    texts = {}

    async def ask(model, number):
        texts[number] = await answer(model, sequence(b"%d" % number, 20))

    engine.step_gate.shut()
    async with fused(slots=4) as model, trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(ask, model, number)
        await engine.step_gate.arrived()
        await wait_all_tasks_blocked()
        engine.step_gate.open()
    assert texts == {number: fake_answer(b"%d" % number, 20) for number in range(4)}
    assert (len(sessions_of(model)), sessions_of(model)[0].max_sequences) == (1, 4)
    assert max(crowds) == 4


async def test_who_comes_later_joins_at_the_next_step(fused, crowds, engine):
    engine.step_gate.shut()
    async with fused(slots=2) as model, trio.open_nursery() as nursery:
        nursery.start_soon(answer, model, sequence())
        await engine.step_gate.arrived()
        nursery.start_soon(answer, model, sequence(b"later"))
        await wait_all_tasks_blocked()
        engine.step_gate.let()
        await engine.step_gate.arrived(2)
        assert crowds == [1, 2]
        engine.step_gate.open()


async def test_more_requests_than_slots_wait_as_ever(fused, engine):
    engine.step_gate.shut()
    async with fused(slots=2) as model, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(answer, model, sequence())
        await engine.step_gate.arrived()
        await wait_all_tasks_blocked()
        status = model.status()
        assert (status.active_slots, status.queued_requests) == (2, 1)
        with pytest.raises(ServerBusyError):
            await model.admit(0)
        engine.step_gate.open()


async def test_a_model_that_rests_has_no_thread_at_work(fused, eventually):
    async with fused(slots=2) as model:
        for _ in range(3):
            await answer(model, sequence())
            await eventually(lambda: model.pool.slots[0].pulse.under_way is None)
            steps = len(sessions_of(model)[0].threads)
            await wait_all_tasks_blocked()
            assert len(sessions_of(model)[0].threads) == steps


async def test_a_slot_keeps_nothing_for_itself(fused):
    async with fused(slots=2) as model:
        await answer(model, sequence())
        assert [slot.place.history for slot in model.pool.slots] == [[], []]


# -- leaving


async def test_who_leaves_does_so_after_the_step_and_costs_the_others_nothing(fused, engine, interrupts, eventually):
    engine.step_gate.shut()
    async with fused(slots=2) as model, working(model, sequence(b"stays", 8)) as (_, job):
        async with working(model, sequence(b"leaves", 100)):
            await engine.step_gate.arrived()
        await wait_all_tasks_blocked()
        assert model.status().active_slots == 2, "its sequence is in the step that is under way"
        engine.step_gate.let()
        await eventually(lambda: model.status().active_slots == 1)
        assert interrupts == []
        engine.step_gate.open()
        assert await read(job) == fake_answer(b"stays", 8)


async def test_who_is_alone_does_not_wait_for_the_step(fused, engine, interrupts, eventually):
    engine.step_gate.shut()
    async with fused(slots=2) as model:
        async with working(model, sequence(tokens=100)):
            await engine.step_gate.arrived()
        await eventually(lambda: model.status().active_slots == 0)
        assert interrupts == ["tiny[0]"]
        engine.step_gate.open()
        assert await answer(model, sequence(b"next")) == fake_answer(b"next", 5)


async def test_a_step_that_nobody_wants_any_more_is_cut_short_however_many_took_part(
    fused, engine, interrupts, eventually
):
    engine.step_gate.shut()
    async with fused(slots=3) as model:
        async with working(model, sequence(tokens=100)), working(model, sequence(tokens=100)):
            await engine.step_gate.arrived()
            await wait_all_tasks_blocked()
            engine.step_gate.let()
            await engine.step_gate.arrived(2)
        await eventually(lambda: model.status().active_slots == 0)
        assert interrupts == ["tiny[0]"]
        engine.step_gate.open()
        assert await answer(model, sequence(b"next")) == fake_answer(b"next", 5)


async def test_of_those_who_leave_together_the_latest_is_removed_first(fused, engine, monkeypatch, eventually):
    """A session that has one prompt wait for another's does nothing for the sake of one that is about to leave, too."""
    removed, remove = [], FakeSession.remove

    def noted(self, number):
        removed.append(number)
        remove(self, number)

    monkeypatch.setattr(FakeSession, "remove", noted)
    engine.step_gate.shut()
    async with fused(slots=3) as model:
        async with working(model, sequence(tokens=100)), working(model, sequence(tokens=100)):
            await engine.step_gate.arrived()
            await wait_all_tasks_blocked()
            engine.step_gate.let()
            await engine.step_gate.arrived(2)
            live = list(sessions_of(model)[0]._live)
        await eventually(lambda: model.status().active_slots == 0)
    assert len(live) == 2
    assert removed == live[::-1]


async def test_who_joins_while_another_s_step_is_cut_short_is_answered(fused, engine):
    engine.step_gate.shut()
    async with fused(slots=2) as model:
        leaving = working(model, sequence(tokens=100))
        await leaving.__aenter__()
        await engine.step_gate.arrived()
        async with working(model, sequence(b"joins", 8)) as (_, job):
            await leaving.__aexit__(None, None, None)
            # As if the flag had been raised in the very moment before the newcomer came.
            sessions_of(model)[0].interrupt()
            model.pool.slots[0].place._conductor._flagged = True
            engine.step_gate.open()
            assert await read(job) == fake_answer(b"joins", 8)


async def test_a_job_that_is_cancelled_before_it_took_part_leaves_nothing(fused, engine, crowds):
    engine.step_gate.shut()
    async with fused(slots=2) as model, working(model, sequence()) as (_, job):
        await engine.step_gate.arrived()
        async with working(model, sequence(b"never")):
            pass
        engine.step_gate.open()
        assert await read(job) == fake_answer(b"prompt", 5)
        assert len(sessions_of(model)[0]._live) == 0
        assert set(crowds) == {1}


async def test_any_mixture_of_guests_gets_the_right_answers(fused, eventually):
    chance, wrong = random.Random(7), []

    async def guest(model, number):
        request = sequence(b"guest %d" % number, chance.randrange(1, 30))
        patience = chance.choice([None, 0, 1, 3])
        async with working(model, request) as (_, job):
            if patience is None:
                text = await read(job)
                if text != fake_answer(b"guest %d" % number, request.max_tokens):
                    wrong.append((number, text))
                return
            for _ in range(patience):
                if isinstance((await job.next_events())[-1][1], Finished):
                    return

    async with fused(slots=4) as model:
        async with trio.open_nursery() as nursery:
            for number in range(120):
                nursery.start_soon(guest, model, number)
        await eventually(lambda: model.status().active_slots == 0)
        assert wrong == []
        assert len(sessions_of(model)) == 1
        # Who leaves in the moment of his last step raises the flag for nothing; whoever plays next lowers it.
        sessions_of(model)[0].resume()
        assert sessions_of(model)[0].is_sound()


# -- slow readers


async def test_a_slow_reader_holds_nobody_else_up(fused, eventually):
    long = 3 * BUFFERED_EVENTS
    async with fused(slots=2) as model, working(model, sequence(b"slow", long)) as (_, slow):
        await eventually(lambda: slow.full)
        for _ in range(3):
            assert await answer(model, sequence(b"quick", 2 * BUFFERED_EVENTS)) == fake_answer(
                b"quick", 2 * BUFFERED_EVENTS
            )
        assert len(slow._events) <= BUFFERED_EVENTS + 1
        assert await read(slow) == fake_answer(b"slow", long)


async def test_a_slow_reader_that_leaves_frees_its_slot(fused, eventually):
    async with fused(slots=2) as model:
        async with working(model, sequence(b"slow", 3 * BUFFERED_EVENTS)) as (_, slow):
            await eventually(lambda: slow.full)
            await wait_all_tasks_blocked()
        await eventually(lambda: model.status().active_slots == 0)
        assert await answer(model, sequence()) == fake_answer(b"prompt", 5)


# -- failures


@pytest.mark.parametrize("how", ["failing_step", "raising_step"])
async def test_a_step_that_fails_ends_all_that_take_part_and_the_session_is_replaced(fused, engine, how, eventually):
    errors = []
    engine.step_gate.shut()
    async with fused(slots=3) as model:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(fails, model, sequence(tokens=50), errors)
            await engine.step_gate.arrived()
            await wait_all_tasks_blocked()
            setattr(engine, how, 3)
            engine.step_gate.open()
        assert [type(error) for error in errors] == [EngineError] * 3
        setattr(engine, how, None)
        await eventually(lambda: model.status().active_slots == 0)
        assert await answer(model, sequence()) == fake_answer(b"prompt", 5)
        assert [session.name for session in sessions_of(model)] == ["tiny[0]", "tiny[1]"]
        assert engine.closed == ["tiny[0]"]
        assert model.status().ailments == {}


async def test_a_sequence_that_fails_alone_costs_nobody_the_session(fused, monkeypatch):
    step, errors = FakeSession.step, []

    def poor(self, threads, held=()):
        events = step(self, threads, held)
        (number, live), *_ = self._live.items()
        live.ended = True
        return [
            *(event for event in events if event.sequence != number),
            Failed(number, "its sampler broke", alone=True),
        ]

    async with fused(slots=2) as model:
        await answer(model, sequence())
        with monkeypatch.context() as broken:
            broken.setattr(FakeSession, "step", poor)
            await fails(model, sequence(b"bad"), errors)
        assert [error.message for error in errors] == ["its sampler broke"]
        assert await answer(model, sequence(b"next")) == fake_answer(b"next", 5)
        assert len(sessions_of(model)) == 1


async def test_a_prompt_that_the_session_does_not_take_fails_alone(fused, engine, monkeypatch):
    add, errors = FakeSession.add, []

    def picky(self, work):
        if bytes(work.prompt) == b"bad":
            raise ValueError("it does not fit")
        return add(self, work)

    monkeypatch.setattr(FakeSession, "add", picky)
    engine.step_gate.shut()
    async with fused(slots=2) as model, working(model, sequence(b"good", 9)) as (_, job):
        await engine.step_gate.arrived()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, model, sequence(b"bad"), errors)
            engine.step_gate.open()
        assert await read(job) == fake_answer(b"good", 9)
        assert [type(error) for error in errors] == [EngineError]
        assert len(sessions_of(model)) == 1


@pytest.mark.parametrize("call", ["is_sound", "remove", "resume"])
async def test_a_session_that_raises_while_a_job_leaves_keeps_no_slot(fused, engine, monkeypatch, call, eventually):
    def raising(self, *_args):
        monkeypatch.undo()
        raise RuntimeError("its memory is damaged")

    engine.step_gate.shut()
    async with fused(slots=2) as model:
        async with working(model, sequence(b"leaves", 50)):
            await engine.step_gate.arrived()
            monkeypatch.setattr(FakeSession, call, raising)
        await eventually(lambda: model.status().active_slots == 0)
        engine.step_gate.open()
        assert await answer(model, sequence()) == fake_answer(b"prompt", 5)
        assert len(sessions_of(model)) == 2


async def test_a_thread_that_can_t_be_had_does_not_end_the_model(fused, monkeypatch):
    run_sync = trio.to_thread.run_sync

    async def without_threads(function, *args, **options):
        if getattr(function, "__name__", "") == "_play":
            monkeypatch.undo()
            raise RuntimeError("can't start new thread")
        return await run_sync(function, *args, **options)

    async with fused(slots=2) as model:
        await model.ensure_loaded()
        monkeypatch.setattr(trio.to_thread, "run_sync", without_threads)
        assert await answer(model, sequence()) == fake_answer(b"prompt", 5)
        assert model.status().ailments == {}


async def test_a_session_that_does_not_prove_itself_is_replaced(fused, engine, eventually):
    errors = []
    engine.step_gate.shut()
    async with fused(slots=2) as model, trio.open_nursery() as nursery:
        async with working(model, sequence(b"leaves", 50)):
            await engine.step_gate.arrived()
            nursery.start_soon(fails, model, sequence(b"other", 50), errors)
            await wait_all_tasks_blocked()
            engine.step_gate.let()
            await engine.step_gate.arrived(2)
        engine.failing_proofs = 2
        engine.step_gate.open()
        await eventually(lambda: len(errors) == 1)
        assert await answer(model, sequence()) == fake_answer(b"prompt", 5)
        assert len(sessions_of(model)) == 2


async def test_slots_that_can_get_no_session_are_broken_all_of_them(fused, engine, eventually):
    errors = []
    async with fused(slots=3) as model:
        await answer(model, sequence())
        engine.failing_session, engine.raising_step = 1, len(sessions_of(model)[0].threads) + 2
        await fails(model, sequence(tokens=50), errors)
        await eventually(lambda: model.status().out_of_order)
        assert model.status().ailments == dict.fromkeys(range(3), Ailment.BROKEN)
        with pytest.raises(ServerBusyError, match="broken"):
            await model.admit(None)


async def test_a_step_that_does_not_come_back_ails_every_slot_until_it_does(fused, engine, mock_clock, eventually):
    engine.deaf, errors = True, []
    engine.step_gate.shut()
    async with fused(slots=3, stall_timeout=TIMEOUT) as model:
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(fails, model, sequence(), errors)
            await engine.step_gate.arrived()
            await wait_all_tasks_blocked()
            mock_clock.jump(TIMEOUT)
        assert ["doesn't answer" in error.message for error in errors] == [True, True]
        await wait_all_tasks_blocked()
        assert model.status().ailments == dict.fromkeys(range(3), Ailment.STALLED)
        engine.step_gate.open()
        await eventually(lambda: model.status().active_slots == 0 and not model.status().ailments)
        assert await answer(model, sequence()) == fake_answer(b"prompt", 5)


async def test_a_batch_that_waits_for_its_reader_has_no_part_in_a_stall_of_the_others(
    fused, engine, mock_clock, eventually
):
    engine.deaf, errors, long = True, [], 2 * BUFFERED_EVENTS
    works = sequence(b"a", long), sequence(b"b", long)
    async with fused(slots=3, stall_timeout=TIMEOUT) as model, working(model, *works) as (lease, batch):
        await eventually(lambda: batch.full)
        await wait_all_tasks_blocked()
        engine.step_gate.shut()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, model, sequence(), errors)
            await eventually(lambda: any(slot.pulse.under_way for slot in model.pool.slots))
            await wait_all_tasks_blocked()
            mock_clock.jump(TIMEOUT)
        assert model.status().ailments == dict.fromkeys({0, 1, 2} - {lease.slot}, Ailment.STALLED)
        engine.step_gate.open()
        events = []
        while sum(isinstance(event, Finished) for _, event in events) < 2:
            events += await batch.next_events()


# -- batches, and the end


async def test_a_batch_gets_a_session_of_its_own_beside_the_others(fused, engine):
    engine.step_gate.shut()
    async with fused(slots=2) as model, working(model, sequence(b"alone", 6)) as (_, job):
        await engine.step_gate.arrived()
        async with working(model, sequence(b"a"), sequence(b"b")) as (_, batch):
            await engine.step_gate.arrived(2)
            engine.step_gate.open()
            assert await read(job) == fake_answer(b"alone", 6)
            while not isinstance((await batch.next_events())[-1][1], Finished):
                pass
        assert [session.max_sequences for session in sessions_of(model)] == [2, 2]


async def test_a_batch_that_is_given_up_before_it_has_its_session_costs_the_others_nothing(fused, engine, interrupts):
    engine.step_gate.shut()
    async with fused(slots=2) as model, working(model, sequence(b"alone", 6)) as (_, job):
        await engine.step_gate.arrived()
        engine.session_gate.shut()
        async with working(model, sequence(b"a"), sequence(b"b")):
            await engine.session_gate.arrived()
        engine.session_gate.open()
        engine.step_gate.open()
        assert await read(job) == fake_answer(b"alone", 6)
        assert interrupts == []


async def test_a_batch_without_a_session_of_its_own_goes_one_by_one(fused, engine, crowds):
    async with fused(slots=2) as model:
        await model.ensure_loaded()
        engine.failing_session, engine.failing_sessions = 1, 2
        async with working(model, sequence(b"a"), sequence(b"b")) as (_, job):
            events = []
            while sum(isinstance(event, Finished) for _, event in events) < 2:
                events += await job.next_events()
        assert [index for index, event in events if isinstance(event, Finished)] == [0, 1]
        assert max(crowds) == 1


async def test_a_model_whose_task_is_cancelled_lets_go_of_what_is_at_work(fused, engine):
    engine.step_gate.shut()
    with trio.CancelScope() as scope:
        async with fused(slots=2) as model, trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(answer, model, sequence(tokens=50))
            await engine.step_gate.arrived()
            await wait_all_tasks_blocked()
            engine.step_gate.open()
            scope.cancel()
    assert scope.cancelled_caught
    assert engine.closed == ["tiny[0]", "tiny"]


async def test_an_unload_waits_for_all_and_frees_the_session(fused, engine):
    engine.step_gate.shut()
    async with fused(slots=2) as model, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(answer, model, sequence())
        await engine.step_gate.arrived()
        nursery.start_soon(model.unload)
        await wait_all_tasks_blocked()
        assert model.status().queued_operations == 1
        engine.step_gate.open()
    assert engine.closed == ["tiny[0]", "tiny"]


async def test_steps_with_prompts_take_no_threads_that_would_be_held_up(fused, monkeypatch):
    monkeypatch.setattr(Pace, "bound", lambda pace, limit: limit - 1)
    async with fused(slots=2) as model:
        await answer(model, sequence())
        assert sessions_of(model)[0].threads == [3, 4, 4, 4, 4]
