"""The decode core: many sequences, one context, one step at a time.

A step is one ``llama_decode`` over whatever the live sequences have to offer, next tokens and prompt chunks together,
then one sampled token for each row that is complete. Every arrangement (one private sequence per slot, a native batch,
slots sharing a context) is this class with other sequences in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trioserve.engine.base import ConstraintError, Failed, Finished, FinishReason, SequenceRequest, StepEvent, Token
from trioserve.engine.llama.constraint import Constraints
from trioserve.engine.llama.context import Batch, Context, Outcome
from trioserve.engine.llama.sampler import Sampler
from trioserve.engine.llama.vocabulary import Vocabulary
from trioserve.engine.prefix import common_prefix
from trioserve.engine.text import TextAssembler


class _Live:
    """What changes while a sequence is worked.

    Attributes:
        known: tokens whose memory is good: they were evaluated, or kept from an earlier sequence.
        pending: tokens not evaluated yet: the rest of the prompt, or the token sampled last.
        offered: how many of those are in the present step.
        cached: tokens of the prompt that were kept from an earlier sequence.
        room: tokens that may still be sampled.
    """

    __slots__ = ("assembler", "cached", "ignore_eos", "known", "number", "offered", "pending", "room", "sampler")

    def __init__(self, number: int, request: SequenceRequest, cached: int, room: int, sampler: Sampler) -> None:
        self.number = number
        self.cached = cached
        self.known = list(request.prompt[:cached])
        self.pending: Sequence[int] = request.prompt[cached:]
        self.offered = 0
        self.room = room
        self.ignore_eos = request.ignore_eos
        self.sampler = sampler
        self.assembler = TextAssembler(request.stops)


class _Row(NamedTuple):
    live: _Live
    number: int


class DecodeCore:
    """Works the sequences of one context. Knows no Trio; one thread at a time.

    Arguments:
        context: where tokens are evaluated.
        vocabulary: of the model.
        constraints: of the model.
        n_ctx: tokens that one sequence may hold.
        n_batch: tokens that one step may evaluate.
        chunk: tokens of one prompt that one step may evaluate.
        max_sequences: sequences that may live at once.
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
        max_sequences: int,
    ) -> None:
        self._context = context
        self._vocabulary = vocabulary
        self._constraints = constraints
        self._n_ctx = n_ctx
        self._chunk = chunk
        self._batch = Batch(max(n_batch, max_sequences))
        self._max_sequences = max_sequences
        self._live: dict[int, _Live] = {}
        # The sequences that aren't live, and the tokens whose memory each of them still has.
        self._kept: dict[int, list[int]] = {number: [] for number in range(max_sequences)}

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
        self._live[number] = _Live(number, request, cached, room, sampler)
        return number

    def _sampler(self, request: SequenceRequest) -> Sampler:
        return Sampler(
            self._vocabulary,
            request.sampling,
            request.prompt,
            self._n_ctx,
            # A grammar decides for itself when an answer may end.
            self._vocabulary.end_tokens if request.ignore_eos and request.constraint is None else (),
            request.logprobs,
            None if request.constraint is None else self._constraints.matcher(request.constraint),
        )

    @property
    def history(self) -> Sequence[int]:
        """The longest run of tokens that the next sequence may begin with at no cost."""
        return max(self._kept.values(), key=len, default=())

    def remove(self, number: int) -> None:
        """End a sequence. Its memory is kept for one that begins like it, as far as it is known to be good."""
        live = self._live.pop(number)
        live.sampler.close()
        self._kept[number] = []  # whatever comes of the next line, the number is not lost
        if self._context.truncate(number, len(live.known)):
            self._kept[number] = live.known

    def end_all(self) -> None:
        """End all sequences and lower the abort flag."""
        for number in list(self._live):
            self.remove(number)
        self._context.lower()

    def clear(self) -> None:
        """Forget all sequences, live and kept, and lower the abort flag."""
        self._close_samplers()
        self._kept = {number: [] for number in range(self._max_sequences)}
        self._live.clear()
        self._context.reset()

    def is_sound(self) -> bool:
        """Tell whether every sequence is free and has in the memory what is known of it, and the abort flag is down."""
        if len(self._kept) < self._max_sequences or self._context.interrupted:
            return False
        return all(self._context.length(number) == len(kept) for number, kept in self._kept.items())

    def close(self) -> None:
        """Free the context and what the live sequences hold. Idempotent."""
        self._close_samplers()
        self._live.clear()
        self._context.close()

    def step(self, threads: int) -> list[StepEvent]:
        """Evaluate one batch; see ``engine.base.Session.step``."""
        if self._context.interrupted:
            return []
        rows = self._fill()
        if not self._batch.size:
            return []
        outcome = self._context.decode(self._batch, threads)
        if outcome is Outcome.INTERRUPTED:
            self._take_back()
            return []
        if outcome is Outcome.FAILED:
            return self._fail()
        self._note_evaluated()
        events: list[StepEvent] = []
        for row in rows:
            self._advance(row, events)
        return events

    def _place(self, request: SequenceRequest) -> tuple[int, int]:
        """Choose the sequence to work in: the one that has most of the prompt, and how many tokens that is.

        At least two tokens are evaluated anew. The last one has to be, for its logits; and alone it would be computed
        in another way than in a prompt's chunk, with other last bits: so an answer does not depend on what was kept of
        earlier prompts.
        """
        most = max(len(request.prompt) - 2, 0) if request.reuse else 0
        common = {
            number: min(most, common_prefix(kept, list(request.prompt[: len(kept)])))
            for number, kept in self._kept.items()
        }
        number = max(common, key=lambda number: (common[number], -len(self._kept[number]), -number))
        cached = common[number]
        if not self._context.truncate(number, cached):
            cached = 0
        self._kept[number] = list(request.prompt[:cached])
        return number, cached

    def _note_evaluated(self) -> None:
        """Move what was offered in a step that succeeded to what is known."""
        for live in self._live.values():
            if live.offered:
                live.known.extend(live.pending[: live.offered])
                live.pending = live.pending[live.offered :]
                live.offered = 0

    def _take_back(self) -> None:
        """What a step that was cut short has evaluated, nobody knows."""
        for live in self._live.values():
            live.offered = 0

    def _close_samplers(self) -> None:
        for live in self._live.values():
            live.sampler.close()

    def _fill(self) -> list[_Row]:
        """Put next tokens first and prompt chunks after them, so that nobody's prompt delays another's next token.

        Returns:
            The rows that are complete and get a token sampled.
        """
        self._batch.clear()
        rows = []
        for live in sorted(self._live.values(), key=lambda live: len(live.pending) > 1):
            count = _piece(len(live.pending), self._chunk, self._batch.room)
            if not count:
                continue
            complete = count == len(live.pending)
            index = self._batch.append(live.pending[:count], len(live.known), live.number, output=complete)
            live.offered = count
            if complete:
                rows.append(_Row(live, index))
        return rows

    def _fail(self) -> list[StepEvent]:
        """End every sequence that had not ended: which of them the context could not take, it does not say."""
        going = [live for live in self._live.values() if live.pending]
        for live in going:
            live.pending, live.offered = (), 0
            live.known.clear()
        reason = "; ".join(self._context.errors[-2:]) or "llama_decode gave no reason"
        return [Failed(live.number, reason) for live in going]

    def _advance(self, row: _Row, events: list[StepEvent]) -> None:
        """Sample the next token of a sequence and say what became of it."""
        live = row.live
        try:
            token, likelihood = live.sampler.choose(self._context, row.number)
        except ConstraintError as error:
            live.pending = ()
            events.append(Failed(live.number, str(error), unanswerable=True))
            return
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


def _piece(pending: int, chunk: int, room: int) -> int:
    """How many of a sequence's pending tokens go into a step.

    Never one alone while there are more: a token that is evaluated alone has other last bits than in a chunk, and an
    answer would depend on how its prompt was cut.

    Arguments:
        pending: tokens that are pending.
        chunk: tokens of one prompt that one step may evaluate.
        room: tokens that still fit into the step.
    """
    count = min(pending, chunk, room)
    if count == pending - 1 > 2:
        count -= 1
    return 0 if count == 1 < min(pending, chunk) else count
