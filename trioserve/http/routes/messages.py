"""Anthropic's messages."""

from __future__ import annotations

from quart import Response, request
from quart_trio import QuartTrio

from trioserve.errors import ChatTemplateError
from trioserve.http import render
from trioserve.http.body import read_as
from trioserve.http.completion import collect_one, stream_response
from trioserve.http.dialect import MESSAGES
from trioserve.http.exchange import Exchange
from trioserve.http.messages import PING, MessageStream, message
from trioserve.http.operation import GENERATES, Operation
from trioserve.http.requests import count_request, translated_request
from trioserve.http.schemas.answers_messages import MessageEvent, MessageObject, TokenCount
from trioserve.http.schemas.messages import CountTokensRequest, MessagesRequest
from trioserve.service import Service

_ERRORS = (ChatTemplateError, *GENERATES)


def register(app: QuartTrio, service: Service) -> None:
    """Add the routes."""

    @app.post(MESSAGES)
    @Operation(
        "The next message, for clients of Anthropic's messages",
        body=MessagesRequest,
        answers={200: MessageObject},
        events=MessageEvent,
        named_events=True,
        errors=_ERRORS,
    )
    async def messages() -> Response:
        body, exchange = await read_as(request, MessagesRequest.parse), Exchange.of(request.scope)
        generation = await service.start(translated_request(body, exchange.request_id), exchange.resources)
        if not body.stream:
            return render.response(message(generation, *await collect_one(generation)))
        return stream_response(exchange, MessageStream(generation), b"", ping=PING, tell=exchange.tell)

    @app.post(f"{MESSAGES}/count_tokens")
    @Operation(
        "How many tokens a conversation has",
        body=CountTokensRequest,
        answers={200: TokenCount},
        errors=_ERRORS,
    )
    async def count_tokens() -> Response:
        body, exchange = await read_as(request, CountTokensRequest.parse), Exchange.of(request.scope)
        count = await service.count_tokens(count_request(body, exchange.request_id), exchange.resources)
        return render.response({"input_tokens": count})
