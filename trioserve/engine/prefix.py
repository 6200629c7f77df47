"""How much of a prompt is in a context's memory already."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCK = 64  # tokens that are compared at once


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that two sequences of the same type begin with in common."""
    most = min(len(one), len(other))
    start = 0
    while start < most and one[start : start + _BLOCK] == other[start : start + _BLOCK]:
        start += _BLOCK
    end = min(start, most)
    while end < most and one[end] == other[end]:
        end += 1
    return end
