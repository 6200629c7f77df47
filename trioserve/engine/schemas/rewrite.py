"""From a JSON Schema to one that the grammar engine enforces in full.

The engine refuses most of what it can't enforce. Here is what it would let pass, or refuses though it needn't: each
rule turns some keywords of one schema into others. A rule may forbid more than the schema did, but never allow more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from trioserve.engine.base import ConstraintError
from trioserve.engine.schemas.disjoint import Resolve, all_disjoint
from trioserve.engine.schemas.document import Document, Path
from trioserve.engine.schemas.formats import ANY_TEXT, PATTERNS, bounds
from trioserve.engine.schemas.patterns import translated, without_text

Schema = dict[str, object]

_MAPPINGS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
_SCHEMAS = {"items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_IN_PLACE = {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"}
_NAME_KEYWORDS = {"type", "enum", "const", "pattern", "minLength", "maxLength", "title", "description"}
_EXACT = 2**53 - 1  # the engine counts in doubles: further whole numbers are not told apart


def enforceable(schema: object) -> object:
    """A schema that allows nothing that this one forbids, in words that the grammar engine honours or refuses.

    Raises:
        ConstraintError: it can't be honoured. ``str()`` names the keyword.
    """
    document = Document(schema)
    made = _rewritten(schema, (), (0,), document)
    document.check_references()
    return made


def _rewritten(schema: object, path: Path, bases: tuple[int, ...], document: Document) -> object:
    if not isinstance(schema, Mapping):
        return schema
    if path and "$id" in schema:
        bases = (*bases, len(path))
    document.note(schema, path, bases)
    made: Schema = {}
    for keyword, value in schema.items():
        here = (*path, keyword)
        if keyword in _MAPPINGS and isinstance(value, Mapping):
            value = {name: _rewritten(item, (*here, name), bases, document) for name, item in value.items()}
        elif keyword in _LISTS and isinstance(value, list):
            value = [_rewritten(item, (*here, str(index)), bases, document) for index, item in enumerate(value)]
        elif keyword in _SCHEMAS:
            value = _rewritten(value, here, bases, document)
        made[keyword] = value
    # In a part with a name of its own "#" is another place.
    resolve = document.resolved if len(bases) == 1 else _unresolved
    for rule in _RULES:
        rule(made, resolve)
    return made


def _counts(schema: Schema, _: Resolve) -> None:
    """A whole number may be written with a point."""
    for keyword in _COUNTS:
        value = schema.get(keyword)
        if isinstance(value, float) and value.is_integer():
            schema[keyword] = int(value)


def _constants(schema: Schema, _: Resolve) -> None:
    for keyword in schema.keys() & {"const", "enum"}:
        _check_constant(schema[keyword], keyword)


def _check_constant(value: object, keyword: str) -> None:
    if isinstance(value, list | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            _check_constant(item, keyword)
    elif isinstance(value, str):
        if any(map(without_text, value)):
            raise ConstraintError(f"{keyword}: {value[:100]!r} has a character that can't be written")
    elif isinstance(value, int | float) and abs(value) > _EXACT:
        raise ConstraintError(f"{keyword}: a number beyond {_EXACT} can't be told from its neighbours")


def _bounds(schema: Schema, _: Resolve) -> None:
    """Bounds that are out of reach are drawn in, the usual ones of 64 bits among them."""
    for keyword, sign in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
        value = schema.get(keyword)
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) <= _EXACT:
            continue
        if (value > 0) != (sign > 0):
            raise ConstraintError(f"{keyword}: {value} is out of reach, which ends at {-sign * _EXACT}")
        schema[keyword] = sign * _EXACT


def _patterns(schema: Schema, _: Resolve) -> None:
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        schema["pattern"] = translated(pattern, "pattern")
    named = schema.get("patternProperties")
    if isinstance(named, Mapping):
        schema["patternProperties"] = {translated(name, "patternProperties"): value for name, value in named.items()}


def _formats(schema: Schema, _: Resolve) -> None:
    name = schema.get("format")
    if not isinstance(name, str):
        return
    if name in ANY_TEXT:
        del schema["format"]
    elif name in PATTERNS:
        del schema["format"]
        _also(schema, {"pattern": PATTERNS[name]})
    elif (limits := bounds(name)) is not None:
        least, most = max(limits[0], -_EXACT), min(limits[1], _EXACT)
        _also(schema, {"minimum": least, "maximum": most})


def _also(schema: Schema, more: Schema) -> None:
    """Let a schema hold as well."""
    if not schema.keys() & more.keys():
        schema |= more
        return
    others = schema.get("allOf")
    schema["allOf"] = [*(others if isinstance(others, list) else []), more]


def _unique(schema: Schema, _: Resolve) -> None:
    most = schema.get("maxItems")
    if schema.get("uniqueItems") is False or (isinstance(most, int) and most <= 1):
        schema.pop("uniqueItems", None)


def _fewest(schema: Schema, _: Resolve) -> None:
    """Names that no keyword lists may be repeated, so several of them are not counted."""
    least, required = schema.get("minProperties"), schema.get("required")
    needed = len({name for name in required if isinstance(name, str)}) if isinstance(required, list) else 0
    if not isinstance(least, int) or least <= 0:
        return
    if least <= needed:
        del schema["minProperties"]
    elif least > 1:
        raise ConstraintError(f"minProperties: {least}, where {needed} are required, can't be counted")


def _unevaluated(schema: Schema, _: Resolve) -> None:
    """Without other schemas in the same place it says what its older relatives do."""
    if schema.keys() & _IN_PLACE:
        return
    for keyword, relative in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if keyword in schema and not (keyword == "unevaluatedItems" and "contains" in schema):
            value = schema.pop(keyword)
            schema.setdefault(relative, value)


def _names(schema: Schema, resolve: Resolve) -> None:
    """The names of an object that lists none can be told by a pattern."""
    if "propertyNames" not in schema or schema.keys() & (_IN_PLACE | {"properties", "patternProperties"}):
        return
    names = resolve(schema["propertyNames"])
    if names is True:
        del schema["propertyNames"]
        return
    pattern = _name_pattern(names) if isinstance(names, Mapping) else None
    if pattern is not None:
        del schema["propertyNames"]
        schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
        schema["additionalProperties"] = False


def _name_pattern(names: Mapping[str, object]) -> str | None:
    """An expression for what a schema says about a text; None where that isn't simple."""
    said = names.keys() - {"type", "title", "description"}
    if names.keys() - _NAME_KEYWORDS or names.get("type", "string") != "string":
        return None
    if said == {"const"} or said == {"enum"}:
        listed = [names["const"]] if "const" in said else names["enum"]
        texts = [text for text in listed if isinstance(text, str)] if isinstance(listed, list) else []
        return translated(f"^(?:{'|'.join(map(re.escape, texts))})$", "propertyNames") if texts else None
    if said == {"pattern"} and isinstance(names["pattern"], str):
        return translated(names["pattern"], "propertyNames")
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if said and said <= {"minLength", "maxLength"}:
        return f"^(?s:.){{{least},{most}}}$"
    return None


def _exclusive(schema: Schema, resolve: Resolve) -> None:
    """One of several that have nothing in common is any of them."""
    options = schema.get("oneOf")
    if isinstance(options, list) and options and all_disjoint(options, resolve):
        made = {("anyOf" if keyword == "oneOf" else keyword): value for keyword, value in schema.items()}
        if "anyOf" in schema:
            made = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
            _also(made, {"anyOf": options})
        schema.clear()
        schema |= made


def _unresolved(schema: object) -> object:
    return schema


_Rule = Callable[[Schema, Resolve], None]
_RULES: tuple[_Rule, ...] = (
    _counts, _constants, _bounds, _patterns, _formats, _unique, _fewest, _unevaluated, _names, _exclusive
)  # fmt: skip
