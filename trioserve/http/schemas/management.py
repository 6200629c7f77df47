"""Bodies of the management routes. A load's body is a ``[[models]]`` entry, which the configuration's table checks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trioserve.http.schemas.base import Schema, Text

_ID = Field(min_length=1, max_length=256, description="Id of a registered model.")


class Waiting(Schema):
    """What every management call may say."""

    busy_timeout_ms: int | None = Field(
        None, ge=0, lt=2**31, description="Wait for the model's turn, in milliseconds; may only shorten the server's."
    )


class UnloadRequest(Waiting):
    """Body of an unload."""

    id: Annotated[Text, _ID]


class UnloadModelsRequest(Waiting):
    """Body of a bulk unload."""

    model_ids: Annotated[
        list[Annotated[Text, _ID]], Field(min_length=1, max_length=4096, description="Ids of registered models.")
    ]


class UnloadAllRequest(Waiting):
    """Body of an unload of everything; may be empty."""
