"""Liveness and readiness: two questions, two answers."""

from __future__ import annotations

from quart import Response
from quart_trio import QuartTrio

from trioserve.http.render import dumps
from trioserve.scheduling.lifecycle import ProcessPhase
from trioserve.service import Service


def register(app: QuartTrio, service: Service) -> None:
    """Add the routes."""

    @app.get("/health/live")
    async def live() -> Response:
        return _json({"status": "ok"}, 200)

    @app.get("/health/ready")
    @app.get("/health")
    async def ready() -> Response:
        if service.ready:
            return _json({"status": "ok"}, 200)
        return _json({"status": "loading" if service.phase is ProcessPhase.SERVING else service.phase.value}, 503)


def _json(value: object, status: int) -> Response:
    return Response(dumps(value), status=status, content_type="application/json")
