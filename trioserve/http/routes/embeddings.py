"""Embeddings."""

from __future__ import annotations

from quart import Response, request
from quart_trio import QuartTrio

from trioserve.errors import WrongTaskError
from trioserve.http import embeddings
from trioserve.http.body import read_as
from trioserve.http.exchange import Exchange
from trioserve.http.operation import GENERATES, Operation
from trioserve.http.schemas.embeddings import EmbeddingsRequest
from trioserve.http.schemas.responses import EmbeddingList
from trioserve.service import EmbeddingRequest, Service


def register(app: QuartTrio, service: Service) -> None:
    """Add the routes."""

    @app.post("/v1/embeddings")
    @Operation(
        "Vectors of texts",
        body=EmbeddingsRequest,
        answers={200: EmbeddingList},
        errors=(WrongTaskError, *GENERATES),
    )
    async def create_embeddings() -> Response:
        body, exchange = await read_as(request, EmbeddingsRequest.parse), Exchange.of(request.scope)
        wanted = EmbeddingRequest(
            inputs=body.input,
            dimensions=body.dimensions,
            model=body.model,
            busy_timeout_ms=body.busy_timeout_ms,
            request_id=exchange.request_id,
        )
        embedding = await service.embed(wanted, exchange.resources)
        return await embeddings.answer(embedding, as_base64=body.encoding_format == "base64")
