"""One answer in the shape of its route: as chunks while it grows, and as a choice when it is whole."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

from trioserve.chat import AnswerParser, Arguments, CallBegun, Content, Event, Reasoning
from trioserve.engine.base import Likelihood
from trioserve.http.render import ChatShape, CompletionShape, TextFrame, dumps
from trioserve.http.requests import Body
from trioserve.http.schemas.chat import ChatCompletionRequest
from trioserve.service import Generation, TextDelta


class AnswerRenderer(Protocol):
    """Renders one answer: by ``opening``, ``pieces`` and ``ending``, in JSON, or by ``whole``."""

    def opening(self) -> list[bytes]:
        """Choices of the chunks that come before there is text."""
        ...

    def pieces(self, part: TextDelta) -> list[bytes]:
        """Choices of the chunks that tell of more text; none where it has to be held back."""
        ...

    def ending(self, reason: str) -> list[bytes]:
        """Choices of the last chunks, the reason in the very last one."""
        ...

    def whole(self, parts: Sequence[TextDelta], reason: str) -> dict[str, Any]:
        """The choice of an answer in one piece."""
        ...


def renderer(body: Body, generation: Generation, index: int) -> AnswerRenderer:
    """What renders one answer of a generation.

    Arguments:
        body: that asked for it.
        generation: that gives it.
        index: of the answer.
    """
    if not isinstance(body, ChatCompletionRequest):
        return TextAnswer(index)
    return ChatAnswer(AnswerParser(generation.expected[index], reasoning=body.shows_reasoning), index)


class TextAnswer:
    """The continuation of a text."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._frame = TextFrame(CompletionShape.piece("", index))

    def opening(self) -> list[bytes]:
        """See ``AnswerRenderer``. Text completions begin with text."""
        return []

    def pieces(self, part: TextDelta) -> list[bytes]:
        """See ``AnswerRenderer``."""
        if not part.likelihoods:
            return [self._frame.around(part.text)]
        return [dumps(CompletionShape.piece(part.text, self._index, part.likelihoods))]

    def ending(self, reason: str) -> list[bytes]:
        """See ``AnswerRenderer``."""
        return [dumps(CompletionShape.ending(reason, self._index))]

    def whole(self, parts: Sequence[TextDelta], reason: str) -> dict[str, Any]:
        """See ``AnswerRenderer``."""
        text = "".join(part.text for part in parts)
        return CompletionShape.choice(text, reason, self._index, _likelihoods(parts))


class ChatAnswer:
    """A message, with thoughts and calls where its text holds some.

    Arguments:
        parser: of this answer.
        index: of the answer.
    """

    def __init__(self, parser: AnswerParser, index: int) -> None:
        self._parser = parser
        self._index = index
        self._frame = TextFrame(ChatShape.piece("", index))
        self._likelihoods: list[Likelihood] = []  # of tokens whose text is held back

    def opening(self) -> list[bytes]:
        """See ``AnswerRenderer``."""
        return [dumps(ChatShape.opening(self._index))]

    def pieces(self, part: TextDelta) -> list[bytes]:
        """See ``AnswerRenderer``. How likely tokens were is told with the first chunk after them."""
        self._likelihoods += part.likelihoods
        return self._deltas(self._parser.feed(part.text))

    def ending(self, reason: str) -> list[bytes]:
        """See ``AnswerRenderer``."""
        choices = self._deltas(self._parser.finish())
        if self._likelihoods:
            choices.append(dumps(ChatShape.piece("", self._index, self._taken())))
        return [*choices, dumps(ChatShape.ending(self._reason(reason), self._index))]

    def whole(self, parts: Sequence[TextDelta], reason: str) -> dict[str, Any]:
        """See ``AnswerRenderer``."""
        events = [event for part in parts for event in self._parser.feed(part.text)] + self._parser.finish()
        words = "".join(event.text for event in events if isinstance(event, Content))
        thoughts = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls = _calls(events)
        more: dict[str, Any] = {"reasoning_content": thoughts} if thoughts else {}
        more |= {"tool_calls": calls} if calls else {}
        text = words if words or not calls else None
        return ChatShape.choice(text, self._reason(reason), self._index, _likelihoods(parts), more)

    def _deltas(self, events: Sequence[Event]) -> list[bytes]:
        return [self._choice(event) for event in events]

    def _choice(self, event: Event) -> bytes:
        if isinstance(event, Content) and not self._likelihoods:
            return self._frame.around(event.text)
        return dumps(ChatShape.delta(_delta(event), self._index, self._taken()))

    def _taken(self) -> list[Likelihood]:
        likelihoods, self._likelihoods = self._likelihoods, []
        return likelihoods

    def _reason(self, reason: str) -> str:
        return "tool_calls" if reason == "stop" and self._parser.called else reason


def _delta(event: Event) -> dict[str, Any]:
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    more: dict[str, Any] = {"function": {"arguments": event.text}} if isinstance(event, Arguments) else {}
    if isinstance(event, CallBegun):
        more = _call(event.name, "")
    return {"tool_calls": [{"index": event.call, **more}]}


def _calls(events: Sequence[Event]) -> list[dict[str, Any]]:
    arguments: defaultdict[int, str] = defaultdict(str)
    for event in events:
        if isinstance(event, Arguments):
            arguments[event.call] += event.text
    return [_call(event.name, arguments[event.call]) for event in events if isinstance(event, CallBegun)]


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _likelihoods(parts: Sequence[TextDelta]) -> list[Likelihood]:
    """Of all tokens of an answer."""
    return [likelihood for part in parts for likelihood in part.likelihoods]
