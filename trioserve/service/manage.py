"""Management: register, reconfigure and unload models, in their turn among the requests."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import trio
from pydantic import ValidationError

from trioserve.config import Config, ModelConfig, explain
from trioserve.errors import (
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    ServerBusyError,
    ShuttingDownError,
    TrioserveError,
)
from trioserve.origin import as_origin, current_origin
from trioserve.runtime.loader import inspect
from trioserve.runtime.model import House, Model, ModelStatus
from trioserve.runtime.registry import Registry
from trioserve.scheduling.admission import Ticket, effective_wait
from trioserve.scheduling.lifecycle import RequestEvent
from trioserve.service.ledger import Ledger
from trioserve.service.metrics import OUTCOMES

logger = logging.getLogger("trioserve.management")


@dataclass(frozen=True, slots=True)
class BulkResult:
    """What a bulk unload did: ids that are unloaded now, each once, and ids that nobody knows."""

    unloaded: Sequence[str]
    not_found: Sequence[str]


class Management:
    """Changes which models there are and what is loaded. Every operation holds one model at a time, and waits for none
    while it holds one: operations can't block each other for good.

    Arguments:
        config: of the server.
        registry: of models.
        house: shared by the models.
        nursery: where the models that are registered here live.
        ledger: where operations are entered beside requests: a drain waits for them, and cuts off what is left.
        check_accepting: raises while the server drains.
    """

    def __init__(
        self,
        config: Config,
        registry: Registry,
        house: House,
        nursery: trio.Nursery,
        ledger: Ledger,
        check_accepting: Callable[[], None],
    ) -> None:
        self._config = config
        self._registry = registry
        self._house = house
        self._nursery = nursery
        self._ledger = ledger
        self._check_accepting = check_accepting

    async def load(self, settings: Mapping[str, object]) -> ModelStatus:
        """Register a model, or reconfigure one, and load it.

        Arguments:
            settings: keys of one ``[[models]]`` entry. For a registered id the keys that are left out keep their
                values; for a new one ``path`` is needed. ``busy_timeout_ms`` also bounds this call's own wait.

        Raises:
            InvalidRequestError, InvalidModelError: the settings or the file are wrong; nothing was changed.
            ServerBusyError, ModelLoadError, InsufficientMemoryError: see ``Model.reconfigure``.
        """
        self._check_accepting()
        known, config = self._meant(settings)
        async with self._entered("load", config.id, label=known.id if known else ""):
            model = known or await self._register(config)
            # What is left out is as it is in the model's turn: others may change it until then.
            await model.reconfigure(partial(self._merged, settings), self._wait(model, config.busy_timeout_ms))
            return model.status()

    async def unload(self, model_id: str, busy_timeout_ms: int | None = None) -> ModelStatus:
        """Unload one model when its earlier work is done. Idempotent.

        Raises:
            ModelNotFoundError: no such model.
            ServerBusyError: no turn within the wait.
        """
        self._check_accepting()
        model = self._registry.get(model_id)
        if model is None:
            raise ModelNotFoundError(f"the model {model_id[:100]!r} does not exist", param="id")
        async with self._entered("unload", model.id, label=model.id):
            await model.unload(self._wait(model, busy_timeout_ms))
            return model.status()

    async def unload_many(self, model_ids: Sequence[str], busy_timeout_ms: int | None = None) -> BulkResult:
        """Unload several models, each as soon as it is free; see ``_unload_each``. Unknown ids are told."""
        self._check_accepting()
        found = {model_id: self._registry.get(model_id) for model_id in model_ids}  # of this moment, each id once
        models = [model for model in found.values() if model is not None]
        not_found = [model_id for model_id, model in found.items() if model is None]
        await self._unload_each(models, busy_timeout_ms)
        return BulkResult(unloaded=[model.id for model in models], not_found=not_found)

    async def unload_all(self, busy_timeout_ms: int | None = None) -> BulkResult:
        """Unload every model that is registered at this moment; see ``_unload_each``."""
        self._check_accepting()
        models = list(self._registry)
        await self._unload_each(models, busy_timeout_ms)
        return BulkResult(unloaded=[model.id for model in models], not_found=[])

    async def _unload_each(self, models: Sequence[Model], busy_timeout_ms: int | None) -> None:
        """Raise all barriers in one step, then let each model go in its own time: none waits for another.

        Raises:
            ServerBusyError: for the ones that it names there was no turn within the wait. The others are unloaded all
                the same, unless one was turned away on arrival: then nothing was changed.
        """
        async with self._entered("unload", ", ".join(model.id for model in models)):
            await self._unload_at_once(models, busy_timeout_ms)

    async def _unload_at_once(self, models: Sequence[Model], busy_timeout_ms: int | None) -> None:
        barriers: list[tuple[Model, Ticket]] = []
        try:
            for model in models:
                ticket = model.begin_unload(self._wait(model, busy_timeout_ms))
                barriers.append((model, ticket))
        except BaseException:
            for model, ticket in barriers:
                model.cancel_unload(ticket)
            raise
        refused: dict[str, ServerBusyError] = {}
        unforeseen: list[Exception] = []

        async def finish(model: Model, ticket: Ticket) -> None:
            try:
                await model.finish_unload(ticket)
            except ServerBusyError as error:
                refused[model.id] = error
            except Exception as error:  # told on its own below: a nursery would wrap it
                logger.exception("model %s could not be unloaded", model.id)
                unforeseen.append(error)

        async with trio.open_nursery() as nursery:
            for model, ticket in barriers:
                nursery.start_soon(finish, model, ticket)
        if unforeseen:
            raise unforeseen[0]
        if refused:
            names = ", ".join(model.id for model in models if model.id in refused)
            first = next(iter(refused.values()))
            raise ServerBusyError(f"not unloaded: {names}: {first.message}", first.busy)

    @contextlib.asynccontextmanager
    async def _entered(self, operation: str, model_id: str, label: str = "") -> AsyncIterator[None]:
        """Have an operation in the book for the length of the block.

        Arguments:
            operation: its name.
            model_id: of its model, or several ids.
            label: id of the one model that it counts for, where that is registered.

        Raises:
            ShuttingDownError: it was cut off.
        """
        origin = current_origin()
        record = self._ledger.open("-" if origin is None else origin.request_id, model_id, label)
        record.fields["operation"] = operation
        try:
            with record.scope:
                yield
                if record.phase in OUTCOMES:  # it was given up meanwhile
                    raise ShuttingDownError("the server is shutting down and gave this operation up")
                for event in (RequestEvent.ADMITTED, RequestEvent.STARTED, RequestEvent.FINISHED):
                    record.advance(event)
                return
            raise ShuttingDownError("the server is shutting down and cut this operation off")
        except Exception as error:
            record.fail(error if isinstance(error, TrioserveError) else EngineError("the operation failed"))
            raise
        finally:
            record.close()

    def _meant(self, settings: Mapping[str, object]) -> tuple[Model | None, ModelConfig]:
        """Which model a load is for, None where it is a new one, and its configuration if nothing comes between."""
        known = self._registered(settings.get("id"))
        config = self._merged(settings, known.config if known else None)
        if known is None and (known := self._registered(config.id)) is not None:  # named by its file alone
            config = self._merged(settings, known.config)
        return known, config

    def _merged(self, settings: Mapping[str, object], before: ModelConfig | None) -> ModelConfig:
        config = _validated(settings, before)
        found: dict[str, object] = {"path": self._confined("path", config.path)}
        if config.lora:
            found["lora"] = tuple(
                replace(adapter, path=self._confined("lora", adapter.path)) for adapter in config.lora
            )
        return config.model_copy(update=found)

    def _registered(self, model_id: object) -> Model | None:
        return self._registry.get(model_id) if isinstance(model_id, str) else None

    async def _register(self, config: ModelConfig) -> Model:
        """Enter a new model whose file was looked at first, so that a wrong one leaves no registration."""
        await inspect(self._house.engine, config)
        await trio.lowlevel.checkpoint_if_cancelled()  # the caller may have left while the thread looked
        if (other := self._registry.get(config.id)) is not None:  # registered by somebody else meanwhile
            return other
        model = Model(config, self._house)
        self._registry.add(model)
        with as_origin(None):  # it outlives the call
            self._nursery.start_soon(model.run)  # whoever finds the model before it runs waits for that
        logger.info("model %s is registered", model.id, extra={"fields": {"path": str(config.path)}})
        return model

    def _confined(self, setting: str, path: Path) -> Path:
        """Return where a file lies that a request names: below ``model_roots``, or in use by a registered model.

        A link is replaced by what it leads to now. Led elsewhere later, it must not be followed when the model is
        loaded again. A name that is registered already stays as its owner wrote it.

        Arguments:
            setting: that names the file, ``path`` or ``lora``; what is in use for the other doesn't count.
            path: as the request spells it.
        """
        registered = {used for model in self._registry for used in _files(model.config, setting)}
        if path in registered:
            return path
        real = _resolved(path)
        roots = [root for root in map(_resolved, self._config.model_roots) if root is not None]
        below = real is not None and any(real.is_relative_to(root) for root in roots)
        if real is not None and (below or real in set(map(_resolved, registered))):
            return real
        raise InvalidRequestError(
            f"{setting}: {str(path)[:300]!r} is not below a folder that requests may load from (model_roots)",
            param=setting,
        )

    def _wait(self, model: Model, busy_timeout_ms: int | None) -> float | None:
        return effective_wait(self._config.busy_timeout_ms, model.config.busy_timeout_ms, busy_timeout_ms)


def _validated(settings: Mapping[str, object], before: ModelConfig | None) -> ModelConfig:
    """Check a load's settings; what is left out, or null, is as it was."""
    given = {name: value for name, value in settings.items() if value is not None}
    kept = before.model_dump(exclude_unset=True) if before is not None else {}
    try:
        return ModelConfig.model_validate({**kept, **given})
    except ValidationError as error:
        problem = explain(error, "model")
        raise InvalidRequestError(problem.text, param=problem.name) from None


def _files(config: ModelConfig, setting: str) -> list[Path]:
    """The files that a setting of a model names."""
    return [config.path] if setting == "path" else [adapter.path for adapter in config.lora]


def _resolved(path: Path) -> Path | None:
    """Where a file really lies; None where the name leads nowhere, such as links in a circle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return None
