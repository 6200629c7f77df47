"""Answering with a generation: in one piece, or as a stream of chunks."""

from __future__ import annotations

import math
from typing import Any

from quart import Response

from trioserve.engine.sampling import Sampling, fold_seed
from trioserve.http import render
from trioserve.http.exchange import Exchange
from trioserve.http.schemas.base import GenerationFields
from trioserve.http.sse import EventStream, frame
from trioserve.service import Done, Generation, GenerationRequest, Service, TextDelta
from trioserve.service.requests import Prompt

_CONTENT_TYPE = "application/json"
_RANDOM_SEED = -1


def generation_request(
    fields: GenerationFields, prompt: Prompt, limit: int | None, exchange: Exchange
) -> GenerationRequest:
    """Turn validated fields into what the service takes."""
    return GenerationRequest(
        prompt=prompt,
        model=fields.model,
        max_tokens=limit,
        sampling=_sampling(fields),
        stops=fields.stops,
        ignore_eos=bool(fields.ignore_eos),
        busy_timeout_ms=fields.busy_timeout_ms,
        request_id=exchange.request_id,
    )


async def answer(
    service: Service, request: GenerationRequest, fields: GenerationFields, shape: render.Shape, exchange: Exchange
) -> Response:
    """Admit a request and answer it. Everything it holds is freed with the exchange."""
    generation = await service.start(request, exchange.resources)
    if not fields.stream:
        return await _in_one_piece(generation, shape)
    with_usage = bool(fields.stream_options and fields.stream_options.include_usage)
    silence = service.config.sse_ping_interval_ms / 1000 or math.inf
    response = Response(EventStream(_Chunks(generation, shape, with_usage=with_usage), silence))
    response.timeout = None  # Quart would cut longer streams at its RESPONSE_TIMEOUT, silently
    response.headers["content-type"] = "text/event-stream; charset=utf-8"
    response.headers["cache-control"] = "no-store"
    response.headers["x-accel-buffering"] = "no"
    return response


async def _in_one_piece(generation: Generation, shape: render.Shape) -> Response:
    texts: list[str] = []
    done: Done | None = None
    async for part in generation:
        if isinstance(part, TextDelta):
            texts.append(part.text)
        else:
            done = part
    assert done is not None, "a generation ends with Done or an error"
    return Response(render.dumps(render.whole(shape, generation, "".join(texts), done)), content_type=_CONTENT_TYPE)


class _Chunks:
    """Turns parts into chunks. What has piled up is sent in one go, each part still in a chunk of its own."""

    def __init__(self, generation: Generation, shape: render.Shape, *, with_usage: bool) -> None:
        self._generation = generation
        self._shape = shape
        self._with_usage = with_usage
        self._envelope = render.envelope(shape, generation, shape.chunk)
        self._opened = False

    async def next_frames(self) -> bytes:
        if not self._opened:
            self._opened = True
            if (opening := self._shape.opening()) is not None:
                return self._frame([opening])
        frames = b""
        for part in await self._generation.next_parts():
            if isinstance(part, TextDelta):
                frames += self._frame([self._shape.piece(part.text)])
            else:
                frames += self._frame([self._shape.ending(part.finish_reason.value)])
                if self._with_usage:
                    frames += self._frame([], render.usage(part.usage))
        return frames

    def _frame(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
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
