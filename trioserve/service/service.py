"""The service: registered models, requests under way, and an end that loses nothing."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import trio

from trioserve.config import Config
from trioserve.engine.base import Engine
from trioserve.errors import EngineError, ShuttingDownError, TrioserveError
from trioserve.origin import current_origin
from trioserve.runtime.cores import Cores
from trioserve.runtime.lease import Lease
from trioserve.runtime.loader import LoadProgress
from trioserve.runtime.model import House, Model, ModelStatus
from trioserve.runtime.registry import Registry
from trioserve.runtime.residency import Residency
from trioserve.runtime.weights_cache import WeightsCache
from trioserve.scheduling.admission import effective_wait
from trioserve.scheduling.lifecycle import PROCESS, ProcessEvent, ProcessPhase, RequestEvent, advance
from trioserve.scheduling.statistics import DrainReport
from trioserve.service.begun import Begun, known_times
from trioserve.service.embed import Embedding
from trioserve.service.generate import Generation
from trioserve.service.ledger import Ledger, Record, Tally
from trioserve.service.manage import Management
from trioserve.service.metrics import Metrics
from trioserve.service.prepare import Prepared, Preparer, check_task
from trioserve.service.reading import Question, Reader, ReadingRequest, Result
from trioserve.service.requests import BatchRequest, EmbeddingRequest, GenerationRequest, Request, describe
from trioserve.service.status import SlotStatus, slot_statuses

logger = logging.getLogger("trioserve.service")

CUT_GRACE = 0.3
"""Seconds in which requests that were cut at the end of a drain may tell their clients."""

HELD_UP_SECONDS = 10.0
"""How often a closing service says what it waits for."""


class Service:
    """What the routes and the embedding program talk to. Made by ``open_service``.

    Arguments:
        config: of the server.
        house: shared by its models.
        registry: of models.
        nursery: where the models live.
        metrics: what is counted here; its models count there too.

    Attributes:
        management: loads, reconfigures and unloads models.
    """

    def __init__(
        self, config: Config, house: House, registry: Registry, nursery: trio.Nursery, metrics: Metrics
    ) -> None:
        self.config = config
        self.registry = registry
        self.metrics = metrics
        # Models that are registered later neither load by themselves nor make the server unready.
        self._at_start = [model for model in registry if not model.config.lazy]
        self._phase = ProcessPhase.SERVING
        self._ledger = Ledger(metrics)
        self.management = Management(config, registry, house, nursery, self._ledger, self.check_accepting)
        self._preparer = Preparer()
        self._reader = Reader()
        self._hurry = trio.Event()
        self._started = trio.Event()
        self._start_error: TrioserveError | None = None

    @property
    def phase(self) -> ProcessPhase:
        """Where the process stands."""
        return self._phase

    @property
    def ready(self) -> bool:
        """Whether new work is taken, and every model that is loaded at the start has been loaded and can serve."""
        loaded = all(model.was_ready for model in self._at_start)
        return self._phase is ProcessPhase.SERVING and loaded and not self.stalled

    @property
    def stalled(self) -> Sequence[str]:
        """Ids of the models, of those that are loaded at the start, of which no slot can serve."""
        return [model.id for model in self._at_start if model.status().out_of_order]

    def models(self) -> list[ModelStatus]:
        """Return one consistent moment of all models. Never waits."""
        return [model.status() for model in self.registry]

    def slots(self) -> Sequence[SlotStatus]:
        """Return one consistent moment of all slots. Never waits."""
        return slot_statuses(self.models(), self._ledger.under_way(), trio.current_time())

    def tally(self) -> Tally:
        """Return the counts of requests since the start."""
        return self._ledger.tally()

    def active(self) -> Counter[tuple[str, str]]:
        """Return how many requests are under way at this moment, by route and model."""
        return self._ledger.active()

    def note_error(self, error: TrioserveError) -> None:
        """Count the error that a call ends with, unless it is in the book already."""
        self._ledger.note_error(error)

    def response_begun(self, route: str, status: int) -> None:
        """Count a response of HTTP."""
        self.metrics.responses[route, status] += 1

    def check_accepting(self) -> None:
        """Turn newcomers away while the server drains.

        Raises:
            ShuttingDownError: it drains.
        """
        if self._phase is not ProcessPhase.SERVING:
            error = ShuttingDownError("the server is shutting down and takes no new requests")
            self._ledger.note_error(error)
            raise error

    async def start(self, request: GenerationRequest | BatchRequest, resources: ExitStack) -> Generation:
        """Admit a request and let a slot begin to answer it.

        Arguments:
            request: what is asked for.
            resources: everything that the request holds is entered there. The caller closes it when the last byte is on
                its way, or when the request is given up.

        Raises:
            InvalidRequestError: the request can't be honoured; no slot was taken.
            ModelNotFoundError: no such model.
            ServerBusyError: no slot within the wait that was allowed.
            ModelLoadError: the model could not be loaded.
            ShuttingDownError: the server drains.
        """
        batch = BatchRequest.of(request) if isinstance(request, GenerationRequest) else request
        begun = await self._begin(batch, resources)
        return Generation(begun, all_or_nothing=batch.all_or_nothing, choices=batch.choices)

    async def embed(self, request: EmbeddingRequest, resources: ExitStack) -> Embedding:
        """Admit a request for vectors and let a slot begin to compute them; see ``start`` for arguments and errors."""
        return Embedding(await self._begin(request, resources))

    async def read(self, question: Question[Result], request: ReadingRequest, resources: ExitStack) -> Result:
        """Ask a model something that needs no inference; see ``start`` for the other arguments and the errors.

        A model that is loaded answers at once, whatever its slots do. Another one is loaded for it.
        """
        model = self._found(request.model)
        if question.task is not None:
            check_task(model.config, question.task)
        record = self._enter(model, request.request_id, resources)
        with _recorded(record):
            return await self._read(model, question, request, record)

    async def count_tokens(self, request: GenerationRequest, resources: ExitStack) -> int:
        """Count the tokens of a prompt as the model takes it, without a slot where the model is loaded.

        Arguments and errors are those of ``start``; a prompt that does not fit is counted all the same.
        """
        model = self._found(request.model)
        check_task(model.config, BatchRequest.task)
        if model.pool is not None:
            return await self._preparer.count(model.pool, request)
        record = self._enter(model, request.request_id, resources)
        with _recorded(record):
            lease = await model.admit(self._wait(model, request.busy_timeout_ms))
            resources.callback(lease.release)
            record.advance(RequestEvent.ADMITTED)
            pool = await lease.ready()
            record.advance(RequestEvent.STARTED)
            count = await self._preparer.count(pool, request)
            record.advance(RequestEvent.FINISHED)
            return count

    @contextlib.asynccontextmanager
    async def generate(self, request: GenerationRequest | BatchRequest) -> AsyncIterator[Generation]:
        """Admit a request and hold its slot for the length of the block; see ``start`` for the errors."""
        with ExitStack() as resources:
            yield await self.start(request, resources)

    async def drain(self) -> DrainReport:
        """Take no new work, let what is under way finish, cut off what doesn't, and report.

        Bounded by ``drain_timeout_ms`` plus a moment in which the requests that are cut off tell their clients.
        """
        started, before = trio.current_time(), self._ledger.tally()
        self._phase = advance(PROCESS, self._phase, ProcessEvent.STOP_REQUESTED)
        logger.info("draining", extra={"fields": {"active": before.active}})
        for model in self.registry:
            model.stay()
        await self._wait_for_requests(self.config.drain_timeout_ms / 1000)
        complete = self._ledger.idle
        if not complete:
            await self._cut_off()
        self._note_drained()
        after = self._ledger.tally()
        return DrainReport(
            finished=after.finished - before.finished,
            failed=after.failed - before.failed,
            cancelled=after.cancelled - before.cancelled,
            rejected=after.rejected - before.rejected,
            seconds=trio.current_time() - started,
            complete=complete,
        )

    def hurry(self) -> None:
        """Make a drain that is under way cut off what is left at once."""
        self._hurry.set()

    async def load_at_start(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load every model that isn't lazy, side by side. ``open_service`` runs this, once, before anybody else comes.

        Each load is a request's, so to speak: it holds a slot, and whoever would change the model waits for it.
        """

        async def load(lease: Lease) -> None:
            try:
                await lease.ready()
            except TrioserveError as error:
                self._start_error = self._start_error or error
            finally:
                lease.release()

        async with trio.open_nursery() as nursery:
            for model in self._at_start:
                nursery.start_soon(load, await model.admit(None))
            task_status.started()
        self._started.set()

    async def wait_started(self) -> None:
        """Return once all models that load at the start have been loaded.

        Raises:
            ModelLoadError, InvalidModelError: one of them failed.
        """
        await self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    async def close(self) -> None:
        """Give up whatever is still under way and unload all models, each when its threads have ended."""
        if self._phase is ProcessPhase.SERVING:
            self._phase = advance(PROCESS, self._phase, ProcessEvent.STOP_REQUESTED)
        self._ledger.cut(ShuttingDownError("the server is shutting down"))
        self._ledger.abandon()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_what_holds_it_up)
            async with trio.open_nursery() as closing:
                for model in self.registry:
                    closing.start_soon(model.close)
            nursery.cancel_scope.cancel()
        self._note_drained()

    def unfinished(self) -> list[str]:
        """Say what threads are at work on, for the log. Safe in any thread."""
        return [what for model in self.registry for what in model.unfinished()]

    async def _tell_what_holds_it_up(self) -> None:
        while True:
            await trio.sleep(HELD_UP_SECONDS)
            for what in self.unfinished():
                logger.warning("the end waits for a thread: %s", what)

    def _note_drained(self) -> None:
        """Whoever comes first, the end of a drain or of a service that is closed without one."""
        if self._phase is ProcessPhase.DRAINING:
            self._phase = advance(PROCESS, self._phase, ProcessEvent.DRAINED)

    async def _begin(self, request: Request, resources: ExitStack) -> Begun:
        """Prepare and enter a request, get it a slot, and let that begin; see ``start``."""
        model = self._found(request.model)
        prepared = await self._prepare_early(model, request)
        self.check_accepting()  # once more: a drain that has begun meanwhile does not know of this request
        record = self._enter(model, request.request_id, resources)
        with _recorded(record):
            return await self._run(model, request, prepared, record, resources)

    def _found(self, model_id: str | None) -> Model:
        """The model that a newcomer asks for."""
        self.check_accepting()
        model = self.registry.find(model_id)
        if (origin := current_origin()) is not None:
            origin.model = model.id
        return model

    def _enter(self, model: Model, request_id: str, resources: ExitStack) -> Record:
        """Open the record of a request, closed with the resources."""
        record = self._ledger.open(request_id, model.id, model.id)
        resources.callback(record.close)
        record.on_abandon(resources.close)
        return record

    async def _prepare_early(self, model: Model, request: Request) -> Prepared | None:
        """Check prompts before a slot is taken. An unloaded model has no tokenizer yet; it is asked later."""
        check_task(model.config, request.task)
        return None if model.pool is None else await self._preparer.prepare(model.pool, request)

    async def _run(
        self,
        model: Model,
        request: Request,
        prepared: Prepared | None,
        record: Record,
        resources: ExitStack,
    ) -> Begun:
        if prepared is not None and not prepared.sequences:
            return self._refuse_all(model, prepared, record)
        reused = prepared.reused_prompt if prepared is not None else ()
        lease = await model.admit(self._wait(model, request.busy_timeout_ms), reused)
        resources.callback(lease.release)
        # The request may have been cut off in the very moment of its admission, and not yet know.
        await trio.lowlevel.checkpoint_if_cancelled()
        record.advance(RequestEvent.ADMITTED)
        record.slot = lease.slot
        record.fields["queue_ms"] = record.age_ms
        metrics = self.metrics.of(model.id)
        metrics.queue_wait.observe(record.age)
        pool = await lease.ready()
        if prepared is None or prepared.pool is not pool:
            # What was queued sees the configuration that it is admitted to.
            prepared = await self._preparer.prepare(pool, request)
        await trio.lowlevel.checkpoint_if_cancelled()  # the same, for the preparation; from here on its job is told
        if not prepared.sequences:
            return self._refuse_all(model, prepared, record)
        job = lease.start(pool, *prepared.sequences.values(), request_id=request.request_id)
        record.advance(RequestEvent.STARTED)
        record.on_cut(lease.fail)
        record.timed_by(partial(known_times, job.times))
        record.prompt_tokens = sum(len(sequence.prompt) for sequence in prepared.sequences.values())
        metrics.prompt_tokens += record.prompt_tokens
        if self.config.log_prompts:
            record.fields["prompt"] = describe(request)
        return Begun(model.id, record, prepared, job, metrics)

    def _wait(self, model: Model, busy_timeout_ms: int | None) -> float | None:
        """Seconds that a request may wait for a model."""
        return effective_wait(self.config.busy_timeout_ms, model.config.busy_timeout_ms, busy_timeout_ms)

    async def _read(self, model: Model, question: Question[Result], request: ReadingRequest, record: Record) -> Result:
        lease = None
        try:
            if (pool := model.pool) is None:
                lease = await model.admit(self._wait(model, request.busy_timeout_ms))
                record.slot = lease.slot
            record.advance(RequestEvent.ADMITTED)
            if lease is not None:
                pool = await lease.ready()
            assert pool is not None, "a lease makes a model ready"
            found = await self._reader.ask(pool, question)
        finally:
            if lease is not None:
                lease.release()
                record.slot = None  # it was a place to wait in, and did no work
        record.advance(RequestEvent.STARTED)
        record.advance(RequestEvent.FINISHED)
        return found

    def _refuse_all(self, model: Model, prepared: Prepared, record: Record) -> Begun:
        """A batch of which nothing can be honoured: each item gets its error, and no slot works."""
        record.fail(prepared.refused[0].error)
        return Begun(model.id, record, prepared, None, self.metrics.of(model.id))

    async def _wait_for_requests(self, seconds: float) -> None:
        """Return when no request is under way, the time is over, or somebody is in a hurry."""
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:

                async def watch() -> None:
                    await self._hurry.wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(watch)
                await self._ledger.wait_idle()
                nursery.cancel_scope.cancel()

    async def _cut_off(self) -> None:
        self._ledger.cut(ShuttingDownError("the server is shutting down and cut this request off"))
        with trio.move_on_after(CUT_GRACE):
            await self._ledger.wait_idle()
        self._ledger.abandon()


@contextlib.contextmanager
def _recorded(record: Record) -> Iterator[None]:
    """Let a request be cut off within the block, and have its failure recorded."""
    try:
        with record.scope:
            yield
            return
        raise ShuttingDownError("the server is shutting down")
    except Exception as error:
        # Something unforeseen is a failure too: without this it would pass for a client that left.
        record.fail(error if isinstance(error, TrioserveError) else EngineError("the request failed"))
        raise


@contextlib.asynccontextmanager
async def open_service(
    config: Config, *, engine: Engine | None = None, progress: LoadProgress | None = None
) -> AsyncIterator[Service]:
    """Run the service for the length of the block.

    Models that aren't lazy begin to load at once; ``Service.wait_started`` waits for them. Leaving the block gives up
    what is still under way; call ``Service.drain`` before to let it finish.

    Arguments:
        config: of the server and its models.
        engine: llama.cpp where it is left out.
        progress: told of loads, in the loading threads.
    """
    if engine is None:
        from trioserve.engine.llama import LlamaEngine  # heavy: not before it is needed

        engine = LlamaEngine()
    registry, metrics = Registry(), Metrics()
    house = House(
        engine,
        WeightsCache(engine),
        Cores(),
        Residency(
            config.max_loaded_models,
            config.min_free_memory_mb,
            registry.__iter__,
            free_device=engine.free_device_memory,
        ),
        max_queued=config.max_queued_requests,
        idle_unload=config.idle_unload_ms / 1000,
        stall_timeout=config.stall_timeout_ms / 1000,
        progress=progress,
        observer=metrics,
    )
    async with trio.open_nursery() as nursery:
        for entry in config.models:
            model = Model(entry, house)
            registry.add(model)
            await nursery.start(model.run)
        service = Service(config, house, registry, nursery, metrics)
        await nursery.start(service.load_at_start)
        try:
            yield service
        finally:
            with trio.CancelScope(shield=True):
                await service.close()
            nursery.cancel_scope.cancel()
