"""Texts and parts of messages, as the other APIs spell them, in the form of chat messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trioserve.errors import InvalidRequestError

Json = dict[str, Any]

MAX_ITEMS = 16_384


def wrong(path: str, message: str) -> InvalidRequestError:
    """An error about one place in a body."""
    return InvalidRequestError(f"{path}: {message}", param=path)


def read_items(value: object, path: str, read: Callable[[Mapping[str, Any], str], Json]) -> list[Json]:
    """Read a list of messages, or of what stands beside messages.

    Arguments:
        value: the list.
        path: where it stands, for errors.
        read: reads one object, given its path.

    Raises:
        InvalidRequestError: it is no list of objects, is empty or too long.
    """
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_ITEMS:
        raise wrong(path, f"must be a list of 1 to {MAX_ITEMS} items")
    return [read(_as_object(item, f"{path}[{index}]"), f"{path}[{index}]") for index, item in enumerate(value)]


def read_role(item: Mapping[str, Any], path: str, roles: tuple[str, ...]) -> str:
    """Read who speaks.

    Raises:
        InvalidRequestError: somebody who isn't known.
    """
    role = item.get("role")
    if not isinstance(role, str) or role not in roles:
        raise wrong(f"{path}.role", f"must be {', '.join(roles[:-1])} or {roles[-1]}")
    return role


def read_text(value: object, path: str, keys: Mapping[str, str]) -> str:
    """Read a text, or a list of parts whose texts are joined with nothing between.

    Arguments:
        value: text or list.
        path: where it stands, for errors.
        keys: for each type of part that carries text, the key that holds it.

    Raises:
        InvalidRequestError: it is something else, or a part is not of these types.
    """
    if isinstance(value, str):
        return _encodable(value, path)
    if not isinstance(value, list):
        raise wrong(path, "must be a string or a list of parts")
    return "".join(_part(_as_object(part, f"{path}[{i}]"), f"{path}[{i}]", keys) for i, part in enumerate(value))


def _part(part: Mapping[str, Any], path: str, keys: Mapping[str, str]) -> str:
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in keys:
        named = f"is {_printable(kind)}" if isinstance(kind, str) else "must be a string"
        raise wrong(f"{path}.type", f"{named}; this route takes text only: {', '.join(keys)}")
    text = part.get(keys[kind])
    if not isinstance(text, str):
        raise wrong(f"{path}.{keys[kind]}", "must be a string")
    return _encodable(text, f"{path}.{keys[kind]}")


def _printable(text: str) -> str:
    return text[:100].encode("ascii", "backslashreplace").decode("ascii")


def _as_object(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise wrong(path, "must be an object")
    return value


def _encodable(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise wrong(path, "must not contain lone surrogates") from None
    return text


def content_schema(keys: Mapping[str, str]) -> Json:
    """What ``read_text`` takes, as a JSON Schema."""
    parts = [
        {
            "type": "object",
            "properties": {"type": {"const": kind}, key: {"type": "string"}},
            "required": ["type", key],
        }
        for kind, key in keys.items()
    ]
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": parts}}]}
