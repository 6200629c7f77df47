"""How large a text operation's result would be, told before it runs.

Each predictor takes the meter, then the operation's own arguments, and raises ChatTemplateError for a result out of
bounds. Arguments of wrong types may give a TypeError, here or in the operation itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Sized
from string import Formatter
from typing import TYPE_CHECKING, Any

from jinja2.sandbox import SandboxedEscapeFormatter, SandboxedFormatter

from trioserve.chat.meter import METER, SLOT_WEIGHT

if TYPE_CHECKING:
    from trioserve.chat.meter import Meter

Predictor = Callable[..., None]

#: The search from the right has no linear worst case, so text length times pattern length is bounded as well.
_SEARCH_STEPS_PER_CHAR = 64
#: A float printed with "%f" has up to 309 digits before the point.
_FLOAT_CHARS = 320
# A width can only follow "%" or the ")" of a mapping key; matching both ends of the key loosely counts too much, never
# too little.
_DIRECTIVE = re.compile(r"[%)][#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?[hlL]?([a-zA-Z])?")
_WHITE_SPACE = " \t\n\r\v\f"
_DIGITS = re.compile(r"\d+")


def predict_padding(meter: Meter, text: str, width: int = 80, *_: object, **__: object) -> None:
    """``center``, ``ljust``, ``rjust`` and ``zfill``."""
    meter.reserve(max(len(text), width))


def predict_replace(meter: Meter, text: object, old: object, new: object, count: int | None = None) -> None:
    """``replace``, method and filter."""
    text, old, new = str(text), str(old), str(new)
    found = text.count(old)
    if count is not None and count >= 0:
        found = min(found, count)
    meter.reserve(len(text) + found * (len(new) - len(old)))


def predict_items(meter: Meter, value: object, *_: object, **__: object) -> None:
    """Operations that handle each item of a value, or each character of a text, on its own."""
    if isinstance(value, Sized):
        meter.reserve(len(value) * SLOT_WEIGHT)


def predict_split(meter: Meter, text: str, sep: str | None = None, *_: object, **__: object) -> None:
    """``split`` and ``splitlines``, by the separators that the text holds."""
    separators = sep if isinstance(sep, str) and sep else None
    found = text.count(separators) if separators else sum(map(text.count, _WHITE_SPACE))
    meter.reserve(found * SLOT_WEIGHT)


def predict_search(meter: Meter, text: str, *args: object, **kwargs: object) -> None:
    """The methods that search from the right."""
    pattern = max((len(value) for value in (*args, *kwargs.values()) if isinstance(value, str)), default=0)
    meter.reserve(len(text) * pattern // _SEARCH_STEPS_PER_CHAR)


def predict_indent(meter: Meter, text: str, width: int | str = 4, *_: object, **__: object) -> None:
    """The ``indent`` filter."""
    unit = len(width) if isinstance(width, str) else width
    meter.reserve(len(text) + len(text.splitlines()) * unit)


def predict_groups(meter: Meter, _: object, count: int, fill_with: object = None) -> None:
    """The ``batch`` and ``slice`` filters, which fill up to ``count`` places."""
    meter.reserve(count * meter.shape(fill_with).weight)


def predict_join(meter: Meter, separator: object, items: Sequence[object]) -> None:
    """``join``, method and filter, over items that can be counted."""
    meter.reserve(len(items) * SLOT_WEIGHT)
    chars = sum(len(item) if isinstance(item, str) else meter.shape(item).weight for item in items)
    meter.reserve(chars + len(str(separator)) * len(items))


def predict_percent(meter: Meter, text: str, values: object) -> None:
    """``text % values``: widths and precisions, and a mapping's values once for each directive."""
    weight = meter.shape(values).weight
    each = weight if isinstance(values, Mapping) else 0
    total = len(text) + weight
    for directive in _DIRECTIVE.finditer(text):
        meter.tick()
        width, precision, conversion = directive.groups()
        total += each + _width(width, values) + _width(precision, values)
        total += _FLOAT_CHARS if conversion in ("f", "F") else 0
        meter.reserve(total)


def _width(digits: str | None, values: object) -> int:
    if digits == "*":
        candidates = values if isinstance(values, tuple) else ()
        return max((abs(value) for value in candidates if isinstance(value, int)), default=0)
    return int(digits or 0)


class _BoundedFields(Formatter):
    """Counts what ``str.format`` has written so far and refuses a field whose width alone is too large."""

    _written = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        meter = METER.get()
        meter.tick()
        meter.reserve(max((int(digits) for digits in _DIGITS.findall(format_spec)), default=0))
        text = super().format_field(value, format_spec)
        self._written += len(text)
        meter.reserve(self._written)
        return text


class BoundedFormatter(_BoundedFields, SandboxedFormatter):
    """``str.format`` within the sandbox and the bounds."""


class BoundedEscapeFormatter(_BoundedFields, SandboxedEscapeFormatter):
    """The same for text that is marked as safe HTML."""


#: Predictors of the ``str`` methods whose result or work can outgrow their operands.
METHOD_PREDICTORS: Mapping[str, Predictor] = {
    "center": predict_padding,
    "ljust": predict_padding,
    "rjust": predict_padding,
    "zfill": predict_padding,
    "replace": predict_replace,
    "split": predict_split,
    "splitlines": predict_split,
    "rfind": predict_search,
    "rindex": predict_search,
    "rsplit": predict_search,
    "rpartition": predict_search,
}

#: ``str`` methods that a template may use. Not among them: ``encode`` (bytes escape the bounds), ``translate`` and
#: ``expandtabs`` (their growth is not predicted).
# fmt: off
STR_METHODS = frozenset((
    "capitalize", "casefold", "center", "count", "endswith", "find", "format", "format_map", "index", "isalnum",
    "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable",
    "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix",
    "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split",
    "splitlines", "startswith", "strip", "swapcase", "title", "upper", "zfill",
))
# fmt: on
