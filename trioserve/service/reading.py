"""What a model's tokenizer and chat template make of a text: questions that no slot works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import trio

from trioserve.engine.base import Task
from trioserve.errors import InvalidRequestError
from trioserve.runtime.pool import Pool
from trioserve.service.prepare import checked_tokens, conversation, text_of, tokenize_conversation
from trioserve.service.requests import ChatPrompt, TokenPrompt

MAX_CHARACTERS = 262_144
"""Of a text that is tokenised for itself. One that is to be answered has the context for its bound."""

_READERS = 2

Found = TypeVar("Found", covariant=True)
Result = TypeVar("Result")


class Question(Protocol[Found]):
    """Something that a loaded model can say without inference."""

    task: ClassVar[Task | None]
    """What the model has to be for; None is anything."""

    def ask(self, pool: Pool) -> Found:
        """Find it out, in a worker thread. Reads the pool's weights only.

        Raises:
            InvalidRequestError: it can't be said.
        """
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """A token, and its bytes, which need not be whole characters."""

    token: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Tokenization:
    """The tokens of a text.

    Attributes:
        text: without lone surrogates.
        add_special: put the tokens around it that the model wants around a text.
        parse_special: read the text of special tokens as those tokens.
    """

    task: ClassVar[Task | None] = None

    text: str
    add_special: bool = False
    parse_special: bool = True

    def ask(self, pool: Pool) -> Sequence[Piece]:
        """See ``Question.ask``."""
        check_length(self.text, "content")
        tokens = pool.weights.tokenize(self.text, special=self.parse_special, add_bos=self.add_special)
        pieces = {token: Piece(token, pool.weights.piece(token)) for token in set(tokens)}
        return [pieces[token] for token in tokens]


@dataclass(frozen=True, slots=True)
class Detokenization:
    """The text of tokens, special ones included. What is no UTF-8 is replaced."""

    task: ClassVar[Task | None] = None

    tokens: Sequence[int]

    def ask(self, pool: Pool) -> str:
        """See ``Question.ask``."""
        tokens = checked_tokens(TokenPrompt(self.tokens), pool.weights.vocab_size, "tokens")
        return text_of(pool.weights, tokens)


@dataclass(frozen=True, slots=True)
class Rendering:
    """The prompt that the model's chat template makes of a conversation."""

    task: ClassVar[Task | None] = Task.GENERATE

    prompt: ChatPrompt

    def ask(self, pool: Pool) -> str:
        """See ``Question.ask``."""
        text, _ = conversation(pool, self.prompt)
        return text


@dataclass(frozen=True, slots=True)
class Count:
    """How many tokens the prompt of a conversation has."""

    task: ClassVar[Task | None] = Task.GENERATE

    prompt: ChatPrompt

    def ask(self, pool: Pool) -> int:
        """See ``Question.ask``."""
        text, _ = conversation(pool, self.prompt)
        check_length(text, "messages")
        return len(tokenize_conversation(pool, text))


@dataclass(frozen=True, slots=True)
class ReadingRequest:
    """Who asks whom.

    Attributes:
        model, busy_timeout_ms, request_id: as in ``GenerationRequest``. Only an unloaded model is waited for.
    """

    model: str | None = None
    busy_timeout_ms: int | None = None
    request_id: str = "-"


class Reader:
    """Asks in worker threads of its own: a long text keeps no prompt waiting."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(_READERS)

    async def ask(self, pool: Pool, question: Question[Result]) -> Result:
        """Return what a pool says to a question."""
        with pool.reading():
            return await trio.to_thread.run_sync(question.ask, pool, limiter=self._limiter)


def check_length(text: str, name: str) -> None:
    """See that a text may be tokenised.

    Arguments:
        text: to look at.
        name: of the field that it comes from.

    Raises:
        InvalidRequestError: it is too long.
    """
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequestError(
            f"{name}: the text has {len(text)} characters, at most {MAX_CHARACTERS} are tokenised", param=name
        )
