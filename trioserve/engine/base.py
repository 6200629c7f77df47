"""The engine's ports: what the rest of the house asks of it, and what comes back.

An ``Engine`` loads ``Weights``; weights open ``Session`` s; a session works sequences step by step. Everything here
blocks and is called in worker threads, except ``Session.interrupt``, which may be called from any thread at any time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from trioserve.engine.prefix import Kept
from trioserve.engine.sampling import Sampling

MAX_SLOTS = 16

Progress = Callable[[float], bool]
"""Told how much of a file is loaded, from 0 to 1, in the loading thread. Answering False gives the load up."""


class Task(StrEnum):
    """What a session is made for."""

    GENERATE = "generate"
    EMBED = "embed"


class Mode(StrEnum):
    """How a session can be worked."""

    OFFLINE = "offline"
    STREAMING = "streaming"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Traits:
    """What all sessions of a pool have in common.

    Attributes:
        family: the engine's name of the model's architecture.
        task: what they are made for.
        modes: how they can be worked.
    """

    family: str
    task: Task
    modes: frozenset[Mode]


class FinishReason(StrEnum):
    """Why a sequence ended by itself."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What, beside the file, makes loaded weights what they are. Equal options on one file share the weights.

    Attributes:
        gpu_layers: layers to offload; -1 is all.
        mmap: map the file instead of reading it.
        mlock: keep the weights in memory.
    """

    gpu_layers: int = 0
    mmap: bool = True
    mlock: bool = False


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter, and how strongly it works.

    Attributes:
        path: of its GGUF file.
        scale: by which its part in the model's numbers is multiplied; with 0 it has none.
    """

    path: Path
    scale: float = 1.0


_ROWS_OF_A_LINE = 16


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a session is made.

    Attributes:
        task: what it is made for.
        n_ctx: tokens of context for each sequence.
        n_batch: tokens that one step may evaluate.
        n_ubatch: tokens that the backend evaluates at once.
        max_sequences: sequences that may live side by side in the session.
        prefill_chunk: tokens of prompts that one step evaluates beside other sequences' next tokens; 0 lets the engine
            choose.
        kv_dtype: element type of the KV cache.
        flash_attention: None lets the engine choose what keeps answers independent of the load.
        pooling: what makes one vector of a text's many: ``mean``, ``cls`` (the first), ``last``; or ``auto``, the
            model's own way, and the mean where it has none.
        adapters: what the session adds to the weights, which stay as they are for all others; each file once.
        threads: the most that a step will have: long pieces of prompts are for many of them.
    """

    task: Task = Task.GENERATE
    n_ctx: int = 4096
    n_batch: int = 2048
    n_ubatch: int = 512
    max_sequences: int = 1
    prefill_chunk: int = 0
    kv_dtype: str = "f16"
    flash_attention: bool | None = None
    pooling: str = "auto"
    adapters: tuple[Adapter, ...] = ()
    threads: int = 1

    @property
    def output_rows(self) -> int:
        """Rows of logits that a step may have: one for each sequence, in whole cache lines.

        llama.cpp lays their numbers, of four bytes each, out before what it computes with, at multiples of 32 bytes.
        After fewer of them all that would lie across the lines of 64, and prompts took up to 1.7 times as long.
        """
        return -(-self.max_sequences // _ROWS_OF_A_LINE) * _ROWS_OF_A_LINE


class ConstraintKind(StrEnum):
    """In which language a constraint is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    GBNF = "gbnf"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer has to look like.

    Attributes:
        kind: the language.
        source: a JSON Schema as JSON; a regular expression for the whole answer, without look-around and
            back-references; a Lark grammar with a rule ``start``; or a GBNF grammar with a rule ``root``.
        trigger: a text after which it holds, up to its end and as often as the answer says that; without one it holds
            for the whole answer.
    """

    kind: ConstraintKind
    source: str
    trigger: str = ""


class ConstraintError(ValueError):
    """A constraint is wrong, or can't be followed. ``str()`` says why, naming what it is about."""


class GapTokens(NamedTuple):
    """The tokens with which a model is asked to fill a gap in a text: they begin the prefix, the suffix, the answer."""

    prefix: int
    suffix: int
    middle: int


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One prompt to be continued.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: how many tokens may follow, at least one; the context's end comes first where it is nearer.
        sampling: how tokens are chosen.
        stops: strings that end the text and never appear in it.
        ignore_eos: go on after an end-of-generation token.
        logprobs: how many of the most likely tokens to report with each token; None reports nothing.
        constraint: what the answer has to look like; checked by ``Weights.check_constraint``.
        reuse: begin with what the session has kept of an earlier sequence, where that began in the same way.
        share: begin with what a sequence at work in the same session has evaluated, where that begins in the same way.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    constraint: Constraint | None = None
    reuse: bool = True
    share: bool = True


@dataclass(frozen=True, slots=True)
class EmbeddingInput:
    """One text to be turned into a vector.

    Attributes:
        prompt: token ids, at least one, at most the session's ``n_ctx``.
        dimensions: keep so many of the vector's numbers, from its beginning; None is all of them.
    """

    prompt: Sequence[int]
    dimensions: int | None = None


Work = SequenceRequest | EmbeddingInput
"""What a session takes in: the one or the other, as its task is."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was.

    Attributes:
        token: its id.
        piece: its bytes, which need not be whole characters.
        logprob: natural logarithm of the probability that the model gave it, before any sampling parameter.
    """

    token: int
    piece: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How likely a token was, and the most likely ones at its place, those first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """A sequence has grown by one token.

    Attributes:
        sequence: which one.
        token: its id in the vocabulary.
        text: what may be sent now: none while a character or a possible stop string is incomplete.
        likelihood: where it was asked for.
    """

    sequence: int
    token: int
    text: str
    likelihood: Likelihood | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence has ended by itself.

    Attributes:
        sequence: which one.
        reason: why.
        text: what was still held back.
        cached: tokens of its prompt that were there already, of an earlier sequence or one at work beside it.
        stop: the stop string that ended it, where one did.
    """

    sequence: int
    reason: FinishReason
    text: str = ""
    cached: int = 0
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence could not go on.

    Attributes:
        sequence: which one.
        message: why, for the log.
        unanswerable: it is the request that leaves no answer, and ``message`` is for the client too.
        alone: the step was good, and the other sequences go on.
    """

    sequence: int
    message: str
    unanswerable: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Embedded:
    """A text has become a vector of unit length, and its sequence has ended.

    Attributes:
        sequence: which one.
        vector: of float32.
    """

    sequence: int
    vector: array[float]


StepEvent = Token | Finished | Failed | Embedded

ENDINGS = (Finished, Failed, Embedded)
"""The events after which nothing follows for a sequence."""


class LoadFailure(Exception):
    """The engine could not make weights or a session. ``str()`` says why, in its own words."""


class UnusableFile(LoadFailure):
    """The model's file is at fault: it is damaged, or of a kind that can't be served. Trying again won't help."""


class UnfitOptions(LoadFailure):
    """The weights are sound, but no session over them can be what was asked for. ``str()`` says what to ask for.

    Arguments:
        message: see above.
        option: which one is at fault.
    """

    def __init__(self, message: str, option: str) -> None:
        super().__init__(message)
        self.option = option


class Session(Protocol):
    """Everything mutable about one execution. Worked by one thread at a time.

    Attributes:
        traits: what it has in common with the other sessions of its pool.
        n_ctx: tokens of context for each sequence.
        max_sequences: sequences that may live side by side.
    """

    traits: Traits
    n_ctx: int
    max_sequences: int

    def add(self, work: Work) -> int:
        """Take a sequence in and return its number, unique among those that were not removed.

        Raises:
            ValueError: it is of another task, empty, or too long for the context.
            RuntimeError: as many sequences live as can.
        """
        ...

    def step(self, threads: int, held: Collection[int] = ()) -> Sequence[StepEvent]:
        """Evaluate one batch with everything the live sequences have to offer, and sample where a row is complete.

        Arguments:
            threads: CPU threads to use.
            held: sequences that have to wait: they take no part in this step.

        Returns:
            What happened, in order. Empty while a prompt is still being evaluated, or when ``interrupt`` cut the step.
        """
        ...

    @property
    def history(self) -> Kept:
        """Tokens of earlier sequences that the next one may begin with at no cost. Only while no thread is inside."""
        ...

    def remove(self, sequence: int) -> None:
        """End a sequence, or let go of one that has ended; its place is free for the next one."""
        ...

    def resume(self) -> None:
        """Lower the interrupt flag and have the live sequences go on from their last good step."""
        ...

    def reset(self) -> None:
        """End all sequences and lower the interrupt flag."""
        ...

    def clear(self) -> None:
        """Forget everything and lower the interrupt flag: as good as new."""
        ...

    def is_sound(self, live: int = 0) -> bool:
        """Tell what has to be true after ``reset``, and after ``remove`` where nobody has interrupted.

        The interrupt flag is down, and the memory holds what the live sequences have evaluated and what the session
        says that it has kept of earlier ones, and nothing else.

        Arguments:
            live: how many sequences have to be live.
        """
        ...

    def interrupt(self) -> None:
        """Make a running ``step`` return soon, and later ones at once, until ``reset``. Thread-safe, never waits."""
        ...

    def close(self) -> None:
        """Free the session. No thread may be inside it. Idempotent."""
        ...


class Weights(Protocol):
    """One model's read-only part, shared by all its sessions.

    Attributes:
        name: a human's name of the model.
        n_ctx_train: context length it was trained for, in tokens.
        size: bytes of its tensors.
        chat_template: Jinja source from the file, or None.
        bos_text, eos_text: the special tokens as text, for the template.
        bos: id of the beginning-of-sequence token, or None.
        n_embd: numbers in a vector that it makes of a text.
        gap: its tokens for filling gaps; None where it has not all of them.
        max_sessions: how many sessions may exist at once.
        longest_piece: bytes of the longest token, at least 1.
        offloads: whether layers of it run on another device than the CPU.
        rows_alike: whether sequences that are evaluated together have the bits that each has alone.
    """

    name: str
    n_ctx_train: int
    offloads: bool
    rows_alike: bool
    size: int
    chat_template: str | None
    bos_text: str
    eos_text: str
    bos: int | None
    vocab_size: int
    n_embd: int
    gap: GapTokens | None
    max_sessions: int

    @property
    def longest_piece(self) -> int:
        """See above; computed at its first use."""
        ...

    def tokenize(self, text: str, *, special: bool, add_bos: bool) -> list[int]:
        """Turn text into token ids.

        Arguments:
            text: any text without lone surrogates.
            special: read the text of special tokens as those tokens, as a rendered template needs.
            add_bos: put the model's beginning-of-sequence token first, where the model wants one.
        """
        ...

    def piece(self, token: int) -> bytes:
        """The bytes of a token, which need not be whole characters; those of special tokens too."""
        ...

    def check_constraint(self, constraint: Constraint) -> None:
        """See that answers can be held to a constraint. May take a second.

        Raises:
            ConstraintError: they can't.
        """
        ...

    def open_session(self, options: SessionOptions) -> Session:
        """Make a session.

        Raises:
            UnfitOptions: the model can't do what the options ask for.
            LoadFailure: it could not be made.
        """
        ...

    def close(self) -> None:
        """Free the weights. No session may be left. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of memory.

    Attributes:
        host: of the computer's own.
        device: of the GPUs' together.
    """

    host: int = 0
    device: int = 0

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(self.host + other.host, self.device + other.device)

    def __sub__(self, other: Footprint) -> Footprint:
        return Footprint(self.host - other.host, self.device - other.device)

    def exceeds(self, other: Footprint) -> bool:
        """Whether it is more of either kind."""
        return self.host > other.host or self.device > other.device


class ModelFile(Protocol):
    """What a file says about itself before it is loaded.

    Attributes:
        architecture: the engine's name of the model family.
        n_ctx_train: context length the model was trained for, in tokens; 0 where it doesn't say.
        offloads: whether there is another device than the CPU for layers that are to be offloaded.
        size: bytes of its tensors.
        rows_alike: whether, on the CPU, sequences that are evaluated together have the bits that each has alone.
    """

    architecture: str
    n_ctx_train: int
    offloads: bool
    size: int
    rows_alike: bool

    def memory(self, options: SessionOptions, slots: int, gpu_layers: int = 0) -> Footprint:
        """Estimate what so many sessions take, weights and adapters included.

        Arguments:
            options: of each session; their adapters are some that the file was inspected with.
            slots: how many sessions.
            gpu_layers: layers to offload; -1 is all.
        """
        ...


class Engine(Protocol):
    """Where weights come from."""

    def free_device_memory(self) -> int | None:
        """Bytes that are free on the GPUs together; None where there is none, or that can't be told."""
        ...

    def inspect(self, path: Path, adapters: Sequence[Path] = ()) -> ModelFile:
        """Read a file's header, and those of LoRA adapters for it; nothing is loaded.

        Raises:
            UnusableFile: the file is no GGUF, damaged, truncated, or would end the process.
            UnfitOptions: the same of an adapter, or it is for another model; the option is ``lora``.
        """
        ...

    def load(self, path: Path, options: LoadOptions, progress: Progress | None = None) -> Weights:
        """Load a GGUF file.

        Raises:
            UnusableFile: the file is damaged, or of an architecture that can't be served.
            LoadFailure: it could not be loaded now, for want of memory for example.
        """
        ...
