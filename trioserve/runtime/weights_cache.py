"""Weights, loaded once however many sessions and models use them."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import trio

from trioserve.engine.base import Engine, LoadFailure, LoadOptions, Progress, Weights
from trioserve.errors import ModelLoadError

logger = logging.getLogger("trioserve.weights")

_PARALLEL_LOADS = 4


@dataclass(frozen=True, slots=True)
class _Key:
    """What makes two loads the same: the very same file, unchanged, with the same options."""

    path: str
    modified_ns: int
    size: int
    options: LoadOptions

    @classmethod
    def of(cls, path: Path, options: LoadOptions) -> _Key:
        real = path.resolve()
        status = real.stat()
        return cls(str(real), status.st_mtime_ns, status.st_size, options)


@dataclass(eq=False, slots=True)
class _Entry:
    """Weights on their way in, in use, or on their way out.

    Attributes:
        users: who holds them or waits for their load. The last one to leave frees them; then there is no way back.
        settled: set at the end of the load, when ``weights`` or ``error`` is there.
        freed: set when they are gone again.
    """

    users: int
    weights: Weights | None = None
    error: ModelLoadError | None = None
    settled: trio.Event = field(default_factory=trio.Event)
    freed: trio.Event = field(default_factory=trio.Event)


class WeightsCache:
    """Shares weights between whoever asks for the same file with the same options.

    The first one loads, those who come meanwhile wait for that load, and the last one to leave frees. Whoever comes
    while they are being freed waits for the end of that and loads anew: there are never two copies. A failed load is
    forgotten, so the next one to come tries again.

    Arguments:
        engine: where weights come from.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._entries: dict[_Key, _Entry] = {}
        self._keys: dict[int, _Key] = {}
        self._limiter = trio.CapacityLimiter(_PARALLEL_LOADS)

    async def acquire(self, path: Path, options: LoadOptions, progress: Progress | None = None) -> Weights:
        """Return loaded weights; each call is paired with one ``release``.

        Arguments:
            path: a GGUF file.
            options: how to load it.
            progress: told of the load, if it is this call that loads.

        Raises:
            ModelLoadError: the file could not be loaded.
        """
        try:
            key = _Key.of(path, options)
        except OSError as error:
            raise ModelLoadError(f"cannot read {path}: {error.strerror}") from None
        while (entry := self._entries.get(key)) is not None and entry.users == 0:
            await entry.freed.wait()
        if entry is None:
            entry = self._entries[key] = _Entry(users=1)
            await self._load(key, entry, path, progress)
        else:
            entry.users += 1  # from now on: the others may have come and gone before this one has woken up
            try:
                await entry.settled.wait()
            except BaseException:
                await self._leave(key, entry)
                raise
        if entry.error is not None:
            raise entry.error
        assert entry.weights is not None, "a settled entry has weights or an error"
        return entry.weights

    async def release(self, weights: Weights) -> None:
        """Give weights back; the last user's call frees them."""
        key = self._keys[id(weights)]
        await self._leave(key, self._entries[key])

    async def _leave(self, key: _Key, entry: _Entry) -> None:
        entry.users -= 1
        if entry.users == 0 and entry.weights is not None:
            del self._keys[id(entry.weights)]
            try:
                await _free(entry.weights)
            finally:
                del self._entries[key]
                entry.freed.set()

    async def _load(self, key: _Key, entry: _Entry, path: Path, progress: Progress | None) -> None:
        try:
            with trio.CancelScope(shield=True):  # others wait for this load, whatever becomes of its caller
                entry.weights = await trio.to_thread.run_sync(
                    self._engine.load, path, key.options, progress, limiter=self._limiter
                )
            self._keys[id(entry.weights)] = key
        except LoadFailure as error:
            entry.error = ModelLoadError(f"{path} could not be loaded: {error}")
        except BaseException:
            entry.error = ModelLoadError(f"{path} could not be loaded")
            raise
        finally:
            if entry.error is not None:
                with suppress(KeyError):
                    del self._entries[key]
            entry.settled.set()


async def _free(weights: Weights) -> None:
    """Close weights in a thread of their own, which no load can keep waiting."""
    with trio.CancelScope(shield=True):
        try:
            await trio.to_thread.run_sync(weights.close, limiter=trio.CapacityLimiter(1))
        except Exception:
            # Whoever gives weights back can do nothing about it, and has more to free.
            logger.exception("the weights of %s could not be freed", weights.name)
