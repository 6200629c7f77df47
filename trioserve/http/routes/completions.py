"""Text completions."""

from __future__ import annotations

from quart import Response, request
from quart_trio import QuartTrio

from trioserve.http.body import read_as
from trioserve.http.completion import answer, generation_request
from trioserve.http.exchange import Exchange
from trioserve.http.render import CompletionShape
from trioserve.http.schemas.completions import CompletionRequest
from trioserve.service import BatchRequest, Service


def register(app: QuartTrio, service: Service) -> None:
    """Add the routes."""

    @app.post("/v1/completions")
    async def completions() -> Response:
        body = await read_as(request, CompletionRequest.parse)
        exchange = Exchange.of(request.scope)
        items = [generation_request(body, prompt, body.max_tokens, exchange.request_id) for prompt in body.prompt]
        wanted = BatchRequest(
            items,
            all_or_nothing=True,
            model=body.model,
            busy_timeout_ms=body.busy_timeout_ms,
            request_id=exchange.request_id,
        )
        return await answer(service, wanted, body, CompletionShape, exchange)
