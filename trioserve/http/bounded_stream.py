"""A connection's socket whose sends are bounded: they end when the peer takes nothing for too long."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

import trio

from trioserve.http.send_queue import untaken

LOOKS = 4
"""How often in each timeout it is looked what the peer has taken: it is known that much later."""


class SendLimits:
    """Bounds the sends of all streams of a server.

    Arguments:
        timeout: seconds for which a peer may take nothing.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._stop_at = math.inf
        self._scopes: set[trio.CancelScope] = set()

    def stop_at(self, deadline: float) -> None:
        """Let no send, present or future, last longer than until then."""
        self._stop_at = min(self._stop_at, deadline)
        for scope in self._scopes:
            scope.deadline = min(scope.deadline, deadline)

    @property
    def over(self) -> bool:
        """Whether no send may last any longer."""
        return trio.current_time() >= self._stop_at

    @contextlib.contextmanager
    def bound(self) -> Iterator[trio.CancelScope]:
        """Bound a wait of a send: until it is time for a look at what was taken, or no send may last any longer."""
        with trio.CancelScope(deadline=min(trio.current_time() + self.timeout / LOOKS, self._stop_at)) as scope:
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
        taken, took_at = self.taken, trio.current_time()
        while not await self._has_room_soon():
            if self.taken > taken:
                taken, took_at = self.taken, trio.current_time()
            if self._limits.over or trio.current_time() >= took_at + self._limits.timeout:
                await trio.aclose_forcefully(self._stream)
                raise trio.BrokenResourceError("the peer took no data for too long")

    async def _has_room_soon(self) -> bool:
        """Wait for room until it is time to look at what the peer has taken."""
        with self._limits.bound() as look:
            await trio.lowlevel.wait_writable(self.socket)
        return not look.cancelled_caught

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
