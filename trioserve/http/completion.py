"""Answering with a generation: in one piece, or as a stream of chunks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from quart import Response

from trioserve.config import Config
from trioserve.engine.sampling import Sampling, fold_seed
from trioserve.http import render
from trioserve.http.exchange import Exchange
from trioserve.http.schemas.base import GenerationFields
from trioserve.http.sse import DONE, EventStream, Source, frame
from trioserve.service import (
    BatchRequest,
    Done,
    Generation,
    GenerationRequest,
    Part,
    Service,
    TextDelta,
    Usage,
)
from trioserve.service.requests import Prompt

_CONTENT_TYPE = "application/json"
_RANDOM_SEED = -1


def generation_request(
    fields: GenerationFields, prompt: Prompt, limit: int | None, request_id: str
) -> GenerationRequest:
    """Turn validated fields into what the service takes."""
    return GenerationRequest(
        prompt=prompt,
        model=fields.model,
        max_tokens=limit,
        sampling=_sampling(fields),
        stops=fields.stops,
        ignore_eos=bool(fields.ignore_eos),
        cache_prompt=fields.cache_prompt is not False,
        busy_timeout_ms=fields.busy_timeout_ms,
        request_id=request_id,
    )


async def answer(
    service: Service,
    request: GenerationRequest | BatchRequest,
    fields: GenerationFields,
    shape: render.Shape,
    exchange: Exchange,
) -> Response:
    """Admit a request and answer it. Everything it holds is freed with the exchange."""
    generation = await service.start(request, exchange.resources)
    if not fields.stream:
        return await _in_one_piece(generation, shape)
    with_usage = bool(fields.stream_options and fields.stream_options.include_usage)
    return stream_response(service.config, _Chunks(generation, shape, with_usage=with_usage))


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


async def _in_one_piece(generation: Generation, shape: render.Shape) -> Response:
    answers = await collect(generation)
    choices = [shape.choice(text, done.finish_reason.value, index) for index, (text, done) in sorted(answers.items())]
    usage = sum((done.usage for _, done in answers.values()), start=Usage(0, 0))
    return Response(render.dumps(render.whole(shape, generation, choices, usage)), content_type=_CONTENT_TYPE)


async def collect(generation: Generation) -> dict[int, tuple[str, Done]]:
    """Wait for all answers of a generation that is for all or nothing.

    Returns:
        Text and end of each, by the index of its prompt.
    """
    texts: defaultdict[int, list[str]] = defaultdict(list)
    ends: dict[int, Done] = {}
    async for part in generation:
        if isinstance(part, TextDelta):
            texts[part.index].append(part.text)
        elif isinstance(part, Done):
            ends[part.index] = part
        else:
            raise part.error
    return {index: ("".join(texts[index]), done) for index, done in ends.items()}


class _Chunks:
    """Turns parts into chunks. What has piled up is sent in one go, each part still in a chunk of its own."""

    def __init__(self, generation: Generation, shape: render.Shape, *, with_usage: bool) -> None:
        self._generation = generation
        self._shape = shape
        self._with_usage = with_usage
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
            yield self._frame([self._shape.piece(part.text, part.index)])
        elif isinstance(part, Done):
            yield self._frame([self._shape.ending(part.finish_reason.value, part.index)])
            self._usage += part.usage
            self._open -= 1
            if self._with_usage and not self._open:
                yield self._frame([], render.usage(self._usage))
        else:
            raise part.error

    def _frame(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        chunk = {**self._envelope, "choices": choices}
        if self._with_usage:
            chunk["usage"] = usage
        return frame(render.dumps(chunk))


def _sampling(fields: GenerationFields) -> Sampling:
    """The fields that were given, over the defaults of ``Sampling``."""
    default = Sampling()
    top_k = default.top_k if fields.top_k is None else fields.top_k
    last_n = default.repeat_last_n if fields.repeat_last_n is None else fields.repeat_last_n
    return Sampling(
        temperature=_given(fields.temperature, default.temperature),
        top_k=max(top_k, 0),
        top_p=_given(fields.top_p, default.top_p),
        min_p=_given(fields.min_p, default.min_p),
        repeat_penalty=_given(fields.repeat_penalty, default.repeat_penalty),
        repeat_last_n=2**31 - 1 if last_n < 0 else last_n,
        frequency_penalty=_given(fields.frequency_penalty, default.frequency_penalty),
        presence_penalty=_given(fields.presence_penalty, default.presence_penalty),
        seed=fold_seed(None if fields.seed == _RANDOM_SEED else fields.seed),
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
