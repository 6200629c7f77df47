"""One HTTP/2 connection, cleartext with prior knowledge, whose flow control is in the client's own hands."""

from __future__ import annotations

import contextlib
import json
import socket
import uuid
from types import TracebackType
from typing import Any, Self

import h2.config
import h2.connection
import h2.events
import h2.settings
from lifecycle.client import CALL_SECONDS, route

LARGEST_WINDOW = 2**31 - 1
_WINDOW = h2.settings.SettingCodes.INITIAL_WINDOW_SIZE


class H2RawClient:
    """Sends requests and says no more than it is told to: it gives no window back by itself.

    Arguments:
        port: of the server.
        window: bytes that the server may send on each stream; the protocol's 65,535 where left out.
        receive_buffer: bytes that the kernel takes for us unread; as it comes where left out.
    """

    def __init__(self, port: int, *, window: int | None = None, receive_buffer: int | None = None) -> None:
        self.request_id = f"raw-{uuid.uuid4().hex}"
        self.data: dict[int, bytes] = {}
        self._ended: set[int] = set()
        self._socket = socket.socket()
        self._socket.settimeout(CALL_SECONDS)
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.connect(("127.0.0.1", port))
        self._state = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        if window is not None:
            self._state.local_settings[_WINDOW] = window
            self._state.local_settings.acknowledge()
        self._state.initiate_connection()
        if window == LARGEST_WINDOW:
            self._state.increment_flow_control_window(LARGEST_WINDOW - 65535)
        self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def port(self) -> int:
        """Our end's."""
        return self._socket.getsockname()[1]

    def post(self, body: dict[str, Any]) -> int:
        """Send a request; return its stream."""
        data = json.dumps(body).encode()
        stream = self._state.get_next_available_stream_id()
        pseudo = [(":method", "POST"), (":path", route(body)), (":scheme", "http"), (":authority", "a")]
        headers = [("content-type", "application/json"), ("x-request-id", self.request_id)]
        self._state.send_headers(stream, pseudo + headers)
        self._state.send_data(stream, data, end_stream=True)
        self.data[stream] = b""
        self._flush()
        return stream

    def get(self, path: bytes) -> int:
        """Ask for a path, whatever is in it; return its stream."""
        stream = self._state.get_next_available_stream_id()
        pseudo = [(":method", "GET"), (":path", path), (":scheme", "http"), (":authority", "a")]
        self._state.send_headers(stream, pseudo, end_stream=True)
        self._flush()
        return stream

    def read_data(self, stream: int, size: int) -> None:
        """Read until so many bytes of a stream have come."""
        while len(self.data[stream]) < size:
            self._read()

    def read_to_end(self, stream: int) -> bytes:
        """Read until a stream has ended; return its data."""
        while stream not in self._ended:
            self._read()
        return self.data[stream]

    def reset_stream(self, stream: int) -> None:
        """Give a stream up."""
        self._state.reset_stream(stream, error_code=8)
        self._flush()

    def go_away(self) -> None:
        """Announce that the connection is given up; it stays open."""
        self._state.close_connection()
        self._flush()

    def close(self) -> None:
        """Leave without a word."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _read(self) -> None:
        data = self._socket.recv(65536)
        assert data, "the server closed the connection"
        for event in self._state.receive_data(data):
            if isinstance(event, h2.events.DataReceived):
                self.data[event.stream_id] += event.data
            elif isinstance(event, h2.events.StreamEnded):
                self._ended.add(event.stream_id)
        self._flush()

    def _flush(self) -> None:
        self._socket.sendall(self._state.data_to_send())
