"""Weights, loaded once however many sessions and models use them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import trio

from trioserve.engine.base import Engine, LoadFailure, LoadOptions, Progress, UnusableFile, Weights
from trioserve.errors import InvalidModelError, ModelLoadError

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
        users: who holds them or waits for their load. The last one to leave frees them, or gives their load up; then
            there is no way back.
        wanted: whether their load shall go on; written by the event loop, read by the loading thread.
        unforeseen: what else a load raised, for the one who began it.
        settled: set at the end of the load, when ``weights`` or ``error`` is there.
        freed: set when they are gone again.
    """

    users: int
    wanted: bool = True
    weights: Weights | None = None
    error: ModelLoadError | InvalidModelError | None = None
    unforeseen: Exception | None = None
    settled: trio.Event = field(default_factory=trio.Event)
    freed: trio.Event = field(default_factory=trio.Event)


class WeightsCache:
    """Shares weights between whoever asks for the same file with the same options.

    The first one loads, those who come meanwhile wait for that load, and the last one to leave frees. Whoever comes
    while they are being freed waits for the end of that and loads anew: there are never two copies. A failed load is
    forgotten, so the next one to come tries again. A load that nobody waits for any more is given up.

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
            InvalidModelError: the file can't be loaded, now or later.
            ModelLoadError: it could not be loaded now.
        """
        try:
            key = _Key.of(path, options)
        except OSError as error:
            raise ModelLoadError(f"cannot read {path}: {error.strerror}") from None
        while (entry := self._entries.get(key)) is not None and entry.users == 0:
            await entry.freed.wait()
        if entry is None:
            entry = self._entries[key] = _Entry(users=1)
            async with trio.open_nursery() as nursery:  # it ends with the load, whatever becomes of this caller
                nursery.start_soon(self._load, key, entry, path, progress)
                await self._settled(key, entry)
            if entry.unforeseen is not None:
                raise entry.unforeseen
        else:
            entry.users += 1  # from now on: the others may have come and gone before this one has woken up
            await self._settled(key, entry)
        if entry.error is not None:
            raise entry.error
        assert entry.weights is not None, "a settled entry has weights or an error"
        return entry.weights

    def has(self, path: Path, options: LoadOptions) -> bool:
        """Whether these weights are loaded, or on their way in: whoever asks for them now takes no more memory."""
        try:
            entry = self._entries.get(_Key.of(path, options))
        except OSError:
            return False
        return entry is not None and entry.users > 0

    async def release(self, weights: Weights) -> None:
        """Give weights back; the last user's call frees them."""
        key = self._keys[id(weights)]
        await self._leave(key, self._entries[key])

    async def _settled(self, key: _Key, entry: _Entry) -> None:
        try:
            await entry.settled.wait()
        except BaseException:
            await self._leave(key, entry)
            raise

    async def _leave(self, key: _Key, entry: _Entry) -> None:
        entry.users -= 1
        if entry.users:
            return
        if entry.settled.is_set():
            await self._remove(key, entry)
        else:
            entry.wanted = False  # whatever comes of the load, its end removes it

    async def _remove(self, key: _Key, entry: _Entry) -> None:
        """Free weights, where there are any, and let those in who wait for that."""
        try:
            if entry.weights is not None:
                del self._keys[id(entry.weights)]
                await _free(entry.weights)
        finally:
            if self._entries.get(key) is entry:
                del self._entries[key]
            entry.freed.set()

    async def _load(self, key: _Key, entry: _Entry, path: Path, progress: Progress | None) -> None:
        def note(fraction: float) -> bool:
            """Called in the loading thread."""
            return (progress is None or progress(fraction)) and entry.wanted

        try:
            with trio.CancelScope(shield=True):  # the others wait for this load, whatever becomes of its caller
                entry.weights = await trio.to_thread.run_sync(
                    self._engine.load, path, key.options, note, limiter=self._limiter
                )
            self._keys[id(entry.weights)] = key
        except UnusableFile as error:
            entry.error = InvalidModelError(f"model file {str(path)!r} can't be used: {error}", param="path")
        except LoadFailure as error:
            entry.error = ModelLoadError(f"{path} could not be loaded: {error}")
        except Exception as error:
            entry.error, entry.unforeseen = ModelLoadError(f"{path} could not be loaded"), error
        except BaseException:
            entry.error = ModelLoadError(f"{path} could not be loaded")
            raise
        finally:
            entry.settled.set()
            if entry.weights is None or not entry.wanted:
                await self._remove(key, entry)


async def _free(weights: Weights) -> None:
    """Close weights in a thread of their own, which no load can keep waiting."""
    with trio.CancelScope(shield=True):
        try:
            await trio.to_thread.run_sync(weights.close, limiter=trio.CapacityLimiter(1))
        except Exception:
            # Whoever gives weights back can do nothing about it, and has more to free.
            logger.exception("the weights of %s could not be freed", weights.name)
