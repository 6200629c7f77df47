"""What a server said, read strictly: answers in one piece and in streams, batches of them, vectors. Pure."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .plan import BATCH, EMBEDDINGS, Order

_FIELD_ERRORS = (ValueError, KeyError, TypeError, AttributeError)


class MalformedError(Exception):
    """Something is in no shape that the contract knows."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, or as much of one as came.

    Attributes:
        text: of it.
        reason: finish reason; None while there is more to come.
        tokens: its count by the server.
        end: ``done``, or the code of an error event; None where a stream has not ended.
        model: who says that it answered.
    """

    text: str
    reason: str | None = None
    tokens: int | None = None
    end: str | None = None
    model: str | None = None

    def wrong(self, expected: Answer, *, whole: bool) -> str | None:
        """Say what is wrong with it.

        Arguments:
            expected: what it should be.
            whole: whether it has to be all of that.
        """
        if self.reason is None and expected.text.startswith(self.text) and not whole:
            return None
        if (self.text, self.reason) != (expected.text, expected.reason):
            return f"{self.text!r} ({self.reason}), alone {expected.text!r}"
        if whole and self.tokens != expected.tokens:
            return f"{self.tokens} tokens, alone {expected.tokens}"
        return None


@dataclass(frozen=True, slots=True)
class Batch:
    """The answers of a batch, or as many as came.

    Attributes:
        items: answers by the index of their requests.
        end, model: as of an answer.
    """

    items: Mapping[int, Answer]
    end: str | None = None
    model: str | None = None

    @property
    def text(self) -> str:
        """Of all answers."""
        return "\n".join(item.text for item in self.items.values())

    def wrong(self, expected: Batch, *, whole: bool) -> str | None:
        """See ``Answer.wrong``."""
        for index, item in self.items.items():
            if index not in expected.items:
                return f"an item {index} that nobody asked for"
            if problem := item.wrong(expected.items[index], whole=True):
                return f"item {index}: {problem}"
        if whole and self.items.keys() != expected.items.keys():
            return f"items {sorted(self.items)}, alone {sorted(expected.items)}"
        return None


@dataclass(frozen=True, slots=True)
class Vectors:
    """What texts were made into.

    Attributes:
        vectors: in the order of the texts.
        tokens: of all texts together.
        end, model: as of an answer.
    """

    vectors: Sequence[array[float]]
    tokens: int
    end: str | None = None
    model: str | None = None

    @property
    def text(self) -> str:
        """There is none."""
        return ""

    def wrong(self, expected: Vectors, *, whole: bool) -> str | None:
        """See ``Answer.wrong``; a piece of a list of vectors is never read."""
        if len(self.vectors) != len(expected.vectors):
            return f"{len(self.vectors)} vectors, alone {len(expected.vectors)}"
        for index, (one, other) in enumerate(zip(self.vectors, expected.vectors, strict=True)):
            if one != other:
                return f"vector {index} is at {likeness(one, other):.6f} to the one alone"
        return None if self.tokens == expected.tokens else f"{self.tokens} tokens, alone {expected.tokens}"


Told: TypeAlias = Answer | Batch | Vectors


def likeness(one: Sequence[float], other: Sequence[float]) -> float:
    """Cosine of the angle between two vectors of unit length; 0 where they have not even a space in common."""
    return sum(a * b for a, b in zip(one, other, strict=True)) if len(one) == len(other) else 0.0


def read(order: Order, body: bytes) -> Told:
    """Read what came for an order, as far as it came where that is in pieces.

    Raises:
        MalformedError: it is nothing that may come for it.
    """
    if order.question.route == BATCH:
        return read_batch(body)
    if order.question.route == EMBEDDINGS:
        return read_vectors(body)
    return read_stream(body) if order.stream else read_whole(body)


def read_whole(body: bytes) -> Answer:
    """Read an answer in one piece; see ``read``."""
    try:
        answer = json.loads(body)
        (choice,) = answer["choices"]
        tokens = answer["usage"]["completion_tokens"]
        return Answer(_text(choice), choice["finish_reason"], tokens, "done", answer["model"])
    except _FIELD_ERRORS as error:
        raise MalformedError(f"no answer ({error!r}): {body[:200]!r}") from None


def read_stream(body: bytes) -> Answer:
    """Read a stream; what is behind its last whole event is left out; see ``read``."""
    text, reason, tokens, end, model = "", None, None, None, None
    for name, data in _events(body):
        if end is not None or name is not None:
            raise MalformedError(f"an event behind the end, or of another stream: {data[:200]}")
        if data == "[DONE]":
            end = "done"
            continue
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                end = chunk["error"]["code"]
                continue
            text += "".join(map(_text, chunk["choices"]))
            reason = next((choice["finish_reason"] for choice in chunk["choices"] if choice["finish_reason"]), reason)
            tokens = (chunk["usage"] or {}).get("completion_tokens", tokens)
            model = chunk["model"]
        except _FIELD_ERRORS as error:
            raise MalformedError(f"no chunk ({error!r}): {data[:200]}") from None
    return Answer(text, reason, tokens, end, model)


def read_batch(body: bytes) -> Batch:
    """Read the stream of a batch; what is behind its last whole event is left out; see ``read``."""
    items: dict[int, Answer] = {}
    end, model = None, None
    for name, data in _events(body):
        try:
            event = json.loads(data)
            if end is not None or name != event["type"] or event.get("index") in items:
                raise MalformedError(f"an event out of place: {data[:200]}")
            if name == "task.batch.done":
                end, model = "done", event["model"]
                if (event["succeeded"], event["failed"]) != (len(items), 0):
                    raise MalformedError(f"{len(items)} items before {data[:200]}")
            elif name == "task.batch.item":
                items[event["index"]] = _item(event["result"])
            else:
                raise MalformedError(f"no event of a batch: {data[:200]}")
        except _FIELD_ERRORS as error:
            raise MalformedError(f"no item ({error!r}): {data[:200]}") from None
    return Batch(items, end, model)


def read_vectors(body: bytes) -> Vectors:
    """Read a list of embeddings; see ``read``."""
    try:
        told = json.loads(body)
        if [entry["index"] for entry in told["data"]] != list(range(len(told["data"]))):
            raise MalformedError(f"vectors out of order: {body[:200]!r}")
        vectors = [_vector(entry["embedding"]) for entry in told["data"]]
        return Vectors(vectors, told["usage"]["prompt_tokens"], "done", told["model"])
    except _FIELD_ERRORS as error:
        raise MalformedError(f"no vectors ({error!r}): {body[:200]!r}") from None


def _item(result: Mapping[str, Any]) -> Answer:
    return Answer(result["text"], result["finish_reason"], result["usage"]["completion_tokens"], "done")


def _vector(told: str | list[float]) -> array[float]:
    """Numbers as they are written, or the little-endian float32 of base64."""
    return array("f", base64.b64decode(told, validate=True) if isinstance(told, str) else told)


def _events(body: bytes) -> Iterator[tuple[str | None, str]]:
    """Name and data of the whole events; comments are left out."""
    *blocks, _ = body.split(b"\n\n")
    for block in blocks:
        if block.startswith(b":"):
            continue
        head, _, last = block.rpartition(b"\n")
        if not last.startswith(b"data: ") or (head and not head.startswith(b"event: ")) or b"\n" in head:
            raise MalformedError(f"no event: {block[:200]!r}")
        try:
            name = head.removeprefix(b"event: ").decode() if head else None
            yield name, last.removeprefix(b"data: ").decode()
        except UnicodeDecodeError:
            raise MalformedError(f"no UTF-8: {block[:200]!r}") from None


def _text(choice: Mapping[str, Any]) -> str:
    if "text" in choice:
        return choice["text"]
    return (choice.get("message") or choice["delta"]).get("content") or ""
