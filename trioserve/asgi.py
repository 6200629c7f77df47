"""``trioserve.app``: the server as one ASGI callable, configured from the environment.

For ``hypercorn -k trio trioserve:app`` and, through a bridge, for servers on asyncio. The service lives as long as the
ASGI lifespan. Nothing heavy is imported before the lifespan begins.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trioserve.http.guard import Guard

logger = logging.getLogger("trioserve")

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class _Application:
    """The Trio side: a service that is open from lifespan start-up to shutdown."""

    def __init__(self, outermost: object) -> None:
        self._outermost = outermost
        self._guard: Guard | None = None

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._guard is None:
            raise RuntimeError("trioserve needs a server with ASGI lifespan support; it has not been started")
        else:
            await self._guard(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        from trioserve.checks import check_models
        from trioserve.config import load_config
        from trioserve.errors import TrioserveError
        from trioserve.http.app import create_app
        from trioserve.http.hypercorn_worker import our_connections
        from trioserve.logs import configure_logging
        from trioserve.service import open_service

        await receive()
        try:
            config = load_config(None, os.environ, {})
            check_models(config)
            configure_logging(config.log_format, config.log_level, background=True)
        except TrioserveError as error:
            await send({"type": "lifespan.startup.failed", "message": error.message})
            return
        async with open_service(config) as service:
            self._guard = create_app(service)
            with our_connections(receive, config.send_timeout_ms / 1000, self._outermost):
                await send({"type": "lifespan.startup.complete"})
                await receive()
            # The server has let its requests finish, or cancelled them, before it says so: this drain is a formality
            # with servers that keep to the specification.
            logger.info("%s", await service.drain())
            self._guard = None
        await send({"type": "lifespan.shutdown.complete"})


class Application:
    """The ASGI callable for any server: Trio directly, asyncio through a bridge."""

    def __init__(self) -> None:
        self._bridge: Any = None

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if self._bridge is None:
            from trioserve.http.bridge import Bridge

            self._bridge = Bridge(_Application(self))
        if scope["type"] == "lifespan":
            _leave_sigterm_to_the_parent()
        await self._bridge(scope, receive, send)


def _leave_sigterm_to_the_parent() -> None:
    """In a worker process, ignore SIGTERM.

    Hypercorn's parent tells its workers to stop through an event and its Trio worker has no handler of its own: a
    SIGTERM to the whole process group, as service managers send it, would kill the workers in the middle of their
    streams.
    """
    import multiprocessing  # a worker process has it anyway, and nobody else needs it

    if multiprocessing.parent_process() is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


app = Application()
