"""Where the slots of a pool work: the places of all of them, and what runs beside them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import trio

from trioserve.engine.base import Session
from trioserve.runtime.batch_sessions import BatchSessions
from trioserve.runtime.conductor import Conductor
from trioserve.runtime.place import Place
from trioserve.runtime.private_place import PrivatePlace
from trioserve.runtime.shared_place import SharedPlace
from trioserve.runtime.slot import Slot
from trioserve.runtime.solo import Solo
from trioserve.runtime.stall_watch import StallWatch


class Stage(Protocol):
    """The part of a pool that differs between the arrangements.

    Attributes:
        places: one for each slot, in order.
    """

    @property
    def places(self) -> Sequence[Place]:
        """See above."""
        ...

    @property
    def sessions(self) -> list[Session]:
        """Those that are there now, the primary first."""
        ...

    async def run(self, slots: Sequence[Slot], watch: StallWatch, *, task_status: trio.TaskStatus[None]) -> None:
        """Do what is to be done beside the slots, until cancelled.

        Arguments:
            slots: that work in the places.
            watch: looks after them.
            task_status: started when slots may be given jobs.
        """
        ...


class PrivateStage:
    """A session for each slot.

    Arguments:
        sessions: one for each slot.
        solos: likewise; work in them.
        batches: where batches get sessions of their own.
        model_id: for the log.
    """

    def __init__(
        self, sessions: Sequence[Session], solos: Sequence[Solo], batches: BatchSessions, model_id: str
    ) -> None:
        self._places = [
            PrivatePlace(session, solo, batches, {"model": model_id, "slot": index})
            for index, (session, solo) in enumerate(zip(sessions, solos, strict=True))
        ]

    @property
    def places(self) -> Sequence[Place]:
        """Each with its session."""
        return self._places

    @property
    def sessions(self) -> list[Session]:
        """One of each slot."""
        return [place.session for place in self._places]

    async def run(self, slots: Sequence[Slot], watch: StallWatch, *, task_status: trio.TaskStatus[None]) -> None:
        """Nothing is to be done beside the slots."""
        task_status.started()


class SharedStage:
    """One session for all slots.

    Arguments:
        conductor: steps it.
        solos: one for each slot; work in sessions of batches.
        batches: where batches get these.
    """

    def __init__(self, conductor: Conductor, solos: Sequence[Solo], batches: BatchSessions) -> None:
        self._conductor = conductor
        self.places: Sequence[Place] = [SharedPlace(conductor, solo, batches) for solo in solos]

    @property
    def sessions(self) -> list[Session]:
        """The one."""
        return [self._conductor.session]

    async def run(self, slots: Sequence[Slot], watch: StallWatch, *, task_status: trio.TaskStatus[None]) -> None:
        """Run the conductor, and tell of all slots, the idle ones too, when there is no session for them any more."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._conductor.run, partial(watch.attending_all, slots))
            task_status.started()
            await self._conductor.broke.wait()
            for slot in slots:
                watch.note_broken(slot)
