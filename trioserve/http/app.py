"""The HTTP application over a service."""

from __future__ import annotations

from quart_trio import QuartTrio

from trioserve.http import error_handlers
from trioserve.http.guard import Guard
from trioserve.http.routes import (
    chat,
    completions,
    embeddings,
    health,
    management,
    messages,
    metrics,
    models,
    openapi,
    responses_api,
    tasks,
    text,
)
from trioserve.http.routing import RouteNames
from trioserve.service import Service

BODY_TIMEOUT_SECONDS = 60


def create_app(service: Service) -> Guard:
    """Make the ASGI application that serves an open service. It is called under Trio and takes http scopes only.

    Arguments:
        service: must stay open as long as requests are served.
    """
    app = QuartTrio("trioserve", static_folder=None)
    # Each of these has a default in Quart that would surprise: 16 MiB, 60 s for a whole streamed answer.
    app.config["MAX_CONTENT_LENGTH"] = service.config.max_request_body_bytes
    app.config["BODY_TIMEOUT"] = BODY_TIMEOUT_SECONDS
    app.config["RESPONSE_TIMEOUT"] = None
    app.url_map.strict_slashes = app.url_map.merge_slashes = False  # both would answer with redirects
    error_handlers.register(app, service.config.max_request_body_bytes)
    for routes in (chat, completions, responses_api, messages, embeddings, tasks, text):
        routes.register(app, service)
    for routes in (models, management, health, metrics, openapi):
        routes.register(app, service)
    return Guard(app, service, RouteNames(app.url_map))
