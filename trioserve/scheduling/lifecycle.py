"""The life of the process, of a model and of a request, as transition tables.

Each table maps a state to the events that are legal in it and to the state that each leads to. ``advance`` is the only
way to move; docs/design.md draws its diagrams from the same tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TypeVar

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)
Table = Mapping[State, Mapping[Event, State]]


class IllegalTransitionError(RuntimeError):
    """An event came in a state that does not know it. Nothing was changed."""

    def __init__(self, state: StrEnum, event: StrEnum) -> None:
        super().__init__(f"{type(state).__name__} {state.value!r} does not allow {event.value!r}")
        self.state = state
        self.event = event


class ProcessPhase(StrEnum):
    """Where the whole server stands. ``serving`` is the only phase that takes new work."""

    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


class ProcessEvent(StrEnum):
    """What moves the process."""

    STOP_REQUESTED = "stop_requested"
    DRAINED = "drained"


class ModelState(StrEnum):
    """Where one model stands. Only a ``ready`` model has a published pool."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    RECONFIGURING = "reconfiguring"
    UNLOADING = "unloading"


class ModelEvent(StrEnum):
    """What moves a model."""

    LOAD_STARTED = "load_started"
    LOAD_SUCCEEDED = "load_succeeded"
    LOAD_FAILED = "load_failed"
    RECONFIGURE_STARTED = "reconfigure_started"
    RECONFIGURE_REFUSED = "reconfigure_refused"
    RECONFIGURE_COMMITTED = "reconfigure_committed"
    UNLOAD_STARTED = "unload_started"
    UNLOAD_FINISHED = "unload_finished"


class RequestPhase(StrEnum):
    """Where one request stands, for the status page, the log and the drain report."""

    QUEUED = "queued"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


class RequestEvent(StrEnum):
    """What moves a request."""

    ADMITTED = "admitted"
    STARTED = "started"
    FIRST_TOKEN = "first_token"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


def _table(rows: dict[State, dict[Event, State]]) -> Table[State, Event]:
    return MappingProxyType({state: MappingProxyType(row) for state, row in rows.items()})


PROCESS: Table[ProcessPhase, ProcessEvent] = _table(
    {
        ProcessPhase.SERVING: {ProcessEvent.STOP_REQUESTED: ProcessPhase.DRAINING},
        ProcessPhase.DRAINING: {ProcessEvent.DRAINED: ProcessPhase.STOPPED},
        ProcessPhase.STOPPED: {},
    }
)

MODEL: Table[ModelState, ModelEvent] = _table(
    {
        ModelState.UNLOADED: {ModelEvent.LOAD_STARTED: ModelState.LOADING},
        ModelState.LOADING: {
            ModelEvent.LOAD_SUCCEEDED: ModelState.READY,
            ModelEvent.LOAD_FAILED: ModelState.UNLOADED,
        },
        ModelState.READY: {
            ModelEvent.RECONFIGURE_STARTED: ModelState.RECONFIGURING,
            ModelEvent.UNLOAD_STARTED: ModelState.UNLOADING,
        },
        # A refused replacement keeps the old pool; a committed one has torn it down and loads like a first time.
        ModelState.RECONFIGURING: {
            ModelEvent.RECONFIGURE_REFUSED: ModelState.READY,
            ModelEvent.RECONFIGURE_COMMITTED: ModelState.LOADING,
        },
        ModelState.UNLOADING: {ModelEvent.UNLOAD_FINISHED: ModelState.UNLOADED},
    }
)

_ENDS = {
    RequestEvent.FAILED: RequestPhase.FAILED,
    RequestEvent.CANCELLED: RequestPhase.CANCELLED,
}

REQUEST: Table[RequestPhase, RequestEvent] = _table(
    {
        RequestPhase.QUEUED: {
            RequestEvent.ADMITTED: RequestPhase.LOADING,
            RequestEvent.REJECTED: RequestPhase.REJECTED,
            **_ENDS,
        },
        RequestPhase.LOADING: {
            RequestEvent.STARTED: RequestPhase.PREFILL,
            RequestEvent.REJECTED: RequestPhase.REJECTED,
            **_ENDS,
        },
        RequestPhase.PREFILL: {
            RequestEvent.FIRST_TOKEN: RequestPhase.DECODE,
            RequestEvent.FINISHED: RequestPhase.FINISHED,
            **_ENDS,
        },
        RequestPhase.DECODE: {RequestEvent.FINISHED: RequestPhase.FINISHED, **_ENDS},
        RequestPhase.FINISHED: {},
        RequestPhase.FAILED: {},
        RequestPhase.CANCELLED: {},
        RequestPhase.REJECTED: {},
    }
)


def advance(table: Table[State, Event], state: State, event: Event) -> State:
    """Return the state that ``event`` leads to from ``state``.

    Raises:
        IllegalTransitionError: the table has no such event in that state.
    """
    try:
        return table[state][event]
    except KeyError:
        raise IllegalTransitionError(state, event) from None
