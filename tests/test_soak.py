"""The deciders of the soak: its plan comes from the seed, and each check can fail."""

from __future__ import annotations

import base64
import itertools
import json
from array import array
from collections import Counter
from dataclasses import replace

import pytest
import trio
from soak import answers, checks, plan
from soak.answers import Answer, Batch, MalformedError, Vectors
from soak.checks import Fate, Kind, Reply, Violation
from soak.clients import Pauses
from soak.tally import TOLD_VIOLATIONS, Tally

from trioserve.config import ModelConfig
from trioserve.http.schemas.chat import ChatCompletionRequest
from trioserve.http.schemas.completions import CompletionRequest
from trioserve.http.schemas.embeddings import EmbeddingsRequest
from trioserve.http.schemas.management import UnloadAllRequest, UnloadModelsRequest, UnloadRequest
from trioserve.http.schemas.tasks import BatchTaskRequest

SHAPE = plan.Shape()
WORDS = ["kobitanu", "devigolu", "marisepo"]
EXPECTED = Answer(" kobitanu. The sea", "length", 5, "done", "a")


def first(iterator, count=400):
    return list(itertools.islice(iterator, count))


# -- the plan


def test_everything_random_comes_from_the_seed():
    own = plan.questions(7, SHAPE)[3]
    assert first(plan.orders(7, 3, own)) == first(plan.orders(7, 3, own))
    assert first(plan.orders(7, 3, own)) != first(plan.orders(8, 3, own))
    assert first(plan.orders(7, 3, own)) != first(plan.orders(7, 4, own))
    assert first(plan.operations(7, SHAPE)) == first(plan.operations(7, SHAPE))
    assert first(plan.operations(7, SHAPE)) != first(plan.operations(8, SHAPE))
    assert plan.farewell(7, SHAPE) == plan.farewell(7, SHAPE)


@pytest.mark.parametrize("seed", range(5))
def test_words_are_unique_and_none_is_part_of_another(seed):
    words = plan.secret_words(seed, 64)
    assert not any(one in other for one, other in itertools.permutations(words, 2))
    assert words != plan.secret_words(seed + 1, 64)


def test_every_question_holds_its_own_word_and_no_other():
    words = plan.secret_words(7, SHAPE.clients)
    for owner, own in enumerate(plan.questions(7, SHAPE)):
        assert len({question.key for question in own}) == len(own)
        for question in own:
            assert question.owner == owner
            assert words[owner] in question.key
            assert checks.foreign_words(question.key, owner, words) == []


def test_orders_are_requests_that_the_server_takes():
    one_answer = {plan.CHAT: ChatCompletionRequest, plan.COMPLETIONS: CompletionRequest}
    schemas = {**one_answer, plan.BATCH: BatchTaskRequest, plan.EMBEDDINGS: EmbeddingsRequest}
    for order in first(plan.orders(7, 0, plan.questions(7, SHAPE)[0])):
        route = order.question.route
        parsed = schemas[route].parse(order.body)
        assert (parsed.model, parsed.busy_timeout_ms) == (order.model, order.busy_timeout_ms)
        assert (order.model == plan.EMBEDDER) is (route == plan.EMBEDDINGS)
        assert order.stream is {plan.BATCH: True, plan.EMBEDDINGS: False}.get(route, order.stream)
        if route in one_answer:
            assert (parsed.cache_prompt is False) is order.fresh
            assert parsed.stream is order.stream
        for part in order.question.parts if route == plan.BATCH else [order.question]:
            if part.route in one_answer:
                answer = one_answer[part.route].parse(part.body)
                assert answer.max_tokens is not None, "or n_ctx would decide how long the answer is"


def test_what_is_asked_together_is_asked_alone_as_well():
    own = plan.questions(7, SHAPE)[3]
    alone = {question.key for question in own if not question.parts}
    parts = {question.kind: [part.key in alone for part in question.parts] for question in own if question.parts}
    assert parts == {"batch": [True] * 4, "vectors": [False, True, False, False]}


def test_operations_are_calls_that_the_server_takes():
    schemas = {plan.UNLOAD: UnloadRequest, plan.UNLOAD_MANY: UnloadModelsRequest, plan.UNLOAD_ALL: UnloadAllRequest}
    for operation in [*first(plan.operations(7, SHAPE)), *plan.patience()]:
        if operation.route != plan.LOAD:
            schemas[operation.route].parse(operation.body)
        elif 200 in operation.statuses:
            config = ModelConfig.model_validate({"path": "model.gguf", **operation.body})
            assert 1 <= config.slots <= 4
            assert config.busy_timeout_ms >= 2000, "it bounds everybody's wait"
            assert config.n_ctx is None or config.n_ctx >= plan.MIN_CONTEXT


def test_the_mixture_has_everything_in_it():
    orders = first(plan.orders(7, 0, plan.questions(7, SHAPE)[0]), 2000)
    cuts = [order.cut for order in orders if order.cut is not None]
    assert 0.25 < len(cuts) / len(orders) < 0.35
    assert {cut.where for cut in cuts} == {"upload", "waiting", "prefill", "decode", "events"}
    assert {cut.reset for cut in cuts} == {True, False}
    assert {order.model for order in orders} == set(plan.SLOTS)
    assert {order.question.kind for order in orders} == {question.kind for question in plan.questions(7, SHAPE)[0]}
    assert {order.fresh for order in orders} == {True, False}
    assert {order.busy_timeout_ms is None for order in orders} == {True, False}
    assert 0 in {order.busy_timeout_ms for order in orders}
    assert all(order.stream for order in orders if order.cut and order.cut.where == "events")
    asked = Counter((order.question.kind, order.stream) for order in orders if order.cut is None)
    ways = {plan.BATCH: 1, plan.EMBEDDINGS: 1}
    assert len(asked) == sum(ways.get(question.route, 2) for question in plan.questions(7, SHAPE)[0])
    operations = first(plan.operations(7, SHAPE))
    assert {operation.route for operation in operations} == {
        plan.LOAD,
        plan.UNLOAD,
        plan.UNLOAD_MANY,
        plan.UNLOAD_ALL,
    }
    assert {operation.body.get("slots") for operation in operations} == {None, 1, 2, 3, 4, 17}
    assert {operation.patience is None for operation in operations} == {True, False}
    assert {operation.body["id"] for operation in operations if operation.route == plan.LOAD} == set(plan.SLOTS)
    assert {order.question.route for order in plan.farewell(7, SHAPE)} == {plan.COMPLETIONS, plan.BATCH}


# -- words


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The password is kobitanu.", []),
        ("The password is devigolu.", ["devigolu"]),
        ("DEVI-golu and Mari sepo", ["devigolu", "marisepo"]),
        ("devigol", []),
        ("", []),
    ],
)
def test_foreign_words(text, found):
    assert checks.foreign_words(text, 0, WORDS) == found


# -- replies


def order(*, stream=False, cut=None):
    question = plan.Question("diary", 0, {"prompt": "The password is kobitanu", "max_tokens": 5, "temperature": 0})
    return plan.Order(question, "a", stream=stream, cut=cut)


def whole(text=EXPECTED.text, reason="length", tokens=5, model="a"):
    return json.dumps(
        {
            "model": model,
            "choices": [{"index": 0, "text": text, "finish_reason": reason}],
            "usage": {"completion_tokens": tokens},
        }
    ).encode()


def event(text=None, reason=None, tokens=None, model="a"):
    choices = [] if tokens is not None else [{"index": 0, "text": text or "", "finish_reason": reason}]
    chunk = {"model": model, "choices": choices, "usage": {"completion_tokens": tokens} if tokens else None}
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()


DONE = b"data: [DONE]\n\n"
STREAM = event(" kobitanu.") + b": ping\n\n" + event(" The sea") + event(reason="length") + event(tokens=5) + DONE
ERROR = b'data: {"error":{"message":"m","type":"internal_error","param":null,"code":"internal_error"}}\n\n'
BUSY = b'{"error":{"message":"m","type":"server_busy","param":null,"code":"server_busy"}}'
LEFT = plan.Cut("waiting", 1)
OWN = {"x-request-id": "r"}


def judged(reply, of=None):
    return [violation.kind for violation in checks.judge(of or order(), "r", reply, EXPECTED, WORDS)]


def reply(body, status=200, fate=Fate.WHOLE, **headers):
    return Reply(fate, status, {**OWN, **headers}, body, 1.0)


def test_right_answers():
    assert judged(reply(whole())) == []
    assert judged(reply(STREAM), order(stream=True)) == []


def test_a_foreign_word_is_found_in_every_kind_of_reply():
    assert Kind.FOREIGN_WORD in judged(reply(whole(" devigolu. The sea")))
    split = event(" devi") + event("golu")
    for fate in (Fate.LEFT, Fate.STUCK, Fate.LOST):
        assert Kind.FOREIGN_WORD in judged(reply(split, fate=fate), order(stream=True, cut=LEFT))
    assert Kind.FOREIGN_WORD in judged(reply(BUSY.replace(b'"m"', b'"devigolu"'), 503, **{"retry-after": "1"}))
    assert Kind.FOREIGN_WORD in judged(reply(whole(" devigolu")[:-9], fate=Fate.LEFT), order(cut=LEFT))


@pytest.mark.parametrize(
    "body",
    [
        whole(" kobitanu. The se"),
        whole(" kobitanu. The sea "),
        whole(reason="stop"),
        whole(tokens=4),
    ],
    ids=["short", "long", "reason", "count"],
)
def test_wrong_bytes_in_one_piece(body):
    assert judged(reply(body)) == [Kind.WRONG_BYTES]


@pytest.mark.parametrize(
    "body",
    [
        STREAM.replace(b" The sea", b" The see"),
        STREAM.replace(b"kobitanu", b"kobitan"),
        STREAM.replace(b"length", b"stop"),
        STREAM.replace(b": 5}", b": 6}"),
    ],
    ids=["text", "short", "reason", "count"],
)
def test_wrong_bytes_in_a_stream(body):
    assert judged(reply(body), order(stream=True)) == [Kind.WRONG_BYTES]


def test_what_came_of_a_stream_that_was_left_has_to_be_right():
    left = order(stream=True, cut=LEFT)
    for end in range(len(STREAM)):
        assert judged(reply(STREAM[:end], fate=Fate.LEFT), left) == []
    assert judged(reply(event(" kobitani"), fate=Fate.LEFT), left) == [Kind.WRONG_BYTES]
    assert judged(reply(event(" kobitanu. The sea") + event(" went"), fate=Fate.LEFT), left) == [Kind.WRONG_BYTES]
    assert judged(reply(event(" kobitanu.") + event(reason="length"), fate=Fate.LEFT), left) == [Kind.WRONG_BYTES]


@pytest.mark.parametrize(
    "body",
    [
        STREAM.removesuffix(DONE),
        event(" kobitanu.") + ERROR,
        STREAM + event(" more"),
        STREAM + DONE,
        b"error: no\n\n" + STREAM,
        b"data: {\n\n",
        b'data: "text"\n\n',
        b"data: \xff\n\n",
        STREAM.replace(b'"a"', b'"b"'),
    ],
    ids=["no end", "error", "more", "two ends", "no event", "no JSON", "no object", "no UTF-8", "other model"],
)
def test_streams_outside_the_contract(body):
    assert judged(reply(body), order(stream=True)) == [Kind.CONTRACT]


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", whole()[:-1], whole(model="b")])
def test_answers_outside_the_contract(body):
    assert judged(reply(body)) == [Kind.CONTRACT]


def test_refusals():
    assert judged(reply(BUSY, 503, **{"retry-after": "1"})) == []
    assert judged(reply(BUSY, 503)) == [Kind.CONTRACT], "without Retry-After"
    assert judged(reply(BUSY, 500, **{"retry-after": "1"})) == [Kind.CONTRACT]
    assert judged(reply(b"busy", 503, **{"retry-after": "1"})) == [Kind.CONTRACT]
    for kind in (b"shutting_down", b"model_load_failed"):
        assert judged(reply(BUSY.replace(b"server_busy", kind), 503, **{"retry-after": "1"})) == [Kind.CONTRACT]
    assert judged(reply(BUSY, 400)) == [Kind.CONTRACT]


def test_ends_of_exchanges():
    assert judged(Reply(Fate.STUCK, seconds=240)) == [Kind.STUCK]
    assert judged(Reply(Fate.LOST, why="reset")) == [Kind.CONTRACT]
    assert judged(Reply(Fate.LEFT)) == [Kind.CONTRACT], "nobody was to leave"
    assert judged(Reply(Fate.LEFT), order(cut=LEFT)) == []


def test_a_response_of_another_request_is_told():
    other = replace(reply(whole()), headers={"x-request-id": "s"})
    assert judged(other) == [Kind.CONTRACT]


def test_operations():
    def judged(reply):
        return [violation.kind for violation in checks.judge_operation(plan.LOAD, {200, 503}, reply)]

    assert judged(reply(b"{}")) == judged(reply(BUSY, 503, **{"retry-after": "1"})) == []
    assert judged(Reply(Fate.LEFT)) == []
    assert judged(reply(b"{}", 400)) == judged(reply(b"{}", 500)) == [Kind.CONTRACT]
    assert judged(reply(BUSY.replace(b"server_busy", b"internal_error"), 503)) == [Kind.CONTRACT]
    assert judged(Reply(Fate.LOST)) == [Kind.CONTRACT]
    assert judged(Reply(Fate.STUCK)) == [Kind.STUCK]


def test_malformed_answers_are_told_as_such():
    with pytest.raises(MalformedError):
        answers.read_whole(b'{"choices": []}')
    assert answers.read_stream(b"") == Answer("")


# -- batches and vectors

ITEMS = {0: Answer(" kobitanu", "stop", 3, "done"), 1: Answer(" The sea", "length", 2, "done")}
TOGETHER = Batch(ITEMS, "done", "a")


def batch_event(kind, **fields):
    return f"event: task.batch.{kind}\ndata: {json.dumps({'type': f'task.batch.{kind}', **fields})}\n\n".encode()


def item(index, text=None, reason=None, tokens=None):
    right = ITEMS.get(index, Answer(""))
    result = {"text": text or right.text, "finish_reason": reason or right.reason}
    return batch_event("item", index=index, result={**result, "usage": {"completion_tokens": tokens or right.tokens}})


def done(succeeded=2, failed=0, model="a"):
    return batch_event("done", succeeded=succeeded, failed=failed, model=model)


def judged_batch(body, fate=Fate.WHOLE):
    question = plan.Question("batch", 0, {"requests": [{"prompt": "kobitanu"}, {"prompt": "The"}]})
    asked = plan.Order(question, "a", stream=True, cut=LEFT)
    found = checks.judge(asked, "r", reply(body, fate=fate), TOGETHER, WORDS)
    return [violation.kind for violation in found]


def test_right_batches():
    for body in (item(0) + item(1) + done(), item(1) + b": ping\n\n" + item(0) + done()):
        assert judged_batch(body) == []
        for end in range(len(body)):
            assert judged_batch(body[:end], Fate.LEFT) == []


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (item(0, text=" The sea") + item(1) + done(), Kind.WRONG_BYTES),
        (item(0, reason="length") + item(1) + done(), Kind.WRONG_BYTES),
        (item(0, tokens=4) + item(1) + done(), Kind.WRONG_BYTES),
        (item(0) + done(1), Kind.WRONG_BYTES),
        (item(0) + item(1) + item(2, "x", "stop", 1) + done(3), Kind.WRONG_BYTES),
        (item(0) + item(1), Kind.CONTRACT),
        (item(0) + item(0) + done(), Kind.CONTRACT),
        (item(0) + item(1) + done(1), Kind.CONTRACT),
        (item(0) + item(1) + done(1, 1), Kind.CONTRACT),
        (item(0) + batch_event("item", index=1, error={"code": "internal_error"}) + done(1, 1), Kind.CONTRACT),
        (item(0) + item(1) + done(model="b"), Kind.CONTRACT),
        (item(0) + done() + item(1), Kind.CONTRACT),
        (item(0).replace(b"event: task.batch.item", b"event: task.delta") + item(1) + done(), Kind.CONTRACT),
        (b"data: [DONE]\n\n", Kind.CONTRACT),
    ],
)
def test_wrong_batches(body, kind):
    assert judged_batch(body) == [kind]


def test_a_foreign_word_is_found_in_a_batch():
    assert Kind.FOREIGN_WORD in judged_batch(item(0) + item(1, text=" devigolu"), Fate.LEFT)


NUMBERS = [array("f", [0.6, 0.8]), array("f", [1.0, 0.0])]
VECTORS = Vectors(NUMBERS, 7, "done", "e")


def vectors(numbers=NUMBERS, tokens=7, model="e", first=0, as_base64=False):
    data = [
        {"index": index, "embedding": base64.b64encode(one.tobytes()).decode() if as_base64 else list(one)}
        for index, one in enumerate(numbers, first)
    ]
    return json.dumps({"data": data, "model": model, "usage": {"prompt_tokens": tokens}}).encode()


def judged_vectors(body, fate=Fate.WHOLE):
    asked = plan.Order(plan.Question("vectors", 0, {"input": ["kobitanu", "x"]}), "e", cut=LEFT)
    return [violation.kind for violation in checks.judge(asked, "r", reply(body, fate=fate), VECTORS, WORDS)]


def test_right_vectors():
    assert judged_vectors(vectors()) == judged_vectors(vectors(as_base64=True)) == []
    assert judged_vectors(vectors()[:40], Fate.LEFT) == [], "a piece of them says nothing"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (vectors(NUMBERS[::-1]), Kind.WRONG_BYTES),
        (vectors(NUMBERS[:1]), Kind.WRONG_BYTES),
        (vectors([array("f", [0.6, 0.8000001]), NUMBERS[1]]), Kind.WRONG_BYTES),
        (vectors(tokens=8), Kind.WRONG_BYTES),
        (vectors(model="a"), Kind.CONTRACT),
        (vectors(first=1), Kind.CONTRACT),
        (b'{"data": []}', Kind.CONTRACT),
        (b"[1]", Kind.CONTRACT),
    ],
)
def test_wrong_vectors(body, kind):
    assert judged_vectors(body) == [kind]


def test_answers_in_company_and_alone():
    one, other = {"prompt": "kobitanu"}, {"prompt": "The"}
    together = plan.Question("batch", 0, {"requests": [one, other]})
    texts = plan.Question("vectors", 0, {"input": ["kobitanu", "x"]})
    expected = {
        together.key: TOGETHER,
        texts.key: VECTORS,
        plan.Question("", 0, one).key: ITEMS[0],
        plan.Question("", 0, other).key: Answer(" The see", "length", 2),
        plan.Question("", 0, {"input": "kobitanu"}).key: Vectors(NUMBERS[:1], 3),
    }
    assert checks.in_company([together, texts], expected) == (1, 2, [])
    expected[plan.Question("", 0, {"input": "x"}).key] = Vectors(NUMBERS[:1], 3)
    _, _, (problem,) = checks.in_company([together, texts], expected)
    assert "vector 1 in company is at 0.6" in problem


# -- forms


def form_of(kind):
    return next(question for question in plan.questions(7, SHAPE)[0] if question.kind == kind)


@pytest.mark.parametrize(
    ("kind", "text", "reason", "kept"),
    [
        ("form", '{"password": "kobitanu", "sure": true, "reason": null}', "stop", True),
        ("form", '{"password": "kobitanu", "sure": tr', "length", True),
        ("form", '{"password": "kobitanu", "sure": true}', "stop", False),
        ("form", '{"password": "kobitanu", "sure": 1, "reason": null}', "stop", False),
        ("form", "It is kobitanu.", "stop", False),
        ("pattern", " kobitanu, yes.", "stop", True),
        ("pattern", " kobitan", "length", True),
        ("pattern", " kobitanu, yes. ", "stop", False),
        ("diary", "anything", "stop", True),
    ],
)
def test_forms(kind, text, reason, kept):
    question, told = form_of(kind), Answer(text, reason, 9, "done", "a")
    assert (list(checks.broken_forms(question, told)) == []) is kept
    body = {"requests": [{"prompt": "x"}, question.body]}
    batch = Batch({0: Answer("x", "stop"), 1: told}, "done", "a")
    assert (list(checks.broken_forms(plan.Question("batch", 0, body), batch)) == []) is kept


def test_a_broken_form_is_told_also_where_it_is_what_came_alone():
    told = Answer(" kobitanu!", "stop", 5, "done", "a")
    found = checks.judge(plan.Order(form_of("pattern"), "a"), "r", reply(whole(told.text, "stop")), told, WORDS)
    assert [violation.kind for violation in found] == [Kind.BROKEN_FORM]


# -- the whole run


def test_a_soak_whose_answers_hold_no_words_is_told():
    keys = {str(number): "kobitanu" for number in range(10)}
    told = {key: Answer("It is kobitanu." if int(key) < 3 else "I forgot.") for key in keys}
    assert checks.toothless({**told, "vector": Vectors([], 1)}, keys) is None
    told["0"] = Answer("I forgot.")
    assert "2 of 10" in checks.toothless(told, keys)


def test_busy_slots():
    def idle(active=0, queued=0, state="idle"):
        return checks.busy_slots(
            [{"id": "a", "active_slots": active, "queued_requests": queued}],
            [{"model": "a", "slot": 0, "state": state}],
        )

    assert idle() == []
    assert idle(active=1) == ["a: 1 active, 0 queued"]
    assert idle(queued=2) == ["a: 0 active, 2 queued"]
    assert idle(state="clearing") == ["slot 0 of a is clearing"]


def test_growth():
    mib = checks.MIB
    assert checks.grown([100 * mib, 300 * mib, 118 * mib]) is None
    assert checks.grown([100 * mib, 119 * mib]) == "memory grew from 100.0 to 119.0 MiB"


def line(end, request_id, more=""):
    return f"2026-01-01T00:00:00.000Z info request {end} request_id={request_id} model=a {more}\n"


def test_reused_tokens_are_those_of_finished_requests():
    log = line("finished", "r1", "prompt_tokens=9 cached_tokens=7") + line("cancelled", "r2", "prompt_tokens=5")
    assert checks.reused_tokens(log + line("finished", "r3", "prompt_tokens=4")) == (7, 13)


def test_the_log_and_the_clients_agree():
    log = line("finished", "r1") + line("rejected", "r2") + line("cancelled", "r3", "cancelled_in=prefill")
    seen = {"r1": "finished", "r2": "busy", "r3": "left", "never-arrived": "left"}
    assert checks.log_problems(log, seen) == []
    assert checks.cut_phases(log) == ["prefill"]
    for request_id, outcome in (("r1", "busy"), ("r2", "finished"), ("r3", "finished"), ("r4", "finished")):
        (problem,) = checks.log_problems(log, {request_id: outcome})
        assert request_id in problem
    (problem,) = checks.log_problems(line("failed", "r1"), {"r1": "left"})
    assert "failed" in problem


@pytest.mark.parametrize("said", ["2026-01-01T00:00:00.000Z error no\n", "t warning no\n", "Traceback (most\n"])
def test_errors_in_the_log_are_told(said):
    assert checks.log_problems(said, {}) == [said.rstrip()]


@pytest.mark.parametrize(
    ("active", "report", "good"),
    [
        (3, "drained in 0.5 s: 3 finished, 0 cancelled, 0 failed, 2 rejected", True),
        (2, "drained in 0.5 s: 2 finished, 0 cancelled, 0 failed, 2 rejected", True),
        (0, "drained in 0.5 s: 0 finished, 0 cancelled, 0 failed, 2 rejected", False),
        (4, "drained in 0.5 s: 4 finished, 0 cancelled, 0 failed, 2 rejected", False),
        (3, "drained in 0.5 s: 2 finished, 0 cancelled, 0 failed, 2 rejected", False),
        (3, "drained in 0.5 s: 2 finished, 1 cancelled, 0 failed, 2 rejected", False),
        (3, "drained in 0.5 s: 3 finished, 0 cancelled, 0 failed, 3 rejected", False),
        (3, "stopped before all work was done in 0.5 s: 3 finished, 0 cancelled, 0 failed, 2 rejected", False),
        (3, "bye", False),
    ],
)
def test_the_report_of_a_drain_adds_up(active, report, good):
    log = f"t info draining active={active}\nt info {report}\n"
    assert (checks.drain_problems(log, finished=3, refused=2) == []) is good


# -- the tally


def test_tally_counts_and_tells():
    tally = Tally()
    tally.note("r1", order(), reply(whole()), [])
    tally.note("r2", order(cut=LEFT), Reply(Fate.LEFT), [])
    tally.note_operation(plan.LOAD, reply(b"{}"), [])
    assert tally.clean
    tally.memory += [100 * checks.MIB]
    assert "1 finished, 0 busy, 1 left, 1 operations, 0 violations, 5 MiB" in tally.line(30, 5 * checks.MIB)
    tally.violate(*[Violation(Kind.WRONG_BYTES, "x")] * (TOLD_VIOLATIONS + 1))
    assert not tally.clean
    said = list(tally.report(["prefill"], (3, 5)))
    assert f"wrong bytes   {TOLD_VIOLATIONS + 1}" in said
    assert sum("VIOLATION" in line for line in said) == TOLD_VIOLATIONS
    assert any("1 waiting" in line for line in said)
    assert any("1 diary" in line for line in said)
    assert "broken forms  0" in said
    assert any("1 prefill" in line for line in said)
    assert any("3 of 5 prompt tokens" in line for line in said)


async def test_a_pause_waits_for_those_at_work(autojump_clock):
    pauses, seen = Pauses(), []

    async def work(number):
        await pauses.begin()
        seen.append(f"{number} begins")
        await trio.sleep(number)
        seen.append(f"{number} ends")
        pauses.end()

    async with trio.open_nursery() as nursery:
        for number in (1, 2):
            nursery.start_soon(work, number)
        await trio.testing.wait_all_tasks_blocked()
        await pauses.pause()
        seen.append("still")
        nursery.start_soon(work, 3)
        await trio.testing.wait_all_tasks_blocked()
        assert seen[-1] == "still"
        pauses.go_on()
    assert seen[-5:] == ["1 ends", "2 ends", "still", "3 begins", "3 ends"]
