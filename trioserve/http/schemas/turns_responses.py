"""The ``input`` of OpenAI's responses: messages, thoughts, calls and results, each an item, as chat messages.

What a model said in one go is one chat message: its thoughts, what it said to the user, and its calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trioserve.http.schemas.content import (
    MAX_ITEMS,
    Json,
    call,
    content_schema,
    kind_schema,
    read_items,
    read_role,
    read_string,
    read_text,
    wrong,
)

_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_RESULTS = {"input_text": "text"}
_THOUGHTS = {"reasoning_text": "text"}
_ROLES = ("user", "assistant", "system", "developer")
_STRING = {"type": "string"}
_NULL = {"type": "null"}
_MESSAGE = {
    "type": "object",
    "properties": {
        "type": {"anyOf": [{"const": "message"}, _NULL]},
        "role": {"enum": list(_ROLES)},
        "content": content_schema(_TEXTS),
    },
    "required": ["role", "content"],
}
_ITEMS = [
    _MESSAGE,
    kind_schema("function_call", {"call_id": _STRING, "name": _STRING, "arguments": _STRING}),
    kind_schema("function_call_output", {"call_id": _STRING, "output": content_schema(_RESULTS)}),
    kind_schema("reasoning", {}, {"content": {"anyOf": [content_schema(_THOUGHTS)["anyOf"][1], _NULL]}}),
]
# The field as a JSON Schema, for the description of the routes.
INPUT = {
    "anyOf": [_STRING, {"type": "array", "items": {"anyOf": _ITEMS}, "minItems": 1, "maxItems": MAX_ITEMS}],
}


def read_input(value: object) -> list[Json]:
    """Read what was said so far.

    Raises:
        InvalidRequestError: an item is wrong, or a result is of no call.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": read_text(value, "input", _TEXTS)}]
    if not isinstance(value, list):
        raise wrong("input", "must be a string or a list of items")
    reader = _Reader()
    read_items(value, "input", reader.item)
    return [turn.message for turn in reader.turns]


@dataclass(slots=True)
class _Turn:
    """One chat message on its way.

    Attributes:
        role: of who speaks.
        texts, thoughts, calls: what it is made of, in order.
        call_id: of a result.
    """

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    call_id: str | None = None

    @property
    def message(self) -> Json:
        """All of it. Where there is nothing but calls the content is null."""
        said: Json = {"role": self.role, "content": "".join(self.texts) if self.texts or not self.calls else None}
        said |= {"tool_call_id": self.call_id} if self.call_id is not None else {}
        said |= {"reasoning_content": "".join(self.thoughts)} if any(self.thoughts) else {}
        return said | ({"tool_calls": self.calls} if self.calls else {})


class _Reader:
    """Reads items in their order.

    Attributes:
        turns: that they make.
    """

    def __init__(self) -> None:
        self.turns: list[_Turn] = []
        self._called: set[str] = set()  # ids of the calls so far
        self._readers = {
            "message": self._message,
            "function_call": self._call,
            "function_call_output": self._result,
            "reasoning": self._reasoning,
        }

    def item(self, item: Mapping[str, Any], path: str) -> None:
        """Read one item."""
        kind = item.get("type")
        reader = self._readers.get("message" if kind is None else kind) if isinstance(kind, str | None) else None
        if reader is None:
            raise wrong(f"{path}.type", f"must be {', '.join(self._readers)}; this server keeps no items")
        reader(item, path)

    def _message(self, item: Mapping[str, Any], path: str) -> None:
        role, text = read_role(item, path, _ROLES), read_text(item.get("content"), f"{path}.content", _TEXTS)
        if role != "assistant":
            self.turns.append(_Turn(role, [text]))
            return
        last = self._last()
        # Two messages with nothing between were said in two turns.
        turn = last if last is not None and (last.calls or not last.texts) else self._begin()
        turn.texts.append(text)

    def _call(self, item: Mapping[str, Any], path: str) -> None:
        call_id, name, arguments = (read_string(item, key, path) for key in ("call_id", "name", "arguments"))
        self._called.add(call_id)
        turn = self._last() or self._begin()
        turn.calls.append(call(call_id, name, arguments))

    def _result(self, item: Mapping[str, Any], path: str) -> None:
        call_id = read_string(item, "call_id", path)
        if call_id not in self._called:
            raise wrong(f"{path}.call_id", "is of no function_call before it, and this server keeps no items")
        text = read_text(item.get("output"), f"{path}.output", _RESULTS)
        self.turns.append(_Turn("tool", [text], call_id=call_id))

    def _reasoning(self, item: Mapping[str, Any], path: str) -> None:
        content = item.get("content")
        if not isinstance(content, list | None):
            raise wrong(f"{path}.content", "must be a list of parts")
        thoughts = read_text(content or "", f"{path}.content", _THOUGHTS)
        last = self._last()
        turn = last if last is not None and not last.calls and not last.texts else self._begin()
        turn.thoughts.append(thoughts)

    def _last(self) -> _Turn | None:
        """The assistant's turn that an item may belong to."""
        return self.turns[-1] if self.turns and self.turns[-1].role == "assistant" else None

    def _begin(self) -> _Turn:
        self.turns.append(_Turn("assistant"))
        return self.turns[-1]
