"""A running generation: the events of one sequence, or of a batch, as text and, at each end, a reason and a count."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence

from trioserve.engine.base import StepEvent, Token
from trioserve.errors import TrioserveError
from trioserve.runtime.job import Job
from trioserve.scheduling.lifecycle import RequestEvent
from trioserve.service.answer import Answer, milliseconds
from trioserve.service.events import Done, Failure, Part
from trioserve.service.ledger import Record
from trioserve.service.metrics import ModelMetrics


class Generation:
    """Made by ``Service.start``; gives its parts once, to one reader.

    Arguments:
        job: at work in a slot; None where no prompt could be honoured.
        answers: one for each sequence of the job.
        refused: prompts that could not be honoured, told first.
        all_or_nothing: an answer that fails ends all of them, with its error. Otherwise it is a part among the others.
        record: of the request.
        model: id of the model that answers.
        metrics: of that model.
    """

    def __init__(
        self,
        job: Job | None,
        answers: Sequence[Answer],
        refused: Sequence[Failure],
        record: Record,
        model: str,
        metrics: ModelMetrics,
        *,
        all_or_nothing: bool = True,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.created = int(time.time())
        self.model = model
        self.prompts = len(answers) + len(refused)
        self._job = job
        self._answers = answers
        self._refused: list[Part] = list(refused)
        self._all_or_nothing = all_or_nothing
        self._open = len(answers)
        self._failed = len(refused)
        self._record = record
        self._metrics = metrics
        self._error: TrioserveError | None = None
        record.timed_by(self._known_times)

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
        parts, self._refused = self._refused, []
        while not parts and self._open:
            try:
                parts = await self._next()
            except TrioserveError as error:
                self._record.fail(error)
                raise
        return parts

    async def __aiter__(self) -> AsyncIterator[Part]:
        while parts := await self.next_parts():
            for part in parts:
                yield part

    async def _next(self) -> list[Part]:
        assert self._job is not None, "open answers have a job"
        events = await self._job.next_events() if self._error is None else ()
        before = self._record.completion_tokens
        parts = [part for event in events for part in self._take(event)]
        # What has piled up is counted in one go: this runs for every token of every stream.
        if made := self._record.completion_tokens - before:
            self._metrics.completion_tokens += made
            for index in {event.sequence for event in events}:
                self._answers[index].measure_gaps(self._metrics.token_gap)
        if not parts:
            self._check()
        return parts

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _take(self, event: StepEvent) -> list[Part]:
        if isinstance(event, Token):
            self._note_token(event.sequence)
        parts = self._answers[event.sequence].take(event)
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

    def _known_times(self) -> Mapping[str, object]:
        """Fields for the log: the time from the first prompt's beginning to the first token, and from there to the end.

        Of an answer that was broken off, as far as it came.
        """
        times = [answer.times for answer in self._answers]
        begun = [each.begun for each in times if each.begun is not None]
        if not begun:
            return {}
        now = time.perf_counter()
        first = min((each.first for each in times if each.first is not None), default=None)
        ended = max(now if each.ended is None else each.ended for each in times)
        fields = {"prefill_ms": milliseconds((now if first is None else first) - min(begun))}
        if first is not None:
            fields["decode_ms"] = milliseconds(ended - first)
        return fields
