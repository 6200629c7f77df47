"""What a route says of itself: an ``Operation`` stands beside each handler, and the document is made from all of them.

    @app.post("/v1/things")
    @Operation("Make a thing", body=ThingRequest, answers={200: Thing}, errors=(ModelNotFoundError,))
    async def make() -> Response: ...

``/openapi.json`` follows from that; so do the errors that every body can meet, parameters from the route's rule, and
what keys have to do with it from ``auth.route_kind``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

from trioserve.errors import (
    ContextLengthError,
    InsufficientMemoryError,
    InvalidModelError,
    ModelLoadError,
    ModelNotFoundError,
    ServerBusyError,
    ShuttingDownError,
    TrioserveError,
)

Handler = TypeVar("Handler", bound=Callable[..., Any])

NEEDS_A_TURN = (ServerBusyError, ShuttingDownError)
"""What can befall whoever waits for a model."""

LOADS = (InvalidModelError, ModelLoadError, InsufficientMemoryError)
"""What can befall whoever has a model loaded."""

GENERATES = (ContextLengthError, ModelNotFoundError, *NEEDS_A_TURN, *LOADS)
"""What can befall whoever asks a model for something."""

_KEY = "trioserve_operation"


@dataclass(frozen=True)
class Operation:
    """Decorates a handler with its documentation. Types are whatever pydantic makes a schema of, unions included.

    Arguments:
        summary: one line without a full stop.
        body: type of the JSON body; None where there is none.
        body_optional: the body may be left out.
        answers: for each status that is no error, the type of its JSON.
        events: type of the JSON in the events of a stream, where status 200 can be one.
        named_events: they have names, and there is no ``[DONE]``.
        text: media type of a status 200 in plain text, where it is that.
        parameters: for each part of the path that varies, what it is.
        errors: classes that this route can answer with, beside those that every route (or every body) can meet.
    """

    summary: str
    _: KW_ONLY
    body: Any = None
    body_optional: bool = False
    answers: Mapping[int, Any] = field(default_factory=dict)
    events: Any = None
    named_events: bool = False
    text: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[type[TrioserveError], ...] = ()

    def __call__(self, handler: Handler) -> Handler:
        """Attach this to a handler, below the decorator that makes it a route."""
        vars(handler)[_KEY] = self
        return handler

    @classmethod
    def of(cls, handler: Callable[..., Any]) -> Operation | None:
        """The operation that a handler was decorated with."""
        found = vars(handler).get(_KEY)
        return found if isinstance(found, cls) else None
