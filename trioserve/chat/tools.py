"""Tools that a model may call: functions with a name and parameters that follow a JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

# Each value in one place and in one layout: small models would lay JSON out for ever.
_LAYOUT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
# Beside one of these, "nothing else" would also rule out what it allows.
_OPENING = {"$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "additionalProperties", "propertyNames"}


@dataclass(frozen=True, slots=True)
class Tool:
    """One function.

    Attributes:
        name: ASCII letters, digits, and ``_.-``.
        parameters: a JSON Schema for an object; None takes no parameters.
        given: how the client describes it, for the template.
        field: what the client calls the parameters, for errors.
    """

    name: str
    parameters: Mapping[str, object] | None
    given: Mapping[str, object]
    field: str = "tools"

    @property
    def loosened(self) -> Tool:
        """The same tool, with arguments that may be any object."""
        return replace(self, parameters={"additionalProperties": True})

    @property
    def schema(self) -> str:
        """What its arguments follow, as JSON. Properties that the parameters don't name are left out of it."""
        schema: dict[str, object] = {"type": "object", **(self.parameters or {})}
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not _OPENING & schema.keys() and isinstance(properties, Mapping) and isinstance(required, Sequence):
            needed = [name for name in required if name not in properties]
            schema |= {} if needed else {"properties": properties, "additionalProperties": False}
        return json.dumps({**schema, **_LAYOUT})


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools an answer may call.

    Attributes:
        tools: all that were given, at least one.
        required: the answer is one or several calls, and not text.
        named: the only tool that it may call then.
        parallel: there may be several calls, unless one is named.
    """

    tools: Sequence[Tool]
    required: bool = False
    named: str | None = None
    parallel: bool = True

    @property
    def callable(self) -> Sequence[Tool]:
        """The tools that may be called."""
        return [tool for tool in self.tools if self.named in (None, tool.name)]

    @property
    def several(self) -> bool:
        """Whether there may be several calls."""
        return self.parallel and self.named is None
