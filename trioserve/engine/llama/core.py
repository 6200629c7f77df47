"""The decode core: many sequences, one context, one step at a time.

A step is one ``llama_decode`` over whatever the live sequences have to offer, next tokens and prompt chunks together,
then one sampled token for each row that is complete. Every arrangement (one private sequence per slot, a native batch,
slots sharing a context) is this class with other sequences in it.

Where a device does the work, a step ends by setting the next one going: what comes of its tokens is handed out
while the device is at work, and it has nothing to wait for but the choice of tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise

from trioserve.engine.base import ConstraintError, Failed, Finished, FinishReason, SequenceRequest, StepEvent, Token
from trioserve.engine.llama.chooser import Choice, Chooser, Row
from trioserve.engine.llama.constraint import Constraints
from trioserve.engine.llama.context import Batch, Context, Outcome
from trioserve.engine.llama.live import Flying, Live
from trioserve.engine.llama.sampler import Sampler
from trioserve.engine.llama.sharing import Sharing
from trioserve.engine.llama.vocabulary import Vocabulary
from trioserve.engine.prefix import Kept, cut, goes_on

_logger = logging.getLogger("trioserve.llama")
_TOKENS_A_THREAD = 32  # whose embeddings it looks up
_NOTHING = 0  # a token that every vocabulary has
_TURN = 4  # steps; in the last of so many the oldest prompt goes first, however long it is


class DecodeCore:
    """Works the sequences of one context. Knows no Trio; one thread at a time.

    Arguments:
        context: where tokens are evaluated.
        vocabulary: of the model.
        constraints: of the model.
        n_ctx: tokens that one sequence may hold.
        n_batch: tokens that one step may evaluate, or two for each sequence where that is more.
        chunk: tokens of prompts that one step may evaluate.
        beside: the same for a step that other sequences' next tokens are in: so long do those have to wait for it.
        max_sequences: sequences that may live at once.
        grain: tokens whose multiples prompts are cut at; see ``prefix.cut``.
        apart: whether next tokens and prompts go into steps of their own, by turns. llama.cpp would cut such a step up
            so that the first token of each prompt is evaluated among the next tokens, with other last bits.
        on_device: whether another device than the CPU does all of the work: ``Context.decode`` returns before it is
            done, and each step ends by setting the next one going.
        bridge: rows that may be spent for nothing to have a gap between sequences closed; see ``_bridges``.
        most_extra: tokens that may be spent for nothing to have a piece of a prompt as long as another; see ``_level``.
    """

    def __init__(
        self,
        context: Context,
        vocabulary: Vocabulary,
        constraints: Constraints,
        *,
        n_ctx: int,
        n_batch: int,
        chunk: int,
        beside: int,
        max_sequences: int,
        grain: int = 1,
        apart: bool = False,
        on_device: bool = False,
        bridge: int = 0,
        most_extra: int = 0,
    ) -> None:
        self._context = context
        self._vocabulary = vocabulary
        self._constraints = constraints
        self._n_ctx = n_ctx
        self._chunk = chunk
        self._beside = min(beside, chunk)
        self._chooser = Chooser(context)
        # Next tokens have to leave room for a piece of a prompt, or it would wait until one of the answers ends.
        self._batch = Batch(max(n_batch, 2 * max_sequences))
        self._max_sequences = max_sequences
        self._on_device = on_device
        self._bridge = bridge
        self._most_extra = most_extra if context.divisible else 0  # what is evaluated for nothing has to be forgotten
        self._flight: list[Flying] | None = None  # what was set going and has not been looked at
        self._apart = apart
        self._prompts_turn = True  # where they go into steps of their own: the last one was of next tokens
        self._steps = 0
        self._live: dict[int, Live] = {}  # in the order of their arrival
        self._grain = grain
        self._kept_grain = grain if context.divisible else 1  # a state is had whole or not at all
        self._sharing = Sharing(context, self._live, n_ctx, self._kept_grain)
        self._parts = True  # until the context turns out to copy no part of what is kept
        # The sequences that aren't live, and the tokens whose memory each of them still has; the oldest ones first.
        self._kept = {number: Kept() for number in range(max_sequences)}

    def add(self, request: SequenceRequest) -> int:
        """Take a sequence in.

        Returns:
            Its number, until ``remove``.

        Raises:
            ValueError: an empty prompt, or one that leaves no room for an answer.
            RuntimeError: all sequences are taken.
        """
        room = min(request.max_tokens, self._n_ctx - len(request.prompt))
        if not request.prompt or room < 1:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens does not fit into {self._n_ctx} with an answer")
        if not self._kept:
            raise RuntimeError(f"all {len(self._live)} sequences of the context are live")
        number, cached = self._place(request)
        sampler = self._sampler(request)
        del self._kept[number]
        live = Live(number, request, cached, room, sampler)
        if request.share:
            self._sharing.join(live)
        self._live[number] = live
        return number

    def _sampler(self, request: SequenceRequest) -> Sampler:
        return Sampler(
            self._vocabulary,
            request.sampling,
            request.prompt,
            self._n_ctx,
            # A grammar decides for itself when an answer may end.
            self._vocabulary.end_tokens if request.ignore_eos and not _is_held(request) else (),
            request.logprobs,
            None if request.constraint is None else self._constraints.matcher(request.constraint),
        )

    @property
    def history(self) -> Kept:
        """The longest run of tokens that the next sequence may begin with at no cost."""
        return max(self._kept.values(), key=len, default=Kept())

    def remove(self, number: int) -> None:
        """End a sequence. Its memory is kept for one that begins like it, as far as it is known to be good."""
        live = self._live.pop(number)
        live.sampler.close()
        self._kept[number] = Kept()  # whatever comes of the next lines, the number is not lost
        self._sharing.leave(live)
        if self._context.truncate(number, len(live.known)):
            asked = min(len(live.prompt), len(live.known))
            self._kept[number] = Kept(live.known, asked, divisible=self._context.divisible)

    def resume(self) -> None:
        """Have the live sequences go on after an interrupt, each from its last good step."""
        self._take_back()
        for live in self._live.values():
            if not self._context.truncate(live.number, len(live.known)):
                # One that has ended and was not removed yet has nothing left to evaluate.
                live.pending = [*live.known, *live.pending] if live.pending else ()
                live.known = []
        self._context.lower()

    def end_all(self) -> None:
        """End all sequences and lower the abort flag."""
        self._take_back()
        for number in reversed(list(self._live)):  # those that wait for others first
            self.remove(number)
        self._context.lower()

    def clear(self) -> None:
        """Forget all sequences, live and kept, and lower the abort flag."""
        self._close_samplers()
        self._flight = None
        self._kept = {number: Kept() for number in range(self._max_sequences)}
        self._live.clear()
        self._context.reset()

    def is_sound(self, live: int) -> bool:
        """Tell whether so many sequences are live, the memory has of each what is known, and the abort flag is down."""
        lengths = {number: len(tokens) for number, tokens in self._kept.items()}
        lengths |= {number: len(one.known) + one.offered for number, one in self._live.items()}
        if len(self._live) != live or len(lengths) < self._max_sequences or self._context.interrupted:
            return False
        return all(self._context.length(number) == length for number, length in lengths.items())

    def close(self) -> None:
        """Free the context and what the live sequences hold. Idempotent."""
        self._chooser.close()
        self._close_samplers()
        self._live.clear()
        self._context.close()

    def step(self, threads: int, held: Collection[int] = ()) -> list[StepEvent]:
        """Evaluate one batch; see ``engine.base.Session.step``."""
        if self._context.interrupted:
            return []
        events = self._set_going(threads, held) if self._flight is None else []
        if self._flight is None:
            return events
        events = self._bring_home(threads)
        if self._on_device:
            events += self._set_going(threads, held)
        return events

    def _set_going(self, threads: int, held: Collection[int]) -> list[StepEvent]:
        """Have a batch evaluated, where there is anything to put into one. Only a failure is told."""
        self._sharing.go_on(held)
        counts = self._shares(held)
        if not counts:
            return []
        extra = self._level(counts) or {}
        bridges = self._bridges(counts, sum(extra.values())) if self._bridge else ()
        flight = self._fill(counts, extra, bridges)
        outcome = self._context.decode(self._batch, self._hands(threads))
        self._take_down(extra if outcome is Outcome.DONE else (), bridges)
        if outcome is Outcome.INTERRUPTED:
            self._take_back()
            return []
        if outcome is Outcome.FAILED:
            return self._fail()
        self._flight = flight
        return []

    def _hands(self, threads: int) -> int:
        """Threads to evaluate the batch with.

        Beside a device they only look up the embeddings of tokens, and to wake them takes longer than that.
        """
        return max(1, min(threads, self._batch.size // _TOKENS_A_THREAD)) if self._on_device else threads

    def _bring_home(self, threads: int) -> list[StepEvent]:
        """Choose a token for each row of what was set going. A sequence that was removed meanwhile gets none."""
        flight, self._flight = self._flight or [], None
        self._note_evaluated()
        landed = [one for one in flight if self._live.get(one.live.number) is one.live]
        rows = [Row(one.live.sampler, one.row, one.output) for one in landed]
        events: list[StepEvent] = []
        for one, choice in zip(landed, self._chooser.choose(rows, len(flight), threads), strict=True):
            self._advance(one.live, choice, events)
        return events

    def _place(self, request: SequenceRequest) -> tuple[int, int]:
        """Choose the sequence to work in, and find how many tokens of the prompt it has.

        It is the one that has most of the prompt, of those that would lose no more of what they have kept than that
        saves. Where another one has enough more of it, that is copied.

        Its last tokens are evaluated anew: the last one has to be, for its logits, and the prompt is cut only where
        that changes no bits, so that an answer does not depend on what was kept of earlier prompts.
        """
        prompt = list(request.prompt) if request.reuse else []
        common = {number: kept.usable(prompt) for number, kept in self._kept.items()}
        good_for = {number: cut(tokens, len(prompt), self._kept_grain) for number, tokens in common.items()}
        worth = [
            number
            for number, kept in self._kept.items()
            if good_for[number] and goes_on(common[number], len(prompt), kept)
        ]
        number = max(worth, key=lambda one: (common[one], -len(self._kept[one]))) if worth else self._free_number()
        self._set_aside(number, common[number])
        best = max(common, key=common.__getitem__)
        there, elsewhere = good_for[number], good_for[best]
        if self._parts and self._sharing.saves(elsewhere - there):
            cached = elsewhere
            good = self._parts = self._context.copy(best, number, cached)
        else:
            cached = there
            good = self._context.truncate(number, cached)
        if not good:
            cached = 0
        self._kept[number] = Kept(prompt[:cached], divisible=self._context.divisible)
        return number, cached

    def _free_number(self) -> int:
        """The sequence for a prompt that has little in common with any: next to the live ones, where there is one.

        Sequences with numbers in a row are evaluated together. Among equals it is an empty one, or else the one that
        was left first.
        """
        return min(self._kept, key=lambda number: (self._distance(number), bool(self._kept[number])))

    def _distance(self, number: int) -> int:
        """How far a sequence is from the nearest live one."""
        return min((abs(number - live) for live in self._live), default=0)

    def _set_aside(self, number: int, common: int) -> None:
        """Have an empty sequence, where there is one, take over what another has kept, where that is worth a copy.

        Arguments:
            number: of the other one, which is about to lose it.
            common: tokens that it will not lose.
        """
        kept = self._kept[number]
        empty = [one for one, tokens in self._kept.items() if not tokens]
        if not empty or not self._sharing.saves(kept.at_stake(common)):
            return
        spare = max(empty, key=self._distance)  # where it is least in the way
        if self._context.copy(number, spare, len(kept)):
            # It is as old there as it was.
            order = {spare if one == number else one: tokens for one, tokens in self._kept.items() if one != spare}
            self._kept = {number: kept, **order}

    def _note_evaluated(self) -> None:
        """Move what was offered in a step that succeeded to what is known."""
        for live in self._live.values():
            if live.offered:
                live.known.extend(live.pending[: live.offered])
                live.pending = live.pending[live.offered :]
                live.offered = 0

    def _take_back(self) -> None:
        """What a step that was cut short has evaluated, nobody knows."""
        self._flight = None
        for live in self._live.values():
            live.offered = 0

    def _close_samplers(self) -> None:
        for live in self._live.values():
            live.sampler.close()

    def _shares(self, held: Collection[int]) -> dict[Live, int]:
        """How many tokens each sequence gets into a step: next tokens first, so that nobody's prompt delays another's.

        The prompt that is nearest to its end goes first, or that such a one waits for, and every few steps the oldest
        one: short ones don't wait for long ones, and long ones have their share beside any number of short ones. Only
        the first one is cut up: where sequences have memories apart, each length of its own is evaluated for itself.
        """
        offering = [
            live for live in self._live.values() if live.pending and live.leader is None and live.number not in held
        ]
        counts = {live: 1 for live in offering if len(live.pending) == 1}
        chunk = self._beside if counts else self._chunk
        prompts = [live for live in offering if len(live.pending) > 1]
        if self._apart and counts and (not prompts or not self._prompts_turn):
            self._prompts_turn = True
            return counts
        if self._apart:
            self._prompts_turn = False
            counts = {}
        left = all_of_it = min(chunk, self._batch.capacity - len(counts))
        self._steps += 1
        first = prompts[0] if prompts and self._steps % _TURN == 0 else None
        rests = self._sharing.rests() if len(prompts) > 1 else {}
        for live in sorted(prompts, key=lambda live: (live is not first, rests.get(live, 0))):
            if left == all_of_it < len(live.pending) <= self._most(all_of_it, len(counts)):
                count = len(live.pending)
            elif len(live.pending) <= left or left == all_of_it:
                count = _piece(len(live.pending), chunk, left, self._grain)
                if self._apart and count > 1 and self._level({**counts, live: count}) is None:
                    continue
            else:
                continue
            if count:
                counts[live] = count
                left = max(left - count, 0)
        return counts

    def _most(self, share: int, singles: int) -> int:
        """How long a prompt may be to go whole where so many tokens are its share.

        A short rest would take a step of its own, which lasts nearly as long as the one before it.
        """
        return min(share + share // 4, self._chunk, self._batch.capacity - singles)

    def _level(self, counts: Mapping[Live, int]) -> dict[Live, int] | None:
        """Tokens to evaluate for nothing after some pieces of prompts, which makes them as long as longer ones.

        Where sequences have memories apart, llama.cpp evaluates what all of them have, then what the longer ones have
        beyond that, and so on, and reads all weights each time.

        Arguments:
            counts: how many tokens each sequence gets.

        Returns:
            None where the pieces can't go into one step: of a longer one, too few tokens would be evaluated alone.
        """
        pieces = sorted((live for live, count in counts.items() if count > 1), key=counts.__getitem__, reverse=True)
        if len(pieces) < 2:
            return {}  # as in nearly every step
        room = min(self._chunk - sum(counts[live] for live in pieces), self._batch.capacity - sum(counts.values()))
        extra: dict[Live, int] = {}
        length = 0
        for live in pieces:
            lack = length - counts[live]
            if 0 < lack <= min(self._most_extra, room, self._n_ctx - len(live.known) - counts[live]):
                extra[live] = lack
                room -= lack
            elif self._apart and 0 < lack < max(self._grain, 2):
                return None
            else:
                length = counts[live]
        return extra

    def _bridges(self, counts: Mapping[Live, int], extra: int) -> list[int]:
        """Idle sequences between those that get a next token.

        A device reads all weights again for each row of numbers without a gap. To evaluate a few tokens more, that
        nobody asks for, is quicker.

        Arguments:
            counts: how many tokens each sequence gets.
            extra: tokens that are evaluated for nothing besides.
        """
        single = sorted(live.number for live, count in counts.items() if count == 1)
        if not single or single[-1] - single[0] == len(single) - 1:
            return []
        present = {live.number for live in counts}
        room = self._batch.capacity - sum(counts.values()) - extra
        bridges: list[int] = []
        for one, other in pairwise(single):
            gap = [number for number in range(one + 1, other) if number not in present]
            if len(gap) <= min(self._bridge, room - len(bridges)) and all(map(self._has_room, gap)):
                bridges += gap
        return bridges

    def _has_room(self, number: int) -> bool:
        """Whether a sequence is idle, and one more token fits into it."""
        return number in self._kept and len(self._kept[number]) < self._n_ctx

    def _take_down(self, extra: Iterable[Live], bridges: Iterable[int]) -> None:
        """Free what was evaluated for nothing. A model that can't forget a part of a sequence gets no more of it."""
        for live in extra:
            if not self._context.truncate(live.number, len(live.known) + live.offered):
                raise RuntimeError(f"the context has forgotten sequence {live.number}")
        for number in bridges:
            if not self._context.truncate(number, len(self._kept[number])):
                self._kept[number] = Kept()
                self._bridge = 0

    def _fill(self, counts: Mapping[Live, int], extra: Mapping[Live, int], bridges: Iterable[int]) -> list[Flying]:
        """Put tokens into the batch. With the last of a sequence's tokens comes a row to choose from.

        In rising order of their numbers: where sequences have memories apart, llama.cpp evaluates together what comes
        in that order, and everything else one after the other.

        Returns:
            The sequences that get a token chosen, in the order of their rows.
        """
        self._batch.clear()
        flight: list[Flying] = []
        lives = {live.number: live for live in counts}
        for number in sorted([*lives, *bridges]):
            live = lives.get(number)
            if live is None:
                self._batch.append((_NOTHING,), len(self._kept[number]), number, output=False)
                continue
            live.offered = counts[live]
            complete = live.offered == len(live.pending)
            row = self._batch.append(live.pending[: live.offered], len(live.known), number, output=complete)
            if more := extra.get(live):
                self._batch.append((_NOTHING,) * more, len(live.known) + live.offered, number, output=False)
            if complete:
                flight.append(Flying(live, row, len(flight)))
        return flight

    def _fail(self) -> list[StepEvent]:
        """End every sequence that had not ended: which of them the context could not take, it does not say."""
        going = [live for live in self._live.values() if live.pending]
        for live in going:
            live.pending, live.offered = (), 0
            live.known.clear()
        reason = "; ".join(self._context.errors[-2:]) or "llama_decode gave no reason"
        return [Failed(live.number, reason) for live in going]

    def _advance(self, live: Live, choice: Choice, events: list[StepEvent]) -> None:
        """Append the token that was chosen for a sequence, and say what became of it."""
        if isinstance(choice, Exception):
            live.pending = ()
            events.append(_failure(live.number, choice))
            return
        token, likelihood = choice
        if not live.ignore_eos and self._vocabulary.ends_generation(token):
            events.append(Finished(live.number, FinishReason.STOP, live.assembler.flush(), live.cached))
            return
        live.room -= 1
        events.append(Token(live.number, token, live.assembler.feed(self._vocabulary.piece(token)), likelihood))
        if live.assembler.stopped:
            events.append(Finished(live.number, FinishReason.STOP, cached=live.cached, stop=live.assembler.stop))
        elif live.sampler.complete:
            events.append(Finished(live.number, FinishReason.STOP, live.assembler.flush(), live.cached))
        elif live.room == 0:
            events.append(Finished(live.number, FinishReason.LENGTH, live.assembler.flush(), live.cached))
        else:
            live.pending = (token,)


def _failure(number: int, error: Exception) -> Failed:
    """What becomes of a sequence for which no token could be chosen. The others go on."""
    if isinstance(error, ConstraintError):
        return Failed(number, str(error), unanswerable=True, alone=True)
    _logger.error("no token could be chosen for a sequence", exc_info=error)
    return Failed(number, f"no token could be chosen: {error}", alone=True)


def _piece(pending: int, chunk: int, room: int, grain: int) -> int:
    """How many of a sequence's pending tokens go into a step.

    Where there is room for it, a prompt is cut as ``prefix.cut`` says. Never one alone while there are more: a token
    that is evaluated alone has other last bits than in a chunk, and an answer would depend on how its prompt was cut.

    Arguments:
        pending: tokens that are pending.
        chunk: tokens of one prompt that one step may evaluate.
        room: tokens that still fit into the step.
        grain: tokens whose multiples it is cut at.
    """
    count = min(pending, chunk, room)
    if count < pending and (piece := cut(count, pending, grain)) > 1:
        return piece
    if count == pending - 1 > 2:
        count -= 1
    return 0 if count == 1 < min(pending, chunk) else count


def _is_held(request: SequenceRequest) -> bool:
    """Whether the whole answer has a form."""
    return request.constraint is not None and not request.constraint.trigger
