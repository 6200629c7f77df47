"""Whether two schemas have no value in common, as far as that is easily told."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

Resolve = Callable[[object], object]
_MOST = 100  # options: each is compared with each
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})


def all_disjoint(options: Sequence[object], resolve: Resolve) -> bool:
    """Tell whether no value is one of two of them.

    Arguments:
        options: schemas.
        resolve: follows a reference.
    """
    resolved = [resolve(option) for option in options]
    return len(options) <= _MOST and all(_disjoint(one, other, resolve) for one, other in combinations(resolved, 2))


def _disjoint(one: object, other: object, resolve: Resolve) -> bool:
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return one is False or other is False
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not values & others
    types, other_types = _types(one), _types(other)
    common = types & other_types
    return not common or (common == {"object"} and _told_apart(one, other, resolve))


def _told_apart(one: Mapping[str, object], other: Mapping[str, object], resolve: Resolve) -> bool:
    """Whether there is a property that both have, with different values."""
    return any(
        _disjoint(resolve(_property(one, name)), resolve(_property(other, name)), resolve)
        for name in _required(one) & _required(other)
        if _values(resolve(_property(one, name))) is not None
    )


def _property(schema: Mapping[str, object], name: str) -> object:
    properties = schema.get("properties")
    return properties.get(name, True) if isinstance(properties, Mapping) else True


def _required(schema: Mapping[str, object]) -> frozenset[str]:
    required = schema.get("required")
    return frozenset(name for name in required if isinstance(name, str)) if isinstance(required, list) else frozenset()


def _values(schema: object) -> frozenset[str] | None:
    """The texts and other constants that it allows at most; None if it lists none. Numbers have too many spellings."""
    if not isinstance(schema, Mapping):
        return None
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list) or not all(isinstance(value, str | bool | None) for value in listed):
        return None
    return frozenset(json.dumps(value) for value in listed)


def _types(schema: Mapping[str, object]) -> frozenset[str]:
    """The types that it allows at most."""
    values = _values(schema)
    if values is not None:
        return frozenset(_type(json.loads(value)) for value in values)
    given = schema.get("type")
    listed = [given] if isinstance(given, str) else given
    if not (isinstance(listed, list) and all(isinstance(name, str) for name in listed)):
        return _TYPES
    return frozenset("number" if name == "integer" else name for name in listed)


def _type(value: object) -> str:
    if value is None:
        return "null"
    return "boolean" if isinstance(value, bool) else "string"
