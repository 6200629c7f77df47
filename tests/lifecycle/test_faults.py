"""The faults that are quick and end alike each time, on ``trioserve serve``; ``nox -s faults`` tries them all."""

from __future__ import annotations

import sys

import pytest
from faults.cases import CASES
from faults.probe import probe
from faults.ways import DRAIN_SECONDS, WAYS

SLACK_SECONDS = 3.0  # a crowded machine
MAY_GROW = 16 * 2**20
QUICK = ("half-closes", "pipelines", "closes in chunk", "h2 goes away")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="they read the server's memory in /proc")


@pytest.mark.parametrize("fault", QUICK)
def test_a_fault_costs_its_own_slot_only_and_for_a_bounded_time(fault):
    outcome = probe(WAYS["serve"], CASES[fault])
    assert outcome.freed is not None
    assert outcome.freed < SLACK_SECONDS
    assert outcome.neighbour
    assert outcome.growth < MAY_GROW
    assert outcome.code == 0
    assert outcome.ended < SLACK_SECONDS
    assert not {"Traceback", " error "} & set(outcome.notes)


def test_a_window_of_zero_does_not_hold_up_the_end():
    outcome = probe(WAYS["serve"], CASES["h2 no window, SIGTERM"])
    assert outcome.code == 3
    assert outcome.ended < DRAIN_SECONDS + 5
    assert not {"Traceback", " error "} & set(outcome.notes)
