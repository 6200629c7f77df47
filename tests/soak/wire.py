"""A client that holds its connection in its own hands: it reuses it, and breaks it off at any moment."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

import h11
import trio

from .checks import Fate, Reply

CALL_SECONDS = 120.0
RECEIVE_BYTES = 65536
_RESET = b"\x01\0\0\0\0\0\0\0"  # SO_LINGER: on, and no time


class Wire:
    """One client's connection to the server, made anew after it was broken off.

    Arguments:
        port: of the server, on the loopback interface.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._stream: trio.SocketStream | None = None
        self._state = h11.Connection(h11.CLIENT)

    async def call(self, method: str, target: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        """Send a request that nothing comes between; return the status and the body of the response."""
        exchange = Exchange(self)
        with trio.fail_after(CALL_SECONDS):
            await exchange.run(method, target, body, "soak-call")
        return exchange.status, exchange.body

    async def status(self, target: str) -> list[dict[str, Any]]:
        """Return what a status route lists."""
        code, body = await self.call("GET", target)
        assert code == 200, body
        return json.loads(body)["data"]

    def leave(self, *, reset: bool = False) -> None:
        """Break the connection off, whatever is under way. Never waits."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            if reset:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            stream.socket.close()

    async def begin(self, request: h11.Request) -> bytes:
        """Return the bytes that a request begins with, on a connection that is ready for it."""
        if self._stream is not None and self._state.our_state is h11.DONE and self._state.their_state is h11.DONE:
            self._state.start_next_cycle()
        else:
            self.leave()
            self._state = h11.Connection(h11.CLIENT)
            self._stream = await trio.open_tcp_stream("127.0.0.1", self._port)
        return self._state.send(request) or b""

    def finish(self, body: bytes) -> bytes:
        """Return the bytes of a body and of the end of its request."""
        data = self._state.send(h11.Data(body)) if body else b""
        return (data or b"") + (self._state.send(h11.EndOfMessage()) or b"")

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        assert self._stream is not None, "a request has begun"
        await self._stream.send_all(data)

    async def next_event(self) -> Any:
        """Return the next event of the response."""
        assert self._stream is not None, "a request has begun"
        while (event := self._state.next_event()) is h11.NEED_DATA:
            self._state.receive_data(await self._stream.receive_some(RECEIVE_BYTES))
        return event


class Exchange:
    """One request and what came back so far, also after a cancellation.

    Arguments:
        wire: to send it on.

    Attributes:
        status, headers, body: of the response.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._began = trio.current_time()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""

    async def run(
        self,
        method: str,
        target: str,
        body: Mapping[str, Any] | None,
        request_id: str,
        *,
        missing: int = 0,
        enough: Callable[[bytes], bool] = lambda body: False,
    ) -> bool:
        """Send a request and read its response.

        Arguments:
            method, target, body: of the request.
            request_id: of it.
            missing: bytes of its end that are never sent; then nothing is read either.
            enough: asked with each piece of the body whether to stop reading.

        Returns:
            Whether the response is whole.

        Raises:
            OSError, trio.BrokenResourceError, h11.ProtocolError: the connection was lost.
        """
        data = b"" if body is None else json.dumps(body).encode()
        message = await self._wire.begin(_request(method, target, data, request_id))
        message += self._wire.finish(data)
        await self._wire.send(message[: len(message) - missing])
        return not missing and await self._read(enough)

    def reply(self, fate: Fate, why: str = "") -> Reply:
        """What came back, in one record."""
        seconds = trio.current_time() - self._began
        return Reply(fate, self.status or None, self.headers, self.body, seconds, why)

    async def _read(self, enough: Callable[[bytes], bool]) -> bool:
        while not isinstance(event := await self._wire.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                self.status = event.status_code
                self.headers = {name.decode(): value.decode() for name, value in event.headers}
            elif isinstance(event, h11.Data):
                self.body += event.data
                if enough(self.body):
                    return False
            elif isinstance(event, h11.ConnectionClosed):
                raise trio.BrokenResourceError("the server closed the connection")
        return True


def _request(method: str, target: str, data: bytes, request_id: str) -> h11.Request:
    headers = [("host", "127.0.0.1"), ("x-request-id", request_id)]
    if data:
        headers += [("content-type", "application/json"), ("content-length", str(len(data)))]
    return h11.Request(method=method, target=target, headers=headers)
