"""``traceparent``: which values are valid, by the rules of W3C Trace Context."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.http.trace import TraceParent, parse_traceparent, trace_of

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{PARENT}-01"
FOUND = TraceParent(TRACE, PARENT)


@pytest.mark.parametrize(
    "value",
    [
        VALID,
        f"00-{TRACE}-{PARENT}-00",
        f"00-{TRACE}-{PARENT}-ff",  # flags that nobody knows yet
        f" {VALID}\t",
        f"01-{TRACE}-{PARENT}-01",
        f"cc-{TRACE}-{PARENT}-01-what-the-future-will-be-like",
        f"cc-{TRACE}-{PARENT}-01-",
        f"fe-{TRACE}-{PARENT}-01",
    ],
)
def test_valid(value):
    assert parse_traceparent(value.encode()) == FOUND


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        "00-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"ff-{TRACE}-{PARENT}-01-more",
        f"FE-{TRACE}-{PARENT}-01",
        f"0g-{TRACE}-{PARENT}-01",
        f"0-{TRACE}-{PARENT}-01",
        f"000-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT.upper()}-01",
        f"00-{TRACE}-{PARENT}-0A",
        f"00-{TRACE[:-1]}-{PARENT}-01",
        f"00-{TRACE}0-{PARENT}-01",
        f"00-{TRACE}-{PARENT[:-1]}-01",
        f"00-{TRACE}-{PARENT}0-01",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE}-{PARENT}-011",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-",
        f"00-{TRACE}-{PARENT}-01-",  # the first version has no more fields
        f"00-{TRACE}-{PARENT}-01-more",
        f"cc-{TRACE}-{PARENT}-01.more",
        f"cc-{TRACE}-{PARENT}-01more",
        f"00_{TRACE}_{PARENT}_01",
        f"00-{TRACE}-{PARENT}-01,00-{TRACE}-{PARENT}-01",
        f"00-{TRACE[:-1]}\u0663-{PARENT}-01",  # a digit, but not one of these
        f"x{VALID}",
        f"{VALID}\n",
    ],
)
def test_invalid(value):
    assert parse_traceparent(value.encode()) is None


@given(st.binary())
def test_anything_is_parsed_or_ignored(value):
    parse_traceparent(value)


def test_a_header_counts_once_and_by_any_case():
    assert trace_of([(b"x", b"y"), (b"TraceParent", VALID.encode())]) == FOUND
    assert trace_of([(b"traceparent", VALID.encode())] * 2) is None
    assert trace_of([(b"tracestate", b"a=b")]) is None
