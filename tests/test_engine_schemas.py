"""JSON Schemas that answers are held to: what is forbidden never passes, what can't be held to is refused by name."""

import contextlib
import datetime
import enum
import json
import typing
import uuid

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from tiny_models import BOS, EOS, FIRST_BYTE, answer, asking, loaded, opened, tiny_model

from trioserve.engine.base import Constraint, ConstraintError, ConstraintKind, FinishReason
from trioserve.engine.sampling import Sampling
from trioserve.engine.schemas import enforceable

OPEN = {"type": "object"}
INTEGERS = {**OPEN, "additionalProperties": {"type": "integer"}}
CAT = {**OPEN, "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind", "lives"]}
DOG = {**OPEN, "properties": {"kind": {"const": "dog"}, "name": {"type": "string"}}, "required": ["kind", "name"]}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            **OPEN,
            "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["v"],
            "additionalProperties": False,
        }
    },
}

# A schema, what follows it, and what doesn't.
TABLE = {
    "type": ({"type": ["integer", "null"]}, [5, -5, None], [1.5, "5", True, []]),
    "nothing": ({}, [5, "a", [], {"a": [1]}], []),
    "enum": ({"enum": ["a", 1, None, [1, "b"]]}, ["a", 1, None, [1, "b"]], ["b", 2, [1], []]),
    "const": ({"const": {"a": 1}}, [{"a": 1}], [{"a": 2}, {"a": 1, "b": 2}, {}]),
    "minLength": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é🙂", "abc"], ["", "a", "🙂", "abcd"]),
    "counts": ({"type": "array", "minItems": 1.0, "maxItems": 2.0}, [[1], [1, 2]], [[], [1, 2, 3]]),
    "pattern": ({"type": "string", "pattern": "b+c"}, ["abbcd", "bc"], ["ac", "b"]),
    "minimum": ({"type": "integer", "minimum": -3, "maximum": 12}, [-3, 0, 12], [-4, 13, 100]),
    "exclusive": (
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        [0.5, 0.01],
        [0, 0.0, 1, 1.5, -0.5],
    ),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, [0, 3, -6], [1, -4, 10]),
    "hundredths": ({"type": "number", "multipleOf": 0.25}, [0.25, 0.75], [0.2, 1.3]),
    "required": (CAT, [{"kind": "cat", "lives": 9}], [{"kind": "cat"}, {"kind": "dog", "lives": 9}, {}]),
    "additionalProperties": (INTEGERS, [{}, {"a": 1, "b": 2}], [{"a": "1"}, {"a": 1, "b": None}]),
    "closed": (
        {**OPEN, "properties": {"a": True}, "additionalProperties": False},
        [{}, {"a": 5}],
        [{"b": 5}, {"a": 5, "b": 5}],
    ),
    "patternProperties": (
        {**OPEN, "patternProperties": {"^a": {"type": "integer"}}},
        [{"ab": 1}, {"b": "x"}],
        [{"ab": "x"}, {"b": "x", "a": "y"}],
    ),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
        [[1, "a"]],
        [[1], ["a", 1], [1, "a", 2], []],
    ),
    "items": ({"type": "array", "items": {"type": "boolean"}}, [[], [True]], [[1], [True, None]]),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 3}], "maximum": 5}, [3, 5], [2, 6, 3.5]),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], [1.5, "a"]),
    "reference": ({"items": {"$ref": "#/$defs/a"}, "type": "array", "$defs": {"a": {"const": 1}}}, [[], [1, 1]], [[2]]),
    "recursion": (
        TREE,
        [{"v": 1}, {"v": 1, "kids": [{"v": 2, "kids": []}]}],
        [{"v": 1, "kids": [{"v": "2"}]}, {"kids": []}],
    ),
    # What is made into something else, so that it can be honoured.
    "oneOf": ({"oneOf": [{"type": "string"}, {"type": "integer"}, {"const": None}]}, ["a", 1, None], [1.5, True, []]),
    "one of references": (
        {
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"type": "null"}],
            "$defs": {"cat": CAT, "dog": DOG},
        },
        [{"kind": "cat", "lives": 9}, {"kind": "dog", "name": "a"}, None],
        [{"kind": "cat", "name": "a"}, {"kind": "cow"}, {}],
    ),
    "oneOf beside anyOf": (
        {"oneOf": [{"type": "string"}, {"type": "integer"}], "anyOf": [{"type": "integer"}, {"type": "null"}]},
        [1],
        ["a", None],
    ),
    "bounds of 64 bits": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        [5, -5, 2**53 - 1],
        [2**63, -(2**63) - 1, 10**30],
    ),
    "bound of an unsigned number": ({"type": "number", "maximum": 2**64 - 1, "minimum": 0}, [0, 1.5], [2**64, -1]),
    "names by enum": (
        {**INTEGERS, "propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"enum": ["r+", "b"]}}},
        [{}, {"r+": 1, "b": 2}],
        [{"r": 1}, {"rr": 1}, {"b": "2"}, {"b": 1, "c": 1}],
    ),
    "names by pattern": ({**OPEN, "propertyNames": {"pattern": "^[a-c]+$"}}, [{"abc": 1}], [{"d": 1}, {"": 1}]),
    "names by length": (
        {**OPEN, "propertyNames": {"minLength": 2, "maxLength": 3}},
        [{"éé": 1}],
        [{"a": 1}, {"abcd": 1}],
    ),
    "unevaluatedProperties": (
        {**OPEN, "properties": {"a": True}, "unevaluatedProperties": False},
        [{"a": 1}, {}],
        [{"b": 1}],
    ),
    "unevaluatedItems": (
        {"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": {"const": 2}},
        [[1, 2, 2], []],
        [[2], [1, 3]],
    ),
    "uniqueItems": ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1]]),
    "not unique": ({"type": "array", "uniqueItems": False}, [[1, 1]], [5]),
    "minProperties": ({**INTEGERS, "minProperties": 1}, [{"a": 1}], [{}]),
    "minProperties that are required": (
        {**INTEGERS, "required": ["a", "b"], "minProperties": 2},
        [{"a": 1, "b": 2}],
        [{"a": 1}],
    ),
    "maxProperties": ({**INTEGERS, "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    "date": (
        {"type": "string", "format": "date"},
        ["2024-02-29", "2000-02-29", "1999-12-31"],
        ["2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01", "2024-00-10", "24-01-01"],
    ),
    "date-time": (
        {"type": "string", "format": "date-time", "pattern": "^2"},
        ["2024-02-29T23:59:59Z", "2024-01-01T00:00:00.123+05:30"],
        ["2023-02-29T00:00:00Z", "2024-01-01T24:00:00Z", "2024-01-01 00:00:00Z", "1999-01-01T00:00:00Z"],
    ),
    "a format that says nothing": ({"type": "string", "format": "password"}, ["", "a"], [5]),
}
# Formats that the validator doesn't know, and expressions that JavaScript reads in another way than Python.
NARROWED = {
    "time": (
        {"type": "string", "format": "time"},
        ["23:59:59Z", "00:00:00.5-08:00"],
        ["23:59:60Z", "24:00:00Z", "12:00:00"],
    ),
    "uuid4": (
        {"type": "string", "format": "uuid4"},
        ["9f1b2c3d-1111-4222-8333-444455556666"],
        ["9f1b2c3d-1111-1222-8333-444455556666", "9f1b2c3d-1111-4222-7333-444455556666"],
    ),
    "int8": ({"type": "integer", "format": "int8"}, [-128, 127], [128, -129]),
    "uint64": ({"type": "integer", "format": "uint64"}, [0, 2**53 - 1], [-1, 2**64]),
    "no leap second": ({"type": "string", "format": "date-time"}, ["2016-12-31T23:59:59Z"], ["2016-12-31T23:59:60Z"]),
    "digits": ({"type": "string", "pattern": r"^\d\D\w\W$"}, ["1aa-"], ["٣aa-", "1٣a-", "1aé-", "1aaé"]),
    "space": (
        {"type": "string", "pattern": r"^\s\S$"},
        [" a", "\u2003a"],
        ["\x85a", "\ufeffa", " \x85", " \ufeff", "aa"],
    ),
    "not these": ({"type": "string", "pattern": r"^[^\s\d][^\W][^\n]$"}, ["aa\t"], ["\x85a ", "٣a ", "aé ", "aa\n"]),
    "lines": ({"type": "string", "pattern": "^a.b$"}, ["axb", "aéb"], ["a\nb", "a\rb", "a\u2028b", "ab"]),
    "brackets in a class": ({"type": "string", "pattern": "^[[:alpha:]]$"}, [":]", "[]"], ["z", "z]"]),
    "signs in a class": ({"type": "string", "pattern": "^[^a&&b~~c]$"}, ["d"], ["a", "b", "&", "~"]),
    "a dash beside a class": ({"type": "string", "pattern": r"^[\w-.][+-\d]$"}, ["-+", ".-", "a0"], ["a,", "`0", "é0"]),
    "groups and escapes": (
        {"type": "string", "pattern": r"^(?<y>\d{2})(?i:a)\<\-\u0061$"},
        ["12A<-a"],
        ["12A-a", "12b<-a"],
    ),
    "lazy": ({"type": "string", "pattern": "^a+?b??$"}, ["a", "aab"], ["b", "aabb"]),
}
# Texts of which only the spelling is wrong.
SPELLINGS = [
    ({**OPEN, "properties": {"a": {"type": "integer"}}}, '{"a": 1}', r'{"\u0061": "x"}'),
    ({**OPEN, "properties": {"\n": {"type": "integer"}}}, r'{"\n": 1}', r'{"\u000a": "x"}'),
    ({**OPEN, "patternProperties": {"^é": {"type": "integer"}}}, '{"é": 1}', r'{"\u00e9": "x"}'),
    ({"type": "string"}, '"\\n"', r'"\ud800"'),
    ({"type": "string", "minLength": 2}, '"🙂a"', r'"\ud83d\ude42"'),
    ({"type": "number"}, "1.5e3", "01"),
    ({"type": "integer"}, "-10", "-01"),
]

REFUSED = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 1}},
    "dependentRequired": {**OPEN, "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {**OPEN, "dependentSchemas": {"a": {"required": ["b"]}}},
    "unevaluatedProperties": {"allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False},
    "propertyNames": {**OPEN, "properties": {"a": True}, "propertyNames": {"maxLength": 2}},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "minProperties": {**INTEGERS, "required": ["a"], "minProperties": 2},
    "minimum": {"type": "integer", "minimum": 2**53},
    "exclusiveMaximum": {"type": "number", "exclusiveMaximum": -1e30},
    "const": {"const": 2**53 + 1},
    "enum": {"enum": ["a", ["b\0"]]},
    "format": {"type": "string", "format": "iri"},
    "$ref": {"$ref": "#/other", "other": {"type": "string"}},
    "patternProperties": {**OPEN, "patternProperties": {"a[": True}},
    "x-guidance": {"type": "object", "x-guidance": {"item_separator": ";"}},
}
PATTERNS = [
    r"^\Aa", r"a\z", r"\bfoo", "(?x)a", "(?m)^a", "a{2}+", "a**", "a+?+", "[]a]", "[^]", "[a--b]", "[a",
    r"\x01", "[\x7f]", r"a\v", r"\x{41}", "(?=a)b", r"(a)\1",
]  # fmt: skip


def constraint(schema):
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


@pytest.fixture(scope="module")
def tiny():
    with loaded(tiny_model()) as weights:
        yield weights


@pytest.fixture(scope="module")
def accepts(tiny):
    """Whether an answer that is held to a schema can be a text."""

    def accept(schema, text):
        matcher = tiny._constraints.matcher(constraint(schema))
        try:
            for byte in text.encode():
                matcher.accept(FIRST_BYTE + byte)
        except ConstraintError:
            return False
        logits = np.zeros(tiny.vocab_size, np.float32)
        return matcher.complete or (matcher.restrict(logits) or logits[EOS] == 0)

    return accept


def text(value):
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("name", TABLE)
def test_what_follows_a_schema_passes_and_nothing_else(accepts, name):
    schema, good, bad = TABLE[name]
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(["date"]))
    for value in good:
        assert accepts(schema, text(value)), value
        validator.validate(value)
    for value in bad:
        assert not accepts(schema, text(value)), value
        assert not validator.is_valid(value) or "format" in schema, value


@pytest.mark.parametrize("name", NARROWED)
def test_what_validators_disagree_about_does_not_pass(accepts, name):
    schema, good, bad = NARROWED[name]
    for value in good:
        assert accepts(schema, text(value)), value
    for value in bad:
        assert not accepts(schema, text(value)), value


@pytest.mark.parametrize(("schema", "good", "bad"), SPELLINGS)
def test_a_text_has_one_spelling(accepts, schema, good, bad):
    assert accepts(schema, good)
    assert not accepts(schema, bad)


@pytest.mark.parametrize("keyword", REFUSED)
def test_what_cannot_be_held_to_is_refused_by_name(tiny, keyword):
    with pytest.raises(ConstraintError) as caught:
        tiny.check_constraint(constraint(REFUSED[keyword]))
    assert keyword.removeprefix("format").lower() in str(caught.value).lower() or "a[" in str(caught.value)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_that_is_read_in_several_ways_is_refused(tiny, pattern):
    for schema in ({"type": "string", "pattern": pattern}, {**OPEN, "patternProperties": {pattern: False}}):
        with pytest.raises(ConstraintError):
            tiny.check_constraint(constraint(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": [[1]], "minProperties": 1},
        {"oneOf": [{"enum": [[1]]}, 5, {"type": [1]}, {"properties": 5, "required": 5}]},
        {"minimum": "5", "format": 5, "pattern": 5, "patternProperties": 5, "propertyNames": {"enum": 5}},
        {"propertyNames": {"minLength": "}"}, "type": "object"},
        {"$ref": "http://[", "x-guidance": 5},
        {"$ref": 5, "$defs": 5, "allOf": {"a": 1}, "items": [5]},
        {"maximum": 10**400, "minimum": -(10**400), "type": "integer", "const": 5},
    ],
)
def test_a_schema_of_any_shape_is_no_accident(schema):
    with contextlib.suppress(ConstraintError):
        enforceable(schema)


def test_a_reference_is_not_taken_for_another_part_s(tiny):
    inner = {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"type": "null"}}}
    schema = {"$defs": {"a": {"type": "string"}}, "type": "array", "items": {"$id": "http://x/inner", **inner}}
    with pytest.raises(ConstraintError, match="oneOf"):
        tiny.check_constraint(constraint(schema))


# Answers of a model that says anything


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: typing.Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: typing.Literal["dog"]
    friends: list["Cat | Dog"] = Field(max_length=1)


Pet = typing.Annotated[Cat | Dog, Field(discriminator="kind")]
TYPES = {
    "discriminated": Pet,
    "union": Cat | Dog | None,
    "names": typing.Annotated[dict[Colour, Pet], Field(max_length=2)],
    "tuple": tuple[bool, Colour | None, typing.Literal["x", 1]],
    "times": tuple[datetime.datetime, datetime.date, datetime.time, uuid.UUID],
    "numbers": tuple[
        typing.Annotated[int, Field(gt=0, lt=10**6, multiple_of=7)],
        typing.Annotated[float, Field(ge=-1, lt=1)],
        typing.Annotated[int, Field(ge=-(2**63), le=2**63 - 1)],
    ],
    "texts": tuple[
        typing.Annotated[str, Field(min_length=2, max_length=4)],
        typing.Annotated[str, Field(pattern=r"^\w{2}[^\w\s]$")],
    ],
}


@pytest.mark.parametrize("name", TYPES)
def test_answers_of_a_model_that_says_anything_are_valid(tiny, name):
    adapter = TypeAdapter(TYPES[name])
    whole = 0
    with opened(tiny, n_ctx=512) as session:
        for seed in range(12):
            sampling = Sampling(temperature=3.0, top_k=0, min_p=0.0, seed=seed)
            got = answer(session, asking([BOS], 400, sampling, constraint=constraint(adapter.json_schema())))
            if got.reason is FinishReason.LENGTH:  # it likes spaces, or numbers without an end
                continue
            adapter.validate_json(got.text)
            whole += 1
    assert whole


def test_an_answer_that_max_tokens_cut_off_is_the_beginning_of_a_valid_one(tiny, accepts):
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 100}
    with opened(tiny, n_ctx=512) as session:
        got = answer(session, asking([BOS], 20, Sampling(seed=1), constraint=constraint(schema)))
    assert got.reason is FinishReason.LENGTH
    assert got.text.startswith("[")
    assert not accepts(schema, got.text)
