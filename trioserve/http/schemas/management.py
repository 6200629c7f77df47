"""Bodies of the management routes. A load's body is a ``[[models]]`` entry, which the configuration's table checks."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from trioserve.config import MAX_MODEL_ID_CHARS
from trioserve.http.schemas.base import Schema, encodable

ModelId = Annotated[
    str,
    Field(min_length=1, max_length=MAX_MODEL_ID_CHARS, description="Id of a registered model."),
    AfterValidator(encodable),
]


class Waiting(Schema):
    """What every management call may say."""

    busy_timeout_ms: int | None = Field(
        None, ge=0, lt=2**31, description="Wait for the model's turn, in milliseconds; may only shorten the server's."
    )


class UnloadRequest(Waiting):
    """Body of an unload."""

    id: ModelId


class UnloadModelsRequest(Waiting):
    """Body of a bulk unload."""

    model_ids: Annotated[list[ModelId], Field(min_length=1, max_length=4096, description="Ids of registered models.")]


class UnloadAllRequest(Waiting):
    """Body of an unload of everything; may be empty."""
