"""Noticing that a worker thread does not come back out of the engine."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import trio

from trioserve.runtime.pulse import Pulse
from trioserve.scheduling.admission import Ailment

logger = logging.getLogger("trioserve.slot")

_RECHECK = 1.0  # seconds between looks at a thread that is known not to come back

Report = Callable[[int, Ailment | None], None]
"""Told a slot's number and what ails it; None when nothing does any more."""


class Patient(Protocol):
    """A slot, as its watch sees it.

    Attributes:
        index: its number.
        pulse: of its worker thread.
        names: model, slot and request, as fields of the log.
    """

    index: int

    @property
    def pulse(self) -> Pulse:
        """See above."""
        ...

    @property
    def names(self) -> Mapping[str, object]:
        """See above."""
        ...

    def note_stall(self) -> None:
        """Take note: the call under way lasts too long."""
        ...


class StallWatch:
    """Watches the slots of one pool while they have something to do, and tells what ails them.

    It looks when the oldest call would be due, and not at every step: calls that began since can't be due before the
    next look.

    Arguments:
        model_id: for the log.
        timeout: seconds that one call into the engine may last; 0 is without bound.
        report: told of each change.
    """

    def __init__(self, model_id: str, timeout: float, report: Report) -> None:
        self.model_id = model_id
        self._timeout = timeout
        self._report = report
        self._stalled: dict[Patient, float] = {}
        self._attended: Counter[Patient] = Counter()
        self._wanted = trio.Event()

    @contextlib.contextmanager
    def attending(self, slot: Patient) -> Iterator[None]:
        """Watch a slot for the length of the block. At its end its thread is back, unless it is seen in that call."""
        self._attended[slot] += 1
        self._wanted.set()
        try:
            yield
        finally:
            self._attended -= Counter((slot,))
            if not self._is_stuck(slot):
                self._note_return(slot)

    @contextlib.contextmanager
    def attending_all(self, slots: Sequence[Patient]) -> Iterator[None]:
        """Watch slots that one thread works for, those too that have nothing to do: they would wait for it as well."""
        with contextlib.ExitStack() as stack:
            for slot in slots:
                stack.enter_context(self.attending(slot))
            yield

    def note_broken(self, slot: Patient) -> None:
        """Have a slot left alone from now on: it has no session."""
        self._stalled.pop(slot, None)
        self._report(slot.index, Ailment.BROKEN)

    async def run(self) -> None:
        """Watch until cancelled."""
        if not self._timeout:
            return
        while True:
            while not self._attended:  # who wanted it may have left again
                self._wanted = trio.Event()
                await self._wanted.wait()
            now = trio.current_time()
            await trio.sleep_until(min(self._look(slot, now) for slot in self._attended))

    def _look(self, slot: Patient, now: float) -> float:
        """Look at one slot and return when to look again."""
        call = slot.pulse.under_way
        if slot in self._stalled:
            if self._is_stuck(slot):
                return now + min(self._timeout, _RECHECK)
            self._note_return(slot)  # and at work again, maybe for another slot
        if call is None:
            return now + self._timeout
        if now < call.since + self._timeout:
            return call.since + self._timeout
        self._stalled[slot] = call.since
        fields = {**slot.names, "doing": call.doing, "seconds": round(now - call.since, 1)}
        logger.error("slot stalled: its thread does not come back", extra={"fields": fields})
        self._report(slot.index, Ailment.STALLED)
        slot.note_stall()
        return now + min(self._timeout, _RECHECK)

    def _is_stuck(self, slot: Patient) -> bool:
        """Whether the call is still under way that a slot was found stalled in."""
        call, since = slot.pulse.under_way, self._stalled.get(slot)
        return call is not None and since is not None and call.since <= since

    def _note_return(self, slot: Patient) -> None:
        since = self._stalled.pop(slot, None)
        if since is None:
            return
        fields = {**slot.names, "seconds": round(trio.current_time() - since, 1)}
        logger.warning("slot recovered: its thread came back", extra={"fields": fields})
        self._report(slot.index, None)
