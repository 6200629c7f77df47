"""Seeds, folded into what llama.cpp takes."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.engine.sampling import Sampling, fold_seed

LARGEST = 2**32 - 2


@pytest.mark.parametrize(
    ("seed", "folded"),
    [
        (0, 0),
        (42, 42),
        (LARGEST, LARGEST),
        (2**32 - 1, LARGEST),  # "take a random one" to llama.cpp
        (2**32, 0),
        (2**32 + 42, 42),
        (-1, LARGEST),
        (-2, LARGEST),
        (-(2**32), 0),
        (2**63 - 1, LARGEST),
    ],
)
def test_a_seed_is_folded_into_the_range_of_the_engine(seed, folded):
    assert fold_seed(seed) == folded


@given(st.integers())
def test_equal_seeds_stay_equal_and_in_range(seed):
    folded = fold_seed(seed)
    assert folded == fold_seed(seed)
    assert 0 <= folded <= LARGEST


@given(st.integers(0, LARGEST))
def test_seeds_in_range_are_kept(seed):
    assert fold_seed(seed) == seed


def test_no_seed_draws_a_fresh_one_each_time():
    drawn = [fold_seed(None) for _ in range(20)]
    assert all(0 <= seed <= LARGEST for seed in drawn)
    assert len(set(drawn)) > 1


def test_a_drawn_seed_is_never_the_reserved_one(monkeypatch):
    bounds = []
    monkeypatch.setattr("secrets.randbelow", lambda bound: bounds.append(bound) or bound - 1)
    assert fold_seed(None) == LARGEST
    assert bounds == [2**32 - 1]


def test_greedy_is_temperature_zero_only():
    assert Sampling(temperature=0).greedy
    assert Sampling(temperature=0.0).greedy
    assert not Sampling(temperature=1e-8).greedy
    assert not Sampling().greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [("repeat_penalty", 1.1), ("frequency_penalty", -0.5), ("presence_penalty", 0.5)],
)
def test_any_penalty_counts_as_one(field, value):
    assert not Sampling().penalised
    assert dataclasses.replace(Sampling(), **{field: value}).penalised
