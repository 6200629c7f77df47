"""How much of a prompt is in a context's memory already."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCK = 64  # tokens that are compared at once
_LEAST_SHARE = 0.1  # of a prompt; less in common, such as the beginning of a chat template, is no reason for anything


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


def goes_on(common: int, prompt: int, kept: int) -> bool:
    """Tell whether a prompt should go on from what is kept of another.

    That has to save some of its work, and no more may be lost of what is kept than that: a question with the system
    prompt of a long conversation is no reason to forget the conversation. A prompt that is there as a whole is the same
    one again, and costs an answer only.

    Arguments:
        common: tokens that both begin with.
        prompt: tokens of the prompt.
        kept: tokens that are kept.
    """
    return common > _LEAST_SHARE * prompt and (common == prompt or kept - common <= common)
