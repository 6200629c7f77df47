"""The decode core: many sequences, one context, one step at a time.

A step is one ``llama_decode`` over whatever the live sequences have to offer, next tokens and prompt chunks together,
then one sampled token for each row that is complete. Every arrangement (one private sequence per slot, a native batch,
slots sharing a context) is this class with other sequences in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trioserve.engine.base import Failed, Finished, FinishReason, SequenceRequest, StepEvent, Token
from trioserve.engine.llama.context import Batch, Context, Outcome
from trioserve.engine.llama.sampler import Sampler
from trioserve.engine.llama.vocabulary import Vocabulary
from trioserve.engine.text import TextAssembler


class _Live:
    """What changes while a sequence is worked.

    Attributes:
        pending: tokens not evaluated yet: the rest of the prompt, or the token sampled last.
        n_past: tokens evaluated so far, which is the position of the next one.
        room: tokens that may still be sampled.
    """

    __slots__ = ("assembler", "ignore_eos", "n_past", "number", "pending", "room", "sampler")

    def __init__(self, number: int, request: SequenceRequest, room: int, sampler: Sampler) -> None:
        self.number = number
        self.pending: Sequence[int] = request.prompt
        self.n_past = 0
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
        n_ctx: tokens that one sequence may hold.
        n_batch: tokens that one step may evaluate.
        chunk: tokens of one prompt that one step may evaluate.
        max_sequences: sequences that may live at once.
    """

    def __init__(
        self, context: Context, vocabulary: Vocabulary, *, n_ctx: int, n_batch: int, chunk: int, max_sequences: int
    ) -> None:
        self._context = context
        self._vocabulary = vocabulary
        self._n_ctx = n_ctx
        self._chunk = chunk
        self._batch = Batch(max(n_batch, max_sequences))
        self._live: dict[int, _Live] = {}
        self._free = list(range(max_sequences - 1, -1, -1))

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
        if not self._free:
            raise RuntimeError(f"all {len(self._live)} sequences of the context are live")
        banned = self._vocabulary.end_tokens if request.ignore_eos else ()
        sampler = Sampler(self._vocabulary, request.sampling, request.prompt, self._n_ctx, banned)
        number = self._free.pop()
        self._live[number] = _Live(number, request, room, sampler)
        return number

    def remove(self, number: int) -> None:
        """Forget a sequence and free its memory."""
        self._live.pop(number).sampler.close()
        self._context.forget(number)
        self._free.append(number)

    def clear(self) -> None:
        """Forget all sequences and lower the abort flag."""
        self._forget_all()
        self._context.reset()

    def close(self) -> None:
        """Free the context and what the live sequences hold. Idempotent."""
        self._forget_all()
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
            return []
        if outcome is Outcome.FAILED:
            return self._fail(rows)
        events: list[StepEvent] = []
        for row in rows:
            self._advance(row, events)
        return events

    def _forget_all(self) -> None:
        for number in list(self._live):
            self._live.pop(number).sampler.close()
            self._free.append(number)

    def _fill(self) -> list[_Row]:
        """Put next tokens first and prompt chunks after them, so that nobody's prompt delays another's next token.

        Returns:
            The rows that are complete and get a token sampled.
        """
        self._batch.clear()
        rows = []
        for live in sorted(self._live.values(), key=lambda live: len(live.pending) > 1):
            tokens = live.pending[: min(self._chunk, self._batch.room)]
            if not tokens:
                continue
            complete = len(tokens) == len(live.pending)
            index = self._batch.append(tokens, live.n_past, live.number, output=complete)
            live.n_past += len(tokens)
            live.pending = live.pending[len(tokens) :]
            if complete:
                rows.append(_Row(live, index))
        return rows

    def _fail(self, rows: Sequence[_Row]) -> list[StepEvent]:
        """End every sequence that had not ended: which of them the context could not take, it does not say.

        Arguments:
            rows: what ``_fill`` returned; their sequences have nothing pending any more.
        """
        complete = {row.live.number for row in rows}
        going = [live for live in self._live.values() if live.pending or live.number in complete]
        for live in going:
            live.pending = ()
        reason = "; ".join(self._context.errors[-2:]) or "llama_decode gave no reason"
        return [Failed(live.number, reason) for live in going]

    def _advance(self, row: _Row, events: list[StepEvent]) -> None:
        """Sample the next token of a sequence and say what became of it."""
        live = row.live
        token = live.sampler.choose(self._context, row.number)
        if not live.ignore_eos and self._vocabulary.ends_generation(token):
            events.append(Finished(live.number, FinishReason.STOP, live.assembler.flush()))
            return
        live.room -= 1
        events.append(Token(live.number, token, live.assembler.feed(self._vocabulary.piece(token))))
        if live.assembler.stopped:
            events.append(Finished(live.number, FinishReason.STOP))
        elif live.room == 0:
            events.append(Finished(live.number, FinishReason.LENGTH, live.assembler.flush()))
        else:
            live.pending = (token,)
