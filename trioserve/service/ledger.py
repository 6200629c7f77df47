"""The book of requests: which are under way, and what became of the others."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import trio

from trioserve.errors import ServerBusyError, ShuttingDownError, TrioserveError
from trioserve.scheduling.lifecycle import REQUEST, RequestEvent, RequestPhase, advance

logger = logging.getLogger("trioserve.request")

ENDS = (RequestPhase.FINISHED, RequestPhase.FAILED, RequestPhase.CANCELLED, RequestPhase.REJECTED)


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts since the start. At all times accepted = active + finished + failed + cancelled + rejected."""

    active: int
    finished: int
    failed: int
    cancelled: int
    rejected: int

    @property
    def accepted(self) -> int:
        """All requests that were entered in the book."""
        return self.active + self.finished + self.failed + self.cancelled + self.rejected


class Record:
    """One request, from its entry until its last byte is on its way.

    Arguments:
        request_id: for the log.
        model: id of its model.
        on_close: told once that the record is closed.
    """

    def __init__(self, request_id: str, model: str, on_close: Callable[[Record], None]) -> None:
        self.request_id = request_id
        self.model = model
        self.phase = RequestPhase.QUEUED
        self.fields: dict[str, object] = {}
        self.slot: int | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens = 0
        self.scope = trio.CancelScope()
        self._on_close = on_close
        self.entered = time.perf_counter()
        self._cut: Callable[[TrioserveError], None] | None = None
        self._abandon: Callable[[], None] | None = None
        self._closed = False

    @property
    def age_ms(self) -> float:
        """Milliseconds since the request's entry."""
        return round(1000 * (time.perf_counter() - self.entered), 1)

    def advance(self, event: RequestEvent) -> None:
        """Move to the next phase."""
        self.phase = advance(REQUEST, self.phase, event)

    def on_cut(self, cut: Callable[[TrioserveError], None]) -> None:
        """Say how a running generation is made to fail. Before that, cutting cancels ``scope``."""
        self._cut = cut

    def on_abandon(self, abandon: Callable[[], None]) -> None:
        """Say how to free what the request holds when even an error can't be delivered."""
        self._abandon = abandon

    def fail(self, error: TrioserveError) -> None:
        """Note how the request ended, by its error."""
        if self.phase in ENDS:
            return
        if isinstance(error, ServerBusyError) or error.status < 500:
            self.advance(RequestEvent.REJECTED)
        elif isinstance(error, ShuttingDownError):
            self.advance(RequestEvent.CANCELLED)
        else:
            self.advance(RequestEvent.FAILED)
        # What a client did wrong may be told in its own words, which don't belong in the log.
        self.fields["error"] = error.message if error.status >= 500 else error.code

    def cut(self, error: TrioserveError) -> None:
        """End the request with an error."""
        if self._cut is None:
            self.scope.cancel()
        else:
            self._cut(error)

    def abandon(self) -> None:
        """Free what the request holds, whether or not its client can be told."""
        if self._abandon is not None:
            self._abandon()
        self.close()

    def close(self) -> None:
        """End the record; a request that has not ended otherwise counts as cancelled. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.phase not in ENDS:
            self.fields["cancelled_in"] = self.phase.value
            self.advance(RequestEvent.CANCELLED)
        self._log()
        self._on_close(self)

    def _log(self) -> None:
        known = {"slot": self.slot, "prompt_tokens": self.prompt_tokens}
        counts = {name: value for name, value in known.items() if value is not None}
        if self.prompt_tokens is not None:
            counts["completion_tokens"] = self.completion_tokens
        fields = {"request_id": self.request_id, "model": self.model, **counts, **self.fields, "total_ms": self.age_ms}
        logger.info("request %s", self.phase.value, extra={"fields": fields})


class Ledger:
    """All requests of the process."""

    def __init__(self) -> None:
        self._open: set[Record] = set()
        self._ended: Counter[RequestPhase] = Counter()
        self._idle = trio.Event()
        self._idle.set()

    def open(self, request_id: str, model: str) -> Record:
        """Enter a request."""
        record = Record(request_id, model, self._close)
        self._open.add(record)
        if self._idle.is_set():
            self._idle = trio.Event()
        return record

    def under_way(self) -> list[Record]:
        """Return the requests that are under way."""
        return list(self._open)

    def turn_away(self) -> None:
        """Count a newcomer that was rejected without a record."""
        self._ended[RequestPhase.REJECTED] += 1

    def tally(self) -> Tally:
        """Return one consistent moment."""
        return Tally(
            active=len(self._open),
            finished=self._ended[RequestPhase.FINISHED],
            failed=self._ended[RequestPhase.FAILED],
            cancelled=self._ended[RequestPhase.CANCELLED],
            rejected=self._ended[RequestPhase.REJECTED],
        )

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return not self._open

    async def wait_idle(self) -> None:
        """Return once no request is under way."""
        await self._idle.wait()

    def cut(self, error: TrioserveError) -> None:
        """End all requests with an error."""
        for record in list(self._open):
            record.cut(error)

    def abandon(self) -> None:
        """Free what all requests hold."""
        for record in list(self._open):
            record.abandon()

    def _close(self, record: Record) -> None:
        self._open.remove(record)
        self._ended[record.phase] += 1
        if not self._open:
            self._idle.set()
