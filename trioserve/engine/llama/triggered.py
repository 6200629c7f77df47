"""Answers that are free until a marker, and follow a grammar after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from trioserve.engine.llama.constraint import Matcher


class Triggered:
    """The state of one sequence that is held to a grammar wherever it has said a marker. Looks like a ``Matcher``.

    Where the grammar ends the answer is free again, up to the next marker. Free text costs no mask.

    Arguments:
        trigger: the marker, at least one byte.
        start: makes a matcher at the beginning of the grammar.
        piece: the bytes of a token, those of control tokens too.
        spell: tokens for some bytes.
    """

    complete = False
    """Such an answer ends where the model ends it."""

    def __init__(
        self,
        trigger: bytes,
        start: Callable[[], Matcher],
        piece: Callable[[int], bytes],
        spell: Callable[[bytes], Sequence[int]],
    ) -> None:
        self._trigger = trigger
        self._start = start
        self._piece = piece
        self._spell = spell
        self._matcher: Matcher | None = None
        self._said = b""  # that a marker may have begun with

    def restrict(self, logits: npt.NDArray[np.float32]) -> None:
        """See ``Matcher``."""
        if self._matcher is not None:
            self._matcher.restrict(logits)

    def accept(self, token: int) -> None:
        """See ``Matcher``."""
        if self._matcher is None:
            self._listen(self._piece(token))
            return
        self._matcher.accept(token)
        if self._matcher.complete:
            self._matcher = None

    def _listen(self, piece: bytes) -> None:
        """Look for the marker. A token may say more: where the grammar has no room for that, the answer stays free."""
        before, found, after = (self._said + piece).partition(self._trigger)
        if not found:
            self._said = before[-len(self._trigger) :]
            return
        self._said = b""
        matcher = self._start()
        if not after or (matcher.follow(self._spell(after)) and not matcher.complete):
            self._matcher = matcher
