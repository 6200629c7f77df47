"""Fields about tools that an answer may call, as each API spells them: ``tools``, ``tool_choice`` and more.

Sources of the formats: the documentation of OpenAI's chat completions and responses, and of Anthropic's messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trioserve.chat import Tool, ToolUse
from trioserve.errors import InvalidRequestError

MAX_TOOLS = 128
MAX_CHARACTERS = 256 * 1024  # of all tools together, as JSON

_NULL = {"type": "null"}
_FLAG = {"anyOf": [{"type": "boolean"}, _NULL]}
_SCHEMA = {"type": "object", "properties": {"type": {"const": "object"}}}


@dataclass(frozen=True, slots=True)
class Spelling:
    """How an API spells a tool.

    Attributes:
        kind: its ``type``.
        kind_required: the ``type`` has to be given.
        inside: key of the object that holds the rest; empty where the tool itself does.
        parameters: key of the JSON Schema of its arguments.
        parameters_required: it has to be given.
        longest: characters of a name.
    """

    kind: str
    parameters: str
    inside: str = ""
    kind_required: bool = True
    parameters_required: bool = False
    longest: int = 128

    @property
    def path(self) -> str:
        """From a tool, or from the choice of one, to what holds its name."""
        return f".{self.inside}" if self.inside else ""

    @property
    def name(self) -> str:
        """What a name matches."""
        return rf"^[a-zA-Z0-9_.-]{{1,{self.longest}}}$"

    @property
    def field(self) -> dict[str, Any]:
        """``tools`` as a JSON Schema, for the description of the routes."""
        parameters = _SCHEMA if self.parameters_required else {"anyOf": [_SCHEMA, _NULL]}
        fields = {
            "name": {"type": "string", "pattern": self.name},
            "description": {"anyOf": [{"type": "string"}, _NULL]},
            self.parameters: parameters,
            "strict": _FLAG,
        }
        required = ["name", self.parameters] if self.parameters_required else ["name"]
        kind: dict[str, Any] = {"const": self.kind}
        tool: dict[str, Any] = {
            "type": "object",
            "properties": {"type": kind if self.kind_required else {"anyOf": [kind, _NULL]}},
            "required": ["type"] if self.kind_required else [],
        }
        if self.inside:
            tool["properties"][self.inside] = {"type": "object", "properties": fields, "required": required}
            tool["required"] += [self.inside]
        else:
            tool["properties"] |= fields
            tool["required"] += required
        return {"anyOf": [{"type": "array", "items": tool, "maxItems": MAX_TOOLS}, _NULL]}


CHAT = Spelling("function", "parameters", inside="function", longest=64)
RESPONSES = Spelling("function", "parameters")
MESSAGES = Spelling("custom", "input_schema", kind_required=False, parameters_required=True)

_NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_MODES = {"enum": ["none", "auto", "required"]}
_KINDS = {"none": "none", "auto": "auto", "any": "required"}
# Each API's tool_choice as a JSON Schema.
CHAT_CHOICE = {
    "anyOf": [
        _MODES,
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "function": _NAME},
            "required": ["type", "function"],
        },
        _NULL,
    ]
}
RESPONSES_CHOICE = {
    "anyOf": [
        _MODES,
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
            "required": ["type", "name"],
        },
        _NULL,
    ]
}
MESSAGES_CHOICE = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"enum": list(_KINDS)}, "disable_parallel_tool_use": _FLAG},
            "required": ["type"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "tool"},
                "name": {"type": "string"},
                "disable_parallel_tool_use": _FLAG,
            },
            "required": ["type", "name"],
        },
        _NULL,
    ]
}


@dataclass(frozen=True, slots=True)
class Choice:
    """What was said about whether tools are called.

    Attributes:
        mode: ``none``, ``auto`` or ``required``.
        named: the only tool that is to be called.
        parallel: there may be several calls.
    """

    mode: str = "auto"
    named: str | None = None
    parallel: bool = True


def read_choice(choice: object, spelling: Spelling, *, parallel: bool) -> Choice:
    """Read OpenAI's ``tool_choice``.

    Arguments:
        choice: what was given as that.
        spelling: of the API.
        parallel: there may be several calls.

    Raises:
        InvalidRequestError: it is wrong.
    """
    if choice is None or choice in ("none", "auto", "required"):
        return Choice(str(choice or "auto"), parallel=parallel)
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        raise _wrong("tool_choice", "must be none, auto, required, or an object with the type function and a name")
    holder = choice.get(spelling.inside) if spelling.inside else choice
    name = holder.get("name") if isinstance(holder, Mapping) else None
    if not isinstance(name, str):
        raise _wrong(f"tool_choice{spelling.path}.name", "must be a string")
    return Choice("required", name, parallel)


def read_messages_choice(choice: object) -> Choice:
    """Read Anthropic's ``tool_choice``, which also says whether there may be several calls.

    Raises:
        InvalidRequestError: it is wrong.
    """
    if choice is None:
        return Choice()
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or not isinstance(kind, str) or kind not in {*_KINDS, "tool"}:
        raise _wrong("tool_choice", "must be an object with the type auto, any, tool or none")
    alone = choice.get("disable_parallel_tool_use")
    if not isinstance(alone, bool | None):
        raise _wrong("tool_choice.disable_parallel_tool_use", "must be true or false")
    name = choice.get("name")
    if kind != "tool":
        return Choice(_KINDS[kind], parallel=not alone)
    if not isinstance(name, str):
        raise _wrong("tool_choice.name", "must be a string")
    return Choice("required", name, not alone)


def parse_tools(tools: object, choice: Choice, spelling: Spelling) -> ToolUse | None:
    """Read which tools an answer may call.

    Arguments:
        tools: what was given as ``tools``.
        choice: among them.
        spelling: of the API.

    Returns:
        None where it may call none.

    Raises:
        InvalidRequestError: a field is wrong, or names a tool that isn't there.
    """
    parsed = _tools(tools, spelling)
    if not parsed and choice.mode == "required":
        raise _wrong("tool_choice", "asks for a tool, but tools holds none")
    if choice.named is not None and choice.named not in [tool.name for tool in parsed]:
        raise _wrong(f"tool_choice{spelling.path}.name", "is none of the tools")
    if not parsed or choice.mode == "none":
        return None
    return ToolUse(parsed, required=choice.mode == "required", named=choice.named, parallel=choice.parallel)


def _tools(value: object, spelling: Spelling) -> list[Tool]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong("tools", "must be a list")
    if len(value) > MAX_TOOLS:
        raise _wrong("tools", f"must have {MAX_TOOLS} items or fewer")
    parsed = [_tool(item, f"tools[{index}]", spelling) for index, item in enumerate(value)]
    _check_text(value)
    return parsed


def _tool(value: object, path: str, spelling: Spelling) -> Tool:
    if not isinstance(value, dict):
        raise _wrong(path, "must be an object")
    _check_kind(value.get("type"), f"{path}.type", spelling)
    function = value.get(spelling.inside) if spelling.inside else value
    path += spelling.path
    if not isinstance(function, dict):
        raise _wrong(path, "must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not re.fullmatch(spelling.name, name, re.ASCII):
        raise _wrong(f"{path}.name", f"must be 1 to {spelling.longest} letters, digits, or any of _ . -")
    if not isinstance(function.get("description"), str | None):
        raise _wrong(f"{path}.description", "must be a string")
    if not isinstance(function.get("strict"), bool | None):
        raise _wrong(f"{path}.strict", "must be true or false")
    field = f"{path}.{spelling.parameters}"
    parameters = _parameters(function.get(spelling.parameters), field, spelling)
    return Tool(name, parameters, value if spelling is CHAT else _as_chat(function, parameters), field)


def _check_kind(kind: object, path: str, spelling: Spelling) -> None:
    if kind == spelling.kind or (kind is None and not spelling.kind_required):
        return
    raise _wrong(path, f"must be {spelling.kind}; this server has no tools of its own")


def _as_chat(function: Mapping[str, Any], parameters: Mapping[str, Any] | None) -> Mapping[str, object]:
    """A tool as chat completions spell it, which is what templates know."""
    told = {"name": function["name"], "description": function.get("description"), "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in told.items() if value is not None}}


def _parameters(value: object, path: str, spelling: Spelling) -> Mapping[str, Any] | None:
    if value is None and not spelling.parameters_required:
        return None
    if not isinstance(value, dict):
        raise _wrong(path, "must be a JSON Schema, as an object")
    if value.get("type", "object") != "object":
        raise _wrong(f"{path}.type", "must be object")
    return value


def _check_text(tools: list[Any]) -> None:
    """Refuse what is too much, and what can't be written: half characters, and numbers beyond all bounds."""
    try:
        text = json.dumps(tools, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise _wrong("tools", "must hold finite numbers only") from None
    except RecursionError:  # a body may be nested a little deeper than what is written from further down the stack
        raise _wrong("tools", "is nested too deeply") from None
    if len(text) > MAX_CHARACTERS:
        raise _wrong("tools", f"has {len(text)} characters, at most {MAX_CHARACTERS} are allowed")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _wrong("tools", "must not contain lone surrogates") from None


def _wrong(path: str, complaint: str) -> InvalidRequestError:
    return InvalidRequestError(f"{path}: {complaint}", param=path)
