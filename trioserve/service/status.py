"""What every slot is doing, at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trioserve.runtime.model import ModelStatus
from trioserve.service.ledger import Record


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """One slot.

    Attributes:
        model: id of its model.
        slot: its number.
        state: ``idle``; ``busy``; ``clearing``, when its request has ended and its session is not clean yet;
            ``stalled``, when its thread does not come back; or ``broken``, when it has no session and can't get one.
        request_id: of the request that has it, or None.
        phase: of that request, or None.
        age: seconds for which the slot has been leased, or None.
        prompt_tokens, completion_tokens: of that request so far, or None.
    """

    model: str
    slot: int
    state: str
    request_id: str | None = None
    phase: str | None = None
    age: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


def slot_statuses(models: Iterable[ModelStatus], records: Iterable[Record], now: float) -> Sequence[SlotStatus]:
    """Lay the requests under way over the slots that are leased.

    Arguments:
        models: of one moment.
        records: of the same moment.
        now: that moment, in seconds on Trio's clock.
    """
    holders = {(record.model, record.slot): record for record in records if record.slot is not None}
    return [_slot(model, slot, holders.get((model.id, slot)), now) for model in models for slot in range(model.slots)]


def _slot(model: ModelStatus, slot: int, holder: Record | None, now: float) -> SlotStatus:
    since = model.leased.get(slot)
    ailment = model.ailments.get(slot)
    if since is None:
        return SlotStatus(model.id, slot, ailment or "idle")
    if holder is None:
        return SlotStatus(model.id, slot, ailment or "clearing", age=now - since)
    return SlotStatus(
        model=model.id,
        slot=slot,
        state=ailment or "busy",
        request_id=holder.request_id,
        phase=holder.phase.value,
        age=now - since,
        prompt_tokens=holder.prompt_tokens,
        completion_tokens=holder.completion_tokens,
    )
