"""OpenAI's responses."""

from __future__ import annotations

from quart import Response, request
from quart_trio import QuartTrio

from trioserve.errors import ChatTemplateError
from trioserve.http import render
from trioserve.http.body import read_as
from trioserve.http.completion import collect_one, stream_response
from trioserve.http.exchange import Exchange
from trioserve.http.operation import GENERATES, Operation
from trioserve.http.requests import translated_request
from trioserve.http.responses_api import ResponseShape, ResponseStream
from trioserve.http.schemas.answers_responses import ResponseEvent, ResponseObject
from trioserve.http.schemas.responses_api import ResponsesRequest
from trioserve.service import Service


def register(app: QuartTrio, service: Service) -> None:
    """Add the routes."""

    @app.post("/v1/responses")
    @Operation(
        "The next message, for clients of OpenAI's responses",
        body=ResponsesRequest,
        answers={200: ResponseObject},
        events=ResponseEvent,
        named_events=True,
        errors=(ChatTemplateError, *GENERATES),
    )
    async def responses() -> Response:
        body, exchange = await read_as(request, ResponsesRequest.parse), Exchange.of(request.scope)
        generation = await service.start(translated_request(body, exchange.request_id), exchange.resources)
        shape = ResponseShape(generation, body)
        if not body.stream:
            return render.response(shape.whole(*await collect_one(generation)))
        stream = ResponseStream(generation, shape)
        exchange.tell = stream.tell
        return stream_response(exchange, stream, ending=b"", tell=stream.tell)
