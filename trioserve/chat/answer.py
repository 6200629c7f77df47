"""From the text of an answer, as it comes, to thoughts, words and calls."""

from __future__ import annotations

from dataclasses import dataclass

from trioserve.chat.calls import FreeText, Reader
from trioserve.chat.dialects import OPENED, OPTIONAL, Dialect
from trioserve.chat.events import CallBegun, Content, Event
from trioserve.chat.reasoning import CLOSING, OPENING, ReasoningSplitter
from trioserve.chat.tools import ToolUse


@dataclass(frozen=True, slots=True)
class Expected:
    """What has to be known to read the answer to a prompt.

    Attributes:
        thinking: the prompt ended with the marker that opens thoughts.
        use: of the tools that may be called; None where there are none.
        dialect: how they are called.
    """

    thinking: bool
    use: ToolUse | None
    dialect: Dialect

    @classmethod
    def after(cls, prompt: str, use: ToolUse | None, dialect: Dialect) -> Expected:
        """What follows a prompt's text."""
        return cls(prompt.rstrip().endswith(OPENING), use, dialect)

    def grammar(self, template: str) -> str | None:
        """A grammar in Lark that the answer follows; None where tools ask for none.

        Arguments:
            template: source of the chat template: where it knows of thoughts, they may come first.
        """
        if self.use is None or not self.dialect.enforces(self.use):
            return None
        optional = OPTIONAL if CLOSING in template else ""
        return self.dialect.grammar(self.use, thoughts=OPENED if self.thinking else optional)


class AnswerParser:
    """Reads one answer. However its text is cut into pieces, the events say the same.

    Arguments:
        expected: of the prompt.
        reasoning: thoughts are told as such, and not as part of what is said.
    """

    def __init__(self, expected: Expected, *, reasoning: bool = True) -> None:
        self._splitter = ReasoningSplitter(opened=expected.thinking)
        self._reader: Reader = FreeText() if expected.use is None else expected.dialect.reader(expected.use)
        self._reasoning = reasoning
        self._calls = False

    @property
    def called(self) -> bool:
        """Whether a tool was called so far."""
        return self._calls

    def feed(self, text: str) -> list[Event]:
        """Return what more text is."""
        return self._read(self._splitter.feed(text)) if self._reasoning else self._note(self._reader.feed(text))

    def finish(self) -> list[Event]:
        """Return what was held back when the text is at its end. To be called once."""
        held = self._read(self._splitter.finish()) if self._reasoning else []
        return held + self._note(self._reader.finish())

    def _read(self, events: list[Event]) -> list[Event]:
        read: list[Event] = []
        for event in events:
            read += self._reader.feed(event.text) if isinstance(event, Content) else (event,)
        return self._note(read)

    def _note(self, events: list[Event]) -> list[Event]:
        for event in events:  # a loop, and no generators: this runs for every token
            if isinstance(event, CallBegun):
                self._calls = True
        return events
