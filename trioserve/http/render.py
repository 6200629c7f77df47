"""Answers in OpenAI's shapes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quart import Response

from trioserve.engine.base import Likelihood, TokenLogprob
from trioserve.errors import TrioserveError
from trioserve.runtime.model import ModelStatus
from trioserve.service import Done, Generation, Usage
from trioserve.service.status import SlotStatus

_IMPOSSIBLE = -9999.0
_SEPARATORS = (",", ":")


_encode = json.JSONEncoder(ensure_ascii=False, separators=_SEPARATORS).encode


def dumps(value: object) -> bytes:
    """Compact JSON in UTF-8."""
    return _encode(value).encode("utf-8", "replace")


class TextFrame:
    """JSON that is the same for every token but for one text in it. To write the text alone takes a twentieth.

    Arguments:
        value: with an empty string where the text goes, and in no other place.
    """

    def __init__(self, value: object) -> None:
        self._before, self._after = dumps(value).split(b'""')

    def around(self, text: str) -> bytes:
        """The value with a text in its place, as ``dumps`` would write it."""
        return self._before + dumps(text) + self._after


def error_body(error: TrioserveError) -> bytes:
    """The error object that every route answers with, as JSON."""
    return dumps(error_fields(error))


def error_fields(error: TrioserveError) -> dict[str, Any]:
    """The error object that every route answers with."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def response(value: object, status: int = 200) -> Response:
    """A JSON response."""
    return Response(dumps(value), status=status, content_type="application/json")


def usage(counts: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.total_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
    }


def counted(done: Done, choices: int) -> Usage:
    """What an answer adds to the usage of its request: of several choices the first one counts the prompt."""
    return done.usage if done.index % choices == 0 else Usage(0, done.usage.completion_tokens)


def timings(answers: Sequence[Done]) -> dict[str, Any]:
    """llama-server's object about one answer, or about several: all their tokens, and the longest of their times."""
    counts = sum((done.usage for done in answers), start=Usage(0, 0))
    evaluated, predicted = counts.prompt_tokens - counts.cached_tokens, counts.completion_tokens
    prefill = max(done.timings.prefill_ms for done in answers)
    decode = max(done.timings.decode_ms for done in answers)
    # The first token of each answer comes with the end of its prompt.
    return {
        "cache_n": counts.cached_tokens,
        **_pace("prompt", evaluated, evaluated, prefill),
        **_pace("predicted", predicted, max(predicted - len(answers), 0), decode),
    }


def _pace(name: str, tokens: int, timed: int, ms: float) -> dict[str, Any]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": ms,
        f"{name}_per_token_ms": round(ms / timed, 3) if timed else 0.0,
        f"{name}_per_second": round(1000 * timed / ms, 3) if ms else 0.0,
    }


def model(status: ModelStatus) -> dict[str, object]:
    """One model of ``GET /v1/models``."""
    return {
        "id": status.id,
        "object": "model",
        "created": status.created,
        "owned_by": "trioserve",
        "task": status.task,
        "state": status.state.value,
        "loaded": status.loaded,
        "slots": status.slots,
        "active_slots": status.active_slots,
        "queued_requests": status.queued_requests,
        "queued_operations": status.queued_operations,
        "max_parallel_slots": status.max_parallel_slots,
        "n_ctx": status.n_ctx,
        "stalled_slots": len(status.ailments),
    }


def slot(status: SlotStatus) -> dict[str, object]:
    """One slot of ``GET /v1/slots``."""
    return {
        "model": status.model,
        "slot": status.slot,
        "state": status.state,
        "request_id": status.request_id,
        "phase": status.phase,
        "age_ms": None if status.age is None else round(1000 * status.age, 1),
        "prompt_tokens": status.prompt_tokens,
        "completion_tokens": status.completion_tokens,
    }


def token_logprobs(likelihoods: Iterable[Likelihood]) -> list[dict[str, Any]]:
    """Tokens with their logarithms of probability, as chat completions tell them."""
    return [
        {**_logprob(likelihood.chosen), "top_logprobs": [_logprob(other) for other in likelihood.top]}
        for likelihood in likelihoods
    ]


def _logprob(said: TokenLogprob) -> dict[str, Any]:
    return {"token": _text(said), "logprob": _finite(said.logprob), "bytes": list(said.piece)}


def _text(said: TokenLogprob) -> str:
    return said.piece.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    """JSON knows no infinity; OpenAI says this for what is next to impossible."""
    return max(logprob, _IMPOSSIBLE)


class ChatShape:
    """Chat completions, whole and in chunks."""

    whole, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    @staticmethod
    def opening(index: int) -> dict[str, Any]:
        """What the first chunk says before there is text."""
        return _choice(index, {"delta": {"role": "assistant", "content": ""}})

    @classmethod
    def piece(cls, text: str, index: int, likelihoods: Sequence[Likelihood] = ()) -> dict[str, Any]:
        """More text."""
        return _choice(index, {"delta": {"content": text}}, cls._logprobs(likelihoods))

    @classmethod
    def delta(cls, fields: Mapping[str, Any], index: int, likelihoods: Sequence[Likelihood] = ()) -> dict[str, Any]:
        """More of anything."""
        return _choice(index, {"delta": fields}, cls._logprobs(likelihoods))

    @staticmethod
    def ending(reason: str, index: int) -> dict[str, Any]:
        """The end of the text."""
        return _choice(index, {"delta": {}}, reason=reason)

    @classmethod
    def choice(
        cls,
        text: str | None,
        reason: str,
        index: int,
        likelihoods: Sequence[Likelihood] = (),
        more: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The whole answer; ``more`` are further fields of its message."""
        message = {"role": "assistant", "content": text, "refusal": None, **(more or {})}
        return _choice(index, {"message": message}, cls._logprobs(likelihoods), reason)

    @staticmethod
    def _logprobs(likelihoods: Sequence[Likelihood]) -> dict[str, Any] | None:
        return {"content": token_logprobs(likelihoods), "refusal": None} if likelihoods else None


class CompletionShape:
    """Text completions, whole and in chunks."""

    whole = chunk = "text_completion"
    prefix = "cmpl-"

    @classmethod
    def piece(cls, text: str, index: int, likelihoods: Sequence[Likelihood] = ()) -> dict[str, Any]:
        """More text."""
        return _choice(index, {"text": text}, cls._logprobs(likelihoods))

    @staticmethod
    def ending(reason: str, index: int) -> dict[str, Any]:
        """The end of the text."""
        return _choice(index, {"text": ""}, reason=reason)

    @classmethod
    def choice(cls, text: str, reason: str, index: int, likelihoods: Sequence[Likelihood] = ()) -> dict[str, Any]:
        """The whole answer."""
        return _choice(index, {"text": text}, cls._logprobs(likelihoods), reason)

    @staticmethod
    def _logprobs(likelihoods: Sequence[Likelihood]) -> dict[str, Any] | None:
        if not likelihoods:
            return None
        tokens = [_text(likelihood.chosen) for likelihood in likelihoods]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(likelihood.chosen.logprob) for likelihood in likelihoods],
            "top_logprobs": [
                {_text(other): _finite(other.logprob) for other in likelihood.top} for likelihood in likelihoods
            ],
            "text_offset": list(itertools.accumulate(map(len, tokens[:-1]), initial=0)),
        }


def _choice(
    index: int, fields: Mapping[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, **fields, "logprobs": logprobs, "finish_reason": reason}


Shape = type[ChatShape] | type[CompletionShape]


def envelope(shape: Shape, generation: Generation, kind: str) -> dict[str, Any]:
    """The fields that all chunks of an answer share."""
    return {
        "id": shape.prefix + generation.id,
        "object": kind,
        "created": generation.created,
        "model": generation.model,
        "system_fingerprint": None,
    }


def whole(
    shape: Shape, generation: Generation, choices: Sequence[object], answers: Sequence[Done], *, with_timings: bool
) -> Mapping[str, Any]:
    """An answer in one piece, with the ends of all the answers in it."""
    counts = sum((counted(done, generation.choices) for done in answers), start=Usage(0, 0))
    more = {"timings": timings(answers)} if with_timings else {}
    return {**envelope(shape, generation, shape.whole), "choices": choices, "usage": usage(counts), **more}
