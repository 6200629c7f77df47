"""Which models may stay loaded: who has to go so that another one can come. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that takes memory, or is about to.

    Attributes:
        id: of the model.
        idle: loaded, with nobody holding or waiting for anything. Only idle models are victims: not the busy ones, not
            those that are queued for, not those that load or are being unloaded.
        last_used: seconds, on any one clock.
        nbytes: estimated memory of the host; what its unloading gives back.
        leaving: it is being unloaded; whoever needs its place waits for that.
        loading: it takes a place once it was granted one.
        device_nbytes: like ``nbytes``, of the GPUs.
    """

    id: str
    idle: bool
    last_used: float
    nbytes: int = 0
    leaving: bool = False
    loading: bool = False
    device_nbytes: int = 0


def victims_for_count(residents: Sequence[Resident], limit: int) -> list[Resident] | None:
    """Choose whom to unload so that one more model may be loaded.

    Arguments:
        residents: all models that are loaded, loading or being unloaded, without the newcomer.
        limit: most models that may be loaded at once; 0 is no bound.

    Returns:
        The idle models to unload, least recently used first; None when there are too few of them.
    """
    excess = len(residents) + 1 - limit
    if limit == 0 or excess <= 0:
        return []
    idle = _by_age(residents)
    return idle[:excess] if len(idle) >= excess else None


def victims_for_memory(
    residents: Sequence[Resident],
    free: int,
    needed: int,
    reserve: int,
    size: Callable[[Resident], int] = attrgetter("nbytes"),
) -> list[Resident] | None:
    """Choose whom to unload so that a newcomer leaves enough memory free.

    Arguments:
        residents: as above.
        free: bytes that are free now.
        needed: bytes that the newcomer is estimated to take.
        reserve: bytes that must stay free; 0 is no bound.
        size: what the unloading of a model gives back.

    Returns:
        The idle models to unload, least recently used first; None when that would not be enough.
    """
    if reserve == 0:
        return []
    victims: list[Resident] = []
    for resident in _by_age(residents):
        if free - needed >= reserve:
            break
        victims.append(resident)
        free += size(resident)
    return victims if free - needed >= reserve else None


def _by_age(residents: Sequence[Resident]) -> list[Resident]:
    return sorted((resident for resident in residents if resident.idle), key=lambda resident: resident.last_used)
