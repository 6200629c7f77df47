"""The routes, described for machines."""

from __future__ import annotations

from functools import cache

from quart import Response
from quart_trio import QuartTrio

from trioserve.http.document import document
from trioserve.http.operation import Operation
from trioserve.http.render import dumps
from trioserve.http.schemas.responses import Document
from trioserve.service import Service
from trioserve.workers import Workers

_writer = Workers("document", 1)


def register(app: QuartTrio, service: Service) -> None:
    """Add the route."""

    @cache
    def encoded() -> bytes:
        return dumps(document(app))

    @app.get("/openapi.json")
    @Operation("This document", answers={200: Document})
    async def openapi() -> Response:
        # The first one takes a while, too long for the event loop.
        return Response(await _writer.run(encoded), content_type="application/json")
