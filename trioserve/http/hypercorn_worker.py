"""Our connections under Hypercorn's own Trio worker, ``hypercorn -k trio``.

Left alone, that worker ends with all its connections when one of them raises, as Hypercorn does on some input of HTTP/2
and when such a client leaves at a bad moment; and a client that stops reading keeps it from ending. It has no setting
for the class of its connections, but looks the name up in its module after the application's start: there ours is put.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import trio
from hypercorn.trio import run
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.typing import AppWrapper

from trioserve.http.bounded_stream import BoundedStream, SendLimits
from trioserve.http.connection import Connection

CLOSING_SECONDS = 0.15
"""How long sends may last when the worker cancels what is left: clients are told how their requests have ended."""


@contextlib.contextmanager
def our_connections(receive: object, send_timeout: float, application: object) -> Iterator[None]:
    """Have Hypercorn's Trio worker serve an application over our connections, and any other one as it would.

    To be entered in the application's lifespan, before the end of its start is said. Without effect under other
    servers, and where something around the application has wrapped ``receive``: the worker can't be told by it then.

    Arguments:
        receive: of the lifespan's ASGI call.
        send_timeout: seconds for which a client may take nothing.
        application: where the worker serves this one itself, its connections lend it their extensions. Middleware in
            between would not see what goes past it.
    """
    lifespan = getattr(receive, "__self__", None)
    if not isinstance(lifespan, Lifespan):
        yield
        return
    app = lifespan.app
    _served[app] = SendLimits(send_timeout), getattr(app, "app", None) is application
    _worker.TCPServer = _make_connection
    try:
        yield
    finally:
        del _served[app]
        if not _served:
            _worker.TCPServer = TCPServer


_worker: Any = run
_served: dict[AppWrapper, tuple[SendLimits, bool]] = {}  # lifespans may overlap, and end in any order


def _make_connection(app: AppWrapper, *args: Any) -> Any:
    if app not in _served:
        return TCPServer(app, *args)
    limits, lends = _served[app]
    return WorkerConnection(limits, lends, app, *args)


class WorkerConnection(Connection):
    """A connection that ends soon after the worker has cancelled it.

    Arguments:
        limits: shared by all connections of the worker.
        lends: whether the application gets the extensions.
        args: of Hypercorn's connection: what it serves, and at last the accepted stream.
    """

    def __init__(self, limits: SendLimits, lends: bool, *args: Any) -> None:
        *others, stream = args
        super().__init__(*others, _bounded(stream, limits), lends=lends)
        self._limits = limits
        self._is_over = False

    async def run(self) -> None:
        """Serve until the connection ends."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wait_for_the_end)
            await super().run()
            self._is_over = True
            nursery.cancel_scope.cancel()

    async def _wait_for_the_end(self) -> None:
        """Bound all sends when the worker cancels its connections: Hypercorn shields those from it."""
        try:
            await trio.sleep_forever()
        finally:
            if not self._is_over:
                self._limits.stop_at(trio.current_time() + CLOSING_SECONDS)


def _bounded(stream: Any, limits: SendLimits) -> Any:
    if isinstance(stream, trio.SSLStream):
        stream.transport_stream = BoundedStream(stream.transport_stream, limits)
        return stream
    return BoundedStream(stream, limits)
