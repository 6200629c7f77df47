"""Answering with vectors, piece by piece: 2048 of them can be a hundred megabytes of digits."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from types import TracebackType
from typing import Self

import trio
from quart import Response
from quart.wrappers.response import ResponseBody

from trioserve.http import render
from trioserve.service import Embedding

_CONTENT_TYPE = "application/json"
_INLINE_NUMBERS = 16 * 1024  # fewer of them are written faster than a thread is woken
_PIECE_NUMBERS = 64 * 1024  # about a megabyte of digits


async def answer(embedding: Embedding, *, as_base64: bool) -> Response:
    """Wait for the vectors and tell them, large answers while they are written."""
    vectors = await embedding.vectors()
    pieces = _pieces(embedding, vectors, as_base64=as_base64)
    if sum(map(len, vectors)) <= _INLINE_NUMBERS:
        return Response(b"".join(pieces), content_type=_CONTENT_TYPE)
    response = Response(_Body(pieces, max(1, _PIECE_NUMBERS // len(vectors[0]))), content_type=_CONTENT_TYPE)
    response.timeout = None  # Quart would cut a slow client off at its RESPONSE_TIMEOUT, silently
    return response


class _Body(ResponseBody):
    """A body that is written in a worker thread while it is sent; see ``http.sse.EventStream`` for its manners.

    Arguments:
        pieces: of the body.
        together: how many of them are written and sent at once.
    """

    def __init__(self, pieces: Iterator[bytes], together: int) -> None:
        self._pieces = pieces
        self._together = together
        self._limiter = trio.CapacityLimiter(1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Nothing to free here."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        data = await trio.to_thread.run_sync(self._write, limiter=self._limiter)
        if not data:
            raise StopAsyncIteration
        return data

    def _write(self) -> bytes:
        # One vector is written in one call of C, which no other thread can interrupt; between two of them all can run.
        return b"".join(islice(self._pieces, self._together))


def _pieces(embedding: Embedding, vectors: Sequence[array[float]], *, as_base64: bool) -> Iterator[bytes]:
    """The JSON text of OpenAI's list of embeddings, a vector at a time."""
    write = _base64 if as_base64 else _floats
    for index, vector in enumerate(vectors):
        opening = b"," if index else b'{"object":"list","data":['
        yield b'%s{"object":"embedding","index":%d,"embedding":%s}' % (opening, index, write(vector))
    usage = {"prompt_tokens": embedding.prompt_tokens, "total_tokens": embedding.prompt_tokens}
    yield b'],"model":%s,"usage":%s}' % (render.dumps(embedding.model), render.dumps(usage))


def _floats(vector: array[float]) -> bytes:
    """A JSON list. Nine digits are enough to tell any float32 from its neighbours."""
    return b"[" + (",".join(["%.9g"] * len(vector)) % tuple(vector)).encode() + b"]"


def _base64(vector: array[float]) -> bytes:
    """A JSON string of little-endian float32."""
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return b'"' + base64.b64encode(vector.tobytes()) + b'"'
