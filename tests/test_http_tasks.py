"""Tasks and batches over a real socket."""

from __future__ import annotations

import json

import pytest
from http_harness import CHAT, COMPLETIONS, PROMPT, assert_error, chat, completion, expected, running, until

from trioserve.testing import FakeEngine

RUN, STREAM, BATCH = "/v1/tasks/run", "/v1/tasks/stream", "/v1/tasks/batch"


def events(reply):
    """Name and data of each event of a stream, its comments left out."""
    found = []
    for block in reply.body.decode().split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith(":")]
        if lines:
            name, data = lines if len(lines) == 2 else ("event: ", lines[0])
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def usage_of(prompt_tokens, completion_tokens):
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def batch(*requests, **fields):
    return {"requests": list(requests), **fields}


def items(reply):
    """The items of a batch by their index; checks what surrounds them."""
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    *others, (name, last) = events(reply)
    assert name == last["type"] == "task.batch.done"
    assert all(name == data["type"] == "task.batch.item" for name, data in others)
    assert {data["id"] for _, data in others} <= {last["id"]}
    found = {data["index"]: data for _, data in others}
    assert len(found) == len(others)
    assert last["succeeded"] == sum("result" in data for data in found.values())
    assert last["failed"] == sum("error" in data for data in found.values())
    assert last["model"] == "fake"
    return found


# One by one


async def test_a_task_is_answered_with_its_metadata():
    async with running(models=[{"slots": 2}]) as server:
        answer = (await server.call(RUN, completion())).json
    assert answer["id"].startswith("task-")
    assert (answer["object"], answer["model"], answer["finish_reason"]) == ("task", "fake", "length")
    assert answer["text"] == expected()
    assert answer["usage"] == usage_of(4, 8)
    metadata = answer["metadata"]
    assert (metadata["slot"], metadata["prompt_tokens"], metadata["completion_tokens"]) == (0, 4, 8)
    assert all(metadata[name] >= 0 for name in ("queue_ms", "prefill_ms", "decode_ms"))


async def test_equal_prompts_side_by_side_tell_the_slot_that_each_had():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine, models=[{"slots": 4}]) as server:
        clients = {f"side-{number}": await server.connect() for number in range(4)}
        for request_id, client in clients.items():
            await client.send(RUN, completion(), headers=[("x-request-id", request_id)])
        await engine.step_gate.arrived(4)
        slots = (await server.call("/v1/slots")).json["data"]
        engine.step_gate.open()
        answers = {request_id: await client.reply() for request_id, client in clients.items()}
    assert {request_id: reply.headers["x-request-id"] for request_id, reply in answers.items()} == dict(
        zip(clients, clients, strict=True)
    )
    assert {reply.json["text"] for reply in answers.values()} == {expected()}
    told = {request_id: reply.json["metadata"]["slot"] for request_id, reply in answers.items()}
    assert told == {slot["request_id"]: slot["slot"] for slot in slots}
    assert sorted(told.values()) == [0, 1, 2, 3]


async def test_the_wait_for_a_slot_is_in_the_metadata():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server, await server.connect() as first, await server.connect() as second:
        await first.send(COMPLETIONS, completion())
        await engine.step_gate.arrived()
        await second.send(RUN, completion())
        await until(lambda: server.status().queued_requests == 1)
        engine.step_gate.open()
        await first.reply()
        assert (await second.reply()).json["metadata"]["queue_ms"] > 0


@pytest.mark.parametrize("body", [chat(), completion()], ids=["chat", "completion"])
async def test_a_task_is_streamed_as_it_is_run(body):
    async with running() as server:
        whole = (await server.call(RUN, body)).json
        reply = await server.call(STREAM, body)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    *deltas, (name, done) = events(reply)
    assert name == done["type"] == "task.done"
    assert {name for name, _ in deltas} == {data["type"] for _, data in deltas} == {"task.delta"}
    assert "".join(data["text"] for _, data in deltas) == whole["text"]
    assert (done["finish_reason"], done["usage"]) == (whole["finish_reason"], whole["usage"])
    assert b"[DONE]" not in reply.body


@pytest.mark.parametrize("path", [RUN, STREAM])
@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", "unless there is a prompt"),
        ({"prompt": None}, "messages", "unless there is a prompt"),
        ({**chat(), "prompt": "x"}, "prompt", "both given"),
        (completion(["a", "b"]), "prompt", "holds 2 prompts"),
        (completion(max_tokens=0), "max_tokens", "must be 1 or more"),
        (chat(temperature="hot"), "temperature", "must be a number"),
        (completion("x" * 5000), "prompt", "5000 tokens"),
    ],
)
async def test_what_is_wrong_with_a_task_is_told_before_it_begins(path, body, param, words):
    async with running() as server:
        error = assert_error(await server.call(path, body), 400, "invalid_request_error", param=param)
    assert words in error["message"]


async def test_a_task_that_fails_in_its_stream_ends_with_an_error():
    engine = FakeEngine()
    engine.failing_step = 4
    async with running(engine) as server:
        *deltas, (_, last) = events(await server.call(STREAM, completion()))
    assert "".join(data["text"] for _, data in deltas) == expected()[:3]
    assert last["error"]["type"] == "internal_error"


# Batches


async def test_a_batch_answers_each_request_for_itself():
    wanted = [completion(f"prompt {number}", max_tokens=3 + number) for number in range(20)]
    async with running() as server:
        found = items(await server.call(BATCH, batch(*wanted)))
        await server.free()
        tally = server.service.tally()
    assert sorted(found) == list(range(20))
    for index, body in enumerate(wanted):
        result = found[index]["result"]
        assert result["text"] == expected(body["prompt"], body["max_tokens"])
        assert result["usage"]["completion_tokens"] == body["max_tokens"]
        assert result["metadata"]["slot"] == 0
    assert (tally.finished, tally.accepted) == (1, 1)


async def test_results_come_as_they_end():
    wanted = [completion("long", max_tokens=300), completion("short", max_tokens=1), chat("middle", max_tokens=30)]
    async with running() as server:
        assert list(items(await server.call(BATCH, batch(*wanted)))) == [1, 2, 0]


async def test_each_request_of_a_batch_has_its_own_error():
    wanted = [
        completion("good"),
        completion(max_tokens=0),
        {},
        "text",
        completion("x" * 5000),
        completion(model="other"),
        completion(n=2),
        chat("good"),
        None,
    ]
    async with running() as server:
        found = items(await server.call(BATCH, batch(*wanted, model="fake")))
        alone = await server.call(RUN, completion("x" * 5000))
    assert [index for index, item in found.items() if "result" in item] == [0, 7]
    assert {index: found[index]["error"]["param"] for index in (1, 2, 4, 5, 6)} == {
        1: "max_tokens",
        2: "messages",
        4: "prompt",
        5: "model",
        6: "n",
    }
    assert found[4]["error"] == alone.json["error"]
    assert "must be an object" in found[3]["error"]["message"]
    assert all(item["error"]["type"] == "invalid_request_error" for item in found.values() if "error" in item)


@pytest.mark.parametrize("lazy", [False, True])
async def test_a_batch_of_errors_only_takes_no_slot_and_is_over(lazy):
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine, models=[{"lazy": lazy}]) as server:
        found = items(await server.call(BATCH, batch({}, completion("x" * 5000))))
        assert all("error" in item for item in found.values())
        await server.free()
        assert server.service.tally().rejected == 1


async def test_a_failing_step_is_the_error_of_those_that_lived():
    engine = FakeEngine()
    engine.failing_step = 2
    async with running(engine, models=[{"batch_capacity": 2}]) as server:
        found = items(await server.call(BATCH, batch(*(completion(f"p{number}") for number in range(5)))))
        await server.free()
        assert server.service.tally().finished == 1
    assert ["error" in found[index] for index in range(5)] == [True, True, False, False, False]
    assert found[0]["error"]["type"] == "internal_error"
    assert found[4]["result"]["text"] == expected("p4")


async def test_a_batch_that_fails_as_a_whole_has_failed():
    engine = FakeEngine()
    engine.failing_step = 1
    async with running(engine) as server:
        assert all("error" in item for item in items(await server.call(BATCH, batch(completion(), chat()))).values())
        await server.free()
        assert server.service.tally().failed == 1


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "requests", "is required"),
        (batch(), "requests", "1 or more items"),
        ({"requests": {}}, "requests", "must be a list"),
        ({"requests": [{}] * 2049}, "requests", "2048 items or fewer"),
        (batch({}, busy_timeout_ms=-1), "busy_timeout_ms", "0 or more"),
        (batch({}, model=1), "model", "must be a string"),
    ],
)
async def test_what_is_wrong_with_a_whole_batch(body, param, words):
    async with running() as server:
        error = assert_error(await server.call(BATCH, body), 400, "invalid_request_error", param=param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("model", "named", "good"),
    [(None, ["b", "b"], [0, 1]), ("b", ["b", None], [0, 1]), (None, ["b", "a"], [0]), ("b", ["a", "b"], [1])],
)
async def test_one_model_answers_a_whole_batch(model, named, good):
    async with running(models=[{"id": "a"}, {"id": "b"}]) as server:
        wanted = [completion(model=name) for name in named]
        *others, (_, last) = events(await server.call(BATCH, batch(*wanted, model=model)))
    assert last["model"] == "b"
    assert sorted(data["index"] for _, data in others if "result" in data) == good


async def test_an_unknown_model_is_the_error_of_a_whole_batch():
    async with running() as server:
        assert_error(await server.call(BATCH, batch(completion(), model="no")), 404, "model_not_found", param="model")


async def test_a_batch_whose_client_leaves_stops_as_a_whole():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server:
        async with await server.connect() as client:
            await client.send(BATCH, batch(*(completion(f"p{number}", max_tokens=500) for number in range(30))))
            await engine.step_gate.arrived()
        await server.free()
        engine.step_gate.open()
        assert server.service.tally().cancelled == 1
        assert (await server.call(COMPLETIONS, completion())).text == expected()


async def test_batches_run_side_by_side_in_several_slots():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with (
        running(engine, models=[{"slots": 2}]) as server,
        await server.connect() as one,
        await server.connect() as other,
    ):
        for client in (one, other):
            await client.send(BATCH, batch(completion("a"), completion("b")))
        await engine.step_gate.arrived(2)
        engine.step_gate.open()
        slots = [items(await client.reply())[0]["result"]["metadata"]["slot"] for client in (one, other)]
    assert sorted(slots) == [0, 1]


# Several prompts in one completion


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_belong_to_prompts_by_index(stream):
    prompts = [f"prompt {number}" for number in range(32)]
    async with running() as server:
        body = completion(prompts, stream=stream, stream_options={"include_usage": True} if stream else None)
        reply = await server.call(COMPLETIONS, body)
    texts, reasons = dict.fromkeys(range(32), ""), {}
    if stream:
        *chunks, last = reply.chunks
        assert last["choices"] == []
        usage = last["usage"]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
    else:
        usage, choices = reply.json["usage"], reply.json["choices"]
        assert [choice["index"] for choice in choices] == list(range(32))
    for choice in choices:
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {index: expected(prompt) for index, prompt in enumerate(prompts)}
    assert set(reasons.values()) == {"length"}
    assert usage == usage_of(sum(map(len, prompts)), 8 * 32)


async def test_tokens_and_texts_are_one_batch():
    async with running() as server:
        reply = await server.call(COMPLETIONS, completion([PROMPT, list(PROMPT.encode())]))
    assert [choice["text"] for choice in reply.json["choices"]] == [expected(), expected()]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_prompt_that_does_not_fit_refuses_all_and_is_named(stream):
    async with running() as server:
        reply = await server.call(COMPLETIONS, completion(["a", "x" * 5000], stream=stream))
        error = assert_error(reply, 400, "invalid_request_error", param="prompt", code="context_length_exceeded")
        assert error["message"].startswith("prompt[1]: ")
        tally = server.service.tally()
        assert (tally.rejected, tally.accepted) == (1, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_prompt_that_fails_fails_the_whole_completion(stream):
    engine = FakeEngine()
    engine.failing_step = 2
    async with running(engine, models=[{"batch_capacity": 2}]) as server:
        reply = await server.call(COMPLETIONS, completion(["a", "b", "c"], stream=stream))
        await server.free()
        assert server.service.tally().failed == 1
    if stream:
        assert b"[DONE]" not in reply.body
        assert reply.body.count(b'{"error":') == 1
    else:
        assert_error(reply, 500, "internal_error")


# Several choices


@pytest.mark.parametrize("stream", [False, True])
async def test_n_gives_choices_by_index(stream):
    async with running() as server:
        reply = await server.call(CHAT, chat(n=3, stream=stream))
        alone = await server.call(CHAT, chat())
    if stream:
        choices = [choice for chunk in reply.chunks for choice in chunk["choices"]]
        assert [choice["index"] for choice in choices[:3]] == [0, 1, 2], "each begins with its role"
        assert all(choice["delta"] == {"role": "assistant", "content": ""} for choice in choices[:3])
        texts = ["".join(c["delta"].get("content", "") for c in choices if c["index"] == index) for index in range(3)]
    else:
        texts = [choice["message"]["content"] for choice in reply.json["choices"]]
        assert reply.json["usage"]["completion_tokens"] == 24
        assert reply.json["usage"]["prompt_tokens"] == alone.json["usage"]["prompt_tokens"], "the prompt counts once"
    assert texts == [alone.text] * 3


async def test_the_usage_of_a_stream_counts_the_prompt_of_choices_once():
    async with running() as server:
        reply = await server.call(COMPLETIONS, completion(n=3, stream=True, stream_options={"include_usage": True}))
    assert reply.chunks[-1]["usage"] == usage_of(4, 24)


@pytest.mark.parametrize(
    ("prompt", "fields", "start"),
    [
        ("x" * 5000, {"n": 2}, "the prompt has"),
        (["a", "x" * 5000], {"n": 2}, "prompt[1]: the prompt has"),
        (["a", "b"], {"logit_bias": {"99999": 1}}, "logit_bias: token 99999"),
    ],
)
async def test_an_error_names_the_prompt_that_it_is_about(prompt, fields, start):
    async with running() as server:
        error = assert_error(await server.call(COMPLETIONS, completion(prompt, **fields)), 400, "invalid_request_error")
    assert error["message"].startswith(start)


async def test_a_task_gives_one_answer():
    async with running() as server:
        for path, body in ((RUN, chat(n=2)), (STREAM, completion(n=2))):
            assert_error(await server.call(path, body), 400, "invalid_request_error", param="n")
