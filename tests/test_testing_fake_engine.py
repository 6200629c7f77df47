"""The fake session keeps the promises of ``engine.base.Session``, so that tests on it mean something."""

from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.engine.base import Failed, Finished, FinishReason, LoadOptions, SequenceRequest, SessionOptions, Token
from trioserve.testing import FakeEngine, fake_answer


@pytest.fixture
def session(engine):
    return engine.load(Path("fake.gguf"), LoadOptions()).open_session(SessionOptions(n_ctx=64, max_sequences=4))


def request(prompt=b"ab", tokens=3, **fields):
    return SequenceRequest(prompt=list(prompt), max_tokens=tokens, **fields)


def run_dry(session):
    """Step until nothing comes any more; the events of each sequence."""
    events = {}
    while step := session.step(1):
        for event in step:
            events.setdefault(event.sequence, []).append(event)
    return events


def text(events):
    return "".join(event.text for event in events)


def test_numbers_are_unique_among_the_live(session):
    numbers = [session.add(request()) for _ in range(3)]
    assert len(set(numbers)) == 3
    session.remove(numbers[0])
    assert session.add(request()) not in numbers[1:]


def test_a_sequence_that_has_ended_gives_nothing_more_until_it_is_removed(session):
    short, long = session.add(request(b"short", 1)), session.add(request(b"long", 5))
    events = run_dry(session)
    assert [type(event) for event in events[short]] == [Token, Finished]
    assert text(events[long]) == fake_answer(b"long", 5)
    assert session.add(request()) not in {short, long}, "an ended sequence keeps its number until it is removed"


def test_a_failed_sequence_gives_nothing_more(session, engine):
    session.add(request())
    engine.failing_step = 1
    assert [type(event) for event in session.step(1)] == [Failed]
    assert list(session.step(1)) == []


@pytest.mark.parametrize(("fields", "reason"), [({}, FinishReason.LENGTH), ({"stops": ("x",)}, FinishReason.LENGTH)])
def test_an_answer_has_all_its_letters(session, fields, reason):
    number = session.add(request(**fields))
    events = run_dry(session)[number]
    assert (text(events), events[-1].reason) == (fake_answer(b"ab", 3), reason)


def test_a_stop_string_is_no_part_of_the_answer():
    answer = fake_answer(b"ab", 8)
    session = FakeEngine().load(Path("f.gguf"), LoadOptions()).open_session(SessionOptions())
    number = session.add(request(tokens=8, stops=(answer[3:5],)))
    events = run_dry(session)[number]
    assert (text(events), events[-1].reason) == (answer[:3], FinishReason.STOP)


def test_a_reset_session_is_as_good_as_new(session):
    session.add(request())
    session.interrupt()
    assert list(session.step(1)) == []
    session.reset()
    number = session.add(request())
    assert text(run_dry(session)[number]) == fake_answer(b"ab", 3)


def test_a_session_is_sound_after_a_reset_unless_told_otherwise(session, engine):
    session.add(request())
    assert not session.is_sound()
    session.reset()
    assert session.is_sound()
    session.interrupt()
    assert not session.is_sound()
    session.reset()
    engine.failing_proofs = 1
    assert [session.is_sound(), session.is_sound()] == [False, True]


async def test_a_deaf_session_is_not_woken_by_an_interrupt(session, engine):
    engine.deaf = True
    engine.step_gate.shut()
    session.add(request())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, session.step, 1)
        await engine.step_gate.arrived()
        session.interrupt()
        await wait_all_tasks_blocked(0.01)
        assert len(nursery.child_tasks) == 1
        engine.step_gate.open()


def test_a_session_is_closed_once(session, engine):
    session.close()
    session.close()
    assert engine.closed == [session.name]
