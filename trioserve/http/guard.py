"""Around every request: its identity, its right to be here, its resources and bounds, and what a drain means for it."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from trioserve.errors import (
    AuthenticationError,
    PermissionDeniedError,
    RouteNotFoundError,
    ShuttingDownError,
    TrioserveError,
)
from trioserve.http.auth import Keyring, route_kind
from trioserve.http.cors import Cors
from trioserve.http.exchange import ClientStalledError, Exchange, Message, Receive, Send
from trioserve.http.routing import UNMATCHED
from trioserve.origin import as_origin
from trioserve.scheduling.lifecycle import ProcessPhase
from trioserve.service import Service

logger = logging.getLogger("trioserve.http")

App = Callable[[Any, Any, Any], Awaitable[None]]
NameRoute = Callable[[str, str], str]
"""Names the route of a request by its method and path."""

_STATUS_ROUTES = ("/health", "/v1/models", "/v1/slots", "/metrics", "/openapi.json")


def _asks_for_status(scope: Message) -> bool:
    path = scope["path"]
    below = any(path == route or path.startswith(f"{route}/") for route in _STATUS_ROUTES)
    return below and scope["method"] in ("GET", "HEAD")


class Guard:
    """An ASGI application around another one.

    Whatever a request holds is entered in its exchange and freed here, on every way out: also where the application
    returned a response whose body was never begun.

    Arguments:
        app: the application, called under Trio.
        service: asked whether new work is taken.
        name_route: of the application's routes.
    """

    def __init__(self, app: App, service: Service, name_route: NameRoute = lambda method, path: UNMATCHED) -> None:
        self._app = app
        self._service = service
        self._name_route = name_route
        self._send_timeout = service.config.send_timeout_ms / 1000
        self._silence = service.config.sse_ping_interval_ms / 1000 or math.inf
        self._keyring = Keyring.of(service.config)
        self._cors = Cors(service.config.cors_origins)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            send = _as_handshake(send)
        elif scope["type"] != "http":
            raise NotImplementedError(f"{scope['type']} is not served here")
        # From here on there is one path: what is judged by it is what is routed by it.
        scope["path"], scope["root_path"] = _origin_form(_below_root(scope)), ""
        more_headers = self._cors.response_headers(scope["headers"])
        route = self._name_route(scope["method"], scope["path"]) if scope["type"] == "http" else UNMATCHED
        exchange = Exchange(
            scope,
            receive,
            send,
            self._send_timeout,
            self._silence,
            self._draining,
            more_headers,
            witness=self._service,
            route=route,
        )
        with as_origin(exchange.origin), exchange.resources:
            try:
                await self._serve(scope, exchange)
            except BaseException as error:
                await self._bury(error, exchange)

    async def _serve(self, scope: Message, exchange: Exchange) -> None:
        method, headers = scope.get("method", "GET"), scope["headers"]  # a websocket has no method
        preflight = self._cors.preflight_headers(method, headers)
        if preflight is not None:  # browsers send no key with it
            await exchange.reply(204, preflight)
            return
        refusal = self._keyring.judge(headers, route_kind(method, scope["path"]))
        if refusal is not None:
            await self._deny(refusal, scope, exchange)
            return
        if scope["type"] == "websocket":
            await exchange.refuse(RouteNotFoundError("websockets are not served here"))
            return
        if self._draining() and not _asks_for_status(scope):
            try:
                self._service.check_accepting()
            except ShuttingDownError as error:
                await exchange.refuse(error)
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange.watch)
            await self._app(scope, exchange.receive, exchange.send)
            nursery.cancel_scope.cancel()

    async def _deny(
        self, refusal: AuthenticationError | PermissionDeniedError, scope: Message, exchange: Exchange
    ) -> None:
        client, *_ = scope.get("client") or ["-"]
        fields = {"request_id": exchange.request_id, "code": refusal.code, "client": client}
        logger.info("request denied", extra={"fields": fields})
        await exchange.refuse(refusal)

    def _draining(self) -> bool:
        return self._service.phase is not ProcessPhase.SERVING

    async def _bury(self, error: BaseException, exchange: Exchange) -> None:
        """Deal with what came out of the application."""
        _, rest = _split(error, ClientStalledError)
        if rest is None:
            return
        if isinstance(rest, Exception):
            logger.error("request failed", exc_info=rest, extra={"fields": {"request_id": exchange.request_id}})
            failure = TrioserveError("an internal error happened; the server's log tells it by the request id")
            exchange.note_error(failure)
            await exchange.give_up(failure)
            return
        cancelled, _ = _split(rest, trio.Cancelled)
        if cancelled is not None:
            await exchange.give_up(ShuttingDownError("the server is shutting down and gave this request up"))
        raise rest


def _below_root(scope: Message) -> str:
    """The path without the prefix under which the server is mounted."""
    path: str = scope["path"]
    root = scope.get("root_path", "").rstrip("/")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _origin_form(path: str) -> str:
    """The path alone, also where the request's target was a whole URL, ``*`` or nothing."""
    return path if path.startswith("/") else "/" + path.partition("://")[2].partition("/")[2]


def _as_handshake(send: Send) -> Send:
    """Let an HTTP response refuse the handshake of a websocket."""

    async def send_refusal(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    return send_refusal


def _split(error: BaseException, kind: type[BaseException]) -> tuple[BaseException | None, BaseException | None]:
    """Divide an exception, or a group of them, into those of one kind and the others."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(kind)
    return (error, None) if isinstance(error, kind) else (None, error)
