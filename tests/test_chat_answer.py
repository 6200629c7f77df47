"""From the text of an answer to thoughts, words and calls, however the text is cut into pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.chat import AnswerParser, Arguments, CallBegun, Content, Expected, Reasoning, Tool, ToolUse
from trioserve.chat.dialects import GENERIC, HERMES, LLAMA, MISTRAL, dialect_of

NAMES = ("get", "set")
TOOLS = [Tool(name, None, {"type": "function", "function": {"name": name}}) for name in NAMES]
AUTO, REQUIRED, ONE = ToolUse(TOOLS), ToolUse(TOOLS, required=True), ToolUse(TOOLS, parallel=False)
WEIRD = {"a": 'a}"{\\', "b": {"c": [{}, "<tool_call>", "é\u2028"]}}


def call(name, arguments, key="arguments"):
    return json.dumps({"name": name, key: arguments})


def parsed(pieces, use=None, dialect=GENERIC, *, thinking=False, reasoning=True):
    """Events with neighbours of one kind as one: how text is cut may show in their number, and in nothing else."""
    parser = AnswerParser(Expected(thinking, use, dialect), reasoning=reasoning)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    assert all(event.text for event in events if not isinstance(event, CallBegun))
    merged = []
    for event in events:
        if merged and type(event) is type(merged[-1]) and not isinstance(event, CallBegun):
            call = {"call": event.call} if isinstance(event, Arguments) else {}
            merged[-1] = type(event)(text=merged[-1].text + event.text, **call)
        else:
            merged.append(event)
    return merged


def calls_of(events):
    """Names and decoded arguments, in order."""
    arguments = {event.call: json.loads(event.text) for event in events if isinstance(event, Arguments)}
    return [(event.name, arguments[event.call]) for event in events if isinstance(event, CallBegun)]


# Thoughts


@pytest.mark.parametrize(
    ("text", "thinking", "events"),
    [
        ("", False, []),
        ("words", False, [Content("words")]),
        (" \n words ", False, [Content(" \n words ")]),
        (" \n", False, [Content(" \n")]),
        ("<think>a</think>b", False, [Reasoning("a"), Content("b")]),
        ("\n<think>\n a b \n</think>\n\nc d\n", False, [Reasoning("a b"), Content("c d\n")]),
        ("<think>\n\n</think>\n\nb", False, [Content("b")]),
        ("<think>a", False, [Reasoning("a")]),
        ("<think>a</thin", False, [Reasoning("a</thin")]),
        ("<think>a</think>", False, [Reasoning("a")]),
        ("<think>a </tin> </think >b</think>c", False, [Reasoning("a </tin> </think >b"), Content("c")]),
        ("<thin", False, [Content("<thin")]),
        ("<thinner>", False, [Content("<thinner>")]),
        ("a<think>b</think>", False, [Content("a<think>b</think>")]),
        ("a</think>b", True, [Reasoning("a"), Content("b")]),
        ("\na\n</think>\nb</think>", True, [Reasoning("a"), Content("b</think>")]),
        ("a", True, [Reasoning("a")]),
        ("", True, []),
    ],
)
def test_thoughts_are_told_apart_from_words(text, thinking, events):
    assert parsed([text], thinking=thinking) == events
    assert parsed(text, thinking=thinking) == events
    as_it_is = [Content(text)] if text else []
    assert parsed(text, thinking=thinking, reasoning=False) == as_it_is


def test_thoughts_are_told_while_they_grow():
    parser = AnswerParser(Expected(False, None, GENERIC))
    told = [parser.feed(piece) for piece in ("<th", "ink>", "a", " b", "</", "think", ">\n", "c")]
    assert told == [[], [], [Reasoning("a")], [Reasoning(" b")], [], [], [], [Content("c")]]


@pytest.mark.parametrize(
    ("prompt", "thinking"), [("<think>", True), ("x<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)]
)
def test_a_prompt_may_have_opened_thoughts(prompt, thinking):
    assert Expected.after(prompt, None, GENERIC).thinking is thinking


# Calls that are read


def hermes(*calls):
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


GOOD = [
    (HERMES, hermes(call("get", WEIRD))),
    (HERMES, hermes(call("get", WEIRD)).replace("\n", "")),
    (HERMES, hermes(call("get", json.dumps(WEIRD)))),
    (HERMES, hermes(call("get", WEIRD)).removesuffix("\n</tool_call>")),
    (LLAMA, call("get", WEIRD, "parameters")),
    (LLAMA, "<|python_tag|>" + call("get", WEIRD, "parameters") + "\n"),
    (MISTRAL, "[TOOL_CALLS]" + f"[{call('get', WEIRD)}]"),
    (MISTRAL, f" [{call('get', WEIRD)}]"),
    (GENERIC, f'{{"tool_calls": [{call("get", WEIRD)}]}}'),
]


@pytest.mark.parametrize(("dialect", "text"), GOOD)
def test_a_call_in_each_dialect(dialect, text):
    assert calls_of(parsed([text], AUTO, dialect)) == [("get", WEIRD)]
    assert parsed(text, AUTO, dialect) == parsed([text], AUTO, dialect)


SEVERAL = [
    (HERMES, "Well.\n" + hermes(call("get", {}), call("set", {"a": 1})) + "\n"),
    (LLAMA, call("get", {}, "parameters") + "; " + call("set", {"a": 1}, "parameters")),
    (MISTRAL, f"[{call('get', {})}, {call('set', {'a': 1})}]"),
    (GENERIC, f'{{"tool_calls": [{call("get", {})}, {call("set", {"a": 1})}]}}'),
]


@pytest.mark.parametrize(("dialect", "text"), SEVERAL)
def test_several_calls(dialect, text):
    events = parsed(text, AUTO, dialect)
    assert calls_of(events) == [("get", {}), ("set", {"a": 1})]
    assert [event.text for event in events if isinstance(event, Content)] == (["Well."] if dialect is HERMES else [])
    assert parsed(text, REQUIRED, dialect) == [event for event in events if not isinstance(event, Content)]
    if dialect is not GENERIC:  # there a grammar sees to it
        assert calls_of(parsed(text, ONE, dialect)) == [("get", {})]


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (HERMES, "a <tool_call>\nno JSON\n</tool_call> b"),
        (HERMES, "a\n<tool_call>" + call("unknown", {}) + "</tool_call>"),
        (HERMES, "<tool_call>" + call("get", [1]) + "</tool_call>"),
        (HERMES, '<tool_call>{"name": "get", "arguments": {"a": NaN}}</tool_call>'),
        (HERMES, '<tool_call>{"name": ["get"]}</tool_call>'),
        (HERMES, "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        (HERMES, '<tool_call>{"name": "get", "argum'),
        (HERMES, "a < b <tool_cal"),
        (HERMES, "<tool_call></tool_call>"),
        (LLAMA, '{"answer": 5}'),
        (LLAMA, call("get", {}, "parameters") + " and so on"),
        (LLAMA, "Well: " + call("get", {}, "parameters")),
        (MISTRAL, "[1, 2]"),
        (MISTRAL, "[not a list"),
        (MISTRAL, call("get", {})),
        (GENERIC, "Well: {}"),
    ],
)
def test_what_only_looks_like_a_call_is_text(dialect, text):
    assert parsed([text], AUTO, dialect) == [Content(text)]
    if len(text) < 1000:
        assert parsed(text, AUTO, dialect) == [Content(text)]


def test_half_a_character_in_arguments_is_written_as_json():
    (_, arguments) = parsed([r'{"name": "get", "parameters": {"a": "\ud800é"}}'], AUTO, LLAMA)
    arguments.text.encode()
    assert json.loads(arguments.text) == {"a": "\ud800é"}


def test_text_is_not_held_back_where_no_call_can_begin():
    for dialect in (HERMES, LLAMA, MISTRAL, GENERIC):
        parser = AnswerParser(Expected(False, AUTO, dialect))
        assert [parser.feed(piece) for piece in ("One", " two", " <b>")] == [
            [Content("One")],
            [Content(" two")],
            [Content(" <b>")],
        ]


def test_enforced_calls_are_told_while_they_grow():
    parser = AnswerParser(Expected(False, REQUIRED, HERMES))
    pieces = ["<tool_call>\n", '{"name": "g', 'et", "argum', 'ents": {"a', '": 1', "}", "}\n</tool_call>"]
    told = [parser.feed(piece) for piece in pieces]
    begun = [CallBegun(0, "get"), Arguments(0, '{"a')]
    assert told == [[], [], [], begun, [Arguments(0, '": 1')], [Arguments(0, "}")], []]
    assert parser.called
    assert parser.finish() == []


def test_enforced_calls_that_are_cut_off_tell_what_there_is():
    text = hermes(call("get", {"a": 1}))
    for size in range(len(text)):
        events = parsed(text[:size], REQUIRED, HERMES)
        told = "".join(event.text for event in events if isinstance(event, Arguments))
        assert json.dumps({"a": 1}).startswith(told)
        assert not [event for event in events if isinstance(event, Content)]


# Any text, cut anyhow

FRAGMENTS = st.sampled_from(
    [
        "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<", "</", "{", "}",
        "[", "]", '"', "\\", ";", " ", "\n", "a", '{"tool_calls": [', ", ", call("get", WEIRD),
        call("set", {}, "parameters"), '{"name": "get", "arguments": ', hermes(call("set", {"x": "</think>"})),
    ]
)  # fmt: skip


@given(
    fragments=st.lists(FRAGMENTS, max_size=12),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    dialect=st.sampled_from([HERMES, LLAMA, MISTRAL, GENERIC]),
    use=st.sampled_from([None, AUTO, REQUIRED, ONE]),
    thinking=st.booleans(),
)
def test_events_do_not_depend_on_the_pieces(fragments, cuts, dialect, use, thinking):
    text = "".join(fragments)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    whole = parsed([text], use, dialect, thinking=thinking)
    assert parsed(pieces, use, dialect, thinking=thinking) == whole
    assert parsed(text, use, dialect, thinking=thinking) == whole


# Which dialect


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        ("{{ messages }}", GENERIC),
        ("<tool_call> without a word of them", GENERIC),
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ("{% if tools %}<tool_call><function=x>{% endif %}", GENERIC),
        ("{% if tools %}<tool_call>x<arg_key>{% endif %}", GENERIC),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", MISTRAL),
        ("{% if tools %}[TOOL_CALLS]x[ARGS]{% endif %}", GENERIC),
        ("""<|start_header_id|>{{ tools }}{"name": "x", "parameters": {}}""", LLAMA),
        ("{{ tools }} in a way of its own", GENERIC),
    ],
)
def test_a_template_shows_how_tools_are_called(template, dialect):
    assert dialect_of(template) is dialect
