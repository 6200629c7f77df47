"""Choosing among the likeliest tokens: the same choices as among all of them."""

import dataclasses
import gc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import GREEDY, answer, asking, loaded, opened, smollm2

from trioserve.engine.llama import sampler as sampler_module
from trioserve.engine.llama.sampler import Sampler
from trioserve.engine.llama.shortlist import reach, shortlist
from trioserve.engine.sampling import Dry, Mirostat, Sampling

VOCAB = 64 * 500 + 7
PROMPT = list(range(100, 180))
STEPS = 40
USUAL = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=7)
NARROW = [
    USUAL,
    dataclasses.replace(USUAL, temperature=5.0, top_p=1.0, min_p=0.0),
    dataclasses.replace(USUAL, top_k=1),
    dataclasses.replace(USUAL, repeat_penalty=1.3),
    dataclasses.replace(USUAL, repeat_penalty=1e30, temperature=3.0, repeat_last_n=10),
    dataclasses.replace(USUAL, frequency_penalty=2.0, presence_penalty=1.0),
    dataclasses.replace(USUAL, typical_p=0.5, xtc_probability=0.5, dynatemp_range=0.5),
    dataclasses.replace(USUAL, logit_bias=((3, -np.inf),)),
    dataclasses.replace(GREEDY, repeat_penalty=1.3),
    dataclasses.replace(GREEDY, presence_penalty=100.0),
]
WIDE = [
    dataclasses.replace(USUAL, top_k=0),
    dataclasses.replace(USUAL, repeat_penalty=0.5),
    dataclasses.replace(USUAL, frequency_penalty=-1.0),
    dataclasses.replace(USUAL, presence_penalty=-1.0),
    dataclasses.replace(USUAL, top_n_sigma=1.0),
    dataclasses.replace(USUAL, mirostat=Mirostat(2)),
    dataclasses.replace(USUAL, dry=Dry(1.0)),
    dataclasses.replace(USUAL, logit_bias=((3, 1.0),)),
]


ANY = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 5.0, 1e6]),
    top_k=st.sampled_from([1, 2, 40, 125, 200]),
    top_p=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    typical_p=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.1, 0.5]),
    dynatemp_range=st.sampled_from([0.0, 0.5, 2.0]),
    repeat_penalty=st.sampled_from([1.0, 1.0000001, 1.1, 10.0]),
    repeat_last_n=st.sampled_from([0, 1, 5, 64, 2**31 - 1]),
    frequency_penalty=st.sampled_from([0.0, 0.01, 2.0]),
    presence_penalty=st.sampled_from([0.0, 2.0]),
    logit_bias=st.sampled_from([(), ((3, -np.inf), (105, -np.inf))]),
    seed=st.integers(0, 2**32 - 2),
)


def sampler_of(sampling, prompt=PROMPT, **options):
    return Sampler(SimpleNamespace(size=VOCAB, pointer=None), sampling, prompt, 2048, **options)


def context_of(logits):
    return SimpleNamespace(logits=lambda _: logits, pointer=None)


def every(logits, _):
    """The longest list."""
    return np.arange(len(logits))


def shortlist_or_every(logits, count):
    """Where there is none, llama.cpp would look into the context, which isn't one."""
    tokens = shortlist(logits, count)
    return every(logits, count) if tokens is None else tokens


def chosen(sampling, banned=(), steps=STEPS, left=VOCAB, up=3.0, down=0.0):
    """Tokens chosen from made-up logits, among which the same ones are near the top again: penalties have work.

    Arguments:
        sampling: the parameters.
        banned: tokens that are not to come.
        steps: choices.
        left: how many tokens are no less than possible.
        up: what those of the prompt's tokens are raised by.
        down: what all logits are lowered by. Penalties change those below zero in another way.
    """
    random = np.random.default_rng(0)
    favoured = random.choice(VOCAB, 60, replace=False)
    sampler = sampler_of(sampling, banned=banned)
    tokens = []
    for _ in range(steps):
        logits = random.standard_normal(VOCAB).astype(np.float32)
        logits[favoured] += 4
        logits[PROMPT] += up
        logits -= down
        logits[random.permutation(VOCAB)[left:]] = -np.inf
        tokens.append(sampler.choose(context_of(logits), 0)[0])
    sampler.close()
    return tokens


@pytest.fixture
def shortlists(monkeypatch):
    """The lengths of the lists that tokens were chosen from."""
    lengths = []

    def noting(logits, count):
        tokens = shortlist(logits, count)
        lengths.append(len(tokens))
        return tokens

    monkeypatch.setattr(sampler_module, "shortlist", noting)
    return lengths


@pytest.mark.parametrize("banned", [(), tuple(range(50, 150))], ids=["", "banned"])
@pytest.mark.parametrize("sampling", NARROW, ids=range(len(NARROW)))
def test_choices_are_those_among_all_tokens(monkeypatch, shortlists, sampling, banned):
    few = chosen(sampling, banned)
    assert len(shortlists) == STEPS
    assert max(shortlists) < 1000
    monkeypatch.setattr(sampler_module, "shortlist", every)
    assert chosen(sampling, banned) == few
    assert len(set(few)) > 5, "choices that could not differ would prove nothing"


@settings(max_examples=60)
@given(
    sampling=ANY, left=st.sampled_from([VOCAB, 300, 20]), up=st.sampled_from([3, 12]), down=st.sampled_from([0, 9, 1e4])
)
def test_choices_are_those_among_all_tokens_whatever_the_parameters(sampling, left, up, down):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampler_module, "shortlist", shortlist_or_every)
        few = chosen(sampling, range(90, 110), 8, left, up, down)
        patched.setattr(sampler_module, "shortlist", every)
        assert chosen(sampling, range(90, 110), 8, left, up, down) == few


@pytest.mark.parametrize("seed", range(20))
def test_equal_logits_stand_in_for_each_other_only(monkeypatch, seed):
    """Which one comes depends on all that the chain gets, in llama.cpp itself."""
    logits = np.round(2 * np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)) / 2

    def choose():
        return sampler_of(dataclasses.replace(USUAL, seed=seed)).choose(context_of(logits), 0)[0]

    few = choose()
    assert choose() == few
    monkeypatch.setattr(sampler_module, "shortlist", every)
    assert logits[choose()] == logits[few]


@pytest.mark.parametrize("sampling", WIDE, ids=range(len(WIDE)))
def test_what_looks_at_all_tokens_or_takes_some_up_has_no_reach(sampling):
    assert reach(sampling, 100, 10) is None


@pytest.mark.parametrize(
    ("sampling", "most"),
    [
        (USUAL, 40),
        (GREEDY, 1),
        (dataclasses.replace(USUAL, repeat_penalty=1.1), 40 + 64),
        (dataclasses.replace(USUAL, repeat_penalty=1.1, repeat_last_n=2**31 - 1), 40 + 110),
        (dataclasses.replace(USUAL, repeat_penalty=1.1, repeat_last_n=0), 40),
        (dataclasses.replace(GREEDY, presence_penalty=0.1), 1 + 10),
        (dataclasses.replace(USUAL, repeat_penalty=1.1, frequency_penalty=0.1), 40 + 64 + 10),
    ],
)
def test_penalties_reach_as_much_further_as_tokens_have_them(sampling, most):
    assert reach(sampling, 100, 10) == most


@given(seed=st.integers(0, 1000), count=st.integers(1, 40), spread=st.sampled_from([0.0, 1.0, 1e30]))
def test_the_likeliest_are_all_in_the_list(seed, count, spread):
    logits = (np.random.default_rng(seed).standard_normal(VOCAB) * spread).astype(np.float32)
    tokens = shortlist(logits, count)
    assert list(tokens) == sorted(set(tokens))
    left_out = np.setdiff1d(np.arange(VOCAB), tokens)
    assert len(tokens) >= count
    assert not left_out.size or logits[left_out].max() < np.sort(logits)[-count]


def test_a_list_is_made_of_the_few_that_are_allowed_and_others_where_those_are_too_few():
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[5:15] = 1.0
    assert list(shortlist(logits, 2)) == list(range(5, 15))
    assert len(shortlist(logits, 40)) == VOCAB


def test_no_list_is_made_of_a_small_vocabulary_or_of_what_are_no_numbers():
    assert shortlist(np.zeros(64 * 4 * 40 - 1, np.float32), 40) is None
    assert shortlist(np.zeros(64 * 4 * 40, np.float32), 40) is not None
    assert shortlist(np.full(VOCAB, np.nan, np.float32), 40) is None


@pytest.mark.parametrize(
    ("sampling", "prompt", "logprobs", "quick"),
    [
        (USUAL, 100, None, True),
        (USUAL, 100, 0, False),
        (GREEDY, 100, None, True),
        (dataclasses.replace(USUAL, top_k=0), 100, None, False),
        (dataclasses.replace(USUAL, repeat_penalty=1.1, repeat_last_n=200), VOCAB // 64 // 4 - 40, None, True),
        (dataclasses.replace(USUAL, repeat_penalty=1.1, repeat_last_n=200), VOCAB // 64 // 4 - 39, None, False),
    ],
)
def test_a_choice_is_quick_where_it_looks_at_a_list_alone(sampling, prompt, logprobs, quick):
    sampler = sampler_of(sampling, range(prompt), logprobs=logprobs)
    assert sampler.quick == quick
    sampler.close()


def test_thousands_of_bans_are_not_looked_through_for_each_token(monkeypatch):
    biases = []
    monkeypatch.setattr(sampler_module, "reach", lambda sampling, *_: biases.extend(sampling.logit_bias))
    sampler = sampler_of(dataclasses.replace(USUAL, logit_bias=((3, -np.inf), (4, 1.0), (5, -np.inf))))
    assert not sampler.quick
    assert biases == [(4, 1.0)]
    sampler.close()


def test_choices_leave_nothing_to_the_garbage_collector():
    with loaded(smollm2()) as weights, opened(weights) as session:
        asked = asking(weights.tokenize("Once upon a time", special=True, add_bos=True), 100, USUAL)
        answer(session, asked)
        gc.collect()
        gc.disable()
        try:
            answer(session, asked)
            assert gc.collect() < 50
        finally:
            gc.enable()


def test_answers_of_a_model_are_those_of_llama_cpps_own_way_through_all_tokens(monkeypatch, shortlists):
    with loaded(smollm2()) as weights, opened(weights) as session:
        prompt = weights.tokenize("Once upon a time there was", special=True, add_bos=True)

        def answers():
            return [
                answer(session, asking(prompt, 24, dataclasses.replace(sampling, seed=seed))).tokens
                for sampling in NARROW[:6]
                for seed in range(3)
            ]

        few = answers()
        assert len(shortlists) == sum(map(len, few))
        monkeypatch.setattr(sampler_module, "shortlist", lambda *_: None)
        assert answers() == few
    assert len(set(map(tuple, few))) > 10


@pytest.mark.parametrize("top", [0, 1, 20, 300])
@pytest.mark.parametrize("spread", [0.0, 3.0, 1e4])
def test_likelihoods_of_a_large_vocabulary_are_those_of_its_distribution(top, spread):
    logits = (np.random.default_rng(1).standard_normal(VOCAB) * spread).astype(np.float32)
    logits[9] = -np.inf
    exact = logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(np.float64))
    vocabulary = SimpleNamespace(size=VOCAB, pointer=None, text_piece=lambda _: b"")
    sampler = Sampler(vocabulary, GREEDY, PROMPT, 2048, logprobs=top)
    token, likelihood = sampler.choose(SimpleNamespace(logits=lambda _: logits, pointer=None), 0)
    assert [said.token for said in likelihood.top] == list(np.argsort(-logits, kind="stable")[:top])
    for said in (likelihood.chosen, *likelihood.top):
        assert said.logprob == pytest.approx(exact[said.token], abs=1e-5, rel=1e-6)
    assert likelihood.chosen.token == token
