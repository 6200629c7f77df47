"""The book of requests: which are under way, and what became of the others."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import trio

from trioserve.errors import ServerBusyError, ShuttingDownError, TrioserveError
from trioserve.origin import Origin, as_origin, current_origin
from trioserve.scheduling.lifecycle import REQUEST, RequestEvent, RequestPhase, advance
from trioserve.service.metrics import OUTCOMES, Metrics

logger = logging.getLogger("trioserve.request")


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
        model: id of its model, or of several.
        label: id of the registered model that it counts for; empty where it is for none or for several.
        on_close: told once that the record is closed.

    Attributes:
        reason: why it was rejected, in a word.
        cancelled_in: the phase in which it was cancelled.
    """

    def __init__(self, request_id: str, model: str, label: str, on_close: Callable[[Record], None]) -> None:
        self.request_id = request_id
        self.model = model
        self.label = label
        self.origin = current_origin()
        self.reason = ""
        self.cancelled_in: RequestPhase | None = None
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
        self._times: Callable[[], Mapping[str, object]] = dict
        self._closed = False
        self._error: TrioserveError | None = None

    @property
    def age(self) -> float:
        """Seconds since the request's entry."""
        return time.perf_counter() - self.entered

    @property
    def age_ms(self) -> float:
        """Milliseconds since the request's entry."""
        return round(1000 * self.age, 1)

    @property
    def route(self) -> str:
        """By which it came; empty where by none."""
        return "" if self.origin is None else self.origin.route

    def advance(self, event: RequestEvent) -> None:
        """Move to the next phase."""
        self.phase = advance(REQUEST, self.phase, event)

    def on_cut(self, cut: Callable[[TrioserveError], None]) -> None:
        """Say how a running generation is made to fail. Before that, cutting cancels ``scope``."""
        self._cut = cut

    def on_abandon(self, abandon: Callable[[], None]) -> None:
        """Say how to free what the request holds when even an error can't be delivered."""
        self._abandon = abandon

    def timed_by(self, times: Callable[[], Mapping[str, object]]) -> None:
        """Say who knows, at the end, where the time of a running generation went: fields for the log."""
        self._times = times

    def fail(self, error: TrioserveError) -> None:
        """Note how the request ended, by its error."""
        if self.phase in OUTCOMES:
            return
        self._error = error
        self.fields["error"] = error.code
        if error.status >= 500:
            # What a client did wrong may be told in its own words, which don't belong in the log.
            self.fields["detail"] = error.message
        at_work = self.phase in (RequestPhase.PREFILL, RequestPhase.DECODE)
        if isinstance(error, ServerBusyError) or (error.status < 500 and not at_work):
            self.reason = error.reason
            self.advance(RequestEvent.REJECTED)
        elif isinstance(error, ShuttingDownError):
            self._cancel()
        else:
            self.advance(RequestEvent.FAILED)

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
        if self.phase not in OUTCOMES:
            self._cancel()
        # A drain may close what its own task is not able to.
        with as_origin(self.origin):
            self._log()
        self._on_close(self)

    def _status(self) -> int | None:
        """Of the response, where there is one or will be: operations end before theirs begins."""
        if self.origin is None:
            return None
        if self.origin.status is not None:
            return self.origin.status
        if self._error is not None:
            return self._error.status
        return 200 if self.phase is RequestPhase.FINISHED else None

    def _cancel(self) -> None:
        self.cancelled_in = self.phase
        self.fields["cancelled_in"] = self.phase.value
        self.advance(RequestEvent.CANCELLED)

    def _log(self) -> None:
        known = {
            "request_id": self.request_id,
            "route": self.route or None,
            "status": self._status(),
            "model": self.model,
            "slot": self.slot,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": None if self.prompt_tokens is None else self.completion_tokens,
            **self.fields,
            **self._times(),
            "total_ms": self.age_ms,
        }
        fields = {name: value for name, value in known.items() if value is not None}
        logger.info("request %s", self.phase.value, extra={"fields": fields})


class Ledger:
    """All requests of the process.

    Arguments:
        metrics: changed in one step with the book.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._open: set[Record] = set()
        self._idle = trio.Event()
        self._idle.set()

    def open(self, request_id: str, model: str, label: str) -> Record:
        """Enter a request; see ``Record`` for the arguments."""
        record = Record(request_id, model, label, self._close)
        if record.origin is not None:
            record.origin.counted = True
        self._metrics.accepted[record.route, label] += 1
        self._open.add(record)
        if self._idle.is_set():
            self._idle = trio.Event()
        return record

    def under_way(self) -> list[Record]:
        """Return the requests that are under way."""
        return list(self._open)

    def active(self) -> Counter[tuple[str, str]]:
        """Return how many requests are under way, by route and model."""
        return Counter((record.route, record.label) for record in self._open)

    def note_error(self, error: TrioserveError) -> None:
        """Count the error that a call ends with, unless it is in the book already.

        A call that came no further than an error is counted once, whoever notices it. One that has a record failed,
        also where that error was foreseen by nobody.
        """
        foreseen = isinstance(error, (ServerBusyError, ShuttingDownError)) or error.status < 500
        route = model = ""
        if (origin := current_origin()) is not None:
            if origin.counted:
                if not foreseen:
                    self._fail(origin, error)
                return
            origin.counted = True
            route, model = origin.route, origin.model
        outcome = RequestPhase.REJECTED if foreseen else RequestPhase.FAILED
        self._metrics.accepted[route, model] += 1
        self._metrics.ended[route, model, outcome] += 1
        if foreseen:
            self._metrics.rejects[error.reason] += 1

    def tally(self) -> Tally:
        """Return one consistent moment."""
        return Tally(
            active=len(self._open),
            finished=self._metrics.outcomes(RequestPhase.FINISHED),
            failed=self._metrics.outcomes(RequestPhase.FAILED),
            cancelled=self._metrics.outcomes(RequestPhase.CANCELLED),
            rejected=self._metrics.outcomes(RequestPhase.REJECTED),
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
        self._count_end(record)
        if not self._open:
            self._idle.set()

    def _fail(self, origin: Origin, error: TrioserveError) -> None:
        for record in self._open:
            if record.origin is origin:
                record.fail(error)

    def _count_end(self, record: Record) -> None:
        metrics = self._metrics
        metrics.ended[record.route, record.label, record.phase] += 1
        if record.phase is RequestPhase.REJECTED:
            metrics.rejects[record.reason] += 1
        elif record.cancelled_in is not None:
            metrics.cancels[record.cancelled_in] += 1
        elif record.phase is RequestPhase.FINISHED and record.slot is not None:
            metrics.of(record.label).duration.observe(record.age)
