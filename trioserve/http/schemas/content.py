"""Texts and parts of messages, as the other APIs spell them, in the form of chat messages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from trioserve.errors import InvalidRequestError

Json = dict[str, Any]
Item = TypeVar("Item")

MAX_ITEMS = 16_384


def wrong(path: str, message: str) -> InvalidRequestError:
    """An error about one place in a body."""
    return InvalidRequestError(f"{path}: {message}", param=path)


def read_items(value: object, path: str, read: Callable[[Mapping[str, Any], str], Item]) -> list[Item]:
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
    return "".join(_part(part, place, keys) for part, place in read_parts(value, path))


def read_parts(value: object, path: str) -> list[tuple[Mapping[str, Any], str]]:
    """Read a list of parts: each of them, and where it stands.

    Arguments:
        value: the list.
        path: where it stands, for errors.

    Raises:
        InvalidRequestError: it is no list of objects.
    """
    if not isinstance(value, list):
        raise wrong(path, "must be a string or a list of parts")
    places = [f"{path}[{index}]" for index in range(len(value))]
    return [(_as_object(part, place), place) for part, place in zip(value, places, strict=True)]


def read_kind(part: Mapping[str, Any], path: str, kinds: Collection[str]) -> str:
    """Read the ``type`` of a part.

    Raises:
        InvalidRequestError: it is none of these.
    """
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        named = f"is {_printable(kind)}" if isinstance(kind, str) else "must be a string"
        raise wrong(f"{path}.type", f"{named}; this server takes text only, here as {', '.join(kinds)}")
    return kind


def read_string(item: Mapping[str, Any], key: str, path: str) -> str:
    """Read a text that has to be there.

    Arguments:
        item: that holds it.
        key: of it.
        path: of the item.

    Raises:
        InvalidRequestError: it is something else, or can't be encoded.
    """
    text = item.get(key)
    if not isinstance(text, str):
        raise wrong(f"{path}.{key}", "must be a string")
    return _encodable(text, f"{path}.{key}")


def call(call_id: str, name: str, arguments: str) -> Json:
    """A call of a tool as chat messages have it.

    Arguments:
        call_id: that its result names.
        name: of the tool.
        arguments: as JSON text.
    """
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _part(part: Mapping[str, Any], path: str, keys: Mapping[str, str]) -> str:
    return read_string(part, keys[read_kind(part, path, keys)], path)


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
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": part_schemas(keys)}}]}


def part_schemas(keys: Mapping[str, str]) -> list[Json]:
    """The parts that ``read_text`` takes, as JSON Schemas."""
    return [kind_schema(kind, required={key: {"type": "string"}}) for kind, key in keys.items()]


def kind_schema(kind: str, required: Json, optional: Json | None = None) -> Json:
    """An object of some type, as a JSON Schema.

    Arguments:
        kind: its ``type``.
        required: schemas of the fields that it has to have.
        optional: of those that it may have.
    """
    properties = {"type": {"const": kind}, **required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": ["type", *required]}
