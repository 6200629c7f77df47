"""Tasks: chat and text completions with native metadata, one by one or as a batch."""

from __future__ import annotations

from collections.abc import Mapping

from quart import Response, request
from quart_trio import QuartTrio

from trioserve.errors import ChatTemplateError, InvalidRequestError
from trioserve.http import render, tasks
from trioserve.http.body import read_as
from trioserve.http.completion import collect, stream_response
from trioserve.http.exchange import Exchange
from trioserve.http.operation import GENERATES, Operation
from trioserve.http.requests import generation_request
from trioserve.http.schemas.responses import BatchEvent, Task, TaskEvent
from trioserve.http.schemas.tasks import BatchTaskRequest, TaskBody, parse_item, parse_task
from trioserve.service import BatchRequest, GenerationRequest, Service

_ERRORS = (ChatTemplateError, *GENERATES)


def register(app: QuartTrio, service: Service) -> None:
    """Add the routes."""

    @app.post("/v1/tasks/run")
    @Operation("One answer, and how it was made", body=TaskBody, answers={200: Task}, errors=_ERRORS)
    async def run() -> Response:
        body, exchange = await read_as(request, parse_task), Exchange.of(request.scope)
        generation = await service.start(generation_request(body, exchange.request_id), exchange.resources)
        ((parts, done),) = (await collect(generation)).values()
        return render.response({**tasks.envelope(generation), "object": "task", **tasks.result(parts, done)})

    @app.post("/v1/tasks/stream")
    @Operation(
        "One answer as it grows, and how it was made",
        body=TaskBody,
        events=TaskEvent,
        named_events=True,
        errors=_ERRORS,
    )
    async def stream() -> Response:
        body, exchange = await read_as(request, parse_task), Exchange.of(request.scope)
        generation = await service.start(generation_request(body, exchange.request_id), exchange.resources)
        return stream_response(exchange, tasks.TaskStream(generation), ending=b"")

    @app.post("/v1/tasks/batch")
    @Operation(
        "Answers to many requests, decoded together",
        body=BatchTaskRequest,
        events=BatchEvent,
        named_events=True,
        errors=_ERRORS,
    )
    async def batch() -> Response:
        exchange = Exchange.of(request.scope)

        def parse(body: Mapping[str, object]) -> BatchRequest:
            return _batch(BatchTaskRequest.parse(body), exchange.request_id)

        generation = await service.start(await read_as(request, parse), exchange.resources)
        return stream_response(exchange, tasks.BatchStream(generation), ending=b"")


def _batch(body: BatchTaskRequest, request_id: str) -> BatchRequest:
    model = body.shared_model

    def item(given: object) -> GenerationRequest | InvalidRequestError:
        try:
            return generation_request(parse_item(given, model), request_id)
        except InvalidRequestError as error:
            return error

    return BatchRequest(
        [item(given) for given in body.requests],
        model=model,
        busy_timeout_ms=body.busy_timeout_ms,
        request_id=request_id,
    )
