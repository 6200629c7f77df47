"""Loading, reconfiguring and unloading models, where the operator allows it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps

from quart import Response, request
from quart_trio import QuartTrio

from trioserve.errors import ManagementDisabledError, ModelNotFoundError
from trioserve.http import render
from trioserve.http.body import read_as
from trioserve.http.operation import LOADS, NEEDS_A_TURN, Operation
from trioserve.http.schemas.management import LoadRequest, UnloadAllRequest, UnloadModelsRequest, UnloadRequest
from trioserve.http.schemas.responses import ModelState, SomeUnloaded, Unloaded
from trioserve.runtime.model import ModelStatus
from trioserve.service import Service

Handler = Callable[[], Awaitable[Response]]

_ERRORS = (ManagementDisabledError, *NEEDS_A_TURN)


def register(app: QuartTrio, service: Service) -> None:
    """Add the routes."""

    def managed(handler: Handler) -> Handler:
        @wraps(handler)
        async def guarded() -> Response:
            if not service.config.management:
                raise ManagementDisabledError("management is off; the operator turns it on with management = true")
            return await handler()

        return guarded

    @app.post("/v1/models/load")
    @Operation(
        "Register a model and load it, or reconfigure one",
        body=LoadRequest,
        answers={200: ModelState},
        errors=(*_ERRORS, *LOADS),
    )
    @managed
    async def load() -> Response:
        return _state(await service.management.load(await read_as(request, dict)))

    @app.post("/v1/models/unload")
    @Operation(
        "Unload a model",
        body=UnloadRequest,
        answers={200: ModelState},
        errors=(*_ERRORS, ModelNotFoundError),
    )
    @managed
    async def unload() -> Response:
        body = await read_as(request, UnloadRequest.parse)
        return _state(await service.management.unload(body.id, body.busy_timeout_ms))

    @app.post("/v1/tasks/unload_models")
    @Operation("Unload several models", body=UnloadModelsRequest, answers={200: SomeUnloaded}, errors=_ERRORS)
    @managed
    async def unload_models() -> Response:
        body = await read_as(request, UnloadModelsRequest.parse)
        result = await service.management.unload_many(body.model_ids, body.busy_timeout_ms)
        return render.response({"unloaded": result.unloaded, "not_found": result.not_found})

    @app.post("/v1/tasks/unload_all_models")
    @Operation("Unload all models", body=UnloadAllRequest, body_optional=True, answers={200: Unloaded}, errors=_ERRORS)
    @managed
    async def unload_all_models() -> Response:
        body = await read_as(request, UnloadAllRequest.parse, optional=True)
        result = await service.management.unload_all(body.busy_timeout_ms)
        return render.response({"unloaded": result.unloaded})


def _state(status: ModelStatus) -> Response:
    fields = {"id": status.id, "state": status.state.value, "loaded": status.loaded, "slots": status.slots}
    return render.response(fields)
