"""What the server counts and measures. Never waits."""

from __future__ import annotations

from quart import Response, request
from quart_trio import QuartTrio

from trioserve.http.exposition import Exposition
from trioserve.http.operation import Operation
from trioserve.service import Service


def register(app: QuartTrio, service: Service) -> None:
    """Add the route."""
    exposition = Exposition(service)

    @app.get("/metrics")
    @Operation("What the server counts and measures, for Prometheus", text="text/plain")
    async def metrics() -> Response:
        text, media_type = exposition.render(request.headers.get("accept", ""))
        return Response(text, content_type=media_type)
