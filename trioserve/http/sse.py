"""Server-sent events as a response body."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from quart.wrappers.response import ResponseBody

from trioserve.errors import TrioserveError
from trioserve.http.render import error_body

DONE = b"data: [DONE]\n\n"
PING = b": keep-alive\n\n"


def frame(data: bytes) -> bytes:
    """One event that carries one line of data."""
    return b"data: " + data + b"\n\n"


def named_frame(name: str, data: bytes) -> bytes:
    """One event with a name."""
    return b"event: " + name.encode() + b"\n" + frame(data)


def error_frame(error: TrioserveError) -> bytes:
    """The last event of a stream that failed."""
    return frame(error_body(error))


class Source(Protocol):
    """What a stream is made of."""

    async def next_frames(self) -> bytes:
        """Return the frames of what has arrived, waiting for at least one; empty at the end."""
        ...


class EventStream(ResponseBody):
    """A body that is made while it is sent.

    Not an async generator: Quart enters no body whose request was cancelled in between, and a generator that was never
    entered never runs its ``finally``. What a stream holds is freed by the request's scope instead.

    An error ends the stream with one event that tells it, and no ending.

    Arguments:
        source: of the frames.
        ending: what follows the last frame.
        tell: makes the event of an error.
    """

    def __init__(
        self, source: Source, ending: bytes = DONE, *, tell: Callable[[TrioserveError], bytes] = error_frame
    ) -> None:
        self._source = source
        self._ending = ending
        self._tell = tell
        self._ended = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Nothing to free here."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        try:
            frames = await self._source.next_frames()
        except TrioserveError as error:
            self._ended = True
            return self._tell(error)
        self._ended = not frames
        if not frames and not self._ending:
            raise StopAsyncIteration
        return frames or self._ending
