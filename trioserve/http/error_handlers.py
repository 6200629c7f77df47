"""Whatever goes wrong in a route, in the error shape of its path."""

from __future__ import annotations

import logging

from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from trioserve.errors import (
    EngineError,
    InvalidRequestError,
    MethodNotAllowedError,
    PayloadTooLargeError,
    RequestTimeoutError,
    RouteNotFoundError,
    TrioserveError,
)
from trioserve.http.dialect import Dialect
from trioserve.http.exchange import Exchange, error_headers

logger = logging.getLogger("trioserve.http")


def respond(error: TrioserveError, dialect: Dialect) -> Response:
    """The response that tells an error."""
    response = Response(dialect.body(error), status=error.status)
    for name, value in error_headers(error):
        response.headers[name.decode()] = value.decode()
    return response


def register(app: QuartTrio, max_body_bytes: int) -> None:
    """Install the handlers.

    Arguments:
        app: the application.
        max_body_bytes: its bound on bodies, for the message.
    """

    @app.errorhandler(TrioserveError)
    async def own(error: TrioserveError) -> Response:
        if isinstance(error, EngineError):
            # Whoever raised it has logged where it came from; a stall ends many requests at once.
            _log(error, traceback=False)
        return _told(error)

    @app.errorhandler(HTTPException)
    async def framework(error: HTTPException) -> Response:
        response = _told(_translated(error, max_body_bytes))
        allow = dict(error.get_headers()).get("Allow")
        if allow:
            response.headers["allow"] = allow
        return response

    @app.errorhandler(Exception)
    async def unexpected(error: Exception) -> Response:
        _log(error)
        return _told(TrioserveError("an internal error happened; the server's log tells it by the request id"))


def _told(error: TrioserveError) -> Response:
    exchange = Exchange.of(request.scope)
    exchange.note_error(error)
    return respond(error, exchange.dialect)


def _log(error: Exception, *, traceback: bool = True) -> None:
    request_id = Exchange.of(request.scope).request_id
    logger.error("request failed", exc_info=error if traceback else None, extra={"fields": {"request_id": request_id}})


def _translated(error: HTTPException, max_body_bytes: int) -> TrioserveError:
    """A framework's exception as one of ours."""
    if error.code == 404:
        return RouteNotFoundError(f"there is no route {request.method} {request.path[:200]}")
    if error.code == 405:
        return MethodNotAllowedError(f"{request.path[:200]} does not take {request.method}")
    if error.code == 408:
        return RequestTimeoutError("the request's body did not arrive in time")
    if error.code == 413:
        return PayloadTooLargeError(
            f"the request's body is larger than {max_body_bytes} bytes (max_request_body_bytes)"
        )
    if error.code is not None and 400 <= error.code < 500:
        return InvalidRequestError(error.description or error.name)
    return TrioserveError("an internal error happened")
