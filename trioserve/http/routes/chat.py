"""Chat completions."""

from __future__ import annotations

from quart import Response, request
from quart_trio import QuartTrio

from trioserve.errors import ChatTemplateError
from trioserve.http.body import read_as
from trioserve.http.completion import answer
from trioserve.http.exchange import Exchange
from trioserve.http.operation import GENERATES, Operation
from trioserve.http.render import ChatShape
from trioserve.http.schemas.chat import ChatCompletionRequest
from trioserve.http.schemas.responses import ChatCompletion, ChatCompletionChunk
from trioserve.service import Service


def register(app: QuartTrio, service: Service) -> None:
    """Add the routes."""

    @app.post("/v1/chat/completions")
    @Operation(
        "The next message of a conversation",
        body=ChatCompletionRequest,
        answers={200: ChatCompletion},
        events=ChatCompletionChunk,
        errors=(ChatTemplateError, *GENERATES),
    )
    async def chat_completions() -> Response:
        body = await read_as(request, ChatCompletionRequest.parse)
        exchange = Exchange.of(request.scope)
        return await answer(service, body, ChatShape, exchange)
