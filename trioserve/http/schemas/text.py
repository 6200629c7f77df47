"""``POST /tokenize`` and ``POST /detokenize``"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from trioserve.http.schemas.base import Schema, Text

MAX_TOKENS = 262_144


class ReadingFields(Schema):
    """Fields that both share."""

    model: Text | None = Field(None, description="Id of a registered model; may be left out where there is one only.")
    busy_timeout_ms: int | None = Field(
        None, ge=0, lt=2**31, description="Wait for an unloaded model's slot; may only shorten the server's."
    )


class TokenizeRequest(ReadingFields):
    """Body of a request for the tokens of a text."""

    defaults: ClassVar[Mapping[str, object]] = {"add_special": False, "parse_special": True, "with_pieces": False}

    content: Text = Field(description="The text.")
    add_special: bool | None = Field(None, description="Put the tokens around it that the model wants around a text.")
    parse_special: bool | None = Field(
        None, description="Read the text of special tokens as those tokens; true by default."
    )
    with_pieces: bool | None = Field(None, description="Tell the text of each token too.")


class DetokenizeRequest(ReadingFields):
    """Body of a request for the text of tokens."""

    tokens: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**31)]],
        Field(max_length=MAX_TOKENS, description="Token ids of the model."),
    ]
