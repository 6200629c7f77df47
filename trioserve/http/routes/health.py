"""Liveness and readiness: two questions, two answers."""

from __future__ import annotations

from quart import Response
from quart_trio import QuartTrio

from trioserve.http.operation import Operation
from trioserve.http.render import response
from trioserve.http.schemas.responses import Health
from trioserve.scheduling.lifecycle import ProcessPhase
from trioserve.service import Service


def register(app: QuartTrio, service: Service) -> None:
    """Add the routes."""

    @app.get("/health/live")
    @Operation("Whether the event loop turns", answers={200: Health})
    async def live() -> Response:
        return response({"status": "ok"}, 200)

    @app.get("/health/ready")
    @app.get("/health")
    @Operation("Whether requests are taken and answered without a load", answers={200: Health, 503: Health})
    async def ready() -> Response:
        if service.ready:
            return response({"status": "ok"}, 200)
        if service.phase is not ProcessPhase.SERVING:
            return response({"status": service.phase.value}, 503)
        if service.stalled:
            return response({"status": "stalled", "models": service.stalled}, 503)
        return response({"status": "loading"}, 503)
