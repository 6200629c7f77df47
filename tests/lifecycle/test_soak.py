"""A short soak; ``nox -s soak`` runs long ones."""

from __future__ import annotations

import sys

import pytest
from soak.plan import Shape
from soak.run import soak

SECONDS = 6
SHAPE = Shape(clients=3, turns=1, filler=4, tale=20, threads=(1,))


@pytest.mark.skipif(sys.platform != "linux", reason="it reads the daemon's memory in /proc")
def test_a_short_soak_finds_nothing():
    lines = []
    tally = soak(SECONDS, 20, SHAPE, lines.append)
    said = "\n".join(lines)
    assert tally.clean, said
    assert "finished" in tally.outcomes.values(), said
    assert tally.operations, said
