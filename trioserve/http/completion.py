"""Answering with a generation: in one piece, or as a stream of chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from quart import Response

from trioserve.errors import TrioserveError
from trioserve.http import render
from trioserve.http.answers import renderer
from trioserve.http.exchange import Exchange
from trioserve.http.requests import Body, batch_request
from trioserve.http.sse import DONE, PING, EventStream, Source, error_frame
from trioserve.service import (
    Done,
    Generation,
    Part,
    Service,
    TextDelta,
    Usage,
)

_CONTENT_TYPE = "application/json"


async def answer(
    service: Service,
    body: Body,
    shape: render.Shape,
    exchange: Exchange,
) -> Response:
    """Admit what a body asks for and answer it. Everything it holds is freed with the exchange."""
    generation = await service.start(batch_request(body, exchange.request_id), exchange.resources)
    if not body.stream:
        return await _in_one_piece(generation, body, shape)
    return stream_response(exchange, _Chunks(generation, body, shape))


def stream_response(
    exchange: Exchange,
    source: Source,
    ending: bytes = DONE,
    *,
    ping: bytes = PING,
    tell: Callable[[TrioserveError], bytes] = error_frame,
) -> Response:
    """Answer with server-sent events.

    Arguments:
        exchange: of the request.
        source: of the frames.
        ending: what the stream ends with.
        ping: what is sent in silence.
        tell: makes the event of an error.
    """
    exchange.ping = ping
    response = Response(EventStream(source, ending, tell=tell))
    response.timeout = None  # Quart would cut longer streams at its RESPONSE_TIMEOUT, silently
    response.headers["content-type"] = "text/event-stream; charset=utf-8"
    response.headers["cache-control"] = "no-store"
    response.headers["x-accel-buffering"] = "no"
    return response


async def _in_one_piece(generation: Generation, body: Body, shape: render.Shape) -> Response:
    answers = await collect(generation)
    choices = [
        renderer(body, generation, index).whole(parts, done.finish_reason.value)
        for index, (parts, done) in sorted(answers.items())
    ]
    ends = [done for _, done in answers.values()]
    told = render.whole(shape, generation, choices, ends, with_timings=bool(body.timings_per_token))
    return Response(render.dumps(told), content_type=_CONTENT_TYPE)


async def collect(generation: Generation) -> dict[int, tuple[list[TextDelta], Done]]:
    """Wait for all answers of a generation that is for all or nothing.

    Returns:
        Pieces and end of each, by the index of its prompt.
    """
    texts: defaultdict[int, list[TextDelta]] = defaultdict(list)
    ends: dict[int, Done] = {}
    async for part in generation:
        if isinstance(part, TextDelta):
            texts[part.index].append(part)
        elif isinstance(part, Done):
            ends[part.index] = part
        else:
            raise part.error
    return {index: (texts[index], done) for index, done in ends.items()}


async def collect_one(generation: Generation) -> tuple[str, Done]:
    """Wait for the only answer of a generation: its text and its end."""
    ((parts, done),) = (await collect(generation)).values()
    return "".join(part.text for part in parts), done


class _Chunks:
    """Turns parts into chunks. What has piled up is sent in one go, each part still in a chunk of its own."""

    def __init__(self, generation: Generation, body: Body, shape: render.Shape) -> None:
        self._generation = generation
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._with_timings = bool(body.timings_per_token)
        self._usage = Usage(0, 0)
        self._open = generation.prompts
        self._answers = [renderer(body, generation, index) for index in range(self._open)]
        # What all chunks begin with, up to their choices, and what most of them end with.
        self._head = b"data: " + render.dumps(render.envelope(shape, generation, shape.chunk))[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self._with_usage else b"]}\n\n"
        self._opened = False

    async def next_frames(self) -> bytes:
        if not self._opened:
            self._opened = True
            if frames := b"".join([self._frame(choice) for answer in self._answers for choice in answer.opening()]):
                return frames
        while parts := await self._generation.next_parts():
            # Empty where all of the text is held back, and that would be the end.
            if frames := b"".join([self._frames(part) for part in parts]):
                return frames
        return b""

    def _frames(self, part: Part) -> bytes:
        if isinstance(part, TextDelta):
            return b"".join([self._frame(choice) for choice in self._answers[part.index].pieces(part)])
        if isinstance(part, Done):
            return b"".join(self._ending(part))
        raise part.error

    def _ending(self, done: Done) -> Iterator[bytes]:
        *choices, last = self._answers[done.index].ending(done.finish_reason.value)
        yield from map(self._frame, choices)
        more: dict[str, Any] = {"timings": render.timings([done])} if self._with_timings else {}
        yield self._frame(last, self._told(more | {"usage": None} if self._with_usage else more))
        self._usage += render.counted(done, self._generation.choices)
        self._open -= 1
        if self._with_usage and not self._open:
            yield self._frame(b"", self._told({"usage": render.usage(self._usage)}))

    def _told(self, more: dict[str, Any]) -> bytes:
        return b"]," + render.dumps(more)[1:] + b"\n\n" if more else self._tail

    def _frame(self, choice: bytes, tail: bytes | None = None) -> bytes:
        return self._head + choice + (tail or self._tail)
