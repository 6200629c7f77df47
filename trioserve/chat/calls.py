"""Tool calls in the text of an answer.

Where a grammar holds the answer to calls they are told as they grow. Where none does they are told when they are whole,
and what only looked like a call is told as the text that it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, Protocol

from trioserve.chat.events import Arguments, CallBegun, Content, Event
from trioserve.chat.markers import held_back

Call = tuple[str, str]
"""Name and arguments, these as JSON text."""

_HEAD = re.compile(r'\{"name": "([A-Za-z0-9_.-]+)", "(?:arguments|parameters)": (?=\{)')
_BRACES = re.compile(r'["\\{}]')


class Reader(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> list[Event]:
        """Return what more text is. Never tells a part of a marker."""
        ...

    def finish(self) -> list[Event]:
        """Return what was held back when the text is at its end."""
        ...


class FreeText:
    """Reads an answer that calls nothing."""

    def feed(self, text: str) -> list[Event]:
        """See ``Reader``."""
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        """See ``Reader``."""
        return []


class EnforcedCalls:
    """Reads calls whose layout a grammar enforces; what stands around them is skipped.

    Arguments:
        or_text: an answer that doesn't begin with a brace is text.
    """

    def __init__(self, *, or_text: bool = False) -> None:
        self._may_be_text = or_text
        self._is_text = False
        self._calls = 0
        self._head = ""  # outside of arguments: what was read of the next call
        self._arguments: _ObjectEnd | None = None

    def feed(self, text: str) -> list[Event]:
        """See ``Reader``."""
        if self._may_be_text and text:
            self._may_be_text, self._is_text = False, not text.startswith("{")
        if self._is_text:
            return [Content(text)] if text else []
        return list(self._read(text))

    def finish(self) -> list[Event]:
        """See ``Reader``. The beginning of a call that was cut off before its arguments is nothing to anybody."""
        return []

    def _read(self, text: str) -> Iterator[Event]:
        while text:
            if self._arguments is None:
                self._head += text
                head = _HEAD.search(self._head)
                if head is None:
                    return
                yield CallBegun(self._calls, head[1])
                text, self._head, self._arguments = self._head[head.end() :], "", _ObjectEnd()
            size = self._arguments.find(text)
            yield Arguments(self._calls, text[:size])
            if size is None:
                return
            text, self._arguments, self._calls = text[size:], None, self._calls + 1


class MarkedCalls:
    """Reads text with calls in it, each between two markers. White space around calls is skipped.

    Arguments:
        opening, closing: the markers.
        decode: reads what stands between them; None where that is no call.
        limit: how many calls are told; further ones are dropped.
    """

    def __init__(
        self, opening: str, closing: str, decode: Callable[[str], Sequence[Call] | None], limit: int | None = None
    ) -> None:
        self._opening = opening
        self._closing = closing
        self._decode = decode
        self._told = _Told(limit)
        self._held = ""
        self._inside = False
        self._before = ""  # white space that is skipped, should what follows be a call

    def feed(self, text: str) -> list[Event]:
        """See ``Reader``."""
        self._held += text
        return list(self._read())

    def finish(self) -> list[Event]:
        """See ``Reader``. A call that isn't closed is one if it is whole."""
        rest, self._held = self._held, ""
        if self._inside:
            return list(self._call(rest, ""))
        return [Content(rest)] if rest and not (self._told.any and rest.isspace()) else []

    def _read(self) -> Iterator[Event]:
        while True:
            if self._inside:
                inner, closing, rest = self._held.partition(self._closing)
                if not closing:
                    return
                self._held, self._inside = rest, False
                yield from self._call(inner, closing)
            words, opening, rest = self._held.partition(self._opening)
            if not opening:
                yield from self._words(words)
                return
            self._held, self._inside = rest, True
            self._before = words[len(words.rstrip()) :]
            if words := words.rstrip():
                yield Content(words)

    def _words(self, words: str) -> Iterator[Event]:
        """Text up to where a marker may begin, and the white space before it."""
        size = len(words[: len(words) - held_back(words, self._opening)].rstrip())
        self._held = words[size:]
        if size:
            yield Content(words[:size])

    def _call(self, inner: str, closing: str) -> Iterator[Event]:
        calls = self._decode(inner)
        if calls is None:
            yield Content(self._before + self._opening + inner + closing)
        else:
            yield from self._told.tell(calls)


class LeadingCalls:
    """Reads an answer that is calls from its first character to its last, or else is text.

    Arguments:
        leads: what calls begin with, after white space.
        decode: reads a whole answer; None where it is no calls.
        limit: how many calls are told; further ones are dropped.
    """

    def __init__(
        self, leads: Sequence[str], decode: Callable[[str], Sequence[Call] | None], limit: int | None = None
    ) -> None:
        self._leads = leads
        self._decode = decode
        self._told = _Told(limit)
        self._held: str | None = ""  # None once it is known to be text

    def feed(self, text: str) -> list[Event]:
        """See ``Reader``."""
        if self._held is None:
            return [Content(text)] if text else []
        self._held += text
        words = self._held.lstrip()[: max(map(len, self._leads))]
        if any(lead.startswith(words) or words.startswith(lead) for lead in self._leads):
            return []
        held, self._held = self._held, None
        return [Content(held)]

    def finish(self) -> list[Event]:
        """See ``Reader``."""
        held, self._held = self._held, None
        if not held:
            return []
        calls = self._decode(held.strip())
        return [Content(held)] if calls is None else list(self._told.tell(calls))


def decoded_calls(text: str, names: Sequence[str], separator: str = "") -> list[Call] | None:
    """Read one or several calls, or lists of calls, in JSON.

    Arguments:
        text: of objects with a ``name``, and ``arguments`` or ``parameters``.
        names: of the tools that there are.
        separator: what stands between them.

    Returns:
        None where it is anything else, at least in part.
    """
    calls: list[Call] = []
    try:
        while text := text.strip():
            value, size = _DECODER.raw_decode(text)
            calls += [_call(item, names) for item in (value if isinstance(value, list) else [value])]
            text = text[size:].lstrip().removeprefix(separator)
    except (ValueError, RecursionError):
        return None
    return calls or None


def _call(value: object, names: Sequence[str]) -> Call:
    if not isinstance(value, dict) or value.get("name") not in names:
        raise ValueError("no call of a tool")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _DECODER.decode(arguments)
    if not isinstance(arguments, dict | None):
        raise ValueError("arguments must be an object")
    return value["name"], _encoded(arguments or {})


def _encoded(arguments: object) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return text if text.isascii() or not re.search("[\ud800-\udfff]", text) else json.dumps(arguments)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


class _Told:
    """Counts calls.

    Arguments:
        limit: how many are told.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._calls = 0

    @property
    def any(self) -> bool:
        """Whether one was told."""
        return self._calls > 0

    def tell(self, calls: Sequence[Call]) -> Iterator[Event]:
        for name, arguments in calls:
            if self._calls == self._limit:
                return
            yield CallBegun(self._calls, name)
            yield Arguments(self._calls, arguments)
            self._calls += 1


class _ObjectEnd:
    """Finds where a JSON object ends that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = False
        self._escaped = False

    def find(self, text: str) -> int | None:
        """Return how many characters of this piece belong to the object; None is all, and more will come."""
        place = 0
        if self._escaped and text:
            place, self._escaped = 1, False
        while found := _BRACES.search(text, place):
            place = found.end()
            mark = found[0]
            if mark == "\\":
                self._escaped = place == len(text)
                place += 1
            elif mark == '"':
                self._in_text = not self._in_text
            elif not self._in_text:
                self._depth += 1 if mark == "{" else -1
                if not self._depth:
                    return place
        return None
