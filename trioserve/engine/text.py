"""From token pieces to text that may be sent: whole characters, and never any part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class StopScanner:
    """Hold back text that could still become a stop string.

    The stop string that is complete first wins; of two that are complete at the same character, the longer one. So the
    result depends on the text alone and not on how it was cut into tokens.

    Arguments:
        stops: non-empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take the next text and return what may be sent now.

        Once ``matched`` is set the returned text ends right before the stop string, and nothing may follow.
        """
        if not self._stops:
            return text
        pending = self._held + text
        found = self._first_match(pending)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return pending[:start]
        keep = self._possible_start(pending)
        self._held = pending[keep:]
        return pending[:keep]

    def flush(self) -> str:
        """Return what was held back, when no more text will come."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, pending: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = pending.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else best[1:]

    def _possible_start(self, pending: str) -> int:
        """Index of the earliest suffix that is the beginning of some stop string."""
        for start in range(max(0, len(pending) - self._longest + 1), len(pending)):
            if any(stop.startswith(pending[start:]) for stop in self._stops):
                return start
        return len(pending)


class TextAssembler:
    """Turn the bytes of token pieces into text, piece by piece.

    A character whose bytes are spread over several tokens appears once it is whole. Bytes that can't be UTF-8 become
    U+FFFD; bytes of a character that the end of the answer cut off are dropped.

    Arguments:
        stops: strings that end the answer and never appear in it.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._scanner = StopScanner(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self._scanner.matched is not None

    @property
    def stop(self) -> str | None:
        """The stop string that was met."""
        return self._scanner.matched

    def feed(self, piece: bytes) -> str:
        """Take a piece and return the text that may be sent now, possibly none."""
        return self._scanner.feed(self._decoder.decode(piece))

    def flush(self) -> str:
        """Return the rest of the text when no more pieces will come."""
        return "" if self.stopped else self._scanner.flush()
