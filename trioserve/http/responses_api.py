"""Answers in the shapes of OpenAI's responses: whole, or as a stream of numbered events with names."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from trioserve.engine.base import FinishReason
from trioserve.errors import TrioserveError
from trioserve.http import render
from trioserve.http.blocks import Block, BlockKind, Blocks, Grown, Opened, Step
from trioserve.http.schemas.responses_api import ResponsesRequest
from trioserve.http.sse import named_frame
from trioserve.service import Done, Generation, Part, TextDelta, Usage

Json = dict[str, Any]

_PREFIXES = {BlockKind.THOUGHTS: "rs", BlockKind.WORDS: "msg", BlockKind.CALL: "fc"}
_EVENTS = {
    BlockKind.THOUGHTS: "response.reasoning_text",
    BlockKind.WORDS: "response.output_text",
    BlockKind.CALL: "response.function_call_arguments",
}


class ResponseShape:
    """The response to one request, as it stands at different times.

    Arguments:
        generation: of the answer.
        body: what was asked for; much of it is told again.
    """

    def __init__(self, generation: Generation, body: ResponsesRequest) -> None:
        self._generation = generation
        self._call_ids: dict[int, str] = {}  # by index of the block
        self._envelope: Json = {
            "id": f"resp_{generation.id}",
            "object": "response",
            "created_at": generation.created,
            "model": generation.model,
        }
        self._asked: Json = {
            "background": False,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1 if body.temperature is None else body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": _choice(body.tool_choice),
            "tools": [_tool(given) for given in body.tools or ()],
            "top_p": 1 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }

    def begun(self) -> Json:
        """Before there is an answer."""
        return self._told("in_progress", [], None, None)

    def whole(self, text: str, done: Done) -> Json:
        """With an answer that came in one piece."""
        return self.ended(Blocks.whole(self._generation, text).blocks, done)

    def ended(self, blocks: Sequence[Block], done: Done) -> Json:
        """With the whole answer."""
        status = status_of(done)
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        items = [self.item(block, "completed") for block in blocks[:-1]] + [self.item(blocks[-1], status)]
        return self._told(status, items, details, _usage(done.usage))

    def item_id(self, block: Block) -> str:
        """Id of the item that a block is."""
        return f"{_PREFIXES[block.kind]}_{self._generation.id}_{block.index}"

    def item(self, block: Block, status: str) -> Json:
        """A block as an item: in progress it has no content yet."""
        begun: Json = {"id": self.item_id(block), "status": status}
        if block.kind is BlockKind.CALL:
            call_id = self._call_ids.setdefault(block.index, f"call_{uuid.uuid4().hex[:24]}")
            arguments = "" if status == "in_progress" else block.text
            return {**begun, "type": "function_call", "call_id": call_id, "name": block.name, "arguments": arguments}
        content = [] if status == "in_progress" else [part(block.kind, block.text)]
        if block.kind is BlockKind.THOUGHTS:
            return {**begun, "type": "reasoning", "summary": [], "content": content}
        return {**begun, "type": "message", "role": "assistant", "content": content}

    def _told(self, status: str, output: list[Json], details: Json | None, usage: Json | None) -> Json:
        return {
            **self._envelope,
            "status": status,
            "incomplete_details": details,
            "output": output,
            "usage": usage,
            **self._asked,
        }


def part(kind: BlockKind, text: str) -> Json:
    """A text as a part of a message, or of thoughts."""
    if kind is BlockKind.THOUGHTS:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def status_of(done: Done) -> str:
    """How an answer ended; so did its last item."""
    return "incomplete" if done.finish_reason is FinishReason.LENGTH else "completed"


def _choice(given: Any) -> Any:
    return {"type": "function", "name": given["name"]} if isinstance(given, dict) else given or "auto"


def _tool(given: Json) -> Json:
    return {"type": "function", **{key: given.get(key) for key in ("name", "description", "parameters", "strict")}}


def _usage(counts: Usage) -> Json:
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.total_tokens,
    }


class ResponseStream:
    """One response as it grows: each item, and the only part of one that has parts, is opened, filled and closed."""

    def __init__(self, generation: Generation, shape: ResponseShape) -> None:
        self._generation = generation
        self._shape = shape
        self._answer = Blocks.of(generation)
        self._number = 0
        self._opened = False

    async def next_frames(self) -> bytes:
        """See ``http.sse.Source``."""
        if not self._opened:
            self._opened = True
            begun = self._shape.begun()
            return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)
        while parts := await self._generation.next_parts():
            # Empty where all of the text is held back, and that would be the end.
            if frames := b"".join([self._frames(part) for part in parts]):
                return frames
        return b""

    def tell(self, error: TrioserveError) -> bytes:
        """The last event of a stream that failed: flat as it is documented, and nested as clients look for it."""
        fields = render.error_fields(error)
        return self._event("error", code=error.code, message=error.message, param=error.param, **fields)

    def _frames(self, arrived: Part) -> bytes:
        if isinstance(arrived, TextDelta):
            return b"".join([self._frame(step, "completed") for step in self._answer.feed(arrived.text)])
        if isinstance(arrived, Done):
            return self._ending(arrived)
        raise arrived.error

    def _ending(self, done: Done) -> bytes:
        status = status_of(done)
        *steps, last = self._answer.finish()
        return (
            b"".join([self._frame(step, "completed") for step in steps])
            + self._frame(last, status)
            + self._event(f"response.{status}", response=self._shape.ended(self._answer.blocks, done))
        )

    def _frame(self, step: Step, status: str) -> bytes:
        """The events of a step; ``status`` is that of an item that it closes."""
        block = step.block
        if isinstance(step, Opened):
            return self._item_event("added", block, "in_progress") + self._part_event("added", block, "")
        if isinstance(step, Grown):
            return self._text_event("delta", block, {"delta": step.text})
        said = {"text": block.text}
        if block.kind is BlockKind.CALL:
            said = {"name": block.name, "arguments": block.text}
        return (
            self._text_event("done", block, said)
            + self._part_event("done", block, block.text)
            + self._item_event("done", block, status)
        )

    def _item_event(self, what: str, block: Block, status: str) -> bytes:
        item = self._shape.item(block, status)
        return self._event(f"response.output_item.{what}", output_index=block.index, item=item)

    def _part_event(self, what: str, block: Block, text: str) -> bytes:
        """What concerns the part of an item; a call has none."""
        if block.kind is BlockKind.CALL:
            return b""
        return self._event(f"response.content_part.{what}", **self._place(block), part=part(block.kind, text))

    def _text_event(self, what: str, block: Block, fields: Json) -> bytes:
        more: Json = {"logprobs": []} if block.kind is BlockKind.WORDS else {}
        return self._event(f"{_EVENTS[block.kind]}.{what}", **self._place(block), **fields, **more)

    def _place(self, block: Block) -> Json:
        index = {} if block.kind is BlockKind.CALL else {"content_index": 0}
        return {"item_id": self._shape.item_id(block), "output_index": block.index, **index}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_frame(kind, render.dumps({"type": kind, "sequence_number": number, **fields}))
