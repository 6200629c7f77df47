"""What is wrong with settings, in words: the setting, its value, and what it may be."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trioserve.config.description import Scope, settings
from trioserve.config.keys import KEYS
from trioserve.config.sources import did_you_mean

if TYPE_CHECKING:
    from pydantic import ValidationError

__all__ = ["Problem", "explain"]

_SHOWN_CHARS = 80


class Problem(NamedTuple):
    """One setting that can't be used: its name, and a sentence that begins with it."""

    name: str
    text: str


def explain(error: ValidationError, scope: Scope) -> Problem:
    """Return the first problem of a validation.

    Arguments:
        error: of ``Config`` (scope ``server``) or ``ModelConfig`` (scope ``model``).
        scope: whose settings these are.
    """
    # A default that could not be computed is only the echo of another field's error.
    first = next(detail for detail in error.errors() if detail["type"] != "default_factory_not_called")
    name = str(first["loc"][0])
    known = {info.name: info for info in settings() if info.scope == scope}
    if first["type"] == "extra_forbidden":
        shown = shortened(name)
        return Problem(shown, f"unknown setting {shown!r}{did_you_mean(name, known)}")
    if first["type"] == "missing":
        return Problem(name, f"{name}: is required")
    if first["type"] == "value_error":
        return Problem(name, f"{name}: {first['ctx']['error']}")
    given = "what is given" if known[name].kind == KEYS else shown_value(first["input"])
    return Problem(name, f"{name}: {given} is not {known[name].expected}")


def shown_value(value: object) -> str:
    """A value as it may stand in a message."""
    return shortened(repr(str(value)) if isinstance(value, Path) else repr(value))


def shortened(text: str) -> str:
    """A text, cut where it is too long for a message."""
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
