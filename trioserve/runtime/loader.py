"""Loading and unloading one model: its state, its pool, and the attempt that may be under way."""

from __future__ import annotations

import copy
import logging
from collections.abc import Awaitable, Callable, Sequence

import trio

from trioserve.config import ModelConfig, check_adapter_file, check_model_file
from trioserve.engine.base import Engine, Footprint, LoadFailure, ModelFile, UnfitOptions
from trioserve.errors import (
    InsufficientMemoryError,
    InvalidModelError,
    ModelLoadError,
    ServerBusyError,
    TrioserveError,
)
from trioserve.origin import as_origin
from trioserve.runtime.cores import Cores
from trioserve.runtime.observer import LoadOutcome
from trioserve.runtime.pool import Plan, Pool, memory_needed, serve_pool
from trioserve.runtime.slot import Slot
from trioserve.runtime.stall_watch import StallWatch
from trioserve.runtime.weights_cache import WeightsCache
from trioserve.scheduling.lifecycle import MODEL, ModelEvent, ModelState, advance
from trioserve.workers import Workers

logger = logging.getLogger("trioserve.model")

_inspections = Workers("inspections", 4)  # as many as may load at a time

LoadProgress = Callable[[str, float], None]
"""Told a model's id and how much of it is loaded, from 0 to 1, in the loading thread."""

HasRoom = Callable[[Footprint], bool]
"""Tells whether so much fits into the memory beside all that is loaded."""

MakeRoom = Callable[[Footprint], Awaitable[None]]
"""Awaited before a load with the memory that it is estimated to take; raises where there is no room."""


class LoadAttempt:
    """One load that any number of callers wait for."""

    def __init__(self) -> None:
        self._settled = trio.Event()
        self._error: TrioserveError | None = None
        self._pool: Pool | None = None

    def settle(self, outcome: Pool | TrioserveError) -> None:
        """Tell everybody who waits."""
        if isinstance(outcome, Pool):
            self._pool = outcome
        else:
            self._error = outcome
        self._settled.set()

    async def wait(self) -> Pool:
        """Return the pool.

        Raises:
            ModelLoadError, InvalidModelError, ServerBusyError, InsufficientMemoryError: what the load failed with.
        """
        await self._settled.wait()
        if self._error is not None:
            # A fresh one for each waiter: a raised exception collects its raiser's traceback.
            raise copy.copy(self._error)
        assert self._pool is not None, "a settled attempt has a pool or an error"
        return self._pool


async def inspect(engine: Engine, config: ModelConfig) -> ModelFile:
    """Look at a model's file and its adapters without loading them.

    Raises:
        InvalidModelError: one is missing, no GGUF, damaged or truncated, or an adapter is for another model.
    """
    check_model_file(config.path)
    adapters = [adapter.path for adapter in config.lora]
    for path in adapters:
        check_adapter_file(path)
    try:
        return await _inspections.run(engine.inspect, config.path, adapters)
    except UnfitOptions as error:
        raise InvalidModelError(f"{error.option}: {error}", param=error.option) from None
    except LoadFailure as error:
        raise InvalidModelError(f"model file {str(config.path)[:300]!r} can't be used: {error}", param="path") from None


class Loader:
    """What is loaded for one model. The model decides when; this knows how.

    Arguments:
        engine: asked about files.
        cache: where weights come from.
        cores: shared by all models of the process.
        has_room: asked before a batch takes memory of its own.
        watch: looks after the slots of its pools.
        progress: told of loads.
        on_settled: called at the end of each load with what came of it.
    """

    def __init__(
        self,
        engine: Engine,
        cache: WeightsCache,
        cores: Cores,
        has_room: HasRoom,
        watch: StallWatch,
        progress: LoadProgress | None,
        on_settled: Callable[[LoadOutcome], None],
    ) -> None:
        self.state = ModelState.UNLOADED
        self.pool: Pool | None = None
        self.was_ready = False
        self.footprint = Footprint()
        self._engine = engine
        self._cache = cache
        self._cores = cores
        self._has_room = has_room
        self._watch = watch
        self._progress = progress
        self._on_settled = on_settled
        self._attempt: LoadAttempt | None = None
        self._slots: Sequence[Slot] = ()  # also while they are on their way out
        self._retire = trio.Event()
        self._gone = trio.Event()
        self._given_up = False  # written by the event loop, read by a loading thread

    def give_up(self) -> None:
        """Let loads, present and future, end early."""
        self._given_up = True

    def unfinished(self) -> list[str]:
        """Say what threads are at work on, for the log. Safe in any thread."""
        busy = [f"slot {slot.index} is {slot.pulse}" for slot in self._slots if slot.pulse.under_way is not None]
        if busy or self.state in (ModelState.UNLOADED, ModelState.READY):
            return busy
        return [f"it is {self.state}"]

    def attempt(
        self,
        nursery: trio.Nursery,
        config: ModelConfig,
        make_room: MakeRoom,
        event: ModelEvent = ModelEvent.LOAD_STARTED,
    ) -> LoadAttempt:
        """Begin to load, or join the load that is under way. Never waits.

        Arguments:
            nursery: where the load and then the pool live: the model's, not the caller's.
            config: what to load.
            make_room: awaited with the estimated memory before the load.
            event: how the load comes about.
        """
        if self._attempt is None:
            self._attempt = LoadAttempt()
            self.advance(event)
            # It outlives the caller, and the slots that it starts work for others.
            with as_origin(None):
                nursery.start_soon(self._load, nursery, config, make_room, self._attempt)
        return self._attempt

    async def settle(self) -> None:
        """Return when no load is under way."""
        while self._attempt is not None:
            try:
                await self._attempt.wait()
            except TrioserveError:
                return

    async def retire(self) -> None:
        """Take the pool from view at once, and return when all of it is freed. Not cut short by cancellation."""
        self.pool = None
        self._retire.set()
        with trio.CancelScope(shield=True):
            await self._gone.wait()

    def advance(self, event: ModelEvent) -> None:
        """Move to the next state."""
        self.state = advance(MODEL, self.state, event)

    async def _load(
        self, nursery: trio.Nursery, config: ModelConfig, make_room: MakeRoom, attempt: LoadAttempt
    ) -> None:
        """Make one attempt, and tell everybody who waits for it."""
        started = trio.current_time()
        outcome: Pool | TrioserveError
        try:
            outcome = await self._load_with_room(nursery, config, make_room)
        except (ServerBusyError, InsufficientMemoryError) as error:
            logger.warning("model %s was not loaded: %s", config.id, error)
            outcome = error
        except TrioserveError as error:
            outcome = error
            if self._given_up:
                logger.info("the load of model %s was given up", config.id)
            else:
                logger.error("model %s failed to load: %s", config.id, error)
        except Exception:
            logger.exception("model %s failed to load", config.id)
            outcome = ModelLoadError(f"{config.id} could not be loaded")
        except BaseException:
            # The model itself is being ended. Whoever waits for this load, maybe behind a shield, must hear of it.
            self._finish(attempt, ModelLoadError(f"the load of {config.id} was given up"))
            raise
        if isinstance(outcome, Pool):
            self.pool, self.was_ready = outcome, True
            seconds = round(trio.current_time() - started, 2)
            fields = {"slots": len(outcome.slots), "n_ctx": outcome.n_ctx, "seconds": seconds}
            logger.info("model %s is ready", config.id, extra={"fields": fields})
        self._finish(attempt, outcome)

    def _finish(self, attempt: LoadAttempt, outcome: Pool | TrioserveError) -> None:
        self.advance(ModelEvent.LOAD_SUCCEEDED if isinstance(outcome, Pool) else ModelEvent.LOAD_FAILED)
        self._attempt = None
        attempt.settle(outcome)
        self._on_settled(self._told(outcome))

    def _told(self, outcome: Pool | TrioserveError) -> LoadOutcome:
        if isinstance(outcome, Pool):
            return LoadOutcome.LOADED
        if isinstance(outcome, (ServerBusyError, InsufficientMemoryError)):
            return LoadOutcome.NO_ROOM
        return LoadOutcome.GIVEN_UP if self._given_up else LoadOutcome.FAILED

    async def _load_with_room(self, nursery: trio.Nursery, config: ModelConfig, make_room: MakeRoom) -> Pool:
        file = await inspect(self._engine, config)
        self.footprint = Footprint()
        # Once more where the weights that it was to share have gone meanwhile, maybe to make this very room.
        while (needed := memory_needed(config, file, self._cache)).exceeds(self.footprint):
            self.footprint = needed
            await make_room(needed)
        self._retire, self._gone = trio.Event(), trio.Event()
        plan = Plan(config, file, self._cache, self._cores, self._has_room, self._watch, lambda: not self._given_up)
        pool: Pool = await nursery.start(self._serve, plan)
        self._slots = pool.slots
        return pool

    async def _serve(self, plan: Plan, *, task_status: trio.TaskStatus[Pool]) -> None:
        def note(fraction: float) -> bool:
            """Called in the loading thread."""
            if self._progress is not None:
                self._progress(plan.config.id, fraction)
            return plan.wanted()

        try:
            await serve_pool(plan, self._retire, note, task_status=task_status)
        finally:
            self._slots = ()
            self._gone.set()
