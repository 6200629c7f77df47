"""Thoughts at the beginning of an answer, between ``<think>`` and ``</think>``."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

from trioserve.chat.events import Content, Event, Reasoning
from trioserve.chat.markers import held_back

OPENING, CLOSING = "<think>", "</think>"


class _Place(Enum):
    START = auto()  # of the answer: thoughts may begin, after white space
    OPENED = auto()  # white space before the first thought
    THOUGHTS = auto()
    CLOSED = auto()  # white space before the first word
    WORDS = auto()


class ReasoningSplitter:
    """Tells thoughts and words of one answer apart. White space around the thoughts belongs to neither.

    Arguments:
        opened: the prompt ended with the opening marker.
    """

    def __init__(self, *, opened: bool) -> None:
        self._place = _Place.OPENED if opened else _Place.START
        self._held = ""

    def feed(self, text: str) -> list[Event]:
        """Return what more text is."""
        if self._place is _Place.WORDS:
            return [Content(text)] if text else []
        self._held += text
        return list(self._read())

    def finish(self) -> list[Event]:
        """Return what was held back when the text is at its end."""
        rest, self._held = self._held, ""
        if self._place is _Place.THOUGHTS:
            return [Reasoning(words)] if (words := rest.rstrip()) else []
        return [Content(rest)] if rest and self._place in (_Place.START, _Place.CLOSED) else []

    def _read(self) -> Iterator[Event]:
        if self._place is _Place.START and not self._begin():
            return
        if self._place is _Place.OPENED:
            self._skip_space(_Place.THOUGHTS)
        if self._place is _Place.THOUGHTS:
            yield from self._think()
        if self._place is _Place.CLOSED:
            self._skip_space(_Place.WORDS)
        if self._place is _Place.WORDS and self._held:
            words, self._held = self._held, ""
            yield Content(words)

    def _begin(self) -> bool:
        """Whether it is known by now what the answer begins with."""
        words = self._held.lstrip()
        if words.startswith(OPENING):
            self._held, self._place = words[len(OPENING) :], _Place.OPENED
        elif OPENING.startswith(words):
            return False
        else:
            self._place = _Place.WORDS
        return True

    def _skip_space(self, after: _Place) -> None:
        self._held = self._held.lstrip()
        if self._held:
            self._place = after

    def _think(self) -> Iterator[Event]:
        thoughts, closing, rest = self._held.partition(CLOSING)
        if closing:
            self._held, self._place = rest, _Place.CLOSED
        else:
            keep = held_back(thoughts, CLOSING)
            thoughts, self._held = thoughts[: len(thoughts) - keep], thoughts[len(thoughts) - keep :]
            spoken = thoughts.rstrip()
            self._held = thoughts[len(spoken) :] + self._held
        if thoughts := thoughts.rstrip():
            yield Reasoning(thoughts)
