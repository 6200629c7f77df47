"""Answers in the shapes of Anthropic's messages: whole, or as a stream of events with names."""

from __future__ import annotations

import json
import sys
import uuid
from typing import Any

from trioserve.engine.base import FinishReason
from trioserve.http import render
from trioserve.http.blocks import Block, BlockKind, Blocks, Grown, Opened, Step
from trioserve.http.sse import named_frame
from trioserve.service import Done, Generation, Part, TextDelta, Usage

# The order of a stream: start; each block with its start, deltas and stop; delta with the reason; stop.
_DELTAS = {
    BlockKind.THOUGHTS: ("thinking_delta", "thinking"),
    BlockKind.WORDS: ("text_delta", "text"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}
_MAX_DIGITS = 4000  # Python converts a few more


def event(kind: str, **fields: Any) -> bytes:
    """One event of a stream; its kind is told in its name and in its data."""
    return named_frame(kind, render.dumps({"type": kind, **fields}))


PING = event("ping")


def message(generation: Generation, text: str, done: Done) -> dict[str, Any]:
    """A whole answer."""
    answer = Blocks.whole(generation, text)
    return {
        **_envelope(generation),
        "content": [_block(block, block.text) for block in answer.blocks],
        **_ending(done, called=answer.called),
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


def read_input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object that JSON can spell; empty where they were cut off.

    Arguments:
        arguments: JSON text.
    """
    try:
        value = json.loads(arguments, parse_float=_finite, parse_int=_integer)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _finite(text: str) -> float:
    """The nearest number that isn't infinite: a model may write 1e999."""
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


def _integer(text: str) -> float:
    return int(text) if len(text) <= _MAX_DIGITS else _finite(text)


def _envelope(generation: Generation) -> dict[str, Any]:
    return {"id": f"msg_{generation.id}", "type": "message", "role": "assistant", "model": generation.model}


def _block(block: Block, text: str) -> dict[str, Any]:
    """A block with some text; of a call with these arguments."""
    if block.kind is BlockKind.WORDS:
        return {"type": "text", "text": text}
    if block.kind is BlockKind.THOUGHTS:
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": block.name, "input": read_input(text)}


def _ending(done: Done, *, called: bool) -> dict[str, str | None]:
    if done.stop is not None:
        reason = "stop_sequence"
    elif done.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    else:
        reason = "tool_use" if called else "end_turn"
    return {"stop_reason": reason, "stop_sequence": done.stop}


class MessageStream:
    """One answer as it grows."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._answer = Blocks.of(generation)
        self._opened = False

    async def next_frames(self) -> bytes:
        """See ``http.sse.Source``."""
        if not self._opened:
            self._opened = True
            return self._opening()
        while parts := await self._generation.next_parts():
            # Empty where all of the text is held back, and that would be the end.
            if frames := b"".join([self._frames(part) for part in parts]):
                return frames
        return b""

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
        return event("message_start", message=begun) + PING

    def _frames(self, part: Part) -> bytes:
        if isinstance(part, TextDelta):
            return b"".join(map(_frame, self._answer.feed(part.text)))
        if isinstance(part, Done):
            rest = b"".join(map(_frame, self._answer.finish()))
            ending = _ending(part, called=self._answer.called)
            return rest + event("message_delta", delta=ending, usage=usage(part.usage)) + event("message_stop")
        raise part.error


def _frame(step: Step) -> bytes:
    if isinstance(step, Opened):
        return event("content_block_start", index=step.block.index, content_block=_block(step.block, ""))
    if isinstance(step, Grown):
        kind, key = _DELTAS[step.block.kind]
        return event("content_block_delta", index=step.block.index, delta={"type": kind, key: step.text})
    return event("content_block_stop", index=step.block.index)
