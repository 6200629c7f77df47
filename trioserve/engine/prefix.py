"""How much of a prompt is in a context's memory already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_BLOCK = 64  # tokens that are compared at once
_LEAST_SHARE = 0.1  # of a prompt; less in common, such as the beginning of a chat template, is no reason for anything
_OPENING = 4  # tokens that a template may open an answer with, and leave out in the next turn, such as "<think>"


class Kept(list[int]):
    """Tokens whose memory is kept for a prompt that begins like them: an earlier prompt's, and its answer's.

    Arguments:
        tokens: token ids.
        asked: how many of them are the prompt's; all, by default.
        divisible: whether a part of their memory can be had, and not only the whole.
    """

    def __init__(self, tokens: Iterable[int] = (), asked: int | None = None, *, divisible: bool = True) -> None:
        super().__init__(tokens)
        self.asked = len(self) if asked is None else asked
        self.divisible = divisible

    def usable(self, prompt: Sequence[int]) -> int:
        """Count the tokens that a prompt, of the same type, can go on after."""
        common = common_prefix(self, prompt)
        return common if self.divisible or common == len(self) else 0

    def at_stake(self, common: int) -> int:
        """Count the tokens that somebody may miss who comes back, if a prompt goes on after so many of these.

        Where it has all of the earlier prompt, it is that one's next turn, or the same one again. Then nobody misses
        the rest of the answer: the next turn doesn't have it, as with thoughts, which templates leave out.
        """
        return 0 if 0 < self.asked - _OPENING <= common else len(self) - common


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that two sequences of the same type begin with in common."""
    most = min(len(one), len(other))
    start = 0
    while start < most and one[start : start + _BLOCK] == other[start : start + _BLOCK]:
        start += _BLOCK
    end = min(start, most)
    while end < most and one[end] == other[end]:
        end += 1
    return end


def cut(most: int, length: int, grain: int = 1) -> int:
    """Find where to cut a run of tokens whose two parts are evaluated one after the other.

    Processors have other routines for a few tokens than for many, and for the last few of a number that is no multiple
    of theirs; these round in other ways. With cuts at multiples of a grain, and that many tokens after the last one,
    each token is evaluated by the same routine wherever the others were cut.

    Arguments:
        most: tokens that the first part may have.
        length: tokens of the run.
        grain: the tokens whose multiples it is cut at. A last token alone is not left in any case.

    Returns:
        Tokens of the first part; 0 where the run is not to be cut.
    """
    return max(min(most, length - max(grain, 2)), 0) // grain * grain


def goes_on(common: int, prompt: int, kept: Kept) -> bool:
    """Tell whether a prompt should go on from what is kept of another.

    That has to save some of its work, and no more may be lost of what is kept than that: a question with the system
    prompt of a long conversation is no reason to forget the conversation.

    Arguments:
        common: tokens that both begin with.
        prompt: tokens of the prompt.
        kept: what is kept.
    """
    return common > _LEAST_SHARE * prompt and kept.at_stake(common) <= common
