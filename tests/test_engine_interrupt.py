"""Interrupting a session: from any thread, at any time, and nobody else notices."""

import itertools
import random
import threading
import time

import pytest
from tiny_models import BOS, answer, asking, loaded, opened, smollm2, tiny_model

from trioserve.engine.base import ENDINGS
from trioserve.engine.llama.context import Context, Outcome

PREFILL = 1900  # tokens; many seconds of work for the real model
HAMMERING = 2.0  # seconds


@pytest.fixture(scope="module")
def tiny():
    with loaded(tiny_model(dim=128, ff=256, quantised=True)) as weights:
        yield weights


@pytest.fixture(scope="module")
def real():
    with loaded(smollm2()) as weights:
        yield weights


@pytest.fixture
def decodes(monkeypatch):
    """What became of each decode of sessions opened from here on, and an event that says that one is under way."""

    class Decodes(list):
        under_way = threading.Event()

    seen = Decodes()

    class Watched(Context):
        def decode(self, batch, threads):
            seen.under_way.set()
            outcome = super().decode(batch, threads)
            seen.append(outcome)
            return outcome

    monkeypatch.setattr("trioserve.engine.llama.session.Context", Watched)
    return seen


def long_prompt(weights, length=PREFILL):
    return [BOS, *(3 + i * i % (weights.vocab_size - 3) for i in range(length - 1))]


def interrupt_once_under_way(session, under_way):
    def interrupt():
        assert under_way.wait(60)
        time.sleep(0.1)  # well inside the evaluation, which takes seconds
        session.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


SIZES = {"n_ctx": 2048, "n_batch": 2048}


@pytest.mark.parametrize("n_ubatch", [512, 2048])
def test_an_interrupt_stops_a_prefill_in_the_middle_of_a_decode(real, decodes, n_ubatch):
    with opened(real, n_ubatch=n_ubatch, **SIZES) as session:
        session.add(asking(long_prompt(real)))
        thread = interrupt_once_under_way(session, decodes.under_way)
        assert [session.step(2) for _ in range(8)] == [[]] * 8
        thread.join()
    # One decode was cut, none came after it, and the prompt was not finished.
    assert decodes.count(Outcome.INTERRUPTED) == 1
    assert decodes[-1] is Outcome.INTERRUPTED
    assert (len(decodes) - 1) * n_ubatch < PREFILL


def test_after_reset_an_interrupted_session_answers_like_a_fresh_one(real, decodes):
    question = asking(long_prompt(real, 40), 4, ignore_eos=True)
    with opened(real, **SIZES) as fresh, opened(real, **SIZES) as session:
        expected = answer(fresh, question).tokens
        decodes.under_way.clear()
        session.add(asking(long_prompt(real)))
        thread = interrupt_once_under_way(session, decodes.under_way)
        assert session.step(2) == []
        thread.join()
        session.reset()
        assert answer(session, question).tokens == expected


def test_an_interrupted_answer_stands_still_until_reset(tiny):
    question = asking(long_prompt(tiny, 20), 12, ignore_eos=True)
    with opened(tiny) as fresh, opened(tiny) as session:
        expected = answer(fresh, question).tokens
        session.add(question)
        grown = [event.token for _ in range(5) for event in session.step(1)]
        session.interrupt()
        assert grown == expected[:5]
        assert [session.step(1) for _ in range(5)] == [[]] * 5
        session.reset()
        assert answer(session, question).tokens == expected


def test_an_interrupt_before_the_first_step_holds(tiny, decodes):
    with opened(tiny) as session:
        session.interrupt()
        session.add(asking(long_prompt(tiny, 20)))
        assert session.step(1) == []
        assert decodes == []
        session.reset()
        assert len(answer(session, asking(long_prompt(tiny, 20), 3, ignore_eos=True)).tokens) == 3


def test_a_sequence_can_be_removed_from_an_interrupted_session(tiny):
    question = asking(long_prompt(tiny, 20), 5, ignore_eos=True)
    with opened(tiny, max_sequences=1) as session:
        expected = answer(session, question).tokens
        number = session.add(question)
        session.interrupt()
        session.step(1)
        session.remove(number)
        session.reset()
        assert answer(session, question).tokens == expected


def test_interrupting_twice_or_when_idle_or_closed_is_harmless(tiny):
    with opened(tiny) as session:
        session.interrupt()
        session.interrupt()
        session.reset()
        assert len(answer(session, asking([BOS, 300], 3, ignore_eos=True)).tokens) == 3
    session.interrupt()


def interrupt_again_and_again(weights, over, counts):
    """Work a session of its own: each round a long prompt is begun and interrupted after a moment."""
    with opened(weights, n_ctx=1024) as victim:
        while not over.is_set():
            victim.reset()
            victim.add(asking(long_prompt(weights, 800), 200, ignore_eos=True))
            timer = threading.Timer(0.002, victim.interrupt)
            timer.start()
            while timer.is_alive():
                victim.step(1)
            counts.append(len(victim.step(1)))


def test_an_interrupted_session_leaves_one_that_decodes_at_the_same_moment_alone(tiny):
    question = asking(long_prompt(tiny, 100), 150, ignore_eos=True, reuse=False)
    over, counts, done = threading.Event(), [], 0
    with opened(tiny) as session:
        expected = answer(session, question)
        thread = threading.Thread(target=interrupt_again_and_again, args=[tiny, over, counts])
        thread.start()
        try:
            while done < 5 or len(counts) < 20:
                assert answer(session, question) == expected
                done += 1
        finally:
            over.set()
            thread.join()
    assert set(counts) == {0}


def test_an_interrupt_is_safe_at_any_time(tiny):
    """Hammer one session with interrupts while it is reset, filled and stepped: an answer is right or cut short."""
    question = asking(long_prompt(tiny, 100), 20, ignore_eos=True)
    over = threading.Event()
    cut = whole = 0

    def hammer(session, longest):
        for i in itertools.count():
            if over.is_set():
                return
            session.interrupt()
            time.sleep(longest * (i % 40) / 40)

    with opened(tiny, n_ubatch=64) as session:
        start = time.monotonic()
        expected = answer(session, question).tokens
        took = time.monotonic() - start
        thread = threading.Thread(target=hammer, args=[session, 4 * took])
        thread.start()
        end = time.monotonic() + HAMMERING
        while time.monotonic() < end:
            session.reset()
            grown = tokens_until_silent(session, question)
            assert grown == expected[: len(grown)]
            whole += len(grown) == 20
            cut += len(grown) < 20
        over.set()
        thread.join()
        session.reset()
        assert answer(session, question).tokens == expected
    assert cut
    assert whole


def tokens_until_silent(session, question):
    """Step until the sequence ends or nothing comes any more; two chunks of prompt are silent too."""
    session.add(question)
    grown, silent = [], 0
    while silent < 3 and len(grown) < question.max_tokens:
        events = session.step(1)
        silent = 0 if events else silent + 1
        grown += [event.token for event in events if hasattr(event, "token")]
    return grown


def test_after_interrupts_at_random_moments_a_session_is_sound_and_answers_as_ever(tiny):
    """Prompts, answers and what was kept of earlier ones are cut anywhere; the next answer doesn't know."""
    question, long = asking(long_prompt(tiny, 100), 20, ignore_eos=True), asking(long_prompt(tiny, 300), 40)
    moments = random.Random(7)
    with opened(tiny, n_ubatch=64, n_ctx=512) as session:
        start = time.monotonic()
        expected = answer(session, question).tokens
        took = time.monotonic() - start
        for _ in range(40):
            timer = threading.Timer(moments.uniform(0, 2 * took), session.interrupt)
            timer.start()
            number = session.add(moments.choice([question, long]))
            while timer.is_alive():
                if any(isinstance(event, ENDINGS) for event in session.step(1)):
                    session.remove(number)
                    number = session.add(question)
            timer.join()
            session.reset()
            assert session.is_sound()
            assert answer(session, question).tokens == expected


def test_a_session_tells_when_its_memory_is_not_what_it_takes_it_for(tiny):
    question = asking(long_prompt(tiny, 30), 5, ignore_eos=True)
    with opened(tiny, max_sequences=2) as session:
        assert session.is_sound()
        number = session.add(question)
        session.step(1)
        assert not session.is_sound(), "a sequence is live"
        session.reset()
        assert session.is_sound()
        session.interrupt()
        assert not session.is_sound(), "the flag is up"
        session.reset()
        session._core._context.truncate(number, 3)
        assert not session.is_sound(), "tokens are missing"
        session.clear()
        assert session.is_sound()
        session.add(question)
        session.step(1)
        session._core._live.clear()
        assert not session.is_sound(), "tokens are there that nobody knows of"
