"""A sequence that is being worked, and whose beginning it may share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trioserve.engine.base import SequenceRequest
from trioserve.engine.llama.sampler import Sampler
from trioserve.engine.text import TextAssembler


class Live:
    """What changes while a sequence is worked.

    Attributes:
        prompt: all of it.
        known: tokens whose memory is good: they were evaluated, or kept or copied from another sequence.
        pending: tokens not evaluated yet: the rest of the prompt, or the token sampled last.
        offered: how many of those are in the present step.
        cached: tokens of the prompt that were kept or copied from another sequence.
        room: tokens that may still be sampled.
        leader: a sequence that begins like this one, which waits for it to evaluate that, and copies it.
        shared: how many tokens that is.
    """

    __slots__ = (
        "assembler",
        "cached",
        "ignore_eos",
        "known",
        "leader",
        "number",
        "offered",
        "pending",
        "prompt",
        "room",
        "sampler",
        "shared",
    )

    def __init__(self, number: int, request: SequenceRequest, cached: int, room: int, sampler: Sampler) -> None:
        self.number = number
        self.prompt = request.prompt
        self.begin_with(cached)
        self.offered = 0
        self.room = room
        self.ignore_eos = request.ignore_eos
        self.sampler = sampler
        self.assembler = TextAssembler(request.stops)
        self.leader: Live | None = None
        self.shared = 0

    def begin_with(self, cached: int) -> None:
        """Have the first tokens of the prompt known, and the rest evaluated."""
        self.cached = cached
        self.known = list(self.prompt[:cached])
        self.pending: Sequence[int] = self.prompt[cached:]

    def go_alone(self) -> None:
        """Wait no more."""
        self.leader, self.shared = None, 0


class Flying(NamedTuple):
    """A sequence that gets a token chosen from what is being evaluated.

    Attributes:
        live: the sequence.
        row: of the batch.
        output: which of the rows that have logits that is.
    """

    live: Live
    row: int
    output: int
