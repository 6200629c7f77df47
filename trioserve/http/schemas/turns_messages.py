"""The ``messages`` of Anthropic's API: turns of texts, thoughts, calls and results, as chat messages.

A turn of the assistant is one chat message. The results in a turn of the user are messages of their own, and its texts
stay before, between or after them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain, groupby
from typing import Any

from trioserve.http.schemas.content import (
    MAX_ITEMS,
    Json,
    call,
    content_schema,
    kind_schema,
    part_schemas,
    read_items,
    read_kind,
    read_parts,
    read_role,
    read_string,
    read_text,
    wrong,
)

TEXTS = {"text": "text"}

_ROLES = ("user", "assistant")
_SAID = ("text", "tool_use", "thinking")
_ASKED = ("text", "tool_result")
_STRING = {"type": "string"}
_NULL = {"type": "null"}
_USE = kind_schema("tool_use", {"id": _STRING, "name": _STRING, "input": {"type": "object"}})
_THINKING = kind_schema("thinking", {"thinking": _STRING})
_RESULT = kind_schema(
    "tool_result",
    {"tool_use_id": _STRING},
    {
        "content": {"anyOf": [*content_schema(TEXTS)["anyOf"], _NULL]},
        "is_error": {"anyOf": [{"type": "boolean"}, _NULL]},
    },
)


def _turn_schema(role: str, *blocks: Json) -> Json:
    listed = {"type": "array", "items": {"anyOf": [*part_schemas(TEXTS), *blocks]}}
    return {
        "type": "object",
        "properties": {"role": {"const": role}, "content": {"anyOf": [_STRING, listed]}},
        "required": ["role", "content"],
    }


# The field as a JSON Schema, for the description of the routes.
MESSAGES = {
    "type": "array",
    "items": {"anyOf": [_turn_schema("user", _RESULT), _turn_schema("assistant", _USE, _THINKING)]},
    "minItems": 1,
    "maxItems": MAX_ITEMS,
}


def read_messages(value: object) -> list[Json]:
    """Read a conversation.

    Raises:
        InvalidRequestError: a turn or a block is wrong, or a result is of no call.
    """
    return list(chain.from_iterable(read_items(value, "messages", _Reader().turn)))


class _Reader:
    """Reads one conversation, in order."""

    def __init__(self) -> None:
        self._called: set[str] = set()  # ids of the calls so far

    def turn(self, item: Mapping[str, Any], path: str) -> list[Json]:
        """Read one turn."""
        role, content, path = read_role(item, path, _ROLES), item.get("content"), f"{path}.content"
        if isinstance(content, str):
            return [{"role": role, "content": read_text(content, path, TEXTS)}]
        blocks = read_parts(content, path)
        return [self._said(blocks)] if role == "assistant" else self._asked(blocks)

    def _said(self, blocks: list[tuple[Mapping[str, Any], str]]) -> Json:
        found: dict[str, list[Any]] = {kind: [] for kind in _SAID}
        for block, place in blocks:
            kind = read_kind(block, place, _SAID)
            found[kind].append(self._call(block, place) if kind == "tool_use" else read_string(block, kind, place))
        calls, thoughts = found["tool_use"], "".join(found["thinking"])
        said: Json = {"role": "assistant", "content": "".join(found["text"]) or (None if calls else "")}
        said |= {"reasoning_content": thoughts} if thoughts else {}
        return said | ({"tool_calls": calls} if calls else {})

    def _asked(self, blocks: list[tuple[Mapping[str, Any], str]]) -> list[Json]:
        kinds = [(read_kind(block, place, _ASKED), block, place) for block, place in blocks]
        asked: list[Json] = []
        for kind, group in groupby(kinds, key=lambda each: each[0]):
            if kind == "tool_result":
                asked += [self._result(block, place) for _, block, place in group]
            else:
                words = "".join(read_string(block, "text", place) for _, block, place in group)
                asked.append({"role": "user", "content": words})
        return asked or [{"role": "user", "content": ""}]

    def _call(self, block: Mapping[str, Any], path: str) -> Json:
        call_id, name = read_string(block, "id", path), read_string(block, "name", path)
        self._called.add(call_id)
        return call(call_id, name, _arguments(block.get("input"), f"{path}.input"))

    def _result(self, block: Mapping[str, Any], path: str) -> Json:
        call_id, content, failed = read_string(block, "tool_use_id", path), block.get("content"), block.get("is_error")
        if call_id not in self._called:
            raise wrong(f"{path}.tool_use_id", "is of no tool_use before it")
        if not isinstance(failed, bool | None):
            raise wrong(f"{path}.is_error", "must be true or false")
        text = "" if content is None else read_text(content, f"{path}.content", TEXTS)
        # Chat messages have no other way to say so.
        return {"role": "tool", "tool_call_id": call_id, "content": f"Error: {text}" if failed else text}


def _arguments(value: object, path: str) -> str:
    """The input of a call as JSON text."""
    if not isinstance(value, dict):
        raise wrong(path, "must be an object")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except RecursionError:
        raise wrong(path, "is nested too deeply") from None
    except UnicodeEncodeError:
        raise wrong(path, "must not contain lone surrogates") from None
    except ValueError:
        raise wrong(path, "must hold finite numbers only") from None
    return text
