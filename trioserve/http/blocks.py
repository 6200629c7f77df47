"""An answer as responses and messages tell it: one block after the other, each of thoughts, of words, or one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from trioserve.chat import AnswerParser, Arguments, CallBegun, Event, Reasoning
from trioserve.service import Generation


class BlockKind(Enum):
    """What a block is made of."""

    THOUGHTS = "thoughts"
    WORDS = "words"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """A stretch of an answer.

    Attributes:
        index: blocks count from 0.
        kind: what it is made of.
        name: of the tool that is called; empty where none is.
        pieces: its text so far; of a call the JSON text of the arguments.
    """

    index: int
    kind: BlockKind
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of its text so far."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins, empty."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    """A block has more text. Never empty."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A block is complete, or was cut off where it is the last one."""

    block: Block


Step = Opened | Grown | Closed


class Blocks:
    """Cuts one answer into blocks. However its text comes in pieces, they are the same.

    Arguments:
        parser: of this answer.

    Attributes:
        blocks: all that have begun.
    """

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self.blocks: list[Block] = []

    @classmethod
    def of(cls, generation: Generation) -> Blocks:
        """Cuts the only answer of a generation."""
        return cls(AnswerParser(generation.expected[0]))

    @classmethod
    def whole(cls, generation: Generation, text: str) -> Blocks:
        """Cuts an answer that came in one piece."""
        answer = cls.of(generation)
        answer.feed(text)
        answer.finish()
        return answer

    @property
    def called(self) -> bool:
        """Whether a tool was called so far."""
        return self._parser.called

    def feed(self, text: str) -> list[Step]:
        """Return what more text does."""
        return list(self._steps(self._parser.feed(text)))

    def finish(self) -> list[Step]:
        """Return what the end of the text does. To be called once. An answer of nothing is one block of no words."""
        steps = list(self._steps(self._parser.finish()))
        if not self.blocks:
            steps += self._open(BlockKind.WORDS)
        return [*steps, Closed(self.blocks[-1])]

    def _steps(self, events: Sequence[Event]) -> Iterator[Step]:
        for event in events:
            if isinstance(event, CallBegun):
                yield from self._open(BlockKind.CALL, event.name)
                continue
            if not isinstance(event, Arguments):
                kind = BlockKind.THOUGHTS if isinstance(event, Reasoning) else BlockKind.WORDS
                if not self.blocks or self.blocks[-1].kind is not kind:
                    yield from self._open(kind)
            self.blocks[-1].pieces.append(event.text)
            yield Grown(self.blocks[-1], event.text)

    def _open(self, kind: BlockKind, name: str = "") -> Iterator[Step]:
        if self.blocks:
            yield Closed(self.blocks[-1])
        self.blocks.append(Block(len(self.blocks), kind, name))
        yield Opened(self.blocks[-1])
