"""Choosing among the likeliest tokens: the same choices as among all of them."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
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


def chosen(sampling, banned=()):
    """Tokens chosen from made-up logits, among which the same ones are near the top again: penalties have work."""
    random = np.random.default_rng(0)
    favoured = random.choice(VOCAB, 60, replace=False)
    sampler = Sampler(SimpleNamespace(size=VOCAB, pointer=None), sampling, PROMPT, 2048, banned)
    tokens = []
    for _ in range(STEPS):
        logits = random.standard_normal(VOCAB).astype(np.float32)
        logits[favoured] += 4
        logits[PROMPT] += 3
        tokens.append(sampler.choose(SimpleNamespace(logits=lambda _, logits=logits: logits, pointer=None), 0)[0])
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
    monkeypatch.setattr(sampler_module, "shortlist", lambda logits, _: np.arange(len(logits)))
    assert chosen(sampling, banned) == few
    assert len(set(few)) > 5, "choices that could not differ would prove nothing"


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
