"""Fields that hold an answer to a form: ``response_format``, ``json_schema``, ``regex`` and ``grammar``."""

from __future__ import annotations

import json
from collections.abc import Mapping

from trioserve.engine.base import Constraint, ConstraintKind
from trioserve.errors import InvalidRequestError

NAMES = ("response_format", "json_schema", "regex", "grammar")
MAX_SOURCE = 64 * 1024  # characters; to compile so many takes seconds
# The fields as JSON Schemas, for the description of the routes.
_NULL = {"type": "null"}
JSON_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "boolean"}, _NULL]}
SOURCE = {"anyOf": [{"type": "string", "maxLength": MAX_SOURCE}, _NULL]}
_WRAPPED = {"type": "object", "properties": {"schema": JSON_SCHEMA}}
RESPONSE_FORMAT = {
    "anyOf": [
        {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]},
        {
            "type": "object",
            "properties": {"type": {"const": "json_object"}, "schema": JSON_SCHEMA},
            "required": ["type"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "json_schema"}, "json_schema": _WRAPPED},
            "required": ["type", "json_schema"],
        },
        _NULL,
    ]
}

_ANY_OBJECT = Constraint(ConstraintKind.JSON_SCHEMA, '{"type":"object"}')


def parse_constraint(fields: Mapping[str, object]) -> tuple[str, Constraint] | None:
    """Read what form the answer shall have.

    Arguments:
        fields: those of ``NAMES`` that were given and not null.

    Returns:
        The field that says so, and the constraint; None where the answer is free.

    Raises:
        InvalidRequestError: a field is wrong, or two of them contradict each other.
    """
    found = [
        (name, constraint) for name, value in fields.items() if (constraint := _READERS[name](value, name)) is not None
    ]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidRequestError(f"{names} are both given: an answer has one form", param=found[1][0])
    return found[0] if found else None


def parse_text_format(value: object, name: str) -> Constraint | None:
    """Read the ``text.format`` of OpenAI's responses, which has its schema in itself.

    Arguments:
        value: of the field.
        name: of the field, for errors.

    Returns:
        None where the answer is free.

    Raises:
        InvalidRequestError: it is wrong.
    """
    if isinstance(value, Mapping) and value.get("type") == "json_schema":
        return _schema(value.get("schema"), f"{name}.schema")
    return _response_format(value, name)


def _response_format(value: object, name: str) -> Constraint | None:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name}: must be an object", param=name)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")  # as llama.cpp's server takes it
        return _ANY_OBJECT if schema is None else _schema(schema, f"{name}.schema")
    if kind == "json_schema":
        wrapped = value.get("json_schema")
        if not isinstance(wrapped, Mapping):
            raise InvalidRequestError(f"{name}.json_schema: must be an object", param=f"{name}.json_schema")
        schema = wrapped.get("schema")
        return _schema({} if schema is None else schema, f"{name}.json_schema.schema")
    raise InvalidRequestError(f"{name}.type: must be text, json_object or json_schema", param=f"{name}.type")


def _json_schema(value: object, name: str) -> Constraint | None:
    return None if value == {} else _schema(value, name)


def _schema(value: object, name: str) -> Constraint:
    if not isinstance(value, (Mapping, bool)):
        raise InvalidRequestError(f"{name}: must be a JSON Schema, an object or a boolean", param=name)
    try:
        source = json.dumps(value, separators=(",", ":"))
    except RecursionError:  # a body may be nested a little deeper than what is written from further down the stack
        raise InvalidRequestError(f"{name}: is nested too deeply", param=name) from None
    return Constraint(ConstraintKind.JSON_SCHEMA, _bounded(source, name))


def _regex(value: object, name: str) -> Constraint | None:
    return _text(ConstraintKind.REGEX, value, name)


def _grammar(value: object, name: str) -> Constraint | None:
    return _text(ConstraintKind.GBNF, value, name)


def _text(kind: ConstraintKind, value: object, name: str) -> Constraint | None:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name}: must be a string", param=name)
    return Constraint(kind, _bounded(value, name)) if value else None


def _bounded(source: str, name: str) -> str:
    if len(source) > MAX_SOURCE:
        raise InvalidRequestError(f"{name}: has {len(source)} characters, at most {MAX_SOURCE} are allowed", param=name)
    try:
        source.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{name}: must not contain lone surrogates", param=name) from None
    return source


_READERS = {"response_format": _response_format, "json_schema": _json_schema, "regex": _regex, "grammar": _grammar}
