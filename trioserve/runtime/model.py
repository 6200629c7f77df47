"""One registered model: its state, its gate, its pool, and the nursery they live in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import trio

from trioserve.config import ModelConfig, check_model_file
from trioserve.errors import ModelLoadError, TrioserveError
from trioserve.runtime.cores import Cores
from trioserve.runtime.gate import Gate
from trioserve.runtime.lease import Lease
from trioserve.runtime.pool import Pool, serve_pool
from trioserve.runtime.weights_cache import WeightsCache
from trioserve.scheduling.admission import Admission, Kind, Ticket
from trioserve.scheduling.lifecycle import MODEL, ModelEvent, ModelState, advance

logger = logging.getLogger("trioserve.model")

LoadProgress = Callable[[str, float], None]
"""Told a model's id and how much of it is loaded, from 0 to 1, in the loading thread."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One consistent moment of a model, for the status page.

    Attributes:
        id: of the registration.
        created: Unix time of the registration, in seconds.
        state: see ``scheduling.lifecycle``.
        slots: as configured.
        active_slots: leased.
        queued_requests: waiting for a slot.
        max_parallel_slots: what the loaded model can have; None while it is unloaded.
        n_ctx: tokens of context of each slot; None while it is unloaded.
    """

    id: str
    created: int
    state: ModelState
    slots: int
    active_slots: int
    queued_requests: int
    max_parallel_slots: int | None
    n_ctx: int | None

    @property
    def loaded(self) -> bool:
        """Whether requests are answered without a load."""
        return self.state is ModelState.READY


class _LoadAttempt:
    """One load that any number of requests wait for."""

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
            ModelLoadError, InvalidModelError: what the load failed with.
        """
        await self._settled.wait()
        if self._error is not None:
            # A fresh one for each waiter: a raised exception collects its raiser's traceback.
            raise type(self._error)(self._error.message, param=self._error.param)
        assert self._pool is not None, "a settled attempt has a pool or an error"
        return self._pool


class Model:
    """A registration and whatever is loaded for it. ``run`` is its life.

    Arguments:
        config: of the model.
        cache: where weights come from.
        cores: shared by all models of the process.
        max_queued: requests that may wait for a slot.
        progress: told of loads.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: WeightsCache,
        cores: Cores,
        *,
        max_queued: int,
        progress: LoadProgress | None = None,
    ) -> None:
        self.config = config
        self.created = int(time.time())
        self._cache = cache
        self._cores = cores
        self._progress = progress
        self._gate = Gate(Admission(config.slots, max_queued))
        self._state = ModelState.UNLOADED
        self._pool: Pool | None = None
        self._retire = trio.Event()
        self._gone = trio.Event()
        self._attempt: _LoadAttempt | None = None
        self._nursery: trio.Nursery | None = None
        self._closing = False  # written by the event loop, read by a loading thread
        self.was_ready = False

    def __repr__(self) -> str:
        return f"<Model {self.id!r} {self._state} {self._gate.statistics()}>"

    @property
    def id(self) -> str:
        """What requests call it."""
        return self.config.id

    @property
    def pool(self) -> Pool | None:
        """The published pool, where there is one."""
        return self._pool

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the nursery of loads, pools and slots until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    async def admit(self, wait: float | None) -> Lease:
        """Wait for a slot.

        Arguments:
            wait: seconds at most; None is without bound, 0 not at all.

        Raises:
            ServerBusyError: no slot within that time.
        """
        ticket = Ticket(wait=wait)
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
        """
        if self._pool is not None:
            return self._pool
        if self._attempt is None:
            self._attempt = _LoadAttempt()
            self._advance(ModelEvent.LOAD_STARTED)
            assert self._nursery is not None, "models run before they are used"
            self._nursery.start_soon(self._load, self._attempt)
        return await self._attempt.wait()

    async def unload(self, wait: float | None = None) -> None:
        """Let earlier work finish, then free the pool. Without effect on an unloaded model.

        Arguments:
            wait: seconds that the caller may wait for its turn.

        Raises:
            ServerBusyError: the whole model could not be had within that time.
        """
        ticket = Ticket(Kind.MANAGER, wait)
        await self._gate.pass_through(ticket)
        try:
            await self._settle_load()
            if self._pool is not None:
                await self._tear_down()
        finally:
            self._gate.release(ticket)

    async def close(self) -> None:
        """Unload for good; a load that is under way is given up. Nobody may ask for leases any more."""
        self._closing = True
        await self.unload()

    def status(self) -> ModelStatus:
        """Return one consistent moment."""
        statistics = self._gate.statistics()
        pool = self._pool
        return ModelStatus(
            id=self.id,
            created=self.created,
            state=self._state,
            slots=statistics.slots,
            active_slots=statistics.active,
            queued_requests=statistics.queued,
            max_parallel_slots=pool.weights.max_sessions if pool else None,
            n_ctx=pool.n_ctx if pool else None,
        )

    def _advance(self, event: ModelEvent) -> None:
        self._state = advance(MODEL, self._state, event)

    async def _load(self, attempt: _LoadAttempt) -> None:
        """Make one attempt to load, and tell everybody who waits for it."""
        started = trio.current_time()
        try:
            check_model_file(self.config.path)
            self._retire, self._gone = trio.Event(), trio.Event()
            assert self._nursery is not None, "loads run in the model's nursery"
            pool: Pool = await self._nursery.start(self._serve)
        except TrioserveError as error:
            logger.error("model %s failed to load: %s", self.id, error)
            self._finish_attempt(attempt, ModelEvent.LOAD_FAILED, error)
        except Exception:
            logger.exception("model %s failed to load", self.id)
            self._finish_attempt(attempt, ModelEvent.LOAD_FAILED, ModelLoadError(f"{self.id} could not be loaded"))
        except BaseException:
            # The model itself is being ended. Whoever waits for this load, maybe behind a shield, must hear of it.
            self._finish_attempt(attempt, ModelEvent.LOAD_FAILED, ModelLoadError(f"the load of {self.id} was given up"))
            raise
        else:
            self._pool, self.was_ready = pool, True
            fields = {"slots": len(pool.slots), "n_ctx": pool.n_ctx, "seconds": round(trio.current_time() - started, 2)}
            logger.info("model %s is ready", self.id, extra={"fields": fields})
            self._finish_attempt(attempt, ModelEvent.LOAD_SUCCEEDED, pool)

    def _finish_attempt(self, attempt: _LoadAttempt, event: ModelEvent, outcome: Pool | TrioserveError) -> None:
        self._advance(event)
        self._attempt = None
        attempt.settle(outcome)

    async def _serve(self, *, task_status: trio.TaskStatus[Pool]) -> None:
        try:
            await serve_pool(
                self.config, self._cache, self._cores, self._retire, self._note_progress, task_status=task_status
            )
        finally:
            self._gone.set()

    def _note_progress(self, fraction: float) -> bool:
        """Called in the loading thread."""
        if self._progress is not None:
            self._progress(self.id, fraction)
        return not self._closing

    async def _settle_load(self) -> None:
        """Wait for a load that nobody's lease waits for any more."""
        while self._attempt is not None:
            try:
                await self._attempt.wait()
            except TrioserveError:
                return

    async def _tear_down(self) -> None:
        self._advance(ModelEvent.UNLOAD_STARTED)
        self._pool = None
        self._retire.set()
        with trio.CancelScope(shield=True):
            await self._gone.wait()
        self._advance(ModelEvent.UNLOAD_FINISHED)
        logger.info("model %s is unloaded", self.id)
