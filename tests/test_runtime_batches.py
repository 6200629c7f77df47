"""Batches: many sequences in one job, the session that is made for them, and how they end."""

import contextlib

import pytest
import trio

from trioserve.engine.base import ENDINGS, Failed, LoadFailure, SequenceRequest, SessionOptions, Token
from trioserve.errors import EngineError, ModelLoadError
from trioserve.runtime.batch_sessions import BatchSessions
from trioserve.testing import FakeEngine, FakeSession, fake_answer


def sequence(prompt=b"prompt", tokens=5):
    return SequenceRequest(prompt=list(prompt), max_tokens=tokens)


def many(count, tokens=3):
    return [sequence(b"prompt %d" % number, tokens) for number in range(count)]


@contextlib.asynccontextmanager
async def working(model, works):
    lease = await model.admit(None)
    try:
        yield lease, lease.start(await lease.ready(), *works)
    finally:
        lease.release()


async def read_all(job):
    """Text of every sequence, by index, and the ends, each with its index, in the order that they came in."""
    texts, ends = dict.fromkeys(range(len(job.works)), ""), []
    while len(ends) < len(job.works):
        for index, event in await job.next_events():
            if isinstance(event, Token):
                texts[index] += event.text
            if isinstance(event, ENDINGS):
                ends.append((index, event))
    return texts, ends


@pytest.fixture
def opened(monkeypatch):
    """The options of all sessions that are made, in order."""
    options = []
    make = FakeSession.__init__

    def note(self, engine, name, given):
        options.append(given)
        make(self, engine, name, given)

    monkeypatch.setattr(FakeSession, "__init__", note)
    return options


@pytest.fixture
def crowd(monkeypatch):
    """The most sequences that ever lived in one session at a step."""
    most = [0]
    step = FakeSession.step

    def note(self, threads):
        most[0] = max(most[0], len(self._live))
        return step(self, threads)

    monkeypatch.setattr(FakeSession, "step", note)
    return most


async def test_each_sequence_of_a_batch_gets_its_own_answer(model_for):
    works = many(20)
    async with model_for() as model, working(model, works) as (_, job):
        texts, ends = await read_all(job)
    assert texts == {index: fake_answer(bytes(work.prompt), 3) for index, work in enumerate(works)}
    assert sorted(index for index, _ in ends) == list(range(20))


@pytest.mark.parametrize(("capacity", "works", "together"), [(8, 20, 8), (8, 3, 3), (1, 4, 1), (2, 5, 2)])
async def test_as_many_sequences_live_together_as_the_capacity_says(model_for, crowd, capacity, works, together):
    async with model_for(batch_capacity=capacity) as model, working(model, many(works)) as (_, job):
        await read_all(job)
    assert crowd == [together]


async def test_sequences_begin_in_their_order_and_where_others_end(model_for, engine):
    works = [sequence(b"long", 9), *many(4, tokens=2)]
    async with model_for(batch_capacity=2) as model, working(model, works) as (_, job):
        _, ends = await read_all(job)
        begun = [times.begun for times in job.times]
    assert [index for index, _ in ends] in ([1, 2, 3, 4, 0], [1, 2, 3, 0, 4])
    assert begun == sorted(begun)


async def test_times_of_each_sequence_are_in_order(model_for):
    async with model_for(batch_capacity=2) as model, working(model, many(5)) as (_, job):
        await read_all(job)
        for times in job.times:
            assert times.begun <= times.first <= times.ended


async def test_the_session_of_a_batch_is_as_large_as_it_needs_and_goes_with_it(model_for, engine, opened, eventually):
    works = [sequence(b"x" * 50, 30), sequence(b"y" * 10, 7), sequence(b"z", 1)]
    async with model_for(n_ctx=1000) as model:
        async with working(model, works) as (_, job):
            await read_all(job)
        await eventually(lambda: model.status().active_slots == 0)
        assert [(options.max_sequences, options.n_ctx) for options in opened] == [(1, 1000), (3, 80)]
        assert engine.closed == ["tiny[1]"]


async def test_a_batch_never_gets_more_context_than_a_slot(model_for, opened):
    async with model_for(n_ctx=100) as model, working(model, [sequence(tokens=5000), sequence(tokens=2)]) as (_, job):
        texts, _ = await read_all(job)
    assert opened[-1].n_ctx == 100
    assert len(texts[0]) == 100 - len(b"prompt")


async def test_one_sequence_needs_no_other_session(model_for, opened):
    async with model_for() as model, working(model, [sequence()]) as (_, job):
        await read_all(job)
    assert len(opened) == 1


async def test_batches_in_several_slots_run_side_by_side(model_for, engine):
    engine.step_gate.shut()
    async with model_for(slots=2) as model, working(model, many(3)) as (_, one), working(model, many(3)) as (_, other):
        await engine.step_gate.arrived(2)
        engine.step_gate.open()
        assert await read_all(one)
        assert await read_all(other)


async def test_a_batch_that_is_given_up_stops_as_a_whole_and_frees_its_session(model_for, engine, eventually):
    engine.step_gate.shut()
    async with model_for() as model:
        async with working(model, many(20, tokens=500)) as (lease, job):
            await engine.step_gate.arrived()
            lease.release()
            with pytest.raises(EngineError, match="given up"):
                await job.next_events()
        await eventually(lambda: model.status().active_slots == 0)
        assert engine.closed == ["tiny[1]"]
        engine.step_gate.open()
        async with working(model, [sequence()]) as (_, job):
            texts, _ = await read_all(job)
        assert texts[0] == fake_answer(b"prompt", 5), "the slot works again"


async def test_a_batch_that_is_given_up_while_its_session_is_made_begins_nothing(model_for, engine, eventually):
    async with model_for() as model:
        async with working(model, [sequence()]) as (_, job):
            await read_all(job)
        engine.session_gate.shut()
        async with working(model, many(3)) as (lease, job):
            await engine.session_gate.arrived(2)
            lease.release()
            engine.session_gate.open()
        await eventually(lambda: model.status().active_slots == 0)
        assert engine.closed == ["tiny[1]"]
        assert all(times.begun is None for times in job.times)


async def test_a_batch_without_a_session_of_its_own_goes_one_by_one(model_for, engine, crowd, caplog):
    async with model_for() as model:
        await model.ensure_loaded()
        engine.failing_session = 1
        engine.failing_sessions = 99
        async with working(model, many(4)) as (_, job):
            texts, _ = await read_all(job)
    assert crowd == [1]
    assert texts == {index: fake_answer(b"prompt %d" % index, 3) for index in range(4)}
    assert "no session for 4 sequences" in caplog.text


async def test_a_step_that_fails_ends_the_sequences_that_live_and_the_others_go_on(model_for, engine):
    engine.failing_step = 2
    async with model_for(batch_capacity=2) as model, working(model, many(4)) as (_, job):
        texts, ends = await read_all(job)
    assert {index: type(end) is Failed for index, end in ends} == {0: True, 1: True, 2: False, 3: False}
    assert texts[2] == fake_answer(b"prompt 2", 3)


async def test_a_slow_reader_pauses_a_batch(model_for, eventually):
    async with model_for() as model, working(model, many(8, tokens=200)) as (_, job):
        await eventually(lambda: job.full)
        texts, _ = await read_all(job)
    assert all(len(text) == 200 for text in texts.values())


class Limited:
    """Weights that make sessions for few sequences only."""

    def __init__(self, most):
        self.most, self.asked = most, []

    def open_session(self, options):
        self.asked.append(options.max_sequences)
        if options.max_sequences > self.most:
            raise LoadFailure("too large")
        return FakeSession(FakeEngine(), "made", options)


@pytest.mark.parametrize(
    ("most", "room", "asked", "made"),
    [(8, 8, [8], 8), (3, 8, [8, 4, 2], 2), (8, 4, [4], 4), (1, 8, [8, 4, 2], None), (8, 1, [], None)],
)
def test_where_memory_is_short_a_session_takes_half_as_many_and_so_on(most, room, asked, made):
    weights = Limited(most)
    batches = BatchSessions(
        weights, SessionOptions(), SessionOptions(), 8, lambda options: options.max_sequences <= room
    )
    session = batches.open(many(20))
    assert weights.asked == asked
    assert (session and session.max_sequences) == made


async def test_a_clone_that_is_made_otherwise_than_the_primary_is_no_clone(model_for, monkeypatch, engine):
    make = FakeSession.__init__

    def other(self, engine, name, options):
        make(self, engine, name, options)
        if name.endswith("[2]"):
            self.traits = type(self.traits)("another", self.traits.task, self.traits.modes)

    monkeypatch.setattr(FakeSession, "__init__", other)
    async with model_for(slots=4) as model:
        with pytest.raises(ModelLoadError, match="slot 2 is made as"):
            await model.ensure_loaded()
        assert engine.closed == ["tiny[2]", "tiny[1]", "tiny[0]", "tiny"]
        assert model.status().state == "unloaded"


async def test_the_last_events_of_a_batch_reach_a_reader_who_comes_late(model_for, eventually):
    async with model_for() as model, working(model, many(3)) as (_, job):
        await eventually(lambda: job.done)
        with trio.fail_after(5):
            texts, _ = await read_all(job)
    assert len(texts) == 3
