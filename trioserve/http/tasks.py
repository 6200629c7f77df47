"""The native shapes of answers: text with what it cost and where it was made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from trioserve.http import render
from trioserve.http.sse import named_frame
from trioserve.service import Done, Failure, Generation, Part, TextDelta

DELTA, DONE = "task.delta", "task.done"
BATCH_ITEM, BATCH_DONE = "task.batch.item", "task.batch.done"


def envelope(generation: Generation) -> dict[str, Any]:
    """The fields that every answer begins with."""
    return {"id": f"task-{generation.id}", "created": generation.created, "model": generation.model}


def result(parts: Sequence[TextDelta], done: Done) -> dict[str, Any]:
    """One answer with its metadata."""
    told = {"text": "".join(part.text for part in parts), **_ending(done)}
    if likelihoods := [likelihood for part in parts for likelihood in part.likelihoods]:
        told["logprobs"] = render.token_logprobs(likelihoods)
    return told


def _ending(done: Done) -> dict[str, Any]:
    timings = done.timings
    return {
        "finish_reason": done.finish_reason.value,
        "usage": render.usage(done.usage),
        "metadata": {
            "slot": timings.slot,
            "queue_ms": timings.queue_ms,
            "prefill_ms": timings.prefill_ms,
            "decode_ms": timings.decode_ms,
            "prompt_tokens": done.usage.prompt_tokens,
            "completion_tokens": done.usage.completion_tokens,
        },
    }


def event(kind: str, fields: dict[str, Any]) -> bytes:
    """One event of a stream; its kind is told in its name and in its data."""
    return named_frame(kind, render.dumps({"type": kind, **fields}))


class TaskStream:
    """One answer as it grows, and then its metadata."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._envelope = envelope(generation)

    async def next_frames(self) -> bytes:
        """See ``http.sse.Source``."""
        return b"".join([self._frame(part) for part in await self._generation.next_parts()])

    def _frame(self, part: Part) -> bytes:
        if isinstance(part, TextDelta):
            fields: dict[str, Any] = {"id": self._envelope["id"], "text": part.text}
            if part.likelihoods:
                fields["logprobs"] = render.token_logprobs(part.likelihoods)
            return event(DELTA, fields)
        if isinstance(part, Done):
            return event(DONE, {**self._envelope, **_ending(part)})
        raise part.error


class BatchStream:
    """The answers of a batch, each whole, in the order in which they end."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._envelope = envelope(generation)
        self._texts: defaultdict[int, list[TextDelta]] = defaultdict(list)
        self._counts = {"succeeded": 0, "failed": 0}
        self._ended = False

    async def next_frames(self) -> bytes:
        """See ``http.sse.Source``."""
        frames = b""
        while not frames and not self._ended:
            parts = await self._generation.next_parts()
            frames = b"".join([self._take(part) for part in parts])
            if not parts:
                self._ended = True
                frames = event(BATCH_DONE, {**self._envelope, **self._counts})
        return frames

    def _take(self, part: Part) -> bytes:
        if isinstance(part, TextDelta):
            self._texts[part.index].append(part)
            return b""
        if isinstance(part, Failure):
            self._counts["failed"] += 1
            return self._item(part.index, render.error_fields(part.error))
        self._counts["succeeded"] += 1
        return self._item(part.index, {"result": result(self._texts.pop(part.index, []), part)})

    def _item(self, index: int, fields: dict[str, Any]) -> bytes:
        return event(BATCH_ITEM, {"id": self._envelope["id"], "index": index, **fields})
