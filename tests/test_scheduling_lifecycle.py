"""The transition tables, walked pair by pair."""

import itertools

import pytest

from trioserve.scheduling.lifecycle import (
    MODEL,
    PROCESS,
    REQUEST,
    IllegalTransitionError,
    ModelEvent,
    ModelState,
    ProcessEvent,
    ProcessPhase,
    RequestEvent,
    RequestPhase,
    advance,
)

TABLES = {
    "process": (PROCESS, ProcessPhase, ProcessEvent),
    "model": (MODEL, ModelState, ModelEvent),
    "request": (REQUEST, RequestPhase, RequestEvent),
}

# Written out once more, so that a change of a table is a change of two places.
LEGAL = {
    "process": {
        ("serving", "stop_requested"): "draining",
        ("draining", "drained"): "stopped",
    },
    "model": {
        ("unloaded", "load_started"): "loading",
        ("loading", "load_succeeded"): "ready",
        ("loading", "load_failed"): "unloaded",
        ("ready", "reconfigure_started"): "reconfiguring",
        ("ready", "unload_started"): "unloading",
        ("reconfiguring", "reconfigure_refused"): "ready",
        ("reconfiguring", "reconfigure_committed"): "loading",
        ("unloading", "unload_finished"): "unloaded",
    },
    "request": {
        ("queued", "admitted"): "loading",
        ("queued", "rejected"): "rejected",
        ("loading", "started"): "prefill",
        ("loading", "rejected"): "rejected",
        ("prefill", "first_token"): "decode",
        ("prefill", "finished"): "finished",
        ("decode", "finished"): "finished",
        **{
            (phase, event): event
            for phase in ("queued", "loading", "prefill", "decode")
            for event in ("failed", "cancelled")
        },
    },
}

PAIRS = [
    pytest.param(name, state, event, id=f"{name}-{state}-{event}")
    for name, (_, states, events) in TABLES.items()
    for state, event in itertools.product(states, events)
]


@pytest.mark.parametrize(("name", "state", "event"), PAIRS)
def test_a_pair_leads_where_the_table_says_or_is_an_error_that_names_both(name, state, event):
    table = TABLES[name][0]
    target = LEGAL[name].get((state.value, event.value))
    if target is not None:
        assert advance(table, state, event) == target
        return
    before = {row: dict(events) for row, events in table.items()}
    with pytest.raises(IllegalTransitionError) as caught:
        advance(table, state, event)
    assert (caught.value.state, caught.value.event) == (state, event)
    assert repr(state.value) in str(caught.value)
    assert repr(event.value) in str(caught.value)
    assert table == before


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_a_row_for_every_state_and_no_other(name):
    table, states, _ = TABLES[name]
    assert list(table) == list(states)


@pytest.mark.parametrize("name", TABLES)
def test_every_event_moves_some_state_to_a_state_of_the_same_table(name):
    table, states, events = TABLES[name]
    assert {event for row in table.values() for event in row} == set(events)
    assert {target for row in table.values() for target in row.values()} <= set(states)


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("process", {ProcessPhase.STOPPED}),
        ("model", set()),
        ("request", {RequestPhase.FINISHED, RequestPhase.FAILED, RequestPhase.CANCELLED, RequestPhase.REJECTED}),
    ],
)
def test_nothing_leads_out_of_the_ends_and_something_out_of_all_else(name, ends):
    assert {state for state, row in TABLES[name][0].items() if not row} == ends


@pytest.mark.parametrize("name", TABLES)
def test_every_state_can_be_reached_from_the_first(name):
    table, states, _ = TABLES[name]
    reached, frontier = set(), {next(iter(states))}
    while frontier:
        reached |= frontier
        frontier = {target for state in frontier for target in table[state].values()} - reached
    assert reached == set(states)


@pytest.mark.parametrize("name", TABLES)
def test_tables_cannot_be_written_to(name):
    table, states, _ = TABLES[name]
    first = next(iter(states))
    with pytest.raises(TypeError):
        table[first] = {}
    with pytest.raises(TypeError):
        table[first]["new"] = first
