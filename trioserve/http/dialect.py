"""How errors are told, by route: in OpenAI's shape everywhere, but in Anthropic's where its clients call.

Told by the path alone, since a request may be turned away before it is routed: by its key, by a drain, by a wrong path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trioserve.errors import TrioserveError
from trioserve.http import render
from trioserve.http.sse import error_frame, named_frame

MESSAGES = "/v1/messages"

# Source: Anthropic's documentation of its errors. It has 529 for an overload, which is no status of HTTP's.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


@dataclass(frozen=True)
class Dialect:
    """A way to tell errors.

    Attributes:
        fields: of the body of a response.
        event: that ends a stream which failed.
    """

    fields: Callable[[TrioserveError], dict[str, Any]]
    event: Callable[[TrioserveError], bytes]

    def body(self, error: TrioserveError) -> bytes:
        """The body of a response, as JSON."""
        return render.dumps(self.fields(error))


def anthropic_type(status: int) -> str:
    """The type that Anthropic's clients know an error of some status by."""
    return _ANTHROPIC_TYPES.get(status, "invalid_request_error")


def _anthropic_fields(error: TrioserveError) -> dict[str, Any]:
    return {"type": "error", "error": {"type": anthropic_type(error.status), "message": error.message}}


def _anthropic_event(error: TrioserveError) -> bytes:
    return named_frame("error", render.dumps(_anthropic_fields(error)))


OPENAI = Dialect(render.error_fields, error_frame)
ANTHROPIC = Dialect(_anthropic_fields, _anthropic_event)


def dialect_of(path: str) -> Dialect:
    """Return how errors are told on a path, also where no such route is.

    Arguments:
        path: as it is routed.
    """
    return ANTHROPIC if f"{path.strip('/')}/".startswith(f"{MESSAGES.strip('/')}/") else OPENAI
