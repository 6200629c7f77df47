"""Transition tables as Mermaid state diagrams, for docs/design.md."""

from __future__ import annotations

from trioserve.scheduling.lifecycle import Event, State, Table

__all__ = ["mermaid"]


def mermaid(table: Table[State, Event], initial: State) -> str:
    """Return the text of a Mermaid ``stateDiagram-v2``, without a newline at its end.

    Arrows come in the order of the table; a state without events leads to the end.

    Arguments:
        table: state -> event -> next state.
        initial: where the life begins.
    """
    lines = ["stateDiagram-v2", f"    [*] --> {initial}"]
    for state, row in table.items():
        lines += [f"    {state} --> {following}: {event}" for event, following in row.items()]
        if not row:
            lines.append(f"    {state} --> [*]")
    return "\n".join(lines)
