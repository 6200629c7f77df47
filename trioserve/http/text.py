"""Answering with tokens: a megabyte of text can be a million of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quart import Response

from trioserve.http import render
from trioserve.service import Piece
from trioserve.workers import Workers

_INLINE_TOKENS = 4096  # fewer of them are written faster than a thread is woken
_writers = Workers("written_tokens", 2)


async def answer_tokens(pieces: Sequence[Piece], *, with_pieces: bool) -> Response:
    """Tell tokens, many of them written in a worker thread."""
    if len(pieces) <= _INLINE_TOKENS:
        body = _body(pieces, with_pieces)
    else:
        body = await _writers.run(_body, pieces, with_pieces)
    return Response(body, content_type="application/json")


def _body(pieces: Sequence[Piece], with_pieces: bool) -> bytes:
    # One call of the JSON writer is one step that no other thread can interrupt; between two of them all can run.
    starts = range(0, len(pieces), _INLINE_TOKENS)
    written = (_items(pieces[start : start + _INLINE_TOKENS], with_pieces) for start in starts)
    return b'{"tokens":[' + b",".join(written) + b"]}"


def _items(pieces: Sequence[Piece], with_pieces: bool) -> bytes:
    items: list[Any] = [_item(piece) if with_pieces else piece.token for piece in pieces]
    return render.dumps(items)[1:-1]


def _item(piece: Piece) -> dict[str, Any]:
    try:
        told: str | list[int] = piece.data.decode()
    except UnicodeDecodeError:
        told = list(piece.data)
    return {"id": piece.token, "piece": told}
