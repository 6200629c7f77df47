"""Which models there are, and how they are. Never waits, never loads."""

from __future__ import annotations

from quart import Response
from quart_trio import QuartTrio
from werkzeug.routing import PathConverter

from trioserve.errors import ModelNotFoundError
from trioserve.http import render
from trioserve.http.operation import Operation
from trioserve.http.schemas.responses import Model, ModelList, SlotList
from trioserve.service import Service


class _ModelId(PathConverter):
    """Any text, also one that begins with a slash."""

    regex, part_isolating = ".+", False


def register(app: QuartTrio, service: Service) -> None:
    """Add the routes."""
    app.url_map.converters["model_id"] = _ModelId

    @app.get("/v1/models")
    @Operation("All models", answers={200: ModelList})
    async def list_models() -> Response:
        return render.response({"object": "list", "data": [render.model(status) for status in service.models()]})

    @app.get("/v1/models/<model_id:model_id>")
    @Operation(
        "One model",
        answers={200: Model},
        parameters={"model_id": "Id of the model. It may hold slashes, as they are or percent-encoded."},
        errors=(ModelNotFoundError,),
    )
    async def one_model(model_id: str) -> Response:
        for status in service.models():
            if status.id == model_id:
                return render.response(render.model(status))
        raise ModelNotFoundError(f"the model {model_id[:100]!r} does not exist", param="model")

    @app.get("/v1/slots")
    @Operation("What every slot is doing", answers={200: SlotList})
    async def slots() -> Response:
        return render.response({"object": "list", "data": [render.slot(status) for status in service.slots()]})
