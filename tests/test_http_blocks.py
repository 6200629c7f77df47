"""Answers in blocks: which there are, and that they are the same however the text comes in pieces."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.chat import AnswerParser, Expected, Tool, ToolUse
from trioserve.chat.dialects import GENERIC, HERMES
from trioserve.engine.base import FinishReason
from trioserve.http.blocks import BlockKind, Blocks, Closed, Grown, Opened
from trioserve.http.messages import MessageStream
from trioserve.http.responses_api import ResponseShape, ResponseStream
from trioserve.http.schemas.responses_api import ResponsesRequest
from trioserve.service import Done, TextDelta, Usage
from trioserve.service.events import Timings

TOOLS = [Tool("f", None, {}), Tool("g", None, {})]
CALL_F = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
CALL_G = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
F, G = ("call", "f", '{"a": 1}'), ("call", "g", "{}")
ANSWERS = {
    "": [("words", "", "")],
    "Yes": [("words", "", "Yes")],
    "<think>Hm</think>": [("thoughts", "", "Hm")],
    "<think></think>": [("words", "", "")],
    "<think>Hm</think>Yes": [("thoughts", "", "Hm"), ("words", "", "Yes")],
    CALL_F: [F],
    CALL_F + CALL_F + CALL_G: [F, F, G],
    f"<think>Hm</think>\nLet me see.\n{CALL_F}\n{CALL_G}": [("thoughts", "", "Hm"), ("words", "", "Let me see."), F, G],
    f"{CALL_F}\nDone.": [F, ("words", "", "\nDone.")],
    "<tool_call>no JSON</tool_call>": [("words", "", "<tool_call>no JSON</tool_call>")],
}


def blocks(dialect=HERMES, **use):
    return Blocks(AnswerParser(Expected(thinking=False, use=ToolUse(TOOLS, **use), dialect=dialect)))


def told(answer):
    return [(block.kind.value, block.name, block.text) for block in answer.blocks]


@pytest.mark.parametrize("text", ANSWERS)
@given(data=st.data())
@settings(max_examples=20)
def test_blocks_are_opened_filled_and_closed_one_after_the_other(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    answer, steps = blocks(), []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        steps += answer.feed(text[begin:end])
    steps += answer.finish()
    assert told(answer) == ANSWERS[text]
    assert answer.called is (BlockKind.CALL in [block.kind for block in answer.blocks])
    assert [block.index for block in answer.blocks] == list(range(len(answer.blocks)))
    for block in answer.blocks:
        opened, *grown, closed = [step for step in steps if step.block is block]
        assert (opened, closed) == (Opened(block), Closed(block))
        assert all(isinstance(step, Grown) and step.text for step in grown)
        assert "".join(step.text for step in grown) == block.text
    places = [step.block.index for step in steps]
    assert places == sorted(places)


def test_a_call_that_was_cut_off_is_the_last_block():
    answer = blocks(GENERIC, required=True)
    answer.feed('{"tool_calls": [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": ')
    assert [step.block.index for step in answer.finish()] == [1]
    assert told(answer) == [("call", "f", "{}"), ("call", "g", '{"a": ')]


def test_the_beginning_of_a_call_that_is_not_named_yet_is_nothing():
    answer = blocks(GENERIC, required=True)
    assert answer.feed('{"tool_calls": [{"na') == []
    assert [type(step) for step in answer.finish()] == [Opened, Closed]
    assert told(answer) == [("words", "", "")]


class Slow:
    """A generation whose every letter arrives alone."""

    id, created, model, prompt_tokens = "a", 1, "fake", 1
    expected: ClassVar = {0: Expected(thinking=False, use=None, dialect=GENERIC)}

    def __init__(self, text):
        ending = Done(FinishReason.STOP, Usage(1, len(text)), Timings(0, 0, 0, 0))
        self.parts = [[TextDelta(letter)] for letter in text] + [[ending]]

    async def next_parts(self):
        return self.parts.pop(0) if self.parts else []


@pytest.mark.parametrize("dialect", ["messages", "responses"])
async def test_text_that_is_held_back_ends_no_stream(dialect):
    generation = Slow("<think>Hm</think>Yes")
    shape = ResponseShape(generation, ResponsesRequest.parse({"input": "hi"}))
    stream = MessageStream(generation) if dialect == "messages" else ResponseStream(generation, shape)
    told = []
    while frames := await stream.next_frames():
        told.append(frames)
    assert not generation.parts
    assert (b"message_stop" if dialect == "messages" else b"response.completed") in told[-1]
