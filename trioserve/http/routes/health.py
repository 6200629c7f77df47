"""Liveness and readiness: two questions, two answers."""

from __future__ import annotations

from quart import Response
from quart_trio import QuartTrio

from trioserve.http.render import response
from trioserve.scheduling.lifecycle import ProcessPhase
from trioserve.service import Service


def register(app: QuartTrio, service: Service) -> None:
    """Add the routes."""

    @app.get("/health/live")
    async def live() -> Response:
        return response({"status": "ok"}, 200)

    @app.get("/health/ready")
    @app.get("/health")
    async def ready() -> Response:
        if service.ready:
            return response({"status": "ok"}, 200)
        return response({"status": "loading" if service.phase is ProcessPhase.SERVING else service.phase.value}, 503)
