"""Diagrams from transition tables."""

from __future__ import annotations

from enum import StrEnum

import pytest

from trioserve.scheduling.diagram import mermaid
from trioserve.scheduling.lifecycle import MODEL, PROCESS, REQUEST, ModelState, ProcessPhase, RequestPhase


class Light(StrEnum):
    RED = "red"
    GREEN = "green"
    DARK = "dark"


class Switch(StrEnum):
    TOGGLE = "toggle"
    CUT = "cut"


def test_a_small_table():
    table = {Light.RED: {Switch.TOGGLE: Light.GREEN}, Light.GREEN: {Switch.CUT: Light.DARK}, Light.DARK: {}}
    assert mermaid(table, Light.RED).split("\n") == [
        "stateDiagram-v2",
        "    [*] --> red",
        "    red --> green: toggle",
        "    green --> dark: cut",
        "    dark --> [*]",
    ]


@pytest.mark.parametrize(
    ("table", "initial"),
    [(PROCESS, ProcessPhase.SERVING), (MODEL, ModelState.UNLOADED), (REQUEST, RequestPhase.QUEUED)],
)
def test_every_transition_is_drawn_once(table, initial):
    lines = mermaid(table, initial).split("\n")
    drawn = [
        f"    {state} --> {following}: {event}" for state, row in table.items() for event, following in row.items()
    ]
    ends = [f"    {state} --> [*]" for state, row in table.items() if not row]
    assert sorted(lines[2:]) == sorted(drawn + ends)
    assert lines[1] == f"    [*] --> {initial}"
