"""Markers in a text that comes in pieces."""

from __future__ import annotations


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of a text may be the beginning of a marker that isn't whole yet."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if marker.startswith(text[-size:])), 0)
