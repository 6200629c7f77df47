"""Messages in normal form: both ways of writing content agree, and what is no text is refused by its path."""

from __future__ import annotations

import pytest

from trioserve.chat import normalise_messages
from trioserve.errors import InvalidRequestError


def only(message):
    (normal,) = normalise_messages([message])
    return normal


def refused(message):
    with pytest.raises(InvalidRequestError) as caught:
        normalise_messages([{"role": "user", "content": "Hi"}, message])
    return caught.value


def test_text_parts_become_the_text_with_nothing_between():
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": ""}, {"type": "text", "text": "there"}]
    assert only({"role": "user", "content": parts}) == only({"role": "user", "content": "Hi there"})
    assert only({"role": "user", "content": []})["content"] == ""


def test_a_refusal_part_is_text():
    assert only({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]})["content"] == "No."


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, None),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, None),
        ({"role": "assistant", "content": None, "tool_calls": []}, ""),
        ({"role": "assistant", "content": None}, ""),
        ({"role": "user", "content": None, "tool_calls": [{"id": "1"}]}, ""),
        ({"role": "tool"}, ""),
    ],
)
def test_null_content_means_something_beside_tool_calls_only(message, content):
    assert only(message)["content"] == content


def test_a_developer_is_the_system():
    assert only({"role": "developer", "content": "Be brief."}) == {"role": "system", "content": "Be brief."}


def test_other_keys_pass_and_the_callers_messages_stay_as_they_were():
    message = {"role": "developer", "content": [{"type": "text", "text": "x"}], "name": "n", "reasoning_content": "r"}
    before = dict(message)
    assert only(message) == {"role": "system", "content": "x", "name": "n", "reasoning_content": "r"}
    assert message == before


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video", None, 7, ["text"]])
def test_parts_that_are_no_text_are_refused_by_their_path(kind):
    error = refused({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind, "text": "y"}]})
    assert error.param == "messages[1].content[1].type"
    assert "text only" in error.message


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("Hi", "messages[1]"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": 1, "content": "x"}, "messages[1].role"),
        ({"role": "user", "content": 1}, "messages[1].content"),
        ({"role": "user", "content": {"type": "text", "text": "x"}}, "messages[1].content"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "refusal", "text": "x"}]}, "messages[1].content[0].refusal"),
    ],
)
def test_wrong_types_are_refused_by_their_path(message, param):
    assert refused(message).param == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "a\ud800b"}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text", "text": "\udfff"}]}, "messages[1].content[0].text"),
        ({"role": "\udc00", "content": "x"}, "messages[1].role"),
        ({"role": "user", "content": "x", "name": "\udc00"}, "messages[1].name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "\ud83d"}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"role": "user", "content": "x", "extra": {"\ud800": 1}}, "messages[1].extra"),
    ],
)
def test_lone_surrogates_are_refused_by_the_field(message, param):
    error = refused(message)
    assert error.param == param
    assert "surrogate" in error.message
    assert error.message.isascii()


def test_a_whole_surrogate_pair_is_a_character():
    assert only({"role": "user", "content": "😀"})["content"] == "😀"


def test_deeply_nested_values_do_not_exhaust_the_stack():
    nested: object = "\ud800"
    for _ in range(5000):
        nested = [nested]
    assert refused({"role": "user", "content": "x", "extra": nested}).param is not None


def test_no_messages_are_refused():
    with pytest.raises(InvalidRequestError) as caught:
        normalise_messages([])
    assert caught.value.param == "messages"
