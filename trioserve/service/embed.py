"""Embeddings on their way: the vectors of a request's inputs, in the order of the inputs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from trioserve.engine.base import Embedded, StepEvent
from trioserve.errors import TrioserveError
from trioserve.scheduling.lifecycle import RequestEvent
from trioserve.service.answer import failure
from trioserve.service.begun import Begun


class Embedding:
    """Made by ``Service.embed``; gives its vectors once.

    Arguments:
        begun: the request, with a job.
    """

    def __init__(self, begun: Begun) -> None:
        assert begun.job is not None, "a request for vectors is honoured as a whole"
        self.model = begun.model
        self.prompt_tokens = sum(len(sequence.prompt) for sequence in begun.prepared.sequences.values())
        self._job = begun.job
        self._record = begun.record

    async def vectors(self) -> Sequence[array[float]]:
        """Wait for all vectors: of float32, of unit length, in the order of the inputs.

        Raises:
            EngineError: inference failed.
            ShuttingDownError: the drain ended before the last vector was there.
        """
        found: dict[int, array[float]] = {}
        inputs = len(self._job.works)
        try:
            while len(found) < inputs:
                for index, event in await self._job.next_events():
                    found[index] = _vector(event)
        except TrioserveError as error:
            self._record.fail(error)
            raise
        self._record.fields["inputs"] = inputs
        self._record.advance(RequestEvent.FINISHED)
        return [found[index] for index in range(inputs)]


def _vector(event: StepEvent) -> array[float]:
    if isinstance(event, Embedded):
        return event.vector
    raise failure(event)
