"""A running generation: the engine's events as text and, at the end, a reason and a count."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator

from trioserve.engine.base import Finished, StepEvent, Token
from trioserve.errors import EngineError, TrioserveError
from trioserve.runtime.job import Job
from trioserve.scheduling.lifecycle import RequestEvent
from trioserve.service.events import Done, Part, TextDelta, Usage
from trioserve.service.ledger import Record


class Generation:
    """Made by ``Service.start``; gives its parts once, to one reader.

    Arguments:
        job: at work in a slot.
        record: of the request.
        model: id of the model that answers.
        prompt_tokens: tokens of the prompt.
    """

    def __init__(self, job: Job, record: Record, model: str, prompt_tokens: int) -> None:
        self.id = uuid.uuid4().hex
        self.created = int(time.time())
        self.model = model
        self.prompt_tokens = prompt_tokens
        self._job = job
        self._record = record
        self._done = False

    @property
    def request_id(self) -> str:
        """Of the request that it answers."""
        return self._record.request_id

    async def next_parts(self) -> list[Part]:
        """Return what has arrived since the last call, waiting for at least one part. Empty once the end was returned.

        Raises:
            EngineError: inference failed.
            ShuttingDownError: the drain ended before the answer did.
        """
        parts: list[Part] = []
        while not parts and not self._done:
            try:
                events = await self._job.next_events()
            except TrioserveError as error:
                self._record.fail(error)
                raise
            for event in events:
                parts.extend(self._parts(event))
        return parts

    async def __aiter__(self) -> AsyncIterator[Part]:
        while parts := await self.next_parts():
            for part in parts:
                yield part

    def _parts(self, event: StepEvent) -> list[Part]:
        if isinstance(event, Token):
            self._note_token()
            return [TextDelta(event.text)] if event.text else []
        if not isinstance(event, Finished):
            raise EngineError(f"unexpected event {event!r}")
        self._done = True
        usage = Usage(self.prompt_tokens, self._record.completion_tokens)
        self._finish(event)
        rest: list[Part] = [TextDelta(event.text)] if event.text else []
        return [*rest, Done(event.reason, usage)]

    def _note_token(self) -> None:
        if self._record.completion_tokens == 0:
            self._record.advance(RequestEvent.FIRST_TOKEN)
        self._record.completion_tokens += 1

    def _finish(self, event: Finished) -> None:
        job, fields = self._job, self._record.fields
        now = time.perf_counter()
        started = job.started_at or now
        first = job.first_token_at or now
        fields["finish_reason"] = event.reason.value
        fields["prefill_ms"] = round(1000 * (first - started), 1)
        fields["decode_ms"] = round(1000 * (now - first), 1)
        self._record.advance(RequestEvent.FINISHED)
