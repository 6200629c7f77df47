"""Formats of JSON Schemas that the grammar engine doesn't know, or knows too loosely, as expressions and bounds.

Dates and times are those of RFC 3339 that exist in the calendar, from the year 1 on; no second is a leap second.
"""

from __future__ import annotations

import re

_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR_AND_MINUTE = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR_AND_MINUTE})"
_HEX = "[0-9a-f]"

PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    **{
        f"uuid{version}": f"^{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}$"
        for version in range(1, 9)
    },
}
"""In the dialect of the grammar engine."""

ANY_TEXT = frozenset({"binary", "password", "path"})
"""What says how a text is to be treated, and nothing of what it is."""

_INTEGER = re.compile(r"(u?)int(8|16|32|64)")


def bounds(name: str) -> tuple[int, int] | None:
    """The least and the largest number of a format of OpenAPI's; None where it has none."""
    found = _INTEGER.fullmatch(name)
    if found is None:
        return None
    bits = int(found[2])
    return (0, 2**bits - 1) if found[1] else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
