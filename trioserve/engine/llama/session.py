"""A session: one private context and the decode core that works it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from trioserve.engine.base import Mode, SequenceRequest, SessionOptions, StepEvent, Task, Traits, Work
from trioserve.engine.llama.adapters import Adapters
from trioserve.engine.llama.constraint import Constraints
from trioserve.engine.llama.context import Context
from trioserve.engine.llama.core import DecodeCore
from trioserve.engine.llama.vocabulary import Vocabulary
from trioserve.engine.prefix import Kept

_MODES = frozenset({Mode.OFFLINE, Mode.STREAMING, Mode.BATCH})

CPU_CHUNK = 128
"""Tokens of a prompt that one step evaluates on a CPU. A step that has begun keeps its threads, so short steps follow
the load; larger ones were no faster (SmolLM2-135M: the same from 32 to 512 on two cores)."""


CPU_BESIDE = 64
"""The same for a step that other sequences' next tokens are in, which wait for it. With 32 prompts took a fifth longer
than with 128 (SmolLM2-135M, four sequences, two cores), with 64 a tenth."""


CPU_SHARE = 16
"""Tokens that there are at least for each thread: threads meet after each operation. On 16 cores steps of 256 were the
best ones for a prompt alone; with 512, four of them side by side, with 4 threads each, took a quarter longer."""


CPU_EXTRA = 8
"""Tokens that may be evaluated for nothing to have one prompt's piece as long as another's, on a CPU. There it changes
little (1.2B in Q8_0, 16 cores); but prompts that differ by less than their cuts allow need not wait for each other."""


GPU_EXTRA = 32
"""The same on a GPU, where each length takes milliseconds for itself: first tokens came in 0.8 to 0.9 of the time, and
with 96 no sooner (H200, 8B in Q8_0, prompts of 80 to 140 tokens)."""


GPU_BRIDGE = 8
"""Rows that may be evaluated for nothing to close a gap, on a GPU (H200, 8B in Q8_0: each row of the first eight takes
half a millisecond and the later ones nothing, and each run of rows four)."""


class LlamaSession:
    """``engine.base.Session`` over llama.cpp.

    Arguments:
        model: a ``llama_model`` pointer that outlives the session.
        vocabulary: of that model.
        constraints: of that model.
        family: of that model.
        options: sizes and types.
        adapters: of that model.
        offloaded: whether layers run on another device than the CPU.
        wholly: whether all of them do, and the output too.
        grain: tokens whose multiples prompts are cut at; see ``prefix.cut``.
    """

    def __init__(
        self,
        model: Any,
        vocabulary: Vocabulary,
        constraints: Constraints,
        family: str,
        options: SessionOptions,
        adapters: Adapters,
        *,
        offloaded: bool,
        wholly: bool,
        grain: int,
    ) -> None:
        self.traits = Traits(family, Task.GENERATE, _MODES)
        self.n_ctx = options.n_ctx
        self.max_sequences = options.max_sequences
        self._context = Context(model, vocabulary.size, options, adapters, offloaded=offloaded)
        chunk, beside = pieces(options, offloaded=offloaded)
        self._core = DecodeCore(
            self._context,
            vocabulary,
            constraints,
            n_ctx=options.n_ctx,
            n_batch=options.n_batch,
            chunk=chunk,
            beside=beside,
            max_sequences=options.max_sequences,
            grain=grain,
            apart=not offloaded,
            on_device=wholly,
            bridge=GPU_BRIDGE if offloaded else 0,
            most_extra=GPU_EXTRA if offloaded else CPU_EXTRA,
        )

    def add(self, work: Work) -> int:
        """Take a sequence in and return its number."""
        if not isinstance(work, SequenceRequest):
            raise ValueError(f"a session that generates takes no {type(work).__name__}")
        return self._core.add(work)

    def step(self, threads: int, held: Collection[int] = ()) -> Sequence[StepEvent]:
        """Evaluate one batch."""
        return self._core.step(threads, held)

    def remove(self, sequence: int) -> None:
        """End a sequence."""
        self._core.remove(sequence)

    @property
    def history(self) -> Kept:
        """What the next sequence may begin with at no cost."""
        return self._core.history

    def resume(self) -> None:
        """Lower the interrupt flag; the live sequences go on."""
        self._core.resume()

    def reset(self) -> None:
        """End all sequences and lower the interrupt flag."""
        self._core.end_all()

    def clear(self) -> None:
        """Forget everything and lower the interrupt flag."""
        self._core.clear()

    def is_sound(self, live: int = 0) -> bool:
        """Tell whether nothing is left of earlier work but what is kept on purpose."""
        return self._core.is_sound(live)

    def interrupt(self) -> None:
        """Stop a running step, from any thread."""
        self._context.interrupt()

    def close(self) -> None:
        """Free the context and what its sequences hold."""
        self._core.close()


def pieces(options: SessionOptions, *, offloaded: bool) -> tuple[int, int]:
    """Find how many tokens of prompts a step evaluates.

    Arguments:
        options: of the session.
        offloaded: whether layers run on another device than the CPU.

    Returns:
        The number for a step that nothing else is in, and the one for a step that others' next tokens wait for.
    """
    most = min(options.n_ubatch, options.n_batch)
    if offloaded:
        return most, min(most, options.prefill_chunk or most)
    least = CPU_SHARE * options.threads
    beside = options.prefill_chunk or max(CPU_BESIDE, least)
    return min(most, max(CPU_CHUNK, least, beside)), min(most, beside)
