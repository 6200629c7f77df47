"""Where a long text may be cut so that its parts have the tokens of the whole.

llama.cpp cuts a text at the texts of special tokens and then walks a list of all parts for each of them: its time grows
with the square of their number, and a conversation of many turns takes it seconds. Between two of those cuts nothing is
carried over, so a text that is cut behind some of its special tokens beforehand has the same tokens, in a time that
grows with its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

LARGE_PART = 32
"""Special tokens in a part; fewer are not worth a cut."""


class Special(NamedTuple):
    """A text that llama.cpp looks for.

    Attributes:
        text: not empty.
        plain: it is looked for also where special tokens are not to be read.
        strips_left, strips_right: white space on that side of it is dropped.
    """

    text: bytes
    plain: bool
    strips_left: bool
    strips_right: bool


class _Found(NamedTuple):
    start: int
    end: int
    special: Special


class Cutter:
    """Cuts texts for one vocabulary.

    Arguments:
        specials: all of its special tokens.
    """

    def __init__(self, specials: Sequence[Special]) -> None:
        self._specials = specials
        self._strips = any(special.strips_left or special.strips_right for special in specials)

    def parts(self, data: bytes, *, special: bool) -> list[bytes]:
        """Return the parts of a text, in order and nothing left out.

        Arguments:
            data: the text in UTF-8.
            special: as in ``engine.base.Weights.tokenize``.
        """
        found = sorted(self._found(data, special=special), key=lambda one: (one.start, -one.end))
        cuts, since = [0], 0
        for cluster, after in _clusters(found, len(data)):
            since += 1
            if since >= LARGE_PART and (cut := self._cut(data, cluster, after)) is not None:
                cuts.append(cut)
                since = 0
        if cuts[-1] < len(data) or not data:
            cuts.append(len(data))
        return [data[start:end] for start, end in pairwise(cuts)]

    def _found(self, data: bytes, *, special: bool) -> Iterator[_Found]:
        for one in self._specials:
            if not (special or one.plain):
                continue
            start = data.find(one.text)
            while start >= 0:
                yield _Found(start, start + len(one.text), one)
                start = data.find(one.text, start + 1)

    def _cut(self, data: bytes, cluster: _Found | None, after: int) -> int | None:
        """Where to cut behind special tokens that overlap each other, or None where that is not safe.

        Arguments:
            data: the text.
            cluster: the one of them that covers the others, and so is the longest and found first; None without one.
            after: where the next special token begins.
        """
        if cluster is None:
            return None
        if self._strips and cluster.special.text.strip(_SPACES) != cluster.special.text:
            return None  # a neighbour may drop it
        end = cluster.end
        if cluster.special.strips_right:
            while end < len(data) and data[end] in _SPACES:
                end += 1
        return end if end <= after else None


_SPACES = b" \t\n\v\f\r"  # C's isspace


def _clusters(found: Sequence[_Found], length: int) -> Iterator[tuple[_Found | None, int]]:
    """Groups of special tokens that overlap: the one that covers its group, if any does, and where the next begins."""
    place = 0
    while place < len(found):
        first = found[place]
        end, covered = first.end, True
        place += 1
        while place < len(found) and found[place].start < end:
            covered = covered and found[place].end <= first.end
            end = max(end, found[place].end)
            place += 1
        yield (first if covered else None), found[place].start if place < len(found) else length
