"""Jinja's filters, tests and globals, each within the bounds; and the ones that chat templates expect beside them."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from jinja2 import pass_environment, pass_eval_context
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.tests import TESTS
from jinja2.utils import Namespace

from trioserve.chat import text_bounds
from trioserve.chat.meter import METER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from jinja2 import Environment
    from jinja2.nodes import EvalContext

    from trioserve.chat.meter import Meter

# Left out on purpose are the filters for HTML pages and terminals (some of them quadratic), and ``random``: a prompt
# depends on the messages alone.
# fmt: off
#: Filters of Jinja that need no prediction: they look at one value, and their result is about as large.
_PLAIN = (
    "abs", "attr", "capitalize", "count", "d", "default", "e", "escape", "first", "float", "forceescape", "int",
    "last", "length", "lower", "reverse", "safe", "string", "trim", "truncate", "upper",
)
#: Filters of Jinja that read their value once, item by item.
_ITERATING = (
    "groupby", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "sort", "unique",
)
# fmt: on


class TemplateNamespace(Namespace):
    """Jinja's ``namespace``, printed by its name only: its values change after they were weighed."""

    def __repr__(self) -> str:
        return "<Namespace>"


def guarded(function: Callable[..., Any], predict: text_bounds.Predictor | None = None) -> Callable[..., Any]:
    """A filter that asks the meter before and after; markers such as ``pass_context`` stay on it."""
    own_arguments = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        meter = METER.get()
        meter.tick()
        if predict is not None:
            predict(meter, *args[own_arguments:], **kwargs)
        return meter.keep(function(*args, **kwargs), args)

    return bounded


def guarded_iteration(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that reads many items: it starts with few enough of them, and asks the clock at each."""
    place = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def ticking(*args: Any, **kwargs: Any) -> Any:
        value = args[place]
        text_bounds.predict_items(METER.get(), value)
        # What is false has no items, and some filters accept it though it cannot be iterated.
        items = _ticking(value) if value else value
        return function(*args[:place], items, *args[place + 1 :], **kwargs)

    return guarded(ticking)


def _ticking(items: Iterable[object]) -> Iterator[object]:
    meter = METER.get()
    for item in items:
        meter.tick()
        yield item


def guarded_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """A test (``x is even``) that asks the clock first."""

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        METER.get().tick()
        return function(*args, **kwargs)

    return bounded


@pass_eval_context
def join(eval_ctx: EvalContext, value: Iterable[object], d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's ``join``; a generator is read once, so that its items can be counted first."""
    items = list(value)
    text_bounds.predict_join(METER.get(), d, items)
    joined: str = FILTERS["join"](eval_ctx, items, d, attribute)
    return joined


def format_percent(value: object, *args: object, **kwargs: object) -> str:
    """Jinja's ``format``: the text's ``%`` directives filled from the arguments."""
    text_bounds.predict_percent(METER.get(), str(value), kwargs or args)
    formatted: str = FILTERS["format"](value, *args, **kwargs)
    return formatted


@pass_environment
def total(environment: Environment, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    """Jinja's ``sum``, one bounded addition at a time: the start value may be a list."""
    read = make_attrgetter(environment, attribute)
    meter = METER.get()
    for item in iterable:
        start = meter.keep(start + read(item))
    return start


def tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as ``json.dumps`` writes it, without Jinja's HTML escapes; the arguments are those of ``json.dumps``.

    Source: the filter of that name that Hugging Face transformers gives to chat templates.
    """
    meter = METER.get()
    meter.reserve(len(indent) if isinstance(indent, str) else indent or 0)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return gather(meter, encoder.iterencode(value))


def gather(meter: Meter, pieces: Iterable[str]) -> str:
    """The pieces as one text; the size bound is checked as they come."""
    parts: list[str] = []
    size = 0
    for piece in pieces:
        meter.tick()
        size += len(piece)
        meter.reserve(size)
        parts.append(piece)
    return "".join(parts)


def _predict_round(meter: Meter, _: object, precision: int = 0, *__: object, **___: object) -> None:
    meter.reserve_bits(4 * precision)  # Jinja multiplies with 10 ** precision


def bounded_filters() -> dict[str, Callable[..., Any]]:
    """The filters of a template, by name."""
    predicted: Mapping[str, text_bounds.Predictor] = {
        "batch": text_bounds.predict_groups,
        "slice": text_bounds.predict_groups,
        "center": text_bounds.predict_padding,
        "dictsort": text_bounds.predict_items,
        "indent": text_bounds.predict_indent,
        "items": text_bounds.predict_items,
        "replace": text_bounds.predict_replace,
        "round": _predict_round,
        "title": text_bounds.predict_items,
    }
    table = {name: guarded(FILTERS[name]) for name in _PLAIN}
    table |= {name: guarded_iteration(FILTERS[name]) for name in _ITERATING}
    table |= {name: guarded(FILTERS[name], predict) for name, predict in predicted.items()}
    own: dict[str, Callable[..., Any]] = {"join": join, "format": format_percent, "tojson": tojson}
    table |= {name: guarded(function) for name, function in own.items()}
    return table | {"sum": guarded_iteration(total)}


def bounded_tests() -> dict[str, Any]:
    """The tests of a template, by name."""
    tests: Mapping[str, Any] = TESTS
    return {name: guarded_test(test) for name, test in tests.items()}
