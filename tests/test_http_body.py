"""Bodies on the wire: what is JSON, and what is declared as JSON."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trioserve.errors import InvalidRequestError, UnsupportedMediaTypeError
from trioserve.http.body import _check_media_type, decode_object

unhurried = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def refused(data: bytes) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        decode_object(data)
    caught.value.message.encode()
    assert len(caught.value.message) < 300
    assert caught.value.status == 400
    return caught.value.message


@pytest.mark.parametrize(
    ("data", "decoded"),
    [
        (b"{}", {}),
        (b' \n{"a": [1, 2.5, null, true, "x"]}\t', {"a": [1, 2.5, None, True, "x"]}),
        ('{"a": "Zürich \U0001f600"}'.encode(), {"a": "Zürich \U0001f600"}),
        (rb'{"a": "\ud83d\ude00"}', {"a": "\U0001f600"}),
        (b'{"a": 1, "a": 2}', {"a": 2}),
    ],
)
def test_objects_are_decoded(data, decoded):
    assert decode_object(data) == decoded


@pytest.mark.parametrize("data", [b"null", b"true", b"1", b'"text"', b"[]", b'[{"a": 1}]'])
def test_json_that_is_no_object(data):
    assert refused(data) == "the body must be a JSON object"


@pytest.mark.parametrize(
    "data",
    [b"", b" ", b"{", b"}", b'{"a"}', b'{"a": }', b"{'a': 1}", b'{"a": 1,}', b"{} {}", b"{}x", b'{"a": 01}', b"a=1"],
)
def test_what_is_no_json_says_where(data):
    assert "not valid JSON" in refused(data)
    assert "line 1 column" in refused(data)


def test_the_place_is_counted_in_lines_and_columns():
    assert "line 3 column 8" in refused(b'{"a": 1,\n"b": 2,\n  "c": ?}')


@pytest.mark.parametrize("control", [b"\0", b"\n", b"\x1f"])
def test_control_characters_in_strings_are_escaped_or_refused(control):
    assert "control character" in refused(b'{"a": "' + control + b'"}')


@pytest.mark.parametrize(
    ("data", "position"),
    [
        (b'{"a": "\xff"}', 7),
        (b"\x80", 0),
        (b'{"a": "\xc3', 7),
        (b'{"\xed\xa0\x80": 1}', 2),
        ('{"a": 1}'.encode("utf-16"), 0),
    ],
)
def test_what_is_not_utf_8_says_where(data, position):
    assert refused(data) == f"the body is not UTF-8: invalid byte at position {position}"


def test_a_byte_order_mark_is_not_json():
    assert "not valid JSON" in refused(b"\xef\xbb\xbf{}")


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("shape", ['{{"a": {}}}', '{{"a": [{{"b": {}}}]}}', "{}"])
def test_numbers_that_json_does_not_have(word, shape):
    assert f"{word} is not a JSON number" in refused(shape.format(word).encode())


@pytest.mark.parametrize("depth", [10_000, 1_000_000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_bottomless_nesting_is_refused(depth, opening, closing):
    assert refused(b'{"a":' + opening * depth + b"1" + closing * depth + b"}") == "the body is nested too deeply"
    refused(b'{"a":' + opening * depth)


def test_reasonable_nesting_is_decoded():
    assert decode_object(b'{"a":' + b"[" * 100 + b"]" * 100 + b"}")


def test_huge_integers_are_bounded():
    assert decode_object(b'{"a": 1' + b"0" * 400 + b"}") == {"a": 10**400}
    assert "not valid JSON" in refused(b'{"a": 1' + b"0" * 100_000 + b"}")


@unhurried
@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(data):
    with contextlib.suppress(InvalidRequestError):
        assert isinstance(decode_object(data), dict)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@unhurried
@given(st.dictionaries(st.text(), json_values))
def test_what_json_writes_is_read_back(value):
    assert decode_object(json.dumps(value).encode()) == value
    assert decode_object(json.dumps(value, ensure_ascii=False).encode()) == value


class Declared:
    """As much of a request as the check looks at."""

    def __init__(self, mimetype):
        self.mimetype = mimetype


@pytest.mark.parametrize("mimetype", ["application/json", "Application/JSON", "application/vnd.api+json", "", None])
def test_json_is_declared_as_json_or_not_at_all(mimetype):
    _check_media_type(Declared(mimetype))


@pytest.mark.parametrize("mimetype", ["text/plain", "application/x-www-form-urlencoded", "json", "a" * 10_000])
def test_other_media_types_are_named(mimetype):
    with pytest.raises(UnsupportedMediaTypeError) as caught:
        _check_media_type(Declared(mimetype))
    assert mimetype[:100] in caught.value.message
    assert len(caught.value.message) < 200
    assert caught.value.status == 415
