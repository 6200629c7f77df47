"""Fields about tools that an answer may call: ``tools``, ``tool_choice`` and ``parallel_tool_calls``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from trioserve.chat import Tool, ToolUse
from trioserve.errors import InvalidRequestError

MAX_TOOLS = 128
MAX_CHARACTERS = 256 * 1024  # of all tools together, as JSON

_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
_NULL = {"type": "null"}
_PARAMETERS = {"anyOf": [{"type": "object", "properties": {"type": {"const": "object"}}}, _NULL]}
_FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": _NAME},
        "description": {"anyOf": [{"type": "string"}, _NULL]},
        "parameters": _PARAMETERS,
    },
    "required": ["name"],
}
_TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["type", "function"],
}
_NAMED = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
# The fields as JSON Schemas, for the description of the routes.
TOOLS = {"anyOf": [{"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS}, _NULL]}
TOOL_CHOICE = {"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED, _NULL]}


def parse_tools(tools: object, choice: object, *, parallel: bool) -> ToolUse | None:
    """Read which tools an answer may call.

    Arguments:
        tools: what was given as ``tools``.
        choice: as ``tool_choice``.
        parallel: there may be several calls.

    Returns:
        None where it may call none.

    Raises:
        InvalidRequestError: a field is wrong, or names a tool that isn't there.
    """
    parsed = _tools(tools)
    named = _named(choice)
    if not parsed and choice not in (None, "none", "auto"):
        raise _wrong("tool_choice", "asks for a tool, but tools holds none")
    if named is not None and named not in [tool.name for tool in parsed]:
        raise _wrong("tool_choice.function.name", "is none of the tools")
    if not parsed or choice == "none":
        return None
    return ToolUse(parsed, required=choice not in (None, "auto"), named=named, parallel=parallel)


def _named(choice: object) -> str | None:
    """The name in a choice of one tool."""
    if choice is None or choice in ("none", "auto", "required"):
        return None
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        raise _wrong("tool_choice", "must be none, auto, required, or an object with the type function and a name")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _wrong("tool_choice.function.name", "must be a string")
    return name


def _tools(value: object) -> list[Tool]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong("tools", "must be a list")
    if len(value) > MAX_TOOLS:
        raise _wrong("tools", f"must have {MAX_TOOLS} items or fewer")
    parsed = [_tool(item, f"tools[{index}]") for index, item in enumerate(value)]
    _check_text(value)
    return parsed


def _tool(value: object, path: str) -> Tool:
    if not isinstance(value, dict):
        raise _wrong(path, "must be an object")
    if value.get("type") != "function":
        raise _wrong(f"{path}.type", "must be function")
    function = value.get("function")
    if not isinstance(function, dict):
        raise _wrong(f"{path}.function", "must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not re.fullmatch(_NAME, name, re.ASCII):
        raise _wrong(f"{path}.function.name", "must be 1 to 64 letters, digits, or any of _ . -")
    if not isinstance(function.get("description"), str | None):
        raise _wrong(f"{path}.function.description", "must be a string")
    return Tool(name, _parameters(function.get("parameters"), f"{path}.function.parameters"), value)


def _parameters(value: object, path: str) -> Mapping[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _wrong(path, "must be a JSON Schema, as an object")
    if value.get("type", "object") != "object":
        raise _wrong(f"{path}.type", "must be object")
    return value


def _check_text(tools: list[Any]) -> None:
    """Refuse what is too much, and half characters, which no template can write."""
    text = json.dumps(tools, ensure_ascii=False)
    if len(text) > MAX_CHARACTERS:
        raise _wrong("tools", f"has {len(text)} characters, at most {MAX_CHARACTERS} are allowed")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _wrong("tools", "must not contain lone surrogates") from None


def _wrong(path: str, complaint: str) -> InvalidRequestError:
    return InvalidRequestError(f"{path}: {complaint}", param=path)
