"""Frozen records that status pages, logs and tests read alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """One consistent moment of a model's admission.

    Attributes:
        slots: how many requests may run side by side.
        active: slots that are leased.
        queued: requests that wait for a slot.
        waiting_managers: management operations that wait for the whole model.
        exclusive: a management operation holds the whole model.
    """

    slots: int
    active: int
    queued: int
    waiting_managers: int
    exclusive: bool


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What became of the work that was under way when the server was told to stop.

    Attributes:
        finished: requests that ran to their end during the drain.
        failed: requests that ended with an error of ours.
        cancelled: requests that were cut off, by their client or at the end of the drain.
        rejected: newcomers that were turned away.
        seconds: from the signal to the end of the last request.
        complete: nothing had to be cut off by the server.
    """

    finished: int
    failed: int
    cancelled: int
    rejected: int
    seconds: float
    complete: bool

    def __str__(self) -> str:
        how = "drained" if self.complete else "stopped before all work was done"
        return (
            f"{how} in {self.seconds:.1f} s: {self.finished} finished, {self.cancelled} cancelled, "
            f"{self.failed} failed, {self.rejected} rejected"
        )
