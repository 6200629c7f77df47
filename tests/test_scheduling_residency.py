"""Who has to go so that another model can come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.scheduling.residency import Resident, victims_for_count, victims_for_memory


def resident(name, last_used=0.0, *, idle=True, nbytes=100):
    return Resident(name, idle, last_used, nbytes)


def names(victims):
    return None if victims is None else [victim.id for victim in victims]


OLD, NEW = resident("old", 1), resident("new", 2)
BUSY = resident("busy", 0, idle=False)


@pytest.mark.parametrize(
    ("residents", "limit", "expected"),
    [
        ([], 1, []),
        ([OLD, NEW], 0, []),
        ([OLD, NEW], 3, []),
        ([OLD, NEW], 2, ["old"]),
        ([NEW, OLD], 2, ["old"]),
        ([NEW, OLD], 1, ["old", "new"]),
        ([BUSY, NEW], 2, ["new"]),
        ([BUSY], 1, None),
        ([BUSY, OLD], 1, None),
    ],
)
def test_victims_for_count(residents, limit, expected):
    assert names(victims_for_count(residents, limit)) == expected


@pytest.mark.parametrize(
    ("residents", "free", "needed", "reserve", "expected"),
    [
        ([OLD, NEW], 0, 10_000, 0, []),
        ([OLD, NEW], 150, 50, 100, []),
        ([OLD, NEW], 149, 50, 100, ["old"]),
        ([OLD, NEW], 50, 50, 100, ["old"]),
        ([OLD, NEW], 49, 50, 100, ["old", "new"]),
        ([OLD, BUSY], 49, 50, 100, None),
        ([], 149, 50, 100, None),
        ([], 0, 0, 1, None),
    ],
)
def test_victims_for_memory(residents, free, needed, reserve, expected):
    assert names(victims_for_memory(residents, free, needed, reserve)) == expected


RESIDENTS = st.lists(
    st.builds(resident, st.uuids().map(str), st.floats(0, 100), idle=st.booleans(), nbytes=st.integers(0, 1000)),
    max_size=6,
)


@given(RESIDENTS, st.integers(0, 7))
def test_no_more_are_loaded_than_allowed_and_no_more_go_than_needed(residents, limit):
    victims = victims_for_count(residents, limit)
    if victims is None:
        assert 0 < limit <= sum(not one.idle for one in residents)
        return
    assert all(victim.idle for victim in victims)
    if limit:
        assert len(residents) - len(victims) + 1 <= limit
        assert not victims or len(residents) - len(victims) + 1 == limit
    spared = [one for one in residents if one.idle and one not in victims]
    assert all(victim.last_used <= one.last_used for victim in victims for one in spared)


@given(RESIDENTS, st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 3000))
def test_as_much_is_left_free_as_asked_for_and_no_more_go_than_needed(residents, free, needed, reserve):
    victims = victims_for_memory(residents, free, needed, reserve)
    if victims is None:
        assert free + sum(one.nbytes for one in residents if one.idle) - needed < reserve
        return
    assert all(victim.idle for victim in victims)
    assert free + sum(victim.nbytes for victim in victims) - needed >= reserve
    assert not victims or free + sum(victim.nbytes for victim in victims[:-1]) - needed < reserve
