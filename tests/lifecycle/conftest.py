"""Servers that tests share; they have to end well, too."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from .client import http, wait_idle
from .daemon import well_behaved

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.lifecycle)


@pytest.fixture(scope="session", autouse=True)
def heeded_interrupts():
    """A shell that starts tests in the background has them ignore SIGINT, and with them the servers that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def four_slots():
    """A server with four slots."""
    with well_behaved("--slots", "4", "--n-ctx", "2048") as daemon:
        yield daemon


@pytest.fixture(scope="session")
def one_slot():
    """A server with one slot."""
    with well_behaved("--slots", "1", "--n-ctx", "2048") as daemon:
        yield daemon


@pytest.fixture
def shared(four_slots):
    """The server with four slots, idle."""
    with http(four_slots.url) as client:
        wait_idle(client)
    return four_slots


@pytest.fixture
def lone(one_slot):
    """The server with one slot, idle."""
    with http(one_slot.url) as client:
        wait_idle(client)
    return one_slot
