"""LoRA adapters of a model, as settings name them: files, each with a scale."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema

from trioserve.config.paths import checked_path

__all__ = ["ADAPTERS", "Adapters", "LoraAdapter"]

ADAPTERS = "list of adapters"
MAX_ADAPTERS = 64
MAX_SCALE = 1_000_000
_SHOWN_CHARS = 300
_FORMS = "write FILE, FILE:SCALE, or a table with path and scale"


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """One adapter.

    Attributes:
        path: of its GGUF file.
        scale: by which its part in the model's numbers is multiplied.
    """

    path: Path
    scale: float = 1.0


def _parsed(value: object) -> object:
    """Return a list's items as adapters; what is no list comes back as it is, for validation to refuse."""
    if not isinstance(value, list | tuple):
        return value
    if len(value) > MAX_ADAPTERS:
        raise ValueError(f"{len(value)} adapters are given, and at most {MAX_ADAPTERS} can be")
    return tuple(item if isinstance(item, LoraAdapter) else _adapter(item) for item in value)


def _adapter(item: object) -> LoraAdapter:
    if isinstance(item, str):
        return _made(*_split(item))
    if isinstance(item, dict) and "path" in item and item.keys() <= {"path", "scale"}:
        return _made(item["path"], item.get("scale", 1.0))
    raise ValueError(f"{_shown(item)} is no adapter: {_FORMS}")


def _split(text: str) -> tuple[str, float]:
    """Take FILE:SCALE apart. What follows the last colon and is no number belongs to the name."""
    name, colon, scale = text.rpartition(":")
    try:
        return (name, float(scale)) if colon else (text, 1.0)
    except ValueError:
        return text, 1.0


def _made(path: object, scale: object) -> LoraAdapter:
    if not isinstance(path, str | Path):
        raise ValueError(f"{_shown(path)} is no path of an adapter: {_FORMS}")
    checked_path(path)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not -MAX_SCALE <= scale <= MAX_SCALE:
        bounds = f"a number from -{MAX_SCALE} to {MAX_SCALE}"
        raise ValueError(f"the scale of {_shown(str(path))} is {_shown(scale)}, and has to be {bounds}")
    return LoraAdapter(Path(path), float(scale))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


Adapters = Annotated[
    tuple[LoraAdapter, ...],
    BeforeValidator(_parsed),
    WithJsonSchema(
        {
            "type": "array",
            "maxItems": MAX_ADAPTERS,
            "items": {
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    {
                        "type": "object",
                        "properties": {
                            "path": {"type": "string", "minLength": 1},
                            "scale": {"type": "number", "minimum": -MAX_SCALE, "maximum": MAX_SCALE},
                        },
                        "required": ["path"],
                        "additionalProperties": False,
                    },
                ]
            },
        }
    ),
]
"""Texts FILE and FILE:SCALE, or tables of the two."""
