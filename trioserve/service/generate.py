"""A running generation: the events of one sequence, or of a batch, as text and, at each end, a reason and a count."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence

from trioserve.engine.base import StepEvent, Token
from trioserve.errors import TrioserveError
from trioserve.runtime.job import Job
from trioserve.scheduling.lifecycle import RequestEvent
from trioserve.service.answer import Answer
from trioserve.service.begun import Begun
from trioserve.service.events import Done, Failure, Part, TextDelta


class Generation:
    """Made by ``Service.start``; gives its parts once, to one reader.

    Arguments:
        begun: the request. Prompts that could not be honoured are told first, and those that are to be echoed.
        all_or_nothing: an answer that fails ends all of them, with its error. Otherwise it is a part among the others.
        choices: how many answers in a row are to the same prompt.

    Attributes:
        expected: how to read the answers to conversations, by index.
    """

    def __init__(self, begun: Begun, *, all_or_nothing: bool = True, choices: int = 1) -> None:
        self.id = uuid.uuid4().hex
        self.created = int(time.time())
        self.model = begun.model
        self.expected = begun.prepared.expected
        self._job = begun.job
        self._answers = _answers(begun)
        refused, echoes = begun.prepared.refused, begun.prepared.echoes
        self._known: list[Part] = [*refused, *(TextDelta(text, index) for index, text in echoes.items())]
        self._all_or_nothing = all_or_nothing
        self.choices = choices
        self._open = len(self._answers)
        self._failed = len(refused)
        self.prompts = self._open + self._failed
        self._record = begun.record
        self._metrics = begun.metrics
        self._error: TrioserveError | None = None

    @property
    def request_id(self) -> str:
        """Of the request that it answers."""
        return self._record.request_id

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(answer.prompt_tokens for answer in self._answers)

    async def next_parts(self) -> list[Part]:
        """Return what has arrived since the last call, waiting for at least one part. Empty once the end was returned.

        Raises:
            EngineError: inference failed.
            ShuttingDownError: the drain ended before the answer did.
        """
        parts, self._known = self._known, []
        try:
            while self._open and not parts:
                assert self._job is not None, "open answers have a job"
                if not (parts := self._read(self._job)):
                    await self._job.wait()
        except TrioserveError as error:
            self._record.fail(error)
            raise
        return parts

    async def __aiter__(self) -> AsyncIterator[Part]:
        while parts := await self.next_parts():
            for part in parts:
                yield part

    def _read(self, job: Job) -> list[Part]:
        """What has arrived, without waiting. What has piled up is counted in one go: every token comes by here."""
        self._check()
        events = job.poll()
        before = self._record.completion_tokens
        parts = [part for index, event in events for part in self._take(index, event)]
        if made := self._record.completion_tokens - before:
            self._metrics.completion_tokens += made
            for index in {index for index, _ in events}:
                self._answers[index].measure_gaps(self._metrics.token_gap)
        if not parts:
            self._check()
        return parts

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _take(self, index: int, event: StepEvent) -> list[Part]:
        if isinstance(event, Token):
            self._note_token(index)
        parts = self._answers[index].take(event)
        if parts and isinstance(ending := parts[-1], (Done, Failure)):
            if isinstance(ending, Failure) and self._all_or_nothing:
                self._error = ending.error
                return []
            self._note_ending(ending)
        return parts

    def _note_token(self, index: int) -> None:
        if self._record.completion_tokens == 0:
            self._record.advance(RequestEvent.FIRST_TOKEN)
            self._metrics.first_token.observe(self._answers[index].first_token_seconds)
        self._record.completion_tokens += 1

    def _note_ending(self, ending: Done | Failure) -> None:
        self._open -= 1
        self._failed += isinstance(ending, Failure)
        if isinstance(ending, Done):
            self._metrics.cached_tokens += ending.usage.cached_tokens
        fields = self._record.fields
        if self.prompts > 1:
            fields["prompts"], fields["failed_prompts"] = self.prompts, self._failed
        elif isinstance(ending, Done):
            fields["finish_reason"] = ending.finish_reason.value
            fields["cached_tokens"] = ending.usage.cached_tokens
        if self._open:
            return
        if isinstance(ending, Failure) and self._failed == self.prompts:
            self._record.fail(ending.error)
        else:
            self._record.advance(RequestEvent.FINISHED)


def _answers(begun: Begun) -> Sequence[Answer]:
    """One answer for each sequence of the job."""
    if begun.job is None:
        return ()
    record = begun.record
    assert record.slot is not None, "a job is at work in a slot"
    return [
        Answer(index, len(sequence.prompt), times, record.slot, record.entered)
        for (index, sequence), times in zip(begun.prepared.sequences.items(), begun.job.times, strict=True)
    ]
