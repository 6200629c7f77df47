"""Answers in the shapes of Anthropic's messages: whole, or as a stream of events with names."""

from __future__ import annotations

from typing import Any

from trioserve.engine.base import FinishReason
from trioserve.http import render
from trioserve.http.sse import named_frame
from trioserve.service import Done, Generation, Part, TextDelta, Usage

# The order of a stream: start; one block with its start, deltas and stop; delta with the reason; stop.
_BLOCK = 0


def event(kind: str, **fields: Any) -> bytes:
    """One event of a stream; its kind is told in its name and in its data."""
    return named_frame(kind, render.dumps({"type": kind, **fields}))


PING = event("ping")


def message(generation: Generation, text: str, done: Done) -> dict[str, Any]:
    """A whole answer."""
    return {
        **_envelope(generation),
        "content": [{"type": "text", "text": text}],
        **_ending(done),
        "usage": usage(done.usage),
    }


def usage(counts: Usage) -> dict[str, int]:
    """Tokens as Anthropic counts them: of the prompt those that were evaluated, and beside them those kept."""
    return {
        "input_tokens": counts.prompt_tokens - counts.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached_tokens,
        "output_tokens": counts.completion_tokens,
    }


def _envelope(generation: Generation) -> dict[str, Any]:
    return {"id": f"msg_{generation.id}", "type": "message", "role": "assistant", "model": generation.model}


def _ending(done: Done) -> dict[str, str | None]:
    if done.stop is not None:
        reason = "stop_sequence"
    else:
        reason = "max_tokens" if done.finish_reason is FinishReason.LENGTH else "end_turn"
    return {"stop_reason": reason, "stop_sequence": done.stop}


class MessageStream:
    """One answer as it grows."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._opened = False

    async def next_frames(self) -> bytes:
        """See ``http.sse.Source``."""
        if not self._opened:
            self._opened = True
            return self._opening()
        return b"".join([self._frames(part) for part in await self._generation.next_parts()])

    def _opening(self) -> bytes:
        # How much of the prompt was kept is known in the end only.
        counts = usage(Usage(self._generation.prompt_tokens, 0))
        begun = {
            **_envelope(self._generation),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": counts,
        }
        return (
            event("message_start", message=begun)
            + event("content_block_start", index=_BLOCK, content_block={"type": "text", "text": ""})
            + PING
        )

    def _frames(self, part: Part) -> bytes:
        if isinstance(part, TextDelta):
            return event("content_block_delta", index=_BLOCK, delta={"type": "text_delta", "text": part.text})
        if isinstance(part, Done):
            return (
                event("content_block_stop", index=_BLOCK)
                + event("message_delta", delta=_ending(part), usage=usage(part.usage))
                + event("message_stop")
            )
        raise part.error
