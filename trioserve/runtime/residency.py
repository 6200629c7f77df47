"""Keeping the number of loaded models, and their memory, within what the operator allows."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Protocol

import trio

from trioserve.engine.base import Footprint
from trioserve.errors import BusyReason, InsufficientMemoryError, ServerBusyError
from trioserve.runtime.memory import free_memory
from trioserve.scheduling.residency import Resident, victims_for_count, victims_for_memory

logger = logging.getLogger("trioserve.residency")

MIB = 1 << 20


class Tenant(Protocol):
    """A model, as residency sees it."""

    @property
    def id(self) -> str:
        """What requests call it."""
        ...

    def resident(self) -> Resident | None:
        """How it takes part in the choice; None where it takes no memory."""
        ...

    async def try_unload(self) -> bool:
        """Unload if idle; say whether that was done."""
        ...

    async def wait_unloaded(self) -> None:
        """Return when it is not being unloaded."""
        ...


class Residency:
    """Makes room before a load, by unloading idle models, least recently used first.

    Arguments:
        max_loaded: most models that are loaded at once; 0 is no bound.
        min_free_mb: MiB that a load must leave free; 0 is no bound.
        tenants: all models.
        free: asked for free memory of the host in bytes; None is unknown.
        free_device: asked for that of the GPUs.
    """

    def __init__(
        self,
        max_loaded: int,
        min_free_mb: int,
        tenants: Callable[[], Iterable[Tenant]],
        free: Callable[[], int | None] = free_memory,
        free_device: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._max_loaded = max_loaded
        self._reserve = min_free_mb * MIB
        self._tenants = tenants
        self._free = free
        self._free_device = free_device
        self._claims: dict[Tenant, Footprint] = {}  # of loads from `make_room` to `settled`, the oldest first
        self._some_settled = trio.Event()

    def has_room_for(self, needed: Footprint, *, unknown: bool = False) -> bool:
        """Whether so much fits beside everything that is loaded or loads. May be asked in every thread.

        Arguments:
            needed: what shall fit.
            unknown: the answer where it can't be told how much is free.
        """
        wanted = sum(list(self._claims.values()), start=needed)
        kinds = [(self._free(), wanted.host)]
        if needed.device:
            kinds.append((self._free_device(), wanted.device))
        return all(unknown if free is None else free - want >= self._reserve for free, want in kinds)

    async def make_room(self, newcomer: Tenant, needed: Footprint) -> None:
        """Return when the newcomer may be loaded. Nobody else takes its place or its memory until ``settled``.

        Of several loads the one that asks first has the first choice. Those that have not asked yet count for nobody.

        Arguments:
            newcomer: about to be loaded.
            needed: what it is estimated to take.

        Raises:
            ServerBusyError: the bound on loaded models leaves no place, and too few of them are idle.
            InsufficientMemoryError: it would leave too little memory, also without the idle models.
        """
        self._claims[newcomer] = needed
        # An idle model may be taken by a request between the choice and its unloading: then the choice is made again.
        while True:
            others, claimed = self._others(newcomer), self._claimed_before(newcomer)
            try:
                victims = self._victims(newcomer, needed, list(others), claimed)
            except (ServerBusyError, InsufficientMemoryError) as error:
                leaving = [tenant for resident, tenant in others.items() if resident.leaving]
                if leaving:
                    await leaving[0].wait_unloaded()
                elif claimed.exceeds(Footprint()) and isinstance(error, InsufficientMemoryError):
                    await self._some_settled.wait()  # what it has taken by now is claimed and no longer free
                else:
                    raise
                continue
            if not victims:
                return
            async with trio.open_nursery() as nursery:
                for victim in victims:
                    logger.info("unloading %s to make room for %s", victim.id, newcomer.id)
                    nursery.start_soon(others[victim].try_unload)

    def keep_place(self, tenant: Tenant) -> None:
        """Let a tenant that is loaded count as that until its next load has ``settled``: nobody is before it."""
        self._claims = {tenant: Footprint(), **self._claims}

    def settled(self, tenant: Tenant) -> None:
        """Note the end of a load, whatever came of it."""
        if self._claims.pop(tenant, None) is not None:
            self._some_settled.set()
            self._some_settled = trio.Event()

    def _claimed_before(self, newcomer: Tenant) -> Footprint:
        """What older loads were promised, or ask for."""
        return sum((self._claims[tenant] for tenant in self._older(newcomer)), start=Footprint())

    def _older(self, newcomer: Tenant) -> list[Tenant]:
        return list(itertools.takewhile(lambda tenant: tenant is not newcomer, self._claims))

    def _others(self, newcomer: Tenant) -> dict[Resident, Tenant]:
        """All that take memory, without the newcomer and the loads that are younger than it."""
        older = self._older(newcomer)
        return {
            resident: tenant
            for tenant in self._tenants()
            if tenant is not newcomer
            and (resident := tenant.resident()) is not None
            and (not resident.loading or tenant in older)
        }

    def _victims(
        self, newcomer: Tenant, needed: Footprint, others: Sequence[Resident], claimed: Footprint
    ) -> list[Resident]:
        """Who has to go. All three choices take the least recently used ones first, so the longest holds the others."""
        by_count = victims_for_count(others, self._max_loaded)
        if by_count is None:
            raise ServerBusyError(
                f"{newcomer.id} can't be loaded: {len(others)} models are loaded or loading and too few of them are "
                f"idle (max_loaded_models is {self._max_loaded})",
                BusyReason.LOADED_MODELS,
            )
        if not self._reserve:
            return by_count
        by_host = self._victims_for(newcomer, needed.host, self._free(), claimed.host, others, "nbytes", "memory")
        if not needed.device:
            return max(by_count, by_host, key=len)
        free = self._free_device()
        by_device = self._victims_for(
            newcomer, needed.device, free, claimed.device, others, "device_nbytes", "GPU memory"
        )
        return max(by_count, by_host, by_device, key=len)

    def _victims_for(
        self,
        newcomer: Tenant,
        needed: int,
        free: int | None,
        claimed: int,
        others: Sequence[Resident],
        size: str,
        what: str,
    ) -> list[Resident]:
        """Who has to go for one kind of memory; nobody where it can't be told how much of it is free."""
        if free is None:
            return []
        free -= claimed
        victims = victims_for_memory(others, free, needed, self._reserve, attrgetter(size))
        if victims is None:
            raise InsufficientMemoryError(
                f"{newcomer.id} needs about {needed // MIB} MiB of {what}, of {free // MIB} MiB that are free "
                f"{self._reserve // MIB} MiB must stay free (min_free_memory_mb)"
            )
        return victims
