"""``POST /v1/embeddings``"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, WithJsonSchema, field_validator

from trioserve.errors import InvalidRequestError
from trioserve.http.schemas.base import TOKENS, HonestSchema, Text, encodable, is_tokens
from trioserve.service import TextPrompt, TokenPrompt

MAX_INPUTS = 2048

_ONE = {"anyOf": [{"type": "string", "minLength": 1}, TOKENS]}
_INPUT = {"anyOf": [*_ONE["anyOf"], {"type": "array", "items": _ONE, "minItems": 1, "maxItems": MAX_INPUTS}]}


class EmbeddingsRequest(HonestSchema):
    """Body of a request for embeddings."""

    ignored: ClassVar[Mapping[str, str]] = {"user": "nobody is told apart by it"}
    defaults: ClassVar[Mapping[str, object]] = {"encoding_format": "float"}

    model: Text | None = Field(None, description="Id of a registered model; may be left out where there is one only.")
    input: Annotated[Any, WithJsonSchema(_INPUT)] = Field(
        description="Text or token ids, or a list of up to 2048 such inputs; none of them empty."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float, or base64 of little-endian 32-bit floats."
    )
    dimensions: int | None = Field(
        None, ge=1, lt=2**31, description="Keep so many of each vector's numbers, at unit length."
    )
    busy_timeout_ms: int | None = Field(
        None, ge=0, lt=2**31, description="Wait for a slot, in milliseconds; may only shorten the server's."
    )

    @classmethod
    def parse(cls, body: Mapping[str, object]) -> Self:
        """Validate a decoded JSON object; null is no input."""
        if body.get("input") is None:
            raise InvalidRequestError("input: is required", param="input")
        return super().parse(body)

    @field_validator("input")
    @classmethod
    def _inputs(cls, value: Any) -> Sequence[TextPrompt | TokenPrompt]:
        if not isinstance(value, list) or is_tokens(value):
            return (_input(value),)
        if not 1 <= len(value) <= MAX_INPUTS:
            raise ValueError(f"holds {len(value)} inputs, 1 to {MAX_INPUTS} are allowed")
        return [_input(item, f"[{index}] ") for index, item in enumerate(value)]


def _input(value: Any, place: str = "") -> TextPrompt | TokenPrompt:
    if isinstance(value, str) and value:
        return TextPrompt(encodable(value))
    if is_tokens(value):
        return TokenPrompt(value)
    raise ValueError(f"{place}must be a non-empty string or list of token ids, or a list of such inputs")
