"""What is measured, and how many measurements become one number. Pure.

One ``Answer`` is one streamed request; the answers of one load become a ``Sample``; the samples of several rounds
become their medians.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

_PREFIX = "data:"
_END = "[DONE]"


class StreamError(Exception):
    """The server sent an error, or something that is no chunk, in a stream that had begun."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one event of a stream says.

    Attributes:
        text: more of the answer, possibly none.
        completion_tokens: the count that the server gives, usually in the last chunk, else None.
    """

    text: str
    completion_tokens: int | None = None


def read_chunk(line: str) -> Chunk | None:
    """Read one line of a stream of chat completion chunks.

    Returns:
        The chunk, or None for lines that carry none: empty ones, comments, other fields of an event, and ``[DONE]``.

    Raises:
        StreamError: the line carries an error, or no JSON object.
    """
    if not line.startswith(_PREFIX):
        return None
    data = line.removeprefix(_PREFIX).strip()
    if data in {"", _END}:
        return None
    try:
        event = json.loads(data)
    except ValueError:
        raise StreamError(f"no JSON in the stream: {data[:100]}") from None
    if not isinstance(event, dict):
        raise StreamError(f"no object in the stream: {data[:100]}")
    if "error" in event:
        raise StreamError(f"error in the stream: {_message(event['error'])}")
    try:
        choices = event.get("choices") or [{}]
        delta = choices[0].get("delta") or {}
        usage = event.get("usage") or {}
        return Chunk(delta.get("content") or "", usage.get("completion_tokens"))
    except (AttributeError, LookupError, TypeError):
        raise StreamError(f"no chunk in the stream: {data[:100]}") from None


def ends_stream(line: str) -> bool:
    """Whether the line is the ``[DONE]`` with which a whole answer ends."""
    return line.startswith(_PREFIX) and line.removeprefix(_PREFIX).strip() == _END


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed request. Times are seconds on one monotonic clock.

    Attributes:
        sent: when the request was sent.
        texts: when each piece of text arrived, in order.
        tokens: completion tokens by the server's count, or the pieces of text where it gives none.
        error: why the request failed, or None.
    """

    sent: float
    texts: tuple[float, ...] = ()
    tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One load: so many clients, each with its next request as soon as the last one has ended.

    Attributes:
        tokens_per_s: completion tokens of all answers, over the wall time of the load.
        ttft_p50_ms, ttft_p95_ms: from the sending of a request to its first text, waiting for a slot included.
        gap_p50_ms, gap_p95_ms: between one piece of text and the next.
        errors: requests that failed.
    """

    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    gap_p50_ms: float
    gap_p95_ms: float
    errors: int


NUMBERS = tuple(field.name for field in fields(Sample) if field.name != "errors")


def percentile(values: Iterable[float], percent: float) -> float:
    """Return a percentile with linear interpolation between ranks; NaN where there are no values.

    Arguments:
        values: in any order.
        percent: 0 to 100.
    """
    ordered = sorted(values)
    if not ordered:
        return math.nan
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarise(answers: Sequence[Answer], seconds: float) -> Sample:
    """Return what the answers of one load amount to.

    Arguments:
        answers: all of the load, failed ones included; those count as errors and nothing else.
        seconds: wall time of the load.
    """
    whole = [answer for answer in answers if answer.error is None]
    firsts = [1000 * (answer.texts[0] - answer.sent) for answer in whole if answer.texts]
    gaps = [1000 * (b - a) for answer in whole for a, b in zip(answer.texts, answer.texts[1:], strict=False)]
    return Sample(
        tokens_per_s=sum(answer.tokens for answer in whole) / seconds if seconds > 0 else math.nan,
        ttft_p50_ms=percentile(firsts, 50),
        ttft_p95_ms=percentile(firsts, 95),
        gap_p50_ms=percentile(gaps, 50),
        gap_p95_ms=percentile(gaps, 95),
        errors=len(answers) - len(whole),
    )


def medians(samples: Sequence[Sample]) -> Sample:
    """Return the median of each number over rounds, those without a value left out; errors are added up."""

    def middle(name: str) -> float:
        known = [value for sample in samples if not math.isnan(value := getattr(sample, name))]
        return median(known) if known else math.nan

    return Sample(**{name: middle(name) for name in NUMBERS}, errors=sum(sample.errors for sample in samples))


def ratios(ours: Sample, theirs: Sample) -> Mapping[str, float]:
    """Return ours over theirs for every number but the errors; NaN where that has no value."""
    pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in NUMBERS}
    return {name: a / b if b else math.nan for name, (a, b) in pairs.items()}


def _message(error: Any) -> str:
    text = error.get("message") if isinstance(error, dict) else error
    return str(text)[:200]
