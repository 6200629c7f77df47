"""What is a violation. Pure: each decider takes what was seen and says what is wrong with it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import jsonschema

from .answers import Answer, Batch, MalformedError, Told, Vectors, likeness, read
from .plan import Order, Question

MIB = 1 << 20
FLAT_SHARE, FLAT_MIB = 1.10, 8
RECALLED_SHARE = 0.3
ALIKE = 0.999
"""Cosine between the vectors of one text, computed in company and without: they differ by rounding only."""


class Kind(StrEnum):
    """Of a violation."""

    FOREIGN_WORD = "foreign word"
    WRONG_BYTES = "wrong bytes"
    BROKEN_FORM = "broken form"
    CONTRACT = "outside the contract"
    STUCK = "stuck"


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that must not be."""

    kind: Kind
    what: str


class Fate(StrEnum):
    """How an exchange ended, as the client saw it."""

    WHOLE = "whole"
    LEFT = "left"  # by the client, as it was planned
    STUCK = "stuck"
    LOST = "lost"  # by the connection


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back.

    Attributes:
        fate: how it ended.
        status: of the response; None where there was none.
        headers: of the response, names in lower case.
        body: as far as it came.
        seconds: from the first byte of the request to the end.
        why: the connection was lost.
    """

    fate: Fate
    status: int | None = None
    headers: Mapping[str, str] | None = None
    body: bytes = b""
    seconds: float = 0
    why: str = ""

    @property
    def outcome(self) -> str:
        """In a word: ``finished``, ``busy``, another status, or how it ended without being whole."""
        if self.fate is not Fate.WHOLE:
            return self.fate.value
        return {200: "finished", 503: "busy"}.get(self.status or 0, f"status {self.status}")


def foreign_words(text: str, owner: int, words: Sequence[str]) -> list[str]:
    """The secret words in a text that are not its owner's. Neither case nor spaces hide them."""
    squeezed = re.sub(r"[\W_]+", "", text.lower())
    return [word for client, word in enumerate(words) if client != owner and word in squeezed]


def judge(order: Order, request_id: str, reply: Reply, expected: Told, words: Sequence[str]) -> list[Violation]:
    """All that is wrong with what came back for an order.

    Arguments:
        order: that was sent.
        request_id: that it was sent with.
        reply: to it.
        expected: the answer that the same question got alone.
        words: everybody's.
    """
    found = list(_judge(order, request_id, reply, expected))
    told = reply.body.decode("utf-8", "replace")
    if reply.status == 200:
        with contextlib.suppress(MalformedError):  # told by the others
            told += read(order, reply.body).text
    found += [Violation(Kind.FOREIGN_WORD, word) for word in foreign_words(told, order.question.owner, words)]
    return [Violation(each.kind, f"{order.question.kind} of {request_id}: {each.what}") for each in found]


def _judge(order: Order, request_id: str, reply: Reply, expected: Told) -> Iterator[Violation]:
    if reply.fate is Fate.STUCK:
        yield Violation(Kind.STUCK, f"no end after {reply.seconds:.0f} s, status {reply.status}")
    if reply.fate is Fate.LOST or (reply.fate is Fate.LEFT and order.cut is None):
        yield Violation(Kind.CONTRACT, f"the connection was {reply.fate} ({reply.why}), status {reply.status}")
    if reply.status is None:
        return
    if (reply.headers or {}).get("x-request-id") != request_id:
        yield Violation(Kind.CONTRACT, f"the response is that of {(reply.headers or {}).get('x-request-id')}")
    if reply.status == 200:
        yield from _judge_answer(order, reply, expected)
    elif reply.fate is Fate.WHOLE and not is_busy(reply):
        yield Violation(Kind.CONTRACT, f"status {reply.status}: {reply.body[:300]!r}")


def is_busy(reply: Reply) -> bool:
    """Whether it is the refusal that a load may earn, in its right shape."""
    return reply.status == 503 and error_type(reply.body) == "server_busy" and "retry-after" in (reply.headers or {})


def error_type(body: bytes) -> str | None:
    """Type of an error object; None for anything else."""
    try:
        error = json.loads(body)["error"]
        return error["type"] if set(error) == {"message", "type", "param", "code"} else None
    except (ValueError, KeyError, TypeError):
        return None


def _judge_answer(order: Order, reply: Reply, expected: Told) -> Iterator[Violation]:
    whole = reply.fate is Fate.WHOLE
    if not whole and not order.stream:
        return  # a piece of a JSON object says nothing
    try:
        answer = read(order, reply.body)
    except MalformedError as error:
        yield Violation(Kind.CONTRACT, str(error))
        return
    if answer.model not in (order.model, None):
        yield Violation(Kind.CONTRACT, f"{order.model} was asked and {answer.model} answered")
    if answer.end not in ("done", None) or (whole and answer.end is None):
        yield Violation(Kind.CONTRACT, f"the stream ended with {answer.end}")
    elif problem := answer.wrong(expected, whole=whole):
        yield Violation(Kind.WRONG_BYTES, problem)
    yield from (Violation(Kind.BROKEN_FORM, problem) for problem in broken_forms(order.question, answer))


def broken_forms(question: Question, told: Told) -> Iterator[str]:
    """Where an answer is not of the form that was asked for. One that was cut off may be the beginning of it."""
    items = told.items if isinstance(told, Batch) else {0: told}
    for index, answer in items.items():
        body = question.requests[index] if index < len(question.requests) else {}
        if isinstance(answer, Vectors) or answer.reason != "stop":
            continue
        if (pattern := body.get("regex")) is not None and not re.fullmatch(pattern, answer.text):
            yield f"{answer.text!r} does not match {pattern}"
        if (form := body.get("response_format")) is not None:
            try:
                jsonschema.validate(json.loads(answer.text), form["json_schema"]["schema"])
            except (ValueError, jsonschema.ValidationError) as error:
                yield f"{answer.text!r} is not of its form: {error}"


def judge_operation(route: str, statuses: Iterable[int], reply: Reply) -> list[Violation]:
    """All that is wrong with what came back for a management call."""
    if reply.fate is Fate.LEFT:
        return []
    if reply.fate is Fate.STUCK:
        return [Violation(Kind.STUCK, f"{route}: no end after {reply.seconds:.0f} s")]
    if reply.fate is Fate.LOST:
        return [Violation(Kind.CONTRACT, f"{route}: the connection was lost ({reply.why})")]
    if reply.status not in statuses or (reply.status == 503 and not is_busy(reply)):
        return [Violation(Kind.CONTRACT, f"{route}: status {reply.status}: {reply.body[:300]!r}")]
    return []


def toothless(expected: Mapping[str, Told], words: Mapping[str, str]) -> str | None:
    """Say so where too few answers hold their own client's word: then one with a foreign word would prove little.

    Arguments:
        expected: answers by question.
        words: of the clients, by question.
    """
    texts = {key: answer.text.lower() for key, answer in expected.items() if not isinstance(answer, Vectors)}
    recalled = sum(words[key] in text for key, text in texts.items())
    if recalled >= RECALLED_SHARE * len(texts):
        return None
    return f"only {recalled} of {len(texts)} answers hold their own word"


def in_company(catalogue: Iterable[Question], expected: Mapping[str, Told]) -> tuple[int, int, list[str]]:
    """Compare what questions got in a batch, or in a list of texts, with what they got alone.

    Rows that are computed together may round otherwise than alone, and then an answer goes another way. A vector
    doesn't.

    Returns:
        How many answers are the same, how many there are, and which vectors are not alike.
    """
    same, all_of_them, unlike = 0, 0, []
    for question in catalogue:
        told = expected[question.key]
        for index, part in enumerate(question.parts):
            alone = expected.get(part.key)
            if isinstance(told, Batch) and isinstance(alone, Answer):
                all_of_them += 1
                same += told.items[index].text == alone.text
            elif isinstance(told, Vectors) and isinstance(alone, Vectors):
                nearness = likeness(told.vectors[index], alone.vectors[0])
                if nearness < ALIKE:
                    unlike.append(f"vector {index} in company is at {nearness:.6f} to the one alone")
    return same, all_of_them, unlike


def busy_slots(models: Sequence[Mapping[str, Any]], slots: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is not idle, of ``GET /v1/models`` and ``GET /v1/slots``."""
    return [
        f"{one['id']}: {one['active_slots']} active, {one['queued_requests']} queued"
        for one in models
        if one["active_slots"] or one["queued_requests"]
    ] + [f"slot {one['slot']} of {one['model']} is {one['state']}" for one in slots if one["state"] != "idle"]


def grown(samples: Sequence[int]) -> str | None:
    """Say so where memory has grown from the first sample to the last, in bytes."""
    first, last = samples[0], samples[-1]
    if last <= first * FLAT_SHARE + FLAT_MIB * MIB:
        return None
    return f"memory grew from {first / MIB:.1f} to {last / MIB:.1f} MiB"


# -- the log

_REQUEST = re.compile(r" info request (\w+) .*\brequest_id=(\S+)")
_CUT_IN = re.compile(r"\bcancelled_in=(\w+)")
_DRAINING = re.compile(r" info draining active=(\d+)")
_REPORT = re.compile(r"(drained|stopped before all work was done) in .*?: (\d+) \w+, (\d+) \w+, (\d+) \w+, (\d+)")
_ALLOWED = {  # what the log may say of a request that ended so for its client
    "finished": {"finished"},
    "busy": {"rejected"},
    # Not every request that was left had arrived, and some were at their end in that very moment.
    "left": {"cancelled", "finished", "rejected", None},
}


def ends_in_log(log: str) -> dict[str, str]:
    """How the requests ended, by their ids."""
    return {request_id: end for end, request_id in _REQUEST.findall(log)}


def cut_phases(log: str) -> list[str]:
    """In which phases requests were left, one item for each."""
    return [found.group(1) for line in log.splitlines() if (found := _CUT_IN.search(line)) and "operation=" not in line]


def reused_tokens(log: str) -> tuple[int, int]:
    """How many tokens of the prompts of finished requests their slots had kept already, and how many there were."""
    lines = [line for line in log.splitlines() if " info request finished " in line]
    kept, all_of_them = (
        sum(int(count) for line in lines for count in re.findall(rf"\b{name}=(\d+)", line))
        for name in ("cached_tokens", "prompt_tokens")
    )
    return kept, all_of_them


def log_problems(log: str, outcomes: Mapping[str, str]) -> list[str]:
    """Where the log tells of errors, or of other ends than clients saw.

    Arguments:
        log: of the daemon, in its text format.
        outcomes: what clients saw, by request id; see ``Reply.outcome``.
    """
    ends = ends_in_log(log)
    found = [line for line in log.splitlines() if re.search(r"^\S+ (error|warning) |^Traceback", line)]
    for request_id, outcome in outcomes.items():
        if outcome in _ALLOWED and ends.get(request_id) not in _ALLOWED[outcome]:
            found.append(f"{request_id} was {outcome} for its client, and is {ends.get(request_id)} in the log")
    return found


def drain_problems(log: str, finished: int, refused: int) -> list[str]:
    """Where the report of a drain does not add up.

    Arguments:
        log: of the daemon.
        finished: requests that were under way at the signal, all of which got their answer.
        refused: newcomers that were turned away.
    """
    began, report = _DRAINING.search(log), _REPORT.search(log)
    if began is None or report is None:
        return ["there is no report of the drain"]
    active, counts = int(began.group(1)), [int(count) for count in report.groups()[1:]]
    wanted = [active, 0, 0, refused]
    found = []
    if report.group(1) != "drained" or counts != wanted:
        found.append(f"finished, cancelled, failed, rejected are {counts} in the report and should be {wanted}")
    if not 1 <= active <= finished:
        found.append(f"{active} requests were under way at the signal, {finished} had been sent")
    return found
