"""What the table of settings says about itself, for ``--help``, the documentation and error messages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from trioserve.config.table import Config, ModelConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel

__all__ = ["Scope", "SettingInfo", "describe", "settings", "settings_by_flag"]

Scope = Literal["server", "model"]
_KINDS = {"integer": "integer", "boolean": "boolean", "array": "list"}


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """One setting.

    Arguments:
        name: its key in a file; the environment variable and the flag follow from it.
        scope: ``server``, or ``model`` for a key of a ``[[models]]`` entry.
        kind: integer, boolean, choice, path, text, ``text or @file``, list (of texts), ``list of paths``,
            ``list of adapters`` or ``list of keys``.
        nullable: whether null is a value.
        default: its default in words: ``8080``, ``false``, ``the file's stem``; empty where it is required.
        range: what it may be: ``1..16``, ``auto, on, off``; empty where nothing bounds it.
        choices: the allowed words of a choice, else empty.
        description: one or two sentences.
    """

    name: str
    scope: Scope
    kind: str
    nullable: bool
    default: str
    range: str
    choices: tuple[str, ...]
    description: str

    @property
    def type(self) -> str:
        """Its type in words, such as ``integer or null``."""
        return f"{self.kind} or null" if self.nullable else self.kind

    @property
    def expected(self) -> str:
        """What a value must be, for the end of "... is not"."""
        if self.kind == "integer":
            words = f"an integer {self.range}"
        elif self.kind in {"boolean", "choice"}:
            words = f"one of {self.range}"
        else:
            words = f"a {self.kind}" + (f" of {self.range}" if self.range else "")
        return f"{words} or null" if self.nullable else words

    @property
    def flag(self) -> str:
        """The flag that sets it, such as ``--n-ctx``."""
        return "--" + self.name.replace("_", "-")


def describe(model: type[BaseModel], scope: Scope) -> tuple[SettingInfo, ...]:
    """Return what the fields of a pydantic model say, in their order; fields that hold models are no settings."""
    schema = model.model_json_schema()
    required = schema.get("required", ())
    return tuple(
        _describe_field(name, field, scope, required=name in required)
        for name, field in schema["properties"].items()
        if "$ref" not in json.dumps(field)
    )


def _describe_field(name: str, field: Mapping[str, Any], scope: Scope, *, required: bool) -> SettingInfo:
    branches = field.get("anyOf", [field])
    value = next(branch for branch in branches if branch.get("type") != "null")
    choices = tuple(value.get("enum", ()))
    kind = field.get("kind") or _kind_of(value)
    return SettingInfo(
        name=name,
        scope=scope,
        kind=kind,
        nullable=len(branches) > 1,
        default="" if required else field.get("default_text") or _default_text(field.get("default")),
        range=_range_text(kind, value),
        choices=choices,
        description=field["description"],
    )


def _kind_of(value: Mapping[str, Any]) -> str:
    if "enum" in value:
        return "choice"
    if value.get("format") == "path":
        return "path"
    return _KINDS.get(value["type"], "text")


def _default_text(default: object) -> str:
    if isinstance(default, list):
        return ", ".join(map(str, default)) or "empty"
    return default if isinstance(default, str) else json.dumps(default)


def _range_text(kind: str, value: Mapping[str, Any]) -> str:
    if kind == "integer":
        return f"{value['minimum']}..{value['maximum']}"
    if kind == "choice":
        return ", ".join(value["enum"])
    if kind == "boolean":
        return "true, false"
    longest = value.get("maxLength")
    return f"at most {longest} characters" if longest else ""


@cache
def settings() -> tuple[SettingInfo, ...]:
    """Return every setting: the server's, then those of a model, each in the order of the table."""
    return describe(Config, "server") + describe(ModelConfig, "model")


@cache
def settings_by_flag() -> Mapping[str, SettingInfo]:
    """Return the settings by name as environment and flags mean them: where both scopes have a name, the server's."""
    found: dict[str, SettingInfo] = {}
    for info in settings():
        found.setdefault(info.name, info)
    return found
