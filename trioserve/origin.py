"""Where the work at hand came from: the one call that log lines and counts are about, wherever they are made.

The edge makes an ``Origin`` for each call and works inside ``as_origin``. Tasks and threads that are started there
inherit it. What lives longer than a call (a model, its load, its slots) steps out of it, and a slot steps into the
origin of each job that it works on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True)
class Origin:
    """One call.

    Attributes:
        request_id: of the call.
        route: the rule of its route; empty where it came by none.
        model: id of the registered model that it is for, once that is known.
        trace: fields for the log that place the call in its caller's trace; empty where it is in none.
        status: of its response, once that has begun.
        counted: it is in the book of requests, or was turned away there: nobody else counts it.
    """

    request_id: str = "-"
    route: str = ""
    model: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)
    status: int | None = None
    counted: bool = False


_current: ContextVar[Origin | None] = ContextVar("trioserve_origin", default=None)


def current_origin() -> Origin | None:
    """The call that this task or thread works for, where it works for one."""
    return _current.get()


@contextlib.contextmanager
def as_origin(origin: Origin | None) -> Iterator[None]:
    """Work for a call, or for none, for the length of the block."""
    token = _current.set(origin)
    try:
        yield
    finally:
        _current.reset(token)
