"""Threads that don't come back: noticed in time, told, and taken back when they do. On a clock that the tests set."""

import contextlib
import logging
import math
from dataclasses import dataclass, field

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.engine.base import SequenceRequest
from trioserve.errors import EngineError, ServerBusyError
from trioserve.runtime.pulse import Call, Pulse
from trioserve.runtime.stall_watch import StallWatch
from trioserve.scheduling.admission import Ailment
from trioserve.testing import FakeSession, ThreadGate, fake_answer

TIMEOUT = 1.0  # the fixtures give a test 40 seconds, of this clock as well


def sequence(prompt=b"prompt", tokens=5):
    return SequenceRequest(prompt=list(prompt), max_tokens=tokens)


@contextlib.asynccontextmanager
async def working(model, *works, request_id="req-1"):
    """A lease and a job at work in its slot."""
    lease = await model.admit(None)
    try:
        yield lease, lease.start(await lease.ready(), *works, request_id=request_id)
    finally:
        lease.release()


async def read(job):
    """Everything to the end or the error, as text; the error."""
    text = ""
    while True:
        try:
            text += "".join(event.text for _, event in await job.next_events())
        except EngineError as error:
            return text, error


async def answer(model):
    async with working(model, sequence()) as (_, job):
        text = ""
        while len(text) < 5:
            text += "".join(event.text for _, event in await job.next_events())
        return text


async def passing(clock, seconds):
    """Let time pass, and then let tasks see to it."""
    await wait_all_tasks_blocked()
    clock.jump(seconds)
    await wait_all_tasks_blocked()


@pytest.fixture
def wedged(engine):
    """Steps of sessions don't come back, whoever interrupts them, until the gate is opened."""
    engine.deaf = True
    engine.step_gate.shut()
    yield engine.step_gate
    engine.step_gate.open()


@pytest.fixture
def logged(monkeypatch, caplog):
    """Messages and fields of the lines about slots."""
    monkeypatch.setattr(logging.getLogger("trioserve"), "propagate", True)
    return lambda: [
        (record.levelname, record.getMessage(), record.fields)
        for record in caplog.records
        if record.name == "trioserve.slot"
    ]


async def test_a_step_that_lasts_too_long_gives_its_request_up_and_keeps_its_slot(
    model_for, wedged, mock_clock, logged
):
    async with model_for(stall_timeout=TIMEOUT, slots=2) as model:
        async with working(model, sequence()) as (_, job):
            await wedged.arrived()
            await passing(mock_clock, TIMEOUT - 0.5)
            assert model.status().ailments == {}
            await passing(mock_clock, 0.5)
            assert model.status().ailments == {0: Ailment.STALLED}
            text, error = await read(job)
            assert text == ""
            assert "doesn't answer" in error.message
        await wait_all_tasks_blocked()
        status = model.status()
        assert (status.active_slots, status.ailments, status.out_of_order) == (1, {0: Ailment.STALLED}, False)
        (line,) = logged()
        fields = {"model": "tiny", "slot": 0, "request_id": "req-1", "doing": "evaluating a step", "seconds": TIMEOUT}
        assert line == ("ERROR", "slot stalled: its thread does not come back", fields)
        await passing(mock_clock, 10 * TIMEOUT)
        assert len(logged()) == 1, "it is told once"
        wedged.open()


async def test_what_came_before_reaches_the_client_before_the_error(model_for, wedged, mock_clock):
    async with model_for(stall_timeout=TIMEOUT) as model, working(model, sequence()) as (_, job):
        wedged.let(2)
        await wedged.arrived(3)
        await passing(mock_clock, TIMEOUT)
        assert (await read(job))[0] == fake_answer(b"prompt", 2)
        wedged.open()


async def test_a_slot_whose_thread_comes_back_serves_again(model_for, wedged, mock_clock, logged, eventually):
    async with model_for(stall_timeout=TIMEOUT) as model:
        async with working(model, sequence()) as (_, job):
            await wedged.arrived()
            await passing(mock_clock, TIMEOUT)
            await read(job)
        with pytest.raises(ServerBusyError, match="stalled"):
            await model.admit(None)
        assert model.status().out_of_order
        await passing(mock_clock, TIMEOUT)
        wedged.open()
        await eventually(lambda: model.status().active_slots == 0)
        assert model.status().ailments == {}
        level, message, fields = logged()[-1]
        assert (level, message, fields["seconds"]) == ("WARNING", "slot recovered: its thread came back", 2 * TIMEOUT)
        assert await answer(model) == fake_answer(b"prompt", 5)


async def test_a_stalled_slot_whose_session_does_not_prove_itself_gets_another_one(
    model_for, engine, wedged, mock_clock, eventually
):
    async with model_for(stall_timeout=TIMEOUT) as model:
        async with working(model, sequence()) as (_, job):
            await wedged.arrived()
            await passing(mock_clock, TIMEOUT)
            await read(job)
        engine.failing_proofs = 2
        wedged.open()
        await eventually(lambda: model.status().active_slots == 0)
        assert (model.pool.slots[0].place.session.name, model.status().ailments) == ("tiny[1]", {})


async def test_many_quick_steps_are_no_stall_however_long_they_take_together(model_for, wedged, mock_clock):
    async with model_for(stall_timeout=TIMEOUT) as model, working(model, sequence(tokens=20)):
        for step in range(1, 10):
            await wedged.arrived(step)
            await passing(mock_clock, 0.7 * TIMEOUT)
            assert model.status().ailments == {}
            wedged.let()
        wedged.open()


async def test_each_slot_is_watched_for_itself(model_for, wedged, mock_clock):
    async with (
        model_for(stall_timeout=TIMEOUT, slots=3) as model,
        working(model, sequence()),
        working(model, sequence()),
    ):
        await wedged.arrived(2)
        await passing(mock_clock, 0.6 * TIMEOUT)
        async with working(model, sequence()):
            await wedged.arrived(3)
            await passing(mock_clock, 0.4 * TIMEOUT)
            assert set(model.status().ailments) == {0, 1}
            await passing(mock_clock, 0.6 * TIMEOUT)
            assert set(model.status().ailments) == {0, 1, 2}
            wedged.open()


@pytest.mark.parametrize("name", ["reset", "add", "remove", "is_sound"])
async def test_every_call_into_a_session_is_watched(model_for, mock_clock, monkeypatch, logged, name):
    gate, call = ThreadGate(), getattr(FakeSession, name)

    def held(self, *arguments):
        gate.wait()
        return call(self, *arguments)

    monkeypatch.setattr(FakeSession, name, held)
    async with model_for(stall_timeout=TIMEOUT) as model:
        await model.ensure_loaded()
        gate.shut()
        async with working(model, sequence()):
            await gate.arrived()
            await passing(mock_clock, TIMEOUT)
            assert model.status().ailments == {0: Ailment.STALLED}
            gate.open()


@pytest.mark.parametrize(("name", "passed"), [("session_gate", 1), ("close_gate", 0)])
async def test_sessions_of_batches_are_watched_too(model_for, engine, mock_clock, name, passed):
    gate = getattr(engine, name)
    async with model_for(stall_timeout=TIMEOUT) as model:
        await model.ensure_loaded()
        gate.shut()
        async with working(model, sequence(b"a"), sequence(b"b")):
            await gate.arrived(passed + 1)
            await passing(mock_clock, TIMEOUT)
            assert model.status().ailments == {0: Ailment.STALLED}
            gate.open()


async def test_a_stall_that_hits_nobody_s_request_is_told_all_the_same(model_for, engine, mock_clock, logged):
    """The answer was complete; what hangs is the clearing up."""
    async with model_for(stall_timeout=TIMEOUT) as model:
        await model.ensure_loaded()
        engine.close_gate.shut()
        async with working(model, sequence(b"a", 1), sequence(b"b", 1)):
            await engine.close_gate.arrived()
        await passing(mock_clock, TIMEOUT)
        assert logged()[0][2]["doing"] == "freeing a batch's session"
        engine.close_gate.open()


async def test_without_a_bound_nothing_is_a_stall(model_for, wedged, mock_clock):
    async with model_for(stall_timeout=0) as model, working(model, sequence()):
        await wedged.arrived()
        await passing(mock_clock, 30)
        assert model.status().ailments == {}
        wedged.open()


async def test_while_nothing_is_at_work_nobody_looks(model_for, mock_clock, eventually):
    async with model_for(stall_timeout=TIMEOUT) as model:
        await answer(model)
        await eventually(lambda: model.status().active_slots == 0)
        await passing(mock_clock, TIMEOUT)  # the look that was due
        with trio.CancelScope(deadline=math.inf):
            await wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().seconds_to_next_deadline > TIMEOUT


@dataclass(eq=False)
class Idle:
    """A slot that calls nothing."""

    index: int = 0
    pulse: Pulse = field(default_factory=Pulse)


async def test_who_comes_and_goes_in_one_step_does_not_end_the_watch(nursery):
    watch = StallWatch("tiny", TIMEOUT, lambda slot, ailment: None)
    nursery.start_soon(watch.run)
    await wait_all_tasks_blocked()
    with watch.attending(Idle()):
        pass
    await wait_all_tasks_blocked()
    with watch.attending(Idle()):
        await wait_all_tasks_blocked()


class Patient:
    """A slot, of whose thread a test says what it does."""

    def __init__(self):
        self.index, self.names, self.failed = 0, {}, 0
        self.pulse = Pulse()

    def note_stall(self):
        self.failed += 1


async def test_a_slot_is_not_better_because_one_of_those_who_attend_to_it_has_gone(mock_clock):
    said, patient = [], Patient()
    watch = StallWatch("tiny", TIMEOUT, lambda slot, ailment: said.append(ailment))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        with watch.attending(patient):
            with watch.attending(patient):
                patient.pulse.under_way = Call("evaluating a step", trio.current_time())
                await passing(mock_clock, TIMEOUT)
            assert (said, patient.failed) == ([Ailment.STALLED], 1)
            patient.pulse.under_way = None
        assert said == [Ailment.STALLED, None]
        nursery.cancel_scope.cancel()
