"""One registered model: who may use it when, and what becomes of it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

import trio

from trioserve.config import ModelConfig
from trioserve.engine.base import Engine, Footprint
from trioserve.errors import InvalidModelError
from trioserve.runtime.cores import Cores
from trioserve.runtime.gate import Gate
from trioserve.runtime.lease import Lease
from trioserve.runtime.loader import Loader, LoadProgress, inspect
from trioserve.runtime.observer import LoadOutcome, Observer, UnloadReason, Unobserved
from trioserve.runtime.pool import Pool, memory_needed, same_pool, tried_out
from trioserve.runtime.residency import Residency
from trioserve.runtime.stall_watch import StallWatch
from trioserve.runtime.weights_cache import WeightsCache
from trioserve.scheduling.admission import Admission, Ailment, Kind, Ticket
from trioserve.scheduling.lifecycle import ModelEvent, ModelState
from trioserve.scheduling.residency import Resident

logger = logging.getLogger("trioserve.model")

Change = Callable[[ModelConfig], ModelConfig]
"""Makes a model's next configuration from the one it has; raises where there is none."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One consistent moment of a model, for the status page.

    Attributes:
        id: of the registration.
        task: what it is configured for.
        created: Unix time of the registration, in seconds.
        state: see ``scheduling.lifecycle``.
        slots: as configured.
        active_slots: leased.
        queued_requests: waiting for a slot.
        queued_operations: loads and unloads that wait for their turn.
        max_parallel_slots: what the loaded model can have; None while it is unloaded.
        n_ctx: tokens of context of each slot; None while it is unloaded.
        leased: the time since which each leased slot has been, in seconds on Trio's clock.
        ailments: what ails the slots that can't serve.
    """

    id: str
    task: str
    created: int
    state: ModelState
    slots: int
    active_slots: int
    queued_requests: int
    queued_operations: int
    max_parallel_slots: int | None
    n_ctx: int | None
    leased: Mapping[int, float]
    ailments: Mapping[int, Ailment]

    @property
    def loaded(self) -> bool:
        """Whether requests are answered without a load."""
        return self.state is ModelState.READY

    @property
    def out_of_order(self) -> bool:
        """Whether none of its slots can serve."""
        return len(self.ailments) == self.slots


@dataclass(frozen=True, eq=False)
class House:
    """What all models of a process share.

    Attributes:
        engine: asked about files.
        cache: where weights come from.
        cores: shared out among whatever decodes.
        residency: makes room before loads.
        max_queued: requests that may wait for one model, where it sets no bound of its own.
        idle_unload: seconds after which an unused model is unloaded, where it sets none; 0 is never.
        stall_timeout: seconds after which a call into the engine counts as stalled; 0 is never.
        progress: told of loads, while they go on.
        observer: told of loads and unloads, when they have happened.
    """

    engine: Engine
    cache: WeightsCache
    cores: Cores
    residency: Residency
    max_queued: int
    idle_unload: float = 0
    stall_timeout: float = 0
    progress: LoadProgress | None = None
    observer: Observer = field(default_factory=Unobserved)


class Model:
    """A registration and whatever is loaded for it. ``run`` is its life.

    Requests come through ``admit``. Everything that changes the model (``reconfigure``, ``unload``) takes its turn
    among them and then has the whole of it.

    Arguments:
        config: of the model.
        house: shared with the other models.
    """

    def __init__(self, config: ModelConfig, house: House) -> None:
        self.config = config
        self.created = int(time.time())
        self._house = house
        has_room = partial(house.residency.has_room_for, unknown=True)
        self._gate = Gate(Admission(config.slots, self._max_queued(config)), self._note_use)
        watch = StallWatch(config.id, house.stall_timeout, self._gate.mark)
        self._loader = Loader(
            house.engine, house.cache, house.cores, has_room, watch, house.progress, self._note_settled
        )
        self._nursery: trio.Nursery | None = None
        self._running = trio.Event()
        self._last_used = trio.current_time()
        self._retires = True
        self._changed = trio.Event()
        self._unloaded = trio.Event()

    def __repr__(self) -> str:
        return f"<Model {self.id!r} {self._loader.state} {self._gate.statistics()}>"

    @property
    def id(self) -> str:
        """What requests call it."""
        return self.config.id

    @property
    def pool(self) -> Pool | None:
        """The published pool, where there is one."""
        return self._loader.pool

    @property
    def was_ready(self) -> bool:
        """Whether it has been loaded at least once."""
        return self._loader.was_ready

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the nursery of loads, pools and slots until cancelled."""
        async with trio.open_nursery() as self._nursery:
            self._running.set()
            task_status.started()
            await self._retire_when_idle()

    # -- requests

    async def admit(self, wait: float | None, prompt: Sequence[int] = ()) -> Lease:
        """Wait for a slot.

        Arguments:
            wait: seconds at most; None is without bound, 0 not at all.
            prompt: token ids that the slot will begin with: of the free slots the one that has most of them suits best.

        Raises:
            ServerBusyError: no slot within that time.
        """
        ticket = Ticket(wait=wait, choose=partial(self._best_slot, prompt))
        await self._gate.pass_through(ticket)
        return Lease(self, ticket)

    def take_back(self, ticket: Ticket) -> None:
        """Return a lease's slot. Only ``Lease.release`` calls this."""
        self._gate.release(ticket)

    async def ensure_loaded(self) -> Pool:
        """Return the pool, loading the model first where that has to be. All callers share one load.

        The load belongs to the model, not to a caller: a cancelled caller leaves it going for the others, and it is
        kept even if nobody is left.

        Raises:
            ModelLoadError: the load failed.
            InvalidModelError: the file or its options are wrong.
            ServerBusyError: too many models are loaded, and too few of them are idle.
            InsufficientMemoryError: it would leave too little memory free.
        """
        if self._loader.pool is not None:
            return self._loader.pool
        return await self._load(ModelEvent.LOAD_STARTED)

    # -- management

    async def reconfigure(self, change: Change, wait: float | None = None) -> None:
        """Load the model with a new configuration, in its turn.

        The configuration is tried before the model's turn comes: while a live pool serves on, and before anything of it
        is touched. Where others have changed the model meanwhile, it is made and tried anew in the turn. One that is
        refused changes nothing.

        Arguments:
            change: asked for the configuration, for the same id: at once, and again in the model's turn.
            wait: seconds that the caller may wait for its turn.

        Raises:
            InvalidModelError: the file or its options are wrong; nothing was changed.
            ModelLoadError: before the commit: it was tried and failed, nothing was changed. After it: the load failed,
                the new configuration is registered and unloaded, and the next request tries again.
            ServerBusyError, InsufficientMemoryError: no turn within the wait; or no room, like a failed load.
        """
        ticket = Ticket(Kind.MANAGER, wait)
        self._gate.check(ticket)  # before anything that costs much is done in vain
        async with AsyncExitStack() as trial:
            tried = None
            if self._replaces_pool(config := change(self.config)):
                await self._try_out(tried := config, trial)
            # Threads that look and try are waited for; a caller who left meanwhile wants nothing changed.
            await trio.lowlevel.checkpoint_if_cancelled()
            await self._gate.pass_through(ticket)
            try:
                await self._loader.settle()
                config = change(self.config)
                if self._replaces_pool(config) and not (tried and same_pool(config, tried)):
                    await trial.aclose()
                    await self._try_out(config, trial)
                    await trio.lowlevel.checkpoint_if_cancelled()
                await self._commit(config)
            finally:
                self._gate.release(ticket)

    async def unload(self, wait: float | None = None, reason: UnloadReason = UnloadReason.REQUEST) -> None:
        """Let earlier work finish, then free the pool. Without effect on an unloaded model.

        Arguments:
            wait: seconds that the caller may wait for its turn.
            reason: for the observer.

        Raises:
            ServerBusyError: no turn within that time.
        """
        await self.finish_unload(self.begin_unload(wait), reason)

    def begin_unload(self, wait: float | None = None) -> Ticket:
        """Raise the barrier of an unload, at once: who comes later waits behind it.

        Returns:
            A ticket for ``finish_unload`` or ``cancel_unload``.

        Raises:
            ServerBusyError: turned away on arrival.
        """
        ticket = Ticket(Kind.MANAGER, wait)
        self._gate.enter(ticket)
        return ticket

    def cancel_unload(self, ticket: Ticket) -> None:
        """Take the barrier down again, before ``finish_unload``."""
        self._gate.withdraw(ticket)

    async def finish_unload(self, ticket: Ticket, reason: UnloadReason = UnloadReason.REQUEST) -> None:
        """Wait for an unload's turn and carry it out; see ``unload``."""
        await self._gate.granted(ticket)
        try:
            await self._loader.settle()
            if self._loader.pool is not None:
                await self._unload(reason)
        finally:
            self._gate.release(ticket)

    async def try_unload(self, reason: UnloadReason = UnloadReason.ROOM) -> bool:
        """Unload if nobody holds or waits for anything, and say whether that was done. Never waits for others."""
        if self._loader.state is not ModelState.READY or not self._gate.idle:
            return False
        await self.unload(wait=0, reason=reason)
        return True

    async def wait_unloaded(self) -> None:
        """Return when the model is not being unloaded."""
        if self._loader.state is ModelState.UNLOADING:
            await self._unloaded.wait()

    def stay(self) -> None:
        """From now on, don't leave for want of use: the process ends soon, and nobody gains by it."""
        self._retires = False
        self._changed.set()

    async def close(self) -> None:
        """Unload for good; a load that is under way is given up. Nobody may ask for leases any more."""
        self._loader.give_up()
        await self.unload(reason=UnloadReason.SHUTDOWN)

    # -- status

    def status(self) -> ModelStatus:
        """Return one consistent moment."""
        statistics, pool = self._gate.statistics(), self._loader.pool
        return ModelStatus(
            id=self.id,
            task=self.config.task,
            created=self.created,
            state=self._loader.state,
            slots=statistics.slots,
            active_slots=statistics.active,
            queued_requests=statistics.queued,
            queued_operations=statistics.waiting_managers,
            max_parallel_slots=pool.weights.max_sessions if pool else None,
            n_ctx=pool.n_ctx if pool else None,
            leased=self._gate.leases(),
            ailments=self._gate.ailments(),
        )

    def unfinished(self) -> list[str]:
        """Say what its threads are at work on, for the log. Safe in any thread."""
        return [f"model {self.id}: {what}" for what in self._loader.unfinished()]

    def resident(self) -> Resident | None:
        """How the model takes part in the choice of what may stay loaded."""
        if self._loader.state is ModelState.UNLOADED:
            return None
        state = self._loader.state
        idle = state is ModelState.READY and self._gate.idle
        return Resident(
            self.id,
            idle,
            self._last_used,
            self._loader.footprint.host,
            leaving=state is ModelState.UNLOADING,
            loading=state is ModelState.LOADING,
            device_nbytes=self._loader.footprint.device,
        )

    # -- how

    async def _load(self, event: ModelEvent) -> Pool:
        if self._nursery is None:  # it was found in the very moment of its registration
            await self._running.wait()
        assert self._nursery is not None, "a running model has its nursery"
        return await self._loader.attempt(self._nursery, self.config, self._make_room, event).wait()

    async def _make_room(self, needed: Footprint) -> None:
        await self._house.residency.make_room(self, needed)

    def _best_slot(self, prompt: Sequence[int], free: Sequence[int]) -> int:
        pool = self._loader.pool
        return min(free) if pool is None else pool.best_slot(prompt, free)

    def _replaces_pool(self, config: ModelConfig) -> bool:
        """Whether a live pool would have to go for this configuration."""
        return self._loader.pool is not None and not same_pool(config, self.config)

    async def _try_out(self, config: ModelConfig, trial: AsyncExitStack) -> None:
        """See that a configuration can be loaded, beside the live one where the memory allows that."""
        file = await inspect(self._house.engine, config)
        if self._house.residency.has_room_for(memory_needed(config, file, self._house.cache, sessions=1)):
            await trial.enter_async_context(tried_out(config, self._house.cache))

    async def _commit(self, config: ModelConfig) -> None:
        """Replace what is loaded, with the whole model held."""
        if self._loader.pool is None:
            await self._load_with(config)
        elif same_pool(config, self.config):
            self._adopt(config)
        else:
            self._loader.advance(ModelEvent.RECONFIGURE_STARTED)
            self._house.observer.unloaded(self.id, UnloadReason.RECONFIGURATION)
            await self._retire()
            # The point of no return: the old pool is gone.
            self._adopt(config)
            self._house.residency.keep_place(self)
            await self._load(ModelEvent.RECONFIGURE_COMMITTED)

    async def _load_with(self, config: ModelConfig) -> None:
        """Load an unloaded model with a configuration; one that is refused leaves the old one."""
        await inspect(self._house.engine, config)
        before = self.config
        self._adopt(config)
        try:
            await self._load(ModelEvent.LOAD_STARTED)
        except InvalidModelError:
            self._adopt(before)
            raise

    def _adopt(self, config: ModelConfig) -> None:
        self.config = config
        self._gate.resize(config.slots, self._max_queued(config))

    async def _unload(self, reason: UnloadReason) -> None:
        self._loader.advance(ModelEvent.UNLOAD_STARTED)
        self._house.observer.unloaded(self.id, reason)
        self._unloaded = trio.Event()
        await self._retire()
        self._loader.advance(ModelEvent.UNLOAD_FINISHED)
        self._unloaded.set()
        logger.info("model %s is unloaded", self.id)

    async def _retire(self) -> None:
        """Free the pool, and forget what ailed its slots."""
        await self._loader.retire()
        self._gate.renew()

    def _max_queued(self, config: ModelConfig) -> int:
        return self._house.max_queued if config.max_queued_requests is None else config.max_queued_requests

    def _note_settled(self, outcome: LoadOutcome) -> None:
        self._house.observer.loaded(self.id, outcome)
        self._house.residency.settled(self)
        self._note_use()

    def _note_use(self) -> None:
        self._last_used = trio.current_time()
        self._changed.set()

    async def _retire_when_idle(self) -> None:
        """Unload whenever the model was unused for as long as it is kept."""
        while True:
            self._changed = trio.Event()
            keep = self._house.idle_unload if self.config.keep_alive_ms is None else self.config.keep_alive_ms / 1000
            waiting = self._retires and self._loader.pool is not None and self._gate.idle and keep > 0
            due = self._last_used + keep if waiting else math.inf
            with trio.move_on_at(due):
                await self._changed.wait()
                continue
            if await self.try_unload(UnloadReason.IDLE):
                logger.info("model %s was unused for %g s", self.id, keep)
