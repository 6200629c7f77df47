"""A session that turns texts into vectors: whole texts side by side in a context that forgets them after each step."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trioserve.engine.base import Embedded, EmbeddingInput, Failed, Mode, SessionOptions, StepEvent, Task, Traits, Work
from trioserve.engine.llama.adapters import Adapters
from trioserve.engine.llama.context import Batch, Context, Outcome
from trioserve.engine.prefix import Kept

_MODES = frozenset({Mode.OFFLINE, Mode.BATCH})


class EmbeddingSession:
    """``engine.base.Session`` for embeddings, over llama.cpp.

    Arguments:
        model: a ``llama_model`` pointer that outlives the session.
        n_vocab: size of its vocabulary.
        family: of that model.
        options: sizes and types. A step takes texts of ``n_batch`` tokens together, or a longer one alone.
        adapters: of that model.
        offloaded: whether layers run on another device than the CPU.
    """

    def __init__(
        self,
        model: Any,
        n_vocab: int,
        family: str,
        options: SessionOptions,
        adapters: Adapters,
        *,
        offloaded: bool,
    ) -> None:
        self.traits = Traits(family, Task.EMBED, _MODES)
        self.n_ctx = options.n_ctx
        self.max_sequences = options.max_sequences
        self._context = Context(model, n_vocab, options, adapters, offloaded=offloaded)
        self._pack = min(options.n_batch, options.n_ctx)
        self._batch = Batch(options.n_ctx)
        self._waiting: dict[int, EmbeddingInput] = {}
        self._free = list(range(options.max_sequences - 1, -1, -1))

    def add(self, work: Work) -> int:
        """Take a text in and return its number."""
        if not isinstance(work, EmbeddingInput):
            raise ValueError(f"a session that embeds takes no {type(work).__name__}")
        if not 1 <= len(work.prompt) <= self.n_ctx:
            raise ValueError(f"a text of {len(work.prompt)} tokens does not fit into {self.n_ctx}")
        if not self._free:
            raise RuntimeError(f"all {self.max_sequences} sequences of the context are taken")
        number = self._free.pop()
        self._waiting[number] = work
        return number

    @property
    def history(self) -> Kept:
        """Nothing is kept for later texts."""
        return Kept()

    def step(self, threads: int, held: Collection[int] = ()) -> Sequence[StepEvent]:
        """Evaluate as many of the waiting texts as fit together, the oldest in any case."""
        if self._context.interrupted:
            return []
        numbers = self._fill(held)
        if not numbers:
            return []
        outcome = self._context.decode(self._batch, threads)
        if outcome is Outcome.INTERRUPTED:
            return []
        works = {number: self._waiting.pop(number) for number in numbers}
        if outcome is Outcome.FAILED:
            reason = "; ".join(self._context.errors[-2:]) or "llama.cpp gave no reason"
            events: list[StepEvent] = [Failed(number, reason) for number in works]
        else:
            events = [self._embedded(number, work) for number, work in works.items()]
        self._context.forget_all()
        return events

    def remove(self, sequence: int) -> None:
        """Forget a text."""
        self._waiting.pop(sequence, None)
        self._free.append(sequence)

    def resume(self) -> None:
        """Lower the interrupt flag; texts that wait are still to come."""
        self._context.reset()

    def reset(self) -> None:
        """Forget all texts and lower the interrupt flag."""
        self._waiting.clear()
        self._free = list(range(self.max_sequences - 1, -1, -1))
        self._context.reset()

    def clear(self) -> None:
        """The same: nothing is kept between steps."""
        self.reset()

    def is_sound(self, live: int = 0) -> bool:
        """Tell whether so many texts are left, none has anything in the memory, and the interrupt flag is down."""
        if len(self._free) + live != self.max_sequences or self._context.interrupted:
            return False
        return not any(self._context.length(number) for number in range(self.max_sequences))

    def interrupt(self) -> None:
        """Stop a running step, from any thread."""
        self._context.interrupt()

    def close(self) -> None:
        """Free the context."""
        self._context.close()

    def _fill(self, held: Collection[int]) -> list[int]:
        """Put whole texts into the batch, in order; shorter ones fill the room that a longer one can't have."""
        self._batch.clear()
        numbers: list[int] = []
        for number, work in self._waiting.items():
            if number not in held and (not numbers or self._batch.size + len(work.prompt) <= self._pack):
                self._batch.append(work.prompt, 0, number, output=True)
                numbers.append(number)
        return numbers

    def _embedded(self, number: int, work: EmbeddingInput) -> StepEvent:
        vector = self._context.vector(number)[: work.dimensions].astype(np.float64)
        length = float(np.linalg.norm(vector))
        if not 0 < length < np.inf:
            return Failed(number, f"a vector of length {length} has no direction")
        return Embedded(number, _as_array(vector / length))


def _as_array(vector: npt.NDArray[np.float64]) -> array[float]:
    """A vector as float32, in the type that may leave this room."""
    return array("f", vector.astype(np.float32).tobytes())
