"""Sequences of one context: what each is given, beside any others, and how tokens are chosen for all of them."""

import random
import threading
from itertools import pairwise

import numpy as np
import pytest
from tiny_models import GREEDY, answer, asking, finish, loaded, opened, smollm2, tiny_model

from trioserve.engine.base import Constraint, ConstraintKind, Failed, Finished, Token
from trioserve.engine.llama.chooser import Chooser, Row
from trioserve.engine.prefix import cut
from trioserve.engine.sampling import Sampling

# In log probability. A quiet session that evaluates the same tokens in one piece instead of one by one moves the lead
# of this model's likeliest token by up to 0.4 (median 0.04): its activations are rounded to 8 bits.
NEAR = 0.5
SEQUENCES = 6


@pytest.fixture(scope="module")
def weights():
    with loaded(smollm2()) as real:
        yield real


@pytest.fixture(scope="module")
def tiny():
    with loaded(tiny_model()) as weights:
        yield weights


PROMPTS = [
    "Once upon a time there was a queen who",
    "The capital of France is",
    "def fibonacci(n):",
    "1, 2, 3, 4, 5,",
    "Water boils when",
    "My favourite colour is blue because " * 6,
    "A letter to my landlord about the roof: Dear Sir,",
    "It was a dark and stormy night. " * 12,
]


def requests_for(weights, sampling=GREEDY, tokens=24):
    return [
        asking(weights.tokenize(text, special=False, add_bos=True), tokens, sampling=sampling, logprobs=2)
        for text in PROMPTS
    ]


def crowded(session, requests, seed):
    """Answer all requests, as many at once as the session takes, in an order and at moments that a seed decides."""
    chance = random.Random(seed)
    waiting = chance.sample(list(enumerate(requests)), len(requests))
    owners, tokens = {}, {index: [] for index, _ in waiting}
    while waiting or owners:
        while waiting and len(owners) < session.max_sequences and chance.random() < 0.6:
            index, request = waiting.pop()
            owners[session.add(request)] = index
        for event in session.step(2):
            if isinstance(event, Token):
                tokens[owners[event.sequence]].append(event)
            else:
                assert isinstance(event, Finished), event
                del owners[event.sequence]
                session.remove(event.sequence)
    return [tokens[index] for index in range(len(requests))]


def parted_without_cause(alone, beside):
    """The place where an answer differs from the one alone though there only one token was likely; None for nowhere."""
    for place, (one, other) in enumerate(zip(alone, beside, strict=False)):
        if one.token != other.token:
            first, second = (said.logprob for said in one.likelihood.top)
            return None if first - second < NEAR else place
    return None


@pytest.fixture(scope="module")
def alone(weights):
    """What a quiet session answers."""
    with opened(weights, n_ctx=512) as session:
        return [_tokens(session, request) for request in requests_for(weights)]


@pytest.mark.parametrize("seed", range(2))
def test_greedy_answers_in_a_crowd_are_those_of_a_quiet_session_but_for_ties(weights, alone, seed):
    requests = requests_for(weights)
    with opened(weights, n_ctx=512, max_sequences=SEQUENCES) as session:
        beside = crowded(session, requests, seed)
    assert [parted_without_cause(*pair) for pair in zip(alone, beside, strict=True)] == [None] * len(requests)
    equal = sum(
        [event.token for event in one] == [event.token for event in other]
        for one, other in zip(alone, beside, strict=True)
    )
    assert equal >= len(requests) / 2, "ties are rare"


def _tokens(session, request):
    number = session.add(request)
    events = []
    while not isinstance(ended := (events or [None])[-1], Finished):
        assert not isinstance(ended, Failed)
        events += session.step(2)
    session.remove(number)
    return events[:-1]


@pytest.mark.parametrize("seed", range(4))
def test_greedy_answers_of_weights_in_32_bits_are_the_same_in_any_crowd(tiny, seed):
    chance = random.Random(seed)
    wanted = [
        asking([chance.randrange(3, 200) for _ in range(chance.randrange(1, 60))], 24, logprobs=2, ignore_eos=True)
        for _ in range(12)
    ]
    with opened(tiny, n_ctx=128) as session:
        alone = [_tokens(session, request) for request in wanted]
    with opened(tiny, n_ctx=128, max_sequences=SEQUENCES) as session:
        beside = crowded(session, wanted, seed)
    assert [[event.token for event in one] for one in alone] == [[event.token for event in one] for one in beside]


def test_random_numbers_are_each_sequence_s_own(tiny):
    """A tiny model in 32 bits: rounding hardly ever decides, so that a seed gives the same text in any company."""
    samplings = [Sampling(temperature=1.5, top_k=50, seed=seed) for seed in range(4)]
    prompts = [[5 + index, 9, 30 + index] for index in range(4)]
    wanted = [asking(prompt, 20, sampling=one) for prompt, one in zip(prompts, samplings, strict=True)]
    with opened(tiny, n_ctx=128) as session:
        alone = [answer(session, request).tokens for request in wanted]
    with opened(tiny, n_ctx=128, max_sequences=4) as session:
        numbers = [session.add(request) for request in wanted]
        beside = finish(session, *numbers, threads=4)
    assert [one.tokens for one in beside] == alone
    assert all(one != other for one, other in pairwise(alone))


def test_an_interrupted_step_is_taken_again(tiny):
    wanted = [asking([5, 6, 7, 8], 8), asking([9, 10], 8)]
    with opened(tiny, n_ctx=128) as session:
        alone = [answer(session, request).tokens for request in wanted]
    with opened(tiny, n_ctx=128, max_sequences=2) as session:
        numbers = [session.add(request) for request in wanted]
        tokens = {number: [] for number in numbers}
        for step in range(60):
            if step % 3 == 0:
                session.interrupt()
            events = session.step(1)
            if step % 3 == 0:
                assert events == []
                session.resume()
                assert session.is_sound(2)
            for event in events:
                if isinstance(event, Token):
                    tokens[event.sequence].append(event.token)
    assert [tokens[number] for number in numbers] == alone


def _told(session, requests, every=0):
    """Tokens and likelihoods of answers to requests that join all at once, or one after so many steps."""
    told, ended, waiting, steps = {}, {}, list(enumerate(requests)), 0
    while waiting or set(told) - set(ended):
        while waiting and steps >= every * waiting[0][0]:
            index, request = waiting.pop(0)
            told[session.add(request), index] = []
        for event in session.step(2):
            key = next(key for key in told if key[0] == event.sequence and key not in ended)
            if isinstance(event, Token):
                told[key].append((event.token, event.likelihood))
            else:
                ended[key] = event
                session.remove(event.sequence)
        steps += 1
    return [told[key] for key in sorted(told, key=lambda key: key[1])]


@pytest.fixture(scope="module")
def quantised():
    with loaded(tiny_model(quantised=True, n_ctx_train=1024)) as tiny:
        yield tiny


@pytest.mark.parametrize("kind", ["weights", "quantised"])
@pytest.mark.parametrize("every", [0, 3])
def test_next_tokens_have_the_same_bits_in_any_company(request, kind, every):
    weights = request.getfixturevalue(kind)
    if not weights.rows_alike:
        pytest.skip("this processor multiplies several rows otherwise than one")
    chooser = random.Random(1)
    lengths = [60, 61, 100, 63, 360, 62, 210, 64]
    requests = [
        asking(
            [chooser.randrange(3, weights.vocab_size) for _ in range(length)],
            16,
            ignore_eos=True,
            reuse=False,
            logprobs=5,
        )
        for length in lengths
    ]
    with opened(weights, n_ctx=512) as session:
        alone = [_told(session, [request])[0] for request in requests]
    with opened(weights, n_ctx=512, max_sequences=len(lengths)) as session:
        assert _told(session, requests, every) == alone
        assert session.is_sound()


def test_what_one_sequence_leaves_serves_any_other(tiny):
    with opened(tiny, n_ctx=128, max_sequences=3) as session:
        prompt = list(range(10, 60))
        number = session.add(asking(prompt, 1))
        finish(session, number)
        session.remove(number)
        session.add(asking([200, 201], 4))
        again = session.add(asking([*prompt, 7, 8], 1))
        (finished,) = [event for event in _until_finished(session, again) if isinstance(event, Finished)]
        assert finished.cached == cut(50, 52, tiny._grain)


def _until_finished(session, number):
    events = []
    while not any(isinstance(event, Finished) and event.sequence == number for event in events):
        events += session.step(1)
    return [event for event in events if event.sequence == number]


# -- choosing


class Table:
    """A context that has logits for some rows of its last batch."""

    def __init__(self, rows):
        self.rows = dict(rows)

    def logits(self, row):
        return self.rows[row]

    def likeliest(self, outputs, which, bans):
        assert outputs == len(self.rows)
        assert bans == [None] * len(which)
        logits = list(self.rows.values())
        return [int(logits[index].argmax()) for index in which]


class Fixed:
    """A sampler that chooses by its own rule."""

    def __init__(self, rule=None, *, quick=False):
        self.plain = rule is None
        self.quick = quick
        self.banned = None
        self._rule = rule

    def choose(self, context, row):
        return (int(context.logits(row).argmax()) if self._rule is None else self._rule(context.logits(row))), None


def least(logits):
    return int(logits.argmin())


def broken(logits):
    raise RuntimeError("it is broken")


def rows_of(table, samplers):
    return [Row(one, row, output) for output, (one, row) in enumerate(zip(samplers, table.rows, strict=True))]


@pytest.mark.parametrize("threads", [1, 2, 5, 32])
def test_each_row_is_chosen_by_its_own_sampler_whichever_way(threads):
    rng = np.random.default_rng(1)
    table = Table((3 * row + 1, rng.random(50, np.float32)) for row in range(9))
    samplers = [Fixed(least if index % 3 else None) for index in range(9)]
    chooser = Chooser(table)
    choices = chooser.choose(rows_of(table, samplers), len(samplers), threads)
    chooser.close()
    expected = [one.choose(table, row) for one, row in zip(samplers, table.rows, strict=True)]
    assert choices == expected


@pytest.mark.parametrize(("quick", "slow", "most"), [(16, 0, 1), (0, 1, 1), (3, 1, 2), (0, 3, 3), (9, 2, 3), (1, 9, 4)])
def test_rows_that_are_chosen_quickly_share_a_thread(quick, slow, most):
    table = Table((row, np.eye(1, 20, row, dtype=np.float32)[0]) for row in range(quick + slow))
    together = threading.Barrier(most)  # which breaks where the first rows of the threads don't meet
    first, used = threading.local(), set()

    def meeting(logits):
        if not hasattr(first, "met"):
            first.met = True
            together.wait(10)
        used.add(threading.get_ident())
        return least(logits)

    samplers = [Fixed(meeting, quick=row < quick) for row in range(quick + slow)]
    chooser = Chooser(table)
    choices = chooser.choose(rows_of(table, samplers), len(samplers), 4)
    chooser.close()
    assert [token for token, _ in choices] == [least(logits) for logits in table.rows.values()]
    assert len(used) == most


@pytest.mark.parametrize("quick", [0, 1, 9])
def test_the_thread_that_chooses_the_quick_rows_has_its_share_of_the_slow_ones(quick):
    table = Table((row, np.eye(1, 20, row, dtype=np.float32)[0]) for row in range(quick + 9))
    threads = []

    def noting(logits):
        threads.append(threading.get_ident())
        return least(logits)

    chooser = Chooser(table)
    samplers = [Fixed(least, quick=True)] * quick + [Fixed(noting) for _ in range(9)]
    chooser.choose(rows_of(table, samplers), len(samplers), 2)
    chooser.close()
    assert threads.count(threading.get_ident()) == 4
    assert len(set(threads)) == 2


@pytest.mark.parametrize("threads", [1, 4])
def test_a_sampler_that_fails_spoils_its_own_row_only(threads):
    table = Table((row, np.eye(1, 20, row, dtype=np.float32)[0]) for row in range(4))
    samplers = [Fixed(), Fixed(broken), Fixed(least), Fixed(broken)]
    chooser = Chooser(table)
    choices = chooser.choose(rows_of(table, samplers), len(samplers), threads)
    chooser.close()
    assert [isinstance(choice, RuntimeError) for choice in choices] == [False, True, False, True]
    assert (choices[0], choices[2]) == ((0, None), (0, None))


def test_bans_hold_for_their_own_row_also_where_rows_are_chosen_together(tiny):
    """One row, then all of them, then those that are plain: three ways to the same token."""
    free, bound = asking([5, 6, 7], 12), asking([5, 6, 7], 12, sampling=banning(tiny, [5, 6, 7]))
    with opened(tiny, n_ctx=128) as session:
        alone = [answer(session, request).tokens for request in (free, bound)]
    assert alone[0][0] != alone[1][0]
    drawn = asking([8, 9], 12, sampling=Sampling(temperature=1, seed=1))
    for more in ([], [drawn]):
        with opened(tiny, n_ctx=128, max_sequences=4) as session:
            numbers = [session.add(request) for request in (bound, free, bound, *more)]
            beside = [one.tokens for one in finish(session, *numbers, threads=2)]
        assert beside[:3] == [alone[1], alone[0], alone[1]]


def banning(weights, prompt):
    """A sampling that forbids the likeliest first token."""
    with opened(weights, n_ctx=128) as session:
        first = answer(session, asking(prompt, 1)).tokens[0]
    return Sampling(temperature=0, logit_bias=((first, -np.inf),))


def test_a_sequence_that_has_no_token_left_ends_and_the_others_go_on(weights):
    constraint = Constraint(ConstraintKind.REGEX, "[0-9]{3}")
    nothing = tuple((token, -np.inf) for token in range(weights.vocab_size))
    with opened(weights, n_ctx=256, max_sequences=2) as session:
        bad = session.add(
            asking([1, 2, 3], 8, sampling=Sampling(temperature=0, logit_bias=nothing), constraint=constraint)
        )
        good = session.add(asking([1, 2, 3], 8, constraint=constraint))
        events = []
        while not any(isinstance(event, Finished) for event in events):
            events += session.step(2)
    assert [event.sequence for event in events if isinstance(event, Failed)] == [bad]
    assert [event.unanswerable for event in events if isinstance(event, Failed)] == [True]
    assert "".join(event.text for event in events if event.sequence == good).isdigit()
