"""Hypercorn's connection, made to end with its client, to fail alone, to wait for no head for ever, and to be bounded.

``hypercorn.trio`` sends inside a shield without a deadline, so a client that stops reading could hold its connection,
and the shutdown, for ever. Here every stream bounds its own sends; everything else is Hypercorn's.
"""

from __future__ import annotations

import contextlib
import logging
import math
import traceback
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import trio
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, H2Protocol, StreamBuffer
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import EventWrapper
from hypercorn.typing import AppWrapper

from trioserve.http.bounded_stream import BoundedStream
from trioserve.http.exchange import CHUNKS, TAKEN, SendChunk

logger = logging.getLogger("trioserve.http")

LAST_WORDS_SECONDS = 0.1
"""How long the last bytes of a client that has left may take to be handled."""

MOST_UNYIELDED = 65536
"""Bytes that a connection may send before other tasks get their turn, while its socket takes all at once."""

RECEIVE_BYTES = 65536
READ_AHEAD = 4
"""How many times ``RECEIVE_BYTES`` are read from a connection before the first of them are handled."""


class BoundedBuffer(StreamBuffer):
    """What waits for the window of one HTTP/2 stream: ``BUFFER_HIGH_WATER`` bytes and two messages at most.

    Hypercorn's own lets a message in whenever it has looked for something to send, also where the window is used up and
    nothing could be: it would take in the whole answer of a client that takes nothing, at the full speed of its slot.
    """

    async def pop(self, max_length: int) -> bytes:
        """Take what may be sent; only room lets the next message in."""
        data = bytes(self.buffer[:max_length])
        del self.buffer[:max_length]
        if len(self.buffer) < BUFFER_HIGH_WATER:
            await self._paused.set()
        if not self.buffer:
            await self._is_empty.set()
        return data


class _BoundedBuffers(dict[int, StreamBuffer]):
    """Replaces each buffer that Hypercorn makes for a stream."""

    def __setitem__(self, stream_id: int, buffer: StreamBuffer) -> None:
        super().__setitem__(stream_id, BoundedBuffer(EventWrapper))


class Connection(TCPServer):
    """Hypercorn's connection, made to end with its client, to fail alone, and to wait for no head for ever."""

    _unyielded = 0
    _has_left = False  # the client

    def __init__(self, app: AppWrapper, *args: Any, lends: bool = True) -> None:
        super().__init__(partial(_lend, self.send_chunk, self.taken, app) if lends else app, *args)

    def taken(self) -> int:
        """Bytes that the client has taken so far."""
        stream = getattr(self.stream, "transport_stream", self.stream)
        assert isinstance(stream, BoundedStream), "no others are served"
        return stream.taken

    def send_chunk(self, body: bytes) -> Awaitable[None] | None:
        """Send a piece of a response that is on its way in chunks, as h11 would write it.

        Nearly everything that a server of streams sends is such a piece. They have no part in the state of the
        connection: three layers that would look at each of them are left out.

        Returns:
            What is to be awaited: until all is sent, or others have had their turn. None where there is nothing.
        """
        return self._send(b"%x\r\n%b\r\n" % (len(body), body))

    async def run(self) -> None:
        """Serve until the connection ends."""
        try:
            await super().run()
        except* Exception as error:
            # Hypercorn raises on some input, such as an HTTP/2 path that is not ASCII. Left alone, that would end all
            # other connections with this one.
            # Their messages may hold bytes of the client's: keys and prompts.
            logger.warning("connection failed: %s", ", ".join(_kinds(error)))

    async def protocol_send(self, event: Event) -> None:
        """Send, and on HTTP/2 see before the first byte, so before the first stream, that its buffers are bounded."""
        protocol = self.protocol.protocol
        if isinstance(protocol, H2Protocol) and not isinstance(protocol.stream_buffers, _BoundedBuffers):
            protocol.stream_buffers = _BoundedBuffers()
        if isinstance(event, Updated) and self._has_left:
            return  # it is idle, and there is nobody to wait for: the timer would hold the socket until it fires
        if not isinstance(event, RawData):
            await super().protocol_send(event)
        elif (rest := self._send(event.data)) is not None:
            await rest

    def _send(self, data: bytes) -> Awaitable[None] | None:
        """Send what the socket takes at once; see ``send_chunk`` for what is returned."""
        stream: object = self.stream  # ours, or TLS over it
        if isinstance(stream, BoundedStream) and not self.send_lock.locked():
            left = stream.send_now(data)
            self._unyielded += len(data) - len(left)
            if not left:
                return self._yield() if self._unyielded > MOST_UNYIELDED else None
            if len(left) < len(data):
                return self._send_rest(left)
        return super().protocol_send(RawData(data))

    async def _yield(self) -> None:
        self._unyielded = 0
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def _send_rest(self, left: bytes) -> None:
        """Send what is left of something that has begun, also in a cancelled task.

        Hypercorn lets a cancelled task turn back at the lock. Its last words would then come in the midst of a chunk.
        """
        try:
            with trio.CancelScope(shield=True):
                async with self.send_lock:  # that nobody holds
                    await self.stream.send_all(left)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self.protocol.handle(Closed())

    async def _read_data(self) -> None:
        # Hypercorn reads nothing while bytes of a next request wait for the end of this one, and would not see that the
        # client has left meanwhile. So somebody else reads, a little ahead.
        ahead, data = trio.open_memory_channel[bytes](READ_AHEAD)
        try:
            async with trio.open_nursery() as nursery, data:
                nursery.start_soon(self._read_ahead, ahead, nursery.cancel_scope)
                async for received in data:
                    before = self.protocol.protocol
                    await self.protocol.handle(RawData(received))
                    if self.protocol.protocol is not before:
                        await self._await_first_request()
            await self.protocol.handle(Closed())
        finally:
            self._has_left = True
            await self._give_up_sends()
        # The client has gone; the timer for an idle connection would hold the socket until it fires.
        await self.idle_task.stop()

    async def _await_first_request(self) -> None:
        """Bound the wait on a connection that has just turned to HTTP/2, as on any other.

        Hypercorn takes the preface for a request and stops its timer for idle connections; without one the timer would
        start only after a first answer, and a client that asks nothing could stay for ever.
        """
        if isinstance(self.protocol.protocol, H2Protocol) and self.protocol.protocol.idle:
            await self.idle_task.restart(self._task_group, self._idle_timeout)

    async def _give_up_sends(self) -> None:
        """Let those go who wait for a client of HTTP/2 to take the end of their answer: it has left.

        Hypercorn lets them wait, and the last message is shielded: request and slot would stay until the send timeout.
        """
        if isinstance(self.protocol.protocol, H2Protocol):
            for buffer in self.protocol.protocol.stream_buffers.values():
                await buffer.close()

    async def _read_ahead(self, ahead: trio.MemorySendChannel[bytes], handling: trio.CancelScope) -> None:
        """Read until the client has left; then what it sent is handled within a moment, or has lost its purpose."""
        patience = self.config.read_timeout or math.inf
        with ahead, contextlib.suppress(trio.ClosedResourceError, trio.BrokenResourceError, trio.TooSlowError):
            received = b"-"
            while received:
                with trio.fail_after(patience):
                    received = bytes(await self.stream.receive_some(RECEIVE_BYTES))
                await ahead.send(received)
        handling.deadline = trio.current_time() + LAST_WORDS_SECONDS


def _kinds(error: BaseException) -> Iterator[str]:
    """Of the exceptions in a group, and where each of them was raised."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _kinds(inner)
    else:
        frames = traceback.extract_tb(error.__traceback__)[-1:]  # none where it was never raised itself
        places = [f" in {frame.name}, {Path(frame.filename).name}:{frame.lineno}" for frame in frames]
        yield "".join([type(error).__name__, *places])


async def _lend(send_chunk: SendChunk, taken: Callable[[], int], app: AppWrapper, scope: Any, *args: Any) -> None:
    """Call an application that may send chunks past Hypercorn, where answers can have some.

    It may also look at what its client takes, where a connection has one answer at a time.
    """
    if scope["type"] == "http" and scope["http_version"] in ("1.0", "1.1"):
        scope["extensions"][TAKEN] = taken
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            scope["extensions"][CHUNKS] = send_chunk
    await app(scope, *args)
