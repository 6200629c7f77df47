"""Answering with a generation: in one piece, or as a stream of chunks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from quart import Response

from trioserve.config import Config
from trioserve.engine.base import Likelihood
from trioserve.http import render
from trioserve.http.exchange import Exchange
from trioserve.http.requests import Body, batch_request
from trioserve.http.sse import DONE, EventStream, Source, frame
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
    with_timings = bool(body.timings_per_token)
    if not body.stream:
        return await _in_one_piece(generation, shape, with_timings=with_timings)
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    chunks = _Chunks(generation, shape, with_usage=with_usage, with_timings=with_timings)
    return stream_response(service.config, chunks)


def stream_response(config: Config, source: Source, ending: bytes = DONE) -> Response:
    """Answer with server-sent events.

    Arguments:
        config: of the server.
        source: of the frames.
        ending: what the stream ends with.
    """
    silence = config.sse_ping_interval_ms / 1000 or math.inf
    response = Response(EventStream(source, silence, ending))
    response.timeout = None  # Quart would cut longer streams at its RESPONSE_TIMEOUT, silently
    response.headers["content-type"] = "text/event-stream; charset=utf-8"
    response.headers["cache-control"] = "no-store"
    response.headers["x-accel-buffering"] = "no"
    return response


async def _in_one_piece(generation: Generation, shape: render.Shape, *, with_timings: bool) -> Response:
    answers = await collect(generation)
    choices = [
        shape.choice("".join(part.text for part in parts), done.finish_reason.value, index, likelihoods_of(parts))
        for index, (parts, done) in sorted(answers.items())
    ]
    ends = [done for _, done in answers.values()]
    body = render.whole(shape, generation, choices, ends, with_timings=with_timings)
    return Response(render.dumps(body), content_type=_CONTENT_TYPE)


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


def likelihoods_of(parts: Iterable[TextDelta]) -> list[Likelihood]:
    """Of all tokens of an answer."""
    return [likelihood for part in parts for likelihood in part.likelihoods]


class _Chunks:
    """Turns parts into chunks. What has piled up is sent in one go, each part still in a chunk of its own."""

    def __init__(self, generation: Generation, shape: render.Shape, *, with_usage: bool, with_timings: bool) -> None:
        self._generation = generation
        self._shape = shape
        self._with_usage = with_usage
        self._with_timings = with_timings
        self._usage = Usage(0, 0)
        self._open = generation.prompts
        self._envelope = render.envelope(shape, generation, shape.chunk)
        self._opened = False

    async def next_frames(self) -> bytes:
        if not self._opened:
            self._opened = True
            openings = [self._shape.opening(index) for index in range(self._open)]
            if frames := b"".join(self._frame([opening]) for opening in openings if opening is not None):
                return frames
        return b"".join([frame for part in await self._generation.next_parts() for frame in self._frames(part)])

    def _frames(self, part: Part) -> Iterator[bytes]:
        if isinstance(part, TextDelta):
            yield self._frame([self._shape.piece(part.text, part.index, part.likelihoods)])
        elif isinstance(part, Done):
            timings = render.timings([part]) if self._with_timings else None
            yield self._frame([self._shape.ending(part.finish_reason.value, part.index)], timings=timings)
            self._usage += part.usage
            self._open -= 1
            if self._with_usage and not self._open:
                yield self._frame([], render.usage(self._usage))
        else:
            raise part.error

    def _frame(
        self,
        choices: list[dict[str, Any]],
        usage: dict[str, Any] | None = None,
        timings: dict[str, Any] | None = None,
    ) -> bytes:
        chunk = {**self._envelope, "choices": choices}
        if timings is not None:
            chunk["timings"] = timings
        if self._with_usage:
            chunk["usage"] = usage
        return frame(render.dumps(chunk))
