"""Hypercorn's connections under our own roof: bounded sends, a drain before the end, an end that is never late.

``hypercorn.trio.serve`` sends inside a shield without a deadline, so a client that stops reading could hold its
connection, and the shutdown, for ever. Here every stream bounds its own sends; everything else is Hypercorn's.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config as HypercornConfig
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, H2Protocol, StreamBuffer
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import EventWrapper, WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState

from trioserve.config import Config
from trioserve.errors import ConfigError
from trioserve.http.exchange import CHUNKS, TAKEN, SendChunk
from trioserve.http.send_queue import untaken
from trioserve.http.socket_file import check_unused, removed_at_the_end

logger = logging.getLogger("trioserve.http")

CLOSING_SECONDS = 0.3
"""How long connections may take to close after the drain."""

LAST_WORDS_SECONDS = 0.1
"""How long the last bytes of a client that has left may take to be handled."""

MOST_UNYIELDED = 65536
"""Bytes that a connection may send before other tasks get their turn, while its socket takes all at once."""

BACKLOG = 1024
RECEIVE_BYTES = 65536
READ_AHEAD = 4
"""How many times ``RECEIVE_BYTES`` are read from a connection before the first of them are handled."""


class SendLimits:
    """Bounds the sends of all streams of a server.

    Arguments:
        timeout: seconds for which a peer may take nothing.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._stop_at = math.inf
        self._scopes: set[trio.CancelScope] = set()

    def stop_at(self, deadline: float) -> None:
        """Let no send, present or future, last longer than until then."""
        self._stop_at = deadline
        for scope in self._scopes:
            scope.deadline = min(scope.deadline, deadline)

    @property
    def over(self) -> bool:
        """Whether no send may last any longer."""
        return trio.current_time() >= self._stop_at

    @contextlib.contextmanager
    def bound(self) -> Iterator[trio.CancelScope]:
        """Bound the wait of one send."""
        with trio.CancelScope(deadline=min(trio.current_time() + self._timeout, self._stop_at)) as scope:
            self._scopes.add(scope)
            try:
                yield scope
            finally:
                self._scopes.discard(scope)


class BoundedStream(trio.abc.HalfCloseableStream):
    """A socket stream whose sends end when the peer takes nothing for too long, by breaking the connection.

    A peer that takes a little all the time is served to the end, as far as the system tells what it takes.

    Arguments:
        stream: of the accepted connection.
        limits: shared by all streams of the server.
    """

    def __init__(self, stream: trio.SocketStream, limits: SendLimits) -> None:
        self._stream = stream
        self._limits = limits
        self._sending = False
        self._written = 0
        self.socket = stream.socket

    @property
    def taken(self) -> int:
        """Bytes that the peer has taken so far."""
        return self._written - untaken(self.socket.fileno())

    def send_now(self, data: bytes) -> bytes:
        """Send what the socket takes at once, without waiting, and return what is left of it.

        Most pieces of a stream go this way, and need no task, scope or lock of their own to be bounded or cancelled.
        """
        if self._sending:
            return data
        try:
            return data[self._write(data) :]
        except OSError:  # it will never take anything again: whoever sends the rest learns that
            return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send, or break the connection when the peer takes nothing for too long."""
        if self._sending:
            # Hypercorn sends under a lock, and ends the connection without it: the client has left meanwhile.
            raise trio.BrokenResourceError("the connection is being closed")
        await trio.lowlevel.checkpoint_if_cancelled()
        self._sending = True
        try:
            with memoryview(data) as rest:
                sent = self._write(rest)
                while sent < len(rest):
                    await self._wait_for_room()
                    sent += self._write(rest[sent:])
        except OSError as error:
            if self.socket.fileno() < 0:
                raise trio.ClosedResourceError("the connection was closed") from None
            raise trio.BrokenResourceError("the connection is broken") from error
        finally:
            self._sending = False
        await trio.lowlevel.cancel_shielded_checkpoint()

    def _write(self, data: bytes | memoryview) -> int:
        """Send what the socket takes at once, and return how much that is."""
        try:
            count = os.write(self.socket.fileno(), data)
        except BlockingIOError:
            return 0
        self._written += count  # before anybody else can look at `taken`
        return count

    async def _wait_for_room(self) -> None:
        while True:
            taken, has_room = self.taken, False
            with self._limits.bound():
                await trio.lowlevel.wait_writable(self.socket)
                has_room = True
            if has_room:
                return
            if self._limits.over or self.taken <= taken:
                await trio.aclose_forcefully(self._stream)
                raise trio.BrokenResourceError("the peer took no data for too long")

    async def wait_send_all_might_not_block(self) -> None:
        """See ``trio.abc.SendStream``."""
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """See ``trio.abc.HalfCloseableStream``."""
        await self._stream.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """See ``trio.abc.ReceiveStream``."""
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        """See ``trio.abc.AsyncResource``."""
        await self._stream.aclose()


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

    def __init__(self, app: AppWrapper, *args: Any) -> None:
        super().__init__(partial(_lend, self.send_chunk, self.taken, app), *args)

    def taken(self) -> int:
        """Bytes that the client has taken so far."""
        stream = getattr(self.stream, "transport_stream", self.stream)
        assert isinstance(stream, BoundedStream), "the listener accepts no others"
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
            logger.warning("connection failed", exc_info=error)

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
        with ahead, contextlib.suppress(trio.ClosedResourceError, trio.BrokenResourceError):
            received = b"-"
            while received:
                received = bytes(await self.stream.receive_some(RECEIVE_BYTES))
                await ahead.send(received)
        handling.deadline = trio.current_time() + LAST_WORDS_SECONDS


async def _lend(send_chunk: SendChunk, taken: Callable[[], int], app: AppWrapper, scope: Any, *args: Any) -> None:
    """Call an application that may send chunks past Hypercorn, where answers can have some.

    It may also look at what its client takes, where a connection has one answer at a time.
    """
    if scope["type"] == "http" and scope["http_version"] in ("1.0", "1.1"):
        scope["extensions"][TAKEN] = taken
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            scope["extensions"][CHUNKS] = send_chunk
    await app(scope, *args)


class _Listener(trio.abc.Listener[BoundedStream]):
    def __init__(self, listener: trio.SocketListener, limits: SendLimits) -> None:
        self._listener = listener
        self._limits = limits

    async def accept(self) -> BoundedStream:
        return BoundedStream(await self._listener.accept(), self._limits)

    async def aclose(self) -> None:
        await self._listener.aclose()


def hypercorn_config(config: Config) -> HypercornConfig:
    """Our settings in Hypercorn's terms, every one that would surprise set on purpose."""
    theirs = HypercornConfig()
    theirs.bind = [config.host if config.host.startswith("unix:") else _address(config.host, config.port)]
    theirs.certfile = str(config.certfile) if config.certfile else None
    theirs.keyfile = str(config.keyfile) if config.keyfile else None
    theirs.keep_alive_timeout = config.keep_alive_timeout_ms / 1000
    theirs.keep_alive_max_requests = 2**31
    theirs.include_server_header = False
    theirs.h2_max_concurrent_streams = 256
    theirs.errorlog = None
    theirs.accesslog = None
    return theirs


def bind(config: Config) -> socket.socket:
    """Bind and listen.

    Raises:
        ConfigError: the address can't be had.
    """
    theirs = hypercorn_config(config)
    try:
        theirs.create_ssl_context()
    except OSError as error:  # SSLError is one
        raise ConfigError(f"certfile and keyfile can't be used: {error}", param="certfile") from None
    if config.host.startswith("unix:"):  # or Hypercorn would remove the file, whoever listens
        check_unused(Path(config.host.removeprefix("unix:")))
    try:
        sockets = theirs.create_sockets()
    except OSError as error:
        raise ConfigError(f"cannot listen on {theirs.bind[0]}: {error.strerror or error}", param="port") from None
    sock = (sockets.secure_sockets or sockets.insecure_sockets)[0]
    sock.listen(BACKLOG)
    return sock


def url(config: Config, sock: socket.socket) -> str:
    """Where clients reach a bound socket."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"{'https' if config.certfile else 'http'}://{_address(host, port)}"


async def serve_http(app: Any, config: Config, sock: socket.socket, until: Callable[[], Awaitable[None]]) -> None:
    """Serve an ASGI application on a bound socket.

    Arguments:
        app: takes http scopes, under Trio.
        config: of the server.
        sock: bound and listening; closed at the end.
        until: returns when serving shall end. New connections are accepted as long as it runs, so a drain inside it
            can answer newcomers. Afterwards connections have ``CLOSING_SECONDS`` to close.
    """
    theirs = hypercorn_config(config)
    limits = SendLimits(config.send_timeout_ms / 1000)
    context = WorkerContext(None)
    handler = partial(Connection, ASGIWrapper(app), theirs, context, ConnectionState({}))
    async with trio.open_nursery() as connections:
        try:
            async with trio.open_nursery() as accepting:
                listeners = [_listener(theirs, sock, limits)]
                accepting.start_soon(partial(trio.serve_listeners, handler, listeners, handler_nursery=connections))
                with removed_at_the_end(sock):
                    await until()
                accepting.cancel_scope.cancel()
        finally:  # also where a program around all this is cancelled
            await context.terminated.set()
            now = trio.current_time()
            # What is cancelled still tells its client why: sends end later than the tasks that make them.
            connections.cancel_scope.deadline = now + CLOSING_SECONDS / 2
            limits.stop_at(now + CLOSING_SECONDS)


def _listener(theirs: HypercornConfig, sock: socket.socket, limits: SendLimits) -> trio.abc.Listener[Any]:
    plain = _Listener(trio.SocketListener(trio.socket.from_stdlib_socket(sock)), limits)
    context = theirs.create_ssl_context()
    return plain if context is None else trio.SSLListener(plain, context, https_compatible=True)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
