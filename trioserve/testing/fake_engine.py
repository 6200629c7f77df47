"""``engine.base`` without a model: bytes are tokens, answers depend on the prompt alone, all can be held or fail."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from array import array
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from trioserve.engine.base import (
    MAX_SLOTS,
    Constraint,
    ConstraintError,
    Embedded,
    EmbeddingInput,
    Failed,
    Finished,
    FinishReason,
    Footprint,
    GapTokens,
    LoadFailure,
    LoadOptions,
    Mode,
    Progress,
    SequenceRequest,
    SessionOptions,
    StepEvent,
    Task,
    Token,
    Traits,
    UnfitOptions,
    Work,
)
from trioserve.engine.prefix import Kept
from trioserve.engine.text import TextAssembler
from trioserve.testing.gate import ThreadGate

VOCAB_SIZE = 257
END = 256
DIMENSIONS = 32


def fake_answer(prompt: bytes, tokens: int) -> str:
    """What a fake session answers to a prompt when nothing stops it: as many letters as tokens were allowed."""
    letters = hashlib.sha256(prompt).hexdigest()
    return (letters * (tokens // len(letters) + 1))[:tokens]


def fake_vector(prompt: Sequence[int], dimensions: int | None = None) -> array[float]:
    """The vector of unit length that a fake session makes of a prompt, or the beginning of it at unit length."""
    numbers = [byte - 127.5 for byte in hashlib.sha256(str(list(prompt)).encode()).digest()][:dimensions]
    length = math.hypot(*numbers)
    return array("f", [number / length for number in numbers])


class FakeEngine:
    """Loads fake weights.

    Attributes:
        load_gate: passed by every load.
        session_gate: passed by every making of a session.
        step_gate: passed by every step of every session.
        close_gate: passed by every closing of a session.
        failing_loads: how many of the next loads fail.
        failing_session: index of the session whose making fails, or None.
        failing_sessions: how many times that one fails.
        failing_step: number of the step, of any sequence, that fails, or None.
        raising_step: number of the step, of any sequence, that raises, or None.
        failing_proofs: how many of the next looks at a session after a reset find it unsound.
        step_seconds: how long each step takes beside that.
        deaf: whether a step that waits at the gate ignores an interrupt.
        refused: name of a file that is refused when it is inspected, or None.
        device_memory: bytes that are free on the GPU; None where there is none.
        gap: tokens with which its models fill gaps; None where they don't.
        closed: names of what was closed, in order.

    Arguments:
        max_sessions: how many sessions may exist at once.
        answer_tokens: after so many letters the model ends each answer by itself; None never does.
        answer_text: in ASCII, what every answer is; the model ends it by itself. None makes it from the prompt.
    """

    def __init__(
        self, *, max_sessions: int = MAX_SLOTS, answer_tokens: int | None = None, answer_text: str | None = None
    ) -> None:
        self.load_gate = ThreadGate()
        self.session_gate = ThreadGate()
        self.step_gate = ThreadGate()
        self.close_gate = ThreadGate()
        self.failing_loads = 0
        self.failing_session: int | None = None
        self.failing_sessions = 1
        self.failing_step: int | None = None
        self.raising_step: int | None = None
        self.failing_proofs = 0
        self.step_seconds = 0.0
        self.deaf = False
        self.refused: str | None = None
        self.device_memory: int | None = None
        self.gap: GapTokens | None = None
        self.closed: list[str] = []
        self.loads = 0
        self.max_sessions = max_sessions
        self.answer_tokens = answer_tokens if answer_text is None else len(answer_text)
        self.answer_text = answer_text

    def free_device_memory(self) -> int | None:
        """Free memory of a GPU, as the test says."""
        return self.device_memory

    def inspect(self, path: Path, adapters: Sequence[Path] = ()) -> FakeFile:
        """Look at nothing, in the manner of an inspection."""
        if self.refused == path.name:
            raise LoadFailure("the fake was told to refuse it")
        if self.refused in {adapter.name for adapter in adapters}:
            raise UnfitOptions("the fake was told to refuse an adapter", "lora")
        return FakeFile(offloads=self.device_memory is not None)

    def load(self, path: Path, options: LoadOptions, progress: Progress | None = None) -> FakeWeights:
        """Load nothing, in the manner of a load."""
        self.loads += 1
        self.load_gate.wait()
        if self.failing_loads:
            self.failing_loads -= 1
            raise LoadFailure("the fake was told to fail")
        if progress is not None and not progress(1.0):
            raise LoadFailure("the load was given up")
        return FakeWeights(self, path.stem, offloads=options.gpu_layers != 0 and self.device_memory is not None)


class FakeFile:
    """Says what a header would say."""

    architecture = "fake"
    n_ctx_train = 4096
    size = 1000
    rows_alike = False

    def __init__(self, *, offloads: bool) -> None:
        self.offloads = offloads

    def memory(self, options: SessionOptions, slots: int, gpu_layers: int = 0) -> Footprint:
        """A million bytes for the weights and as many for each slot."""
        nbytes = 1_000_000 * (1 + slots)
        return Footprint(device=nbytes) if gpu_layers else Footprint(host=nbytes)


class FakeWeights:
    """A vocabulary of bytes and one token that ends answers."""

    def __init__(self, engine: FakeEngine, name: str, *, offloads: bool) -> None:
        self.engine = engine
        self.offloads = offloads
        self.rows_alike = False
        self.name = name
        self.n_ctx_train = 4096
        self.size = 1000
        self.chat_template: str | None = None
        self.bos_text = self.eos_text = ""
        self.bos: int | None = None
        self.vocab_size = VOCAB_SIZE
        self.n_embd = DIMENSIONS
        self.gap = engine.gap
        self.longest_piece = 1
        self.max_sessions = engine.max_sessions
        self.sessions: list[FakeSession] = []

    def tokenize(self, text: str, *, special: bool, add_bos: bool) -> list[int]:
        """One token for each byte."""
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        """The byte that a token is."""
        return b"<end>" if token == END else bytes([token])

    def check_constraint(self, constraint: Constraint) -> None:
        """Refuse what says so."""
        if "refused" in constraint.source:
            raise ConstraintError("the fake was told to refuse it")

    def open_session(self, options: SessionOptions) -> FakeSession:
        """Make a session."""
        self.engine.session_gate.wait()
        if self.engine.failing_session == len(self.sessions):
            self.engine.failing_sessions -= 1
            if not self.engine.failing_sessions:
                self.engine.failing_session, self.engine.failing_sessions = None, 1
            raise LoadFailure("the fake was told to fail")
        session = FakeSession(self.engine, f"{self.name}[{len(self.sessions)}]", options)
        self.sessions.append(session)
        return session

    def close(self) -> None:
        """Note it."""
        self.engine.closed.append(self.name)


class _Answer:
    """An answer that grows by one letter a step."""

    def __init__(self, number: int, request: SequenceRequest, n_ctx: int, engine: FakeEngine) -> None:
        self.ended = False
        self._number = number
        most = min(request.max_tokens, n_ctx - len(request.prompt))
        told, prompt = engine.answer_text, bytes(token % 256 for token in request.prompt)
        self._text = fake_answer(prompt, most) if told is None else told[:most]
        self._limit = engine.answer_tokens
        self._cut = told is None or len(told) >= most
        self._given = 0
        self._assembler = TextAssembler(request.stops)

    def advance(self) -> Iterator[StepEvent]:
        if self._given == self._limit:
            yield self._finished(FinishReason.STOP)
            return
        letter = self._text[self._given]
        self._given += 1
        yield Token(self._number, ord(letter), self._assembler.feed(letter.encode()))
        if self._assembler.stopped:
            yield self._finished(FinishReason.STOP)
        elif self._given == len(self._text) and self._cut:
            yield self._finished(FinishReason.LENGTH)

    def _finished(self, reason: FinishReason) -> Finished:
        self.ended = True
        return Finished(self._number, reason, self._assembler.flush(), stop=self._assembler.stop)


class _Vector:
    """A vector that is there after one step."""

    def __init__(self, number: int, work: EmbeddingInput) -> None:
        self.ended = False
        self._number = number
        self._work = work

    def advance(self) -> Iterator[StepEvent]:
        self.ended = True
        yield Embedded(self._number, fake_vector(self._work.prompt, self._work.dimensions))


class FakeSession:
    """Gives one letter of each answer, or all vectors, for each step."""

    def __init__(self, engine: FakeEngine, name: str, options: SessionOptions) -> None:
        self.traits = Traits("fake", options.task, frozenset(Mode))
        self.n_ctx = options.n_ctx
        self.max_sequences = options.max_sequences
        self.name = name
        self.options = options
        self.history = Kept()
        self.threads: list[int] = []
        self.resets = 0
        self._engine = engine
        self._live: dict[int, _Answer | _Vector] = {}
        self._interrupted = False
        self._closed = False
        self._steps = 0

    def add(self, work: Work) -> int:
        """Take a sequence in."""
        if isinstance(work, EmbeddingInput) is not (self.traits.task is Task.EMBED):
            raise ValueError(f"a session that is made to {self.traits.task} takes no {type(work).__name__}")
        number = next(number for number in itertools.count() if number not in self._live)
        if isinstance(work, EmbeddingInput):
            self._live[number] = _Vector(number, work)
        else:
            self._live[number] = _Answer(number, work, self.n_ctx, self._engine)
        return number

    def step(self, threads: int, held: Collection[int] = ()) -> Sequence[StepEvent]:
        """Pass the gate, then give the next letter, or the vector, of each sequence."""
        self.threads.append(threads)
        if self._interrupted or not self._engine.step_gate.wait(self._heeds_interrupt):
            return []
        if self._engine.step_seconds:
            time.sleep(self._engine.step_seconds)
        self._steps += 1
        if self._steps == self._engine.raising_step:
            raise RuntimeError("the fake was told to raise")
        if self._steps == self._engine.failing_step:
            return [self._fail(number, live) for number, live in self._live.items() if not live.ended]
        going = [live for number, live in self._live.items() if not live.ended and number not in held]
        events = [event for live in going for event in live.advance()]
        # No order is promised among texts, and an engine that packs them gives them in another one than it got them.
        return events[::-1] if self.traits.task is Task.EMBED else events

    def remove(self, sequence: int) -> None:
        """Forget a sequence."""
        del self._live[sequence]

    def resume(self) -> None:
        """Let steps go on."""
        self._interrupted = False

    def reset(self) -> None:
        """Forget all sequences."""
        self.resets += 1
        self._live.clear()
        self._interrupted = False

    def clear(self) -> None:
        """Forget all sequences."""
        self.reset()

    def is_sound(self, live: int = 0) -> bool:
        """Look, or fail as told."""
        if self._engine.failing_proofs:
            self._engine.failing_proofs -= 1
            return False
        return len(self._live) == live and not self._interrupted

    def interrupt(self) -> None:
        """Make a step that waits at the gate return."""
        self._interrupted = True
        self._engine.step_gate.wake()

    def close(self) -> None:
        """Pass the gate and note it, once."""
        if self._closed:
            return
        self._closed = True
        self._engine.close_gate.wait()
        self._engine.closed.append(self.name)

    def _heeds_interrupt(self) -> bool:
        return self._interrupted and not self._engine.deaf

    def _fail(self, number: int, live: _Answer | _Vector) -> Failed:
        live.ended = True
        return Failed(number, "the fake was told to fail")
