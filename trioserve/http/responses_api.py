"""Answers in the shapes of OpenAI's responses: whole, or as a stream of numbered events with names."""

from __future__ import annotations

from typing import Any

from trioserve.engine.base import FinishReason
from trioserve.errors import TrioserveError
from trioserve.http import render
from trioserve.http.schemas.responses_api import ResponsesRequest
from trioserve.http.sse import named_frame
from trioserve.service import Done, Generation, Part, TextDelta, Usage

Json = dict[str, Any]


class ResponseShape:
    """The response to one request, as it stands at different times.

    Arguments:
        generation: of the answer.
        body: what was asked for; much of it is told again.
    """

    def __init__(self, generation: Generation, body: ResponsesRequest) -> None:
        self.item_id = f"msg_{generation.id}"
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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": 1 if body.temperature is None else body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }

    def begun(self) -> Json:
        """Before there is an answer."""
        return self._told("in_progress", [], None, None)

    def ended(self, text: str, done: Done) -> Json:
        """With the whole answer."""
        status = _status(done)
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._told(status, [self.item(status, text)], details, _usage(done.usage))

    def item(self, status: str, text: str | None = None) -> Json:
        """The message of the answer; without text it has no content yet."""
        content = [] if text is None else [part(text)]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _told(self, status: str, output: list[Json], details: Json | None, usage: Json | None) -> Json:
        return {
            **self._envelope,
            "status": status,
            "incomplete_details": details,
            "output": output,
            "usage": usage,
            **self._asked,
        }


def part(text: str) -> Json:
    """A text as a part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(done: Done) -> str:
    return "incomplete" if done.finish_reason is FinishReason.LENGTH else "completed"


def _usage(counts: Usage) -> Json:
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.total_tokens,
    }


class ResponseStream:
    """One response as it grows: its item and the item's only part are opened, filled and closed again."""

    def __init__(self, generation: Generation, shape: ResponseShape) -> None:
        self._generation = generation
        self._shape = shape
        self._texts: list[str] = []
        self._number = 0
        self._opened = False

    async def next_frames(self) -> bytes:
        """See ``http.sse.Source``."""
        if not self._opened:
            self._opened = True
            return self._opening()
        return b"".join([self._frames(part) for part in await self._generation.next_parts()])

    def tell(self, error: TrioserveError) -> bytes:
        """The last event of a stream that failed: flat as it is documented, and nested as clients look for it."""
        fields = render.error_fields(error)
        return self._event("error", code=error.code, message=error.message, param=error.param, **fields)

    def _opening(self) -> bytes:
        begun = self._shape.begun()
        return (
            self._event("response.created", response=begun)
            + self._event("response.in_progress", response=begun)
            + self._event("response.output_item.added", output_index=0, item=self._shape.item("in_progress"))
            + self._part_event("response.content_part.added", part=part(""))
        )

    def _frames(self, arrived: Part) -> bytes:
        if isinstance(arrived, TextDelta):
            self._texts.append(arrived.text)
            return self._part_event("response.output_text.delta", delta=arrived.text, logprobs=[])
        if isinstance(arrived, Done):
            return self._ending("".join(self._texts), arrived)
        raise arrived.error

    def _ending(self, text: str, done: Done) -> bytes:
        status = _status(done)
        return (
            self._part_event("response.output_text.done", text=text, logprobs=[])
            + self._part_event("response.content_part.done", part=part(text))
            + self._event("response.output_item.done", output_index=0, item=self._shape.item(status, text))
            + self._event(f"response.{status}", response=self._shape.ended(text, done))
        )

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._shape.item_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_frame(kind, render.dumps({"type": kind, "sequence_number": number, **fields}))
