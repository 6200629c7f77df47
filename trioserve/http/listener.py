"""Where the server listens: its address, connections under our own roof, a drain before an end that is never late."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from trioserve.config import Config
from trioserve.errors import ConfigError
from trioserve.http.bounded_stream import BoundedStream, SendLimits
from trioserve.http.connection import Connection
from trioserve.http.socket_file import check_unused, removed_at_the_end

CLOSING_SECONDS = 0.3
"""How long connections may take to close after the drain."""

BACKLOG = 1024


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
