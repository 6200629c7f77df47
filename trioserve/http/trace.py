"""W3C Trace Context: what a ``traceparent`` header says. Pure.

The format is that of https://www.w3.org/TR/trace-context/, section 3.2. Nothing is sent onwards, so flags and
``tracestate`` are of no use here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_FORMAT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?", re.DOTALL)
_NO_VERSION, _FIRST_VERSION = b"ff", b"00"


class TraceParent(NamedTuple):
    """The caller's place in a trace: ids in lower-case hexadecimal."""

    trace_id: str
    parent_id: str


def parse_traceparent(value: bytes) -> TraceParent | None:
    """Return what a header's value says; None where it is not valid, and so says nothing.

    A version that is not known yet may have more fields behind those of the first one, which has no more.
    """
    found = _FORMAT.fullmatch(value.strip(b" \t"))
    if found is None:
        return None
    version, trace_id, parent_id, more = found.groups()
    if version == _NO_VERSION or (version == _FIRST_VERSION and more is not None):
        return None
    if not trace_id.strip(b"0") or not parent_id.strip(b"0"):
        return None
    return TraceParent(trace_id.decode(), parent_id.decode())


def trace_of(headers: Iterable[tuple[bytes, bytes]]) -> TraceParent | None:
    """Return the trace that a request belongs to. A header that is given twice says nothing."""
    values = [value for name, value in headers if name.lower() == b"traceparent"]
    return parse_traceparent(values[0]) if len(values) == 1 else None
