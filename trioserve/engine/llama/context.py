"""One ``llama_context`` with the batch it is fed from and the flag that stops it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import Enum
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from trioserve.engine.base import Adapter, LoadFailure, SessionOptions, Task, UnfitOptions
from trioserve.engine.llama.adapters import Adapters
from trioserve.engine.llama.library import captured_errors, flag_reader

_KV_TYPES = {
    "f32": llama_cpp.GGML_TYPE_F32,
    "f16": llama_cpp.GGML_TYPE_F16,
    "bf16": 30,  # GGML_TYPE_BF16; the binding does not name it
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}
_POOLINGS = {
    "auto": llama_cpp.LLAMA_POOLING_TYPE_UNSPECIFIED,  # the model's own
    "mean": llama_cpp.LLAMA_POOLING_TYPE_MEAN,
    "cls": llama_cpp.LLAMA_POOLING_TYPE_CLS,
    "last": llama_cpp.LLAMA_POOLING_TYPE_LAST,
}
_FLASH_AUTO, _FLASH_OFF, _FLASH_ON = -1, 0, 1
_FULL, _ABORTED = 1, 2  # positive answers of llama_decode


class Outcome(Enum):
    """How a decode ended."""

    DONE = "done"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


class Batch:
    """The tokens of one decode, as numpy arrays that ``llama_batch`` points into.

    Arguments:
        capacity: tokens that fit.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._counts = np.ones(capacity, np.int32)
        self._sequences = np.zeros(capacity, np.int32)
        self._outputs = np.zeros(capacity, np.int8)
        item = self._sequences.itemsize
        # llama_batch wants a pointer to the sequence list of each token; ours point into one array, one entry each.
        self._pointers = self._sequences.ctypes.data + item * np.arange(capacity, dtype=np.uintp)
        self._struct = llama_cpp.llama_batch(
            n_tokens=0,
            token=_as(self._tokens, ctypes.c_int32),
            embd=None,
            pos=_as(self._positions, ctypes.c_int32),
            n_seq_id=_as(self._counts, ctypes.c_int32),
            seq_id=_as(self._pointers, ctypes.POINTER(ctypes.c_int32)),
            logits=_as(self._outputs, ctypes.c_int8),
        )

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return self.capacity - self.size

    @property
    def struct(self) -> Any:
        """The ``llama_batch`` over what was appended so far."""
        self._struct.n_tokens = self.size
        return self._struct

    def clear(self) -> None:
        """Start over."""
        self.size = 0

    def append(self, tokens: Sequence[int], position: int, sequence: int, *, output: bool) -> int:
        """Add consecutive tokens of one sequence.

        Arguments:
            tokens: token ids; they must fit into ``room``.
            position: of the first of them in its sequence.
            sequence: its number.
            output: compute logits after the last of them.

        Returns:
            The row of the last token, to ask ``Context.logits`` for.
        """
        start, end = self.size, self.size + len(tokens)
        last = end - 1
        self._outputs[last] = output
        if start == last:  # as in most steps, for each of the sequences
            self._tokens[last], self._positions[last], self._sequences[last] = tokens[0], position, sequence
        else:
            self._tokens[start:end] = tokens
            self._positions[start:end] = range(position, position + len(tokens))
            self._sequences[start:end] = sequence
            self._outputs[start:last] = 0
        self.size = end
        return last


class Context:
    """A private KV cache and compute buffers over shared weights.

    Arguments:
        model: a ``llama_model`` pointer that outlives this object.
        n_vocab: size of its vocabulary.
        options: sizes and types, and which adapters it uses.
        adapters: of that model.
        offloaded: whether layers run on another device than the CPU.

    Attributes:
        divisible: whether a part of a sequence's memory can be kept or copied, and not only the whole.

    Raises:
        UnfitOptions: the model can't continue a text, or an adapter can't be used.
        LoadFailure: llama.cpp could not allocate it.
    """

    def __init__(
        self, model: Any, n_vocab: int, options: SessionOptions, adapters: Adapters, *, offloaded: bool
    ) -> None:
        self._adapters = adapters
        self._adapters_held: Sequence[Adapter] = ()
        self._flag = ctypes.create_string_buffer(b"\x00\x00", 2)
        self._read_flag = flag_reader()
        with adapters.lock, captured_errors() as errors:
            self._ctx = llama_cpp.llama_init_from_model(model, _parameters(options, offloaded=offloaded))
        if not self._ctx:
            raise LoadFailure("; ".join(errors[-2:]) or "the context could not be allocated")
        self._memory = llama_cpp.llama_get_memory(self._ctx)
        is_encoder = not self._memory or bool(llama_cpp.llama_model_has_encoder(model))
        if is_encoder and options.task is not Task.EMBED:
            # llama_decode would abort the process at the first token that has no place in one micro-batch.
            self.close()
            raise UnfitOptions('the model turns text into vectors and continues none: give it task = "embed"', "task")
        self._evaluate = llama_cpp.llama_encode if is_encoder else llama_cpp.llama_decode
        llama_cpp.llama_set_abort_callback(self._ctx, self._read_flag, ctypes.cast(self._flag, ctypes.c_void_p))
        self._window: int = llama_cpp.llama_model_n_swa(model)
        # A state is of all tokens so far, and has no parts.
        self.divisible = not (llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model))
        self._threads = 0
        self.errors: list[str] = []
        self._row_type = ctypes.c_float * n_vocab
        self._vector_type = ctypes.c_float * llama_cpp.llama_model_n_embd_out(model)
        try:
            adapters.apply(self._ctx, options.adapters, self._plan)
            self._adapters_held = options.adapters
        except BaseException:
            self.close()
            raise

    @property
    def pointer(self) -> Any:
        """The ``llama_context`` pointer."""
        return self._ctx

    @property
    def interrupted(self) -> bool:
        """Whether the abort flag is up."""
        return self._flag.raw[0] != 0

    def interrupt(self) -> None:
        """Raise the abort flag. Any thread, any time, no waiting."""
        self._flag[0] = 1  # type: ignore[call-overload]

    def decode(self, batch: Batch, threads: int) -> Outcome:
        """Evaluate a batch with so many CPU threads."""
        if threads != self._threads:
            llama_cpp.llama_set_n_threads(self._ctx, threads, threads)
            self._threads = threads
        with captured_errors() as self.errors:
            code = self._evaluate(self._ctx, batch.struct)
        if code == 0:
            return Outcome.DONE
        return Outcome.INTERRUPTED if code == _ABORTED or self.interrupted else Outcome.FAILED

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """The logits after a row of the last batch: ``[n_vocab]``, a view that the next decode overwrites."""
        return _view(llama_cpp.llama_get_logits_ith(self._ctx, row), self._row_type, f"row {row} of the batch")

    def likeliest(
        self, outputs: int, which: Sequence[int], bans: Sequence[npt.NDArray[np.intp] | None]
    ) -> list[int | None]:
        """The likeliest token after each of some rows of the last batch; None where all are banned.

        Arguments:
            outputs: how many rows of it have logits.
            which: of these, counted in their order in the batch.
            bans: tokens that are not to come, for each of those.
        """
        pointer = llama_cpp.llama_get_logits(self._ctx)
        table = _view(pointer, self._row_type * outputs, "the batch").reshape(outputs, -1)
        for row, banned in zip(which, bans, strict=True):
            if banned is not None:
                table[row, banned] = -np.inf
        # All at one stroke: between two calls of numpy the interpreter may be somebody else's for a while.
        best = table.argmax(axis=1) if len(which) == outputs else [table[row].argmax() for row in which]
        return [None if table[row, token] == -np.inf else int(token) for row, token in zip(which, best, strict=True)]

    def vector(self, sequence: int) -> npt.NDArray[np.float32]:
        """The pooled vector of a sequence of the last batch: ``[n_embd]``, a view that the next decode overwrites."""
        return _view(llama_cpp.llama_get_embeddings_seq(self._ctx, sequence), self._vector_type, f"sequence {sequence}")

    def truncate(self, sequence: int, tokens: int) -> bool:
        """Free the memory of one sequence from some token on.

        Arguments:
            sequence: which one.
            tokens: how many of its tokens stay.

        Returns:
            False where not all of these tokens are there any more: then all of the sequence was freed. Some models
            can't forget a part of one, others keep no more of it than their window of attention.
        """
        if llama_cpp.llama_memory_seq_rm(self._memory, sequence, tokens, -1) and self._has(sequence, tokens):
            return True
        if not llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1):
            raise RuntimeError(f"sequence {sequence} could not be removed from the context's memory")
        return False

    def copy(self, source: int, target: int, tokens: int) -> bool:
        """Give one sequence the memory of another's first tokens, in place of its own.

        llama.cpp notes what is to be copied, and does so before it evaluates the next batch.

        Arguments:
            source: whose it is.
            target: who gets it.
            tokens: how many of its tokens.

        Returns:
            False where the model's memory can't be had in part: then all of the target's is freed.
        """
        llama_cpp.llama_memory_seq_rm(self._memory, target, -1, -1)
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        return self.truncate(target, tokens)

    def _has(self, sequence: int, tokens: int) -> bool:
        """Whether a sequence's memory holds all that its next token will look at."""
        if not tokens:
            return True
        first = llama_cpp.llama_memory_seq_pos_min(self._memory, sequence)
        return bool(first == 0 or 0 <= first < tokens - self._window)

    def lower(self) -> None:
        """Lower the abort flag."""
        self._flag[0] = 0  # type: ignore[call-overload]

    def forget_all(self) -> None:
        """Free the memory of all sequences."""
        if self._memory:
            llama_cpp.llama_memory_clear(self._memory, False)

    def reset(self) -> None:
        """Free all memory and lower the abort flag."""
        self.forget_all()
        self.lower()

    def length(self, sequence: int) -> int:
        """How many tokens of a sequence are in the memory."""
        if not self._memory:
            return 0
        last: int = llama_cpp.llama_memory_seq_pos_max(self._memory, sequence)  # -1 for none
        return last + 1

    def close(self) -> None:
        """Free the context. Idempotent."""
        if self._ctx:
            ctx, self._ctx = self._ctx, None
            llama_cpp.llama_free(ctx)
            self._adapters.let_go(self._adapters_held)

    def _plan(self) -> None:
        """Have llama.cpp plan its graphs, as it otherwise does before it computes the next token.

        With the abort flag up it comes to that and, on a CPU, no further.
        """
        batch = Batch(1)
        batch.append([0], 0, 0, output=True)
        self.interrupt()
        self._evaluate(self._ctx, batch.struct)
        self.reset()


def _parameters(options: SessionOptions, *, offloaded: bool) -> Any:
    params = llama_cpp.llama_context_default_params()
    params.n_seq_max = options.max_sequences
    if options.task is Task.EMBED:
        # A pooled vector is made of one micro-batch, and so is attention to what follows: a text goes in whole.
        # llama.cpp plans micro-batches of equal sequences, and aborts the process where they don't come out even.
        even = -(-options.n_ctx // options.max_sequences) * options.max_sequences
        params.n_ctx = params.n_batch = params.n_ubatch = even
        params.kv_unified = True
        params.embeddings = True
        params.pooling_type = _POOLINGS[options.pooling]
    else:
        params.n_ctx = options.n_ctx * options.max_sequences
        params.n_batch = max(options.n_batch, 2 * options.max_sequences)  # as in a core's batch
        params.n_ubatch = min(options.n_ubatch, params.n_batch)
        params.kv_unified = False
        # One row of logits per sequence is all that is ever asked for; the default reserves one for every token.
        params.n_outputs_max = options.output_rows
    # A cache of the whole context also for layers that look no further back than a window: only then can a sequence go
    # on from any of its tokens, and only then does the estimate of its size hold.
    params.swa_full = True
    params.type_k = params.type_v = _KV_TYPES[options.kv_dtype]
    params.flash_attn_type = _flash_attention(options, offloaded=offloaded)
    # A GPU that was given no layers would still evaluate prompts of 32 tokens and more, with roundings of its own: an
    # answer would depend on how its prompt was cut up. It would also take some hundred megabytes for that.
    params.op_offload = offloaded
    params.no_perf = True
    return params


def _view(pointer: Any, kind: Any, owner: str) -> npt.NDArray[np.float32]:
    """The floats of a type of ctypes array at an address of llama.cpp's."""
    if not pointer:
        raise RuntimeError(f"{owner} has no numbers")
    # Not by a cast of the pointer, which would leave garbage in a circle behind, with each token.
    address = ctypes.addressof(pointer.contents)
    view: npt.NDArray[np.float32] = np.ctypeslib.as_array(kind.from_address(address))
    return view


def _flash_attention(options: SessionOptions, *, offloaded: bool) -> int:
    """Choose flash attention where the operator left it open.

    On the CPU it makes the logits depend on the number of threads and on how a prompt was cut into chunks; without it
    they are the same bits either way, so an answer can't depend on the load. A quantised V cache can't do without it.
    """
    if options.flash_attention is not None:
        return _FLASH_ON if options.flash_attention else _FLASH_OFF
    quantised = options.kv_dtype.startswith("q")
    return _FLASH_AUTO if offloaded or quantised else _FLASH_OFF


def _as(array: npt.NDArray[Any], kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
