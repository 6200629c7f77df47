"""Sequences of one context that begin alike: one of them evaluates that, and the others copy it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from trioserve.engine.llama.context import Context
from trioserve.engine.llama.live import Live
from trioserve.engine.prefix import common_prefix, cut

_LEAST_COPY = 32  # tokens; fewer are evaluated as soon as copied
_CELLS_A_TOKEN = 64  # of a cache, which is always copied whole: to evaluate a token takes longer


class Sharing:
    """Decides who waits for whom, and copies. Who waits is always younger than the one that he waits for.

    Arguments:
        context: where the sequences' memory is.
        lives: the live sequences in the order of their arrival, by their numbers; the core's own.
        n_ctx: cells of a sequence's cache.
        grain: tokens whose multiples prompts are cut at; see ``prefix.cut``.
    """

    def __init__(self, context: Context, lives: Mapping[int, Live], n_ctx: int, grain: int) -> None:
        self._context = context
        self._lives = lives
        self._grain = grain
        self._least = max(_LEAST_COPY, n_ctx // _CELLS_A_TOKEN)  # tokens that a copy has to save
        self._copies = True  # until the context turns out to have none

    def saves(self, tokens: int) -> bool:
        """Tell whether to copy so many tokens takes less time than to evaluate them."""
        return self._copies and tokens >= self._least

    def join(self, live: Live) -> None:
        """Have a sequence that is about to live wait for one that begins like it, where that saves enough."""
        if self._copies:
            self._follow(live, self._lives.values())

    def leave(self, leader: Live, held: Collection[int] = ()) -> None:
        """Have those who wait for a sequence that ends, or doesn't come on, go on from where it has got to.

        One of them leads the others.

        Arguments:
            leader: that sequence, whose memory is still there.
            held: sequences that nobody is to wait for.
        """
        others: list[Live] = []
        for live in self._lives.values():
            if live.leader is leader:
                there = cut(min(live.shared, len(leader.known)), len(live.prompt), self._grain)
                self._follow(live, others)
                if live.shared <= there:
                    live.go_alone()
                    if self.saves(there - live.cached):
                        self._copy(live, leader, there)
            if live is not leader and live.number not in held:
                others.append(live)

    def go_on(self, held: Collection[int]) -> None:
        """Have those go on who wait for another one's beginning that is there, or does not come on."""
        for live in self._lives.values():
            leader = live.leader
            if leader is None:
                continue
            if len(leader.known) >= live.shared:
                self._copy(live, leader, live.shared)
            elif leader.number in held or not leader.pending:
                self.leave(leader, held)

    def rests(self) -> dict[Live, int]:
        """How many tokens each sequence has to go, or one that waits for it where those are fewer."""
        rests = {live: len(live.pending) for live in self._lives.values()}
        for live in reversed(rests):
            if live.leader is not None:
                rests[live.leader] = min(rests[live.leader], rests[live])
        return rests

    def _follow(self, live: Live, others: Iterable[Live]) -> None:
        """Have a sequence wait for the one of some others that has most of its prompt, where that saves enough.

        Among equals it is the oldest one, which comes first.
        """
        live.go_alone()
        prompt = list(live.prompt)
        # One that has failed comes to nothing more.
        common = {other: common_prefix(list(other.prompt), prompt) for other in others if other.pending or other.known}
        if not common:
            return
        leader = max(common, key=common.__getitem__)
        shared = cut(common[leader], len(prompt), self._grain)
        if self.saves(shared - live.cached):
            live.leader, live.shared = leader, shared

    def _copy(self, live: Live, leader: Live, tokens: int) -> None:
        """Have a sequence go on alone, after so many tokens of another one's."""
        live.go_alone()
        if self._context.copy(leader.number, live.number, tokens):
            live.begin_with(tokens)
            return
        live.begin_with(0)
        self._copies = False
        for other in self._lives.values():
            other.go_alone()
