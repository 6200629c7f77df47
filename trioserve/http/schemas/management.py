"""Bodies of the management routes. A load's body is a ``[[models]]`` entry, which the configuration's table checks."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field

from trioserve.config import MAX_MODEL_ID_CHARS, ModelConfig
from trioserve.http.schemas.base import Schema, encodable

ModelId = Annotated[
    str,
    Field(min_length=1, max_length=MAX_MODEL_ID_CHARS, description="Id of a registered model."),
    AfterValidator(encodable),
]


_NULL = {"type": "null"}
_BOUNDS = {"type", "enum", "format", "minimum", "maximum", "minLength", "maxLength", "items", "maxItems"}


def _of_a_request(schema: dict[str, Any]) -> None:
    """Turn the schema of a ``[[models]]`` entry into that of a load: nothing is required, and null leaves out."""
    del schema["required"]
    properties = schema["properties"]
    properties["path"]["minLength"] = properties["id"]["minLength"] = 1
    properties["chat_template"]["anyOf"][0]["pattern"] = "^[^@]"
    properties["chat_template"]["description"] = "A Jinja template for chat messages in place of the model's own."
    for name, described in properties.items():
        bounds = described.pop("anyOf", None) or [{key: described.pop(key) for key in _BOUNDS & described.keys()}]
        values = [*(bound for bound in bounds if bound != _NULL), _NULL]
        properties[name] = {"anyOf": values, "description": described["description"]}


class LoadRequest(ModelConfig):
    """Body of a load: the keys of a ``[[models]]`` entry. For a registered model those that are left out stay as they
    are; a new one needs a path. It only describes: the configuration's own table checks, key by key.
    """

    model_config = ConfigDict(json_schema_extra=_of_a_request, defer_build=True)


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
