"""The pool of one model: its sessions, made one after another and published whole."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import trio

from trioserve.config import ModelConfig
from trioserve.engine.base import (
    Footprint,
    LoadFailure,
    LoadOptions,
    ModelFile,
    Progress,
    Session,
    SessionOptions,
    UnfitOptions,
    UnusableFile,
    Weights,
)
from trioserve.engine.prefix import goes_on
from trioserve.errors import InvalidModelError, ModelLoadError
from trioserve.runtime.arrangement import Arrangement, arrange
from trioserve.runtime.batch_sessions import BatchSessions
from trioserve.runtime.conductor import Conductor
from trioserve.runtime.cores import Cores
from trioserve.runtime.pace import Pace, Paces
from trioserve.runtime.slot import Slot
from trioserve.runtime.solo import Solo
from trioserve.runtime.stage import PrivateStage, SharedStage, Stage
from trioserve.runtime.stall_watch import StallWatch
from trioserve.runtime.weights_cache import WeightsCache

logger = logging.getLogger("trioserve.model")

_OF_THE_QUEUE = {"lazy", "keep_alive_ms", "busy_timeout_ms", "max_queued_requests"}


class _Readers:
    def __init__(self) -> None:
        self.count = 0
        self.gone = trio.Event()
        self.gone.set()


@dataclass(frozen=True, eq=False)
class Pool:
    """A published pool. Its weights may be asked to tokenise by whoever has a lease, or is inside ``reading``.

    Attributes:
        config: what it was made from.
        weights: shared by its sessions.
        n_ctx: tokens of context of each slot.
        slots: one task each, the primary's first.
    """

    config: ModelConfig
    weights: Weights
    n_ctx: int
    slots: Sequence[Slot]
    _readers: _Readers = field(default_factory=_Readers, init=False, repr=False)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the weights for the length of the block, without a lease."""
        readers = self._readers
        if readers.count == 0:
            readers.gone = trio.Event()
        readers.count += 1
        try:
            yield
        finally:
            readers.count -= 1
            if readers.count == 0:
                readers.gone.set()

    def best_slot(self, prompt: Sequence[int], free: Sequence[int]) -> int:
        """Choose the slot that a prompt costs least in.

        That is the one that has most of it in memory; where that is too little to count, or less than it would lose of
        a conversation, one whose memory is empty, or else the one that was used least lately.

        Arguments:
            prompt: token ids.
            free: slots to choose from.
        """
        histories = {slot: self.slots[slot].place.history for slot in free}
        common = {slot: history.usable(prompt) for slot, history in histories.items()}
        good = [slot for slot in free if goes_on(common[slot], len(prompt), histories[slot])]
        if good:
            return max(good, key=lambda slot: (common[slot], -len(histories[slot]), -slot))
        return min(free, key=lambda slot: (self.slots[slot].kept_since, slot))

    async def wait_unread(self) -> None:
        """Return once nobody is inside ``reading``."""
        await self._readers.gone.wait()


def load_options(config: ModelConfig) -> LoadOptions:
    """What of a model's configuration makes its weights what they are."""
    return LoadOptions(gpu_layers=config.gpu_layers, mmap=config.mmap, mlock=config.mlock)


def same_pool(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two configurations make the same pool: they differ in nothing but who waits how long, if at all."""
    return one.model_dump(exclude=_OF_THE_QUEUE) == other.model_dump(exclude=_OF_THE_QUEUE)


def memory_needed(config: ModelConfig, file: ModelFile, cache: WeightsCache, sessions: int | None = None) -> Footprint:
    """Estimate what a load would take beside what is loaded: weights that are there already count once.

    Adapters are counted in any case: others that use the weights may use none of them.

    Arguments:
        config: of the model.
        file: what its file says.
        cache: where its weights may be.
        sessions: how many of them; None is all.
    """
    arrangement = arrange(config, file)
    sessions = arrangement.sessions if sessions is None else sessions
    whole = file.memory(arrangement.options, sessions, config.gpu_layers)
    if cache.has(config.path, load_options(config)):
        return whole - file.memory(replace(arrangement.options, adapters=()), 0, config.gpu_layers)
    return whole


@contextlib.asynccontextmanager
async def open_sessions(
    config: ModelConfig, cache: WeightsCache, progress: Progress | None, wanted: Callable[[], bool]
) -> AsyncIterator[tuple[Weights, list[Session], Arrangement]]:
    """Load weights and make the sessions; undo all of it in reverse order.

    Clones go before the primary and the primary before the weights, also when making one of them failed.

    Arguments:
        config: of the model.
        cache: where its weights come from.
        progress: told of their load.
        wanted: asked before each session whether the load shall go on.

    Yields:
        The weights, the sessions, and how they were made. Of the list, what is in it at the end is freed.

    Raises:
        InvalidModelError: the model can't have that many slots, its file can't be used, or not for this task.
        ModelLoadError: weights or a session could not be made.
    """
    weights = await cache.acquire(config.path, load_options(config), progress)
    maker = _Maker(weights)
    sessions: list[Session] = []
    try:
        check_capacity(config, weights)
        arrangement = arrange(config, weights)
        for index in range(arrangement.sessions):
            if not wanted():
                raise ModelLoadError(f"the load of {config.id} was given up")
            session = await maker.open(arrangement.options, index)
            sessions.append(session)
            check_clone(session, sessions[0], index)
        yield weights, sessions, arrangement
    finally:
        with trio.CancelScope(shield=True):
            for session in reversed(sessions):
                await maker.close(session)
            await cache.release(weights)


def check_capacity(config: ModelConfig, weights: Weights) -> None:
    """See that the model's family can have so many sessions.

    Raises:
        InvalidModelError: it can't.
    """
    if config.slots > weights.max_sessions:
        raise InvalidModelError(
            f"slots is {config.slots}, but {weights.name} can have {weights.max_sessions} at most", param="slots"
        )


def check_clone(session: Session, primary: Session, index: int) -> None:
    """See that a session may stand for the primary.

    Raises:
        ModelLoadError: it differs in family, task or modes.
    """
    if session.traits != primary.traits:
        raise ModelLoadError(f"slot {index} is made as {session.traits}, but slot 0 as {primary.traits}")


@contextlib.asynccontextmanager
async def tried_out(config: ModelConfig, cache: WeightsCache) -> AsyncIterator[None]:
    """Hold a configuration's weights, after a session over them could be made.

    Weights that are loaded already are reused, and the load that follows within the block reuses these.

    Raises:
        InvalidModelError: the model can't have that many slots, its file can't be used, or not for this task.
        ModelLoadError: weights or a session could not be made.
    """
    weights = await cache.acquire(config.path, load_options(config))
    maker = _Maker(weights)
    try:
        check_capacity(config, weights)
        with trio.CancelScope(shield=True):
            await maker.close(await maker.open(arrange(config, weights).options, 0))
        yield
    finally:
        with trio.CancelScope(shield=True):
            await cache.release(weights)


class _Maker:
    """Makes and frees the sessions of one pool, one after another.

    It has a thread of its own: neither another model's load nor anything else in the process can keep it waiting.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._limiter = trio.CapacityLimiter(1)

    async def open(self, options: SessionOptions, index: int) -> Session:
        try:
            return await trio.to_thread.run_sync(self._weights.open_session, options, limiter=self._limiter)
        except UnusableFile as error:
            raise InvalidModelError(f"{self._weights.name} can't be used: {error}", param="path") from None
        except UnfitOptions as error:
            raise InvalidModelError(f"{error.option}: {error}", param=error.option) from None
        except LoadFailure as error:
            raise ModelLoadError(f"slot {index} of {self._weights.name} could not be made: {error}") from None

    async def close(self, session: Session) -> None:
        try:
            await trio.to_thread.run_sync(session.close, limiter=self._limiter)
        except Exception:
            # The other sessions and the weights have to be freed all the same.
            logger.exception("a session of %s could not be freed", self._weights.name)


@dataclass(frozen=True, eq=False)
class Plan:
    """What a pool is made from.

    Attributes:
        config: of the model.
        file: what the model's file says about itself.
        cache: where its weights come from.
        cores: shared with all other slots of the process.
        has_room: whether so much fits into the memory beside all that is loaded; any thread.
        watch: looks after its slots.
        wanted: whether the load shall go on.
    """

    config: ModelConfig
    file: ModelFile
    cache: WeightsCache
    cores: Cores
    has_room: Callable[[Footprint], bool]
    watch: StallWatch
    wanted: Callable[[], bool]

    def has_room_for(self, options: SessionOptions) -> bool:
        """Whether one more session, made like this, fits into the memory."""
        gpu_layers = self.config.gpu_layers
        return self.has_room(self.file.memory(options, 1, gpu_layers) - self.file.memory(options, 0, gpu_layers))


async def serve_pool(
    plan: Plan,
    retire: trio.Event,
    progress: Progress | None = None,
    *,
    task_status: trio.TaskStatus[Pool],
) -> None:
    """Be a loaded model: load, publish the pool, run its slots until told to retire, then free everything.

    Arguments:
        plan: what to make.
        retire: set when no lease is left and the pool shall go.
        progress: told of the load.
        task_status: started with the pool once it is whole.
    """
    config = plan.config
    async with open_sessions(config, plan.cache, progress, plan.wanted) as (weights, sessions, arrangement):
        limiter = trio.CapacityLimiter(config.slots)
        batches = BatchSessions(
            weights, arrangement.options, arrangement.private, config.batch_capacity, plan.has_room_for
        )
        paces = Paces(Pace(), Pace())
        solos = [Solo(limiter, plan.cores, config.threads, paces) for _ in range(config.slots)]
        stage: Stage
        if arrangement.fused:
            conductor = Conductor(sessions[0], limiter, plan.cores, config.threads, batches, {"model": config.id})
            stage = SharedStage(conductor, solos, batches)
        else:
            stage = PrivateStage(sessions, solos, batches, config.id)
        slots = [Slot(index, place, plan.watch) for index, place in enumerate(stage.places)]
        pool = Pool(config, weights, arrangement.private.n_ctx, slots)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(plan.watch.run)
                await nursery.start(stage.run, slots, plan.watch)
                for slot in slots:
                    await nursery.start(slot.run)
                task_status.started(pool)
                await retire.wait()
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                sessions[:] = stage.sessions
                await pool.wait_unread()
