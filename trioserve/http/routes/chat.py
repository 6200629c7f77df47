"""Chat completions."""

from __future__ import annotations

from quart import Response, request
from quart_trio import QuartTrio

from trioserve.http.body import read_as
from trioserve.http.completion import answer
from trioserve.http.exchange import Exchange
from trioserve.http.render import ChatShape
from trioserve.http.schemas.chat import ChatCompletionRequest
from trioserve.service import Service


def register(app: QuartTrio, service: Service) -> None:
    """Add the routes."""

    @app.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        body = await read_as(request, ChatCompletionRequest.parse)
        exchange = Exchange.of(request.scope)
        return await answer(service, body, ChatShape, exchange)
