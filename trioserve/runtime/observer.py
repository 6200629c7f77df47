"""What the runtime tells whoever keeps count of it."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol


class LoadOutcome(StrEnum):
    """What came of a load."""

    LOADED = "loaded"
    FAILED = "failed"
    NO_ROOM = "no_room"
    GIVEN_UP = "given_up"


class UnloadReason(StrEnum):
    """Why a model's pool went."""

    REQUEST = "request"
    RECONFIGURATION = "reconfiguration"
    ROOM = "room"
    IDLE = "idle"
    SHUTDOWN = "shutdown"


class Observer(Protocol):
    """Told of what has happened, in the event loop. Never waits and never fails."""

    def loaded(self, model: str, outcome: LoadOutcome) -> None:
        """A load has ended."""
        ...

    def unloaded(self, model: str, reason: UnloadReason) -> None:
        """A model's pool has begun to go."""
        ...


class Unobserved:
    """Nobody keeps count."""

    def loaded(self, model: str, outcome: LoadOutcome) -> None:
        """See ``Observer``."""

    def unloaded(self, model: str, reason: UnloadReason) -> None:
        """See ``Observer``."""
