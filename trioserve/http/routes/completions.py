"""Text completions."""

from __future__ import annotations

from quart import Response, request
from quart_trio import QuartTrio

from trioserve.http.body import read_as
from trioserve.http.completion import answer
from trioserve.http.exchange import Exchange
from trioserve.http.operation import GENERATES, Operation
from trioserve.http.render import CompletionShape
from trioserve.http.schemas.completions import CompletionRequest
from trioserve.http.schemas.responses import TextCompletion, TextCompletionChunk
from trioserve.service import Service


def register(app: QuartTrio, service: Service) -> None:
    """Add the routes."""

    @app.post("/v1/completions")
    @Operation(
        "More of a text",
        body=CompletionRequest,
        answers={200: TextCompletion},
        events=TextCompletionChunk,
        errors=GENERATES,
    )
    async def completions() -> Response:
        body = await read_as(request, CompletionRequest.parse)
        exchange = Exchange.of(request.scope)
        return await answer(service, body, CompletionShape, exchange)
