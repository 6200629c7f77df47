"""Embeddings over a real socket."""

from __future__ import annotations

import array
import base64
import json
import math
import struct
import threading

import pytest
from http_harness import CHAT, COMPLETIONS, assert_error, chat, completion, running, until

from trioserve.http import embeddings
from trioserve.testing import FakeEngine, fake_vector

EMBEDDINGS = "/v1/embeddings"
TEXTS = [f"{number}: {'x' * (number * 13 % 50)}" for number in range(32)]


def embedding(wanted="text", **fields):
    return {"input": wanted, **fields}


def serving(engine=None, **settings):
    """A server whose one model embeds."""
    models = settings.pop("models", [{"task": "embed", **settings.pop("model", {})}])
    return running(engine, models=models, **settings)


def vectors(reply):
    """The vectors of an answer in order; checks what surrounds them."""
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "application/json"
    body = reply.json
    assert list(body) == ["object", "data", "model", "usage"]
    assert (body["object"], body["model"]) == ("list", "fake")
    assert [item["index"] for item in body["data"]] == list(range(len(body["data"])))
    assert all(list(item) == ["object", "index", "embedding"] for item in body["data"])
    assert {item["object"] for item in body["data"]} == {"embedding"}
    return [item["embedding"] for item in body["data"]]


def expected(text, dimensions=None):
    return list(fake_vector(text.encode(), dimensions))


def float32(numbers):
    return list(array.array("f", numbers))


# Vectors


@pytest.mark.parametrize("wanted", ["text", ["text"], list(b"text"), [list(b"text")]], ids=str)
async def test_one_input_in_each_of_its_shapes(wanted):
    async with serving() as server:
        reply = await server.call(EMBEDDINGS, embedding(wanted))
    (vector,) = vectors(reply)
    assert float32(vector) == expected("text")
    assert reply.json["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


async def test_many_inputs_keep_their_order_and_are_counted_together():
    async with serving(model={"batch_capacity": 8}) as server:
        reply = await server.call(EMBEDDINGS, embedding(TEXTS))
        await server.free()
        assert server.service.tally().finished == server.service.tally().accepted == 1
    assert [float32(vector) for vector in vectors(reply)] == [expected(text) for text in TEXTS]
    assert reply.json["usage"]["prompt_tokens"] == sum(map(len, TEXTS))


async def test_texts_and_tokens_may_be_mixed():
    async with serving() as server:
        reply = await server.call(EMBEDDINGS, embedding(["a", list(b"b")]))
    assert [float32(vector) for vector in vectors(reply)] == [expected("a"), expected("b")]


async def test_base64_is_little_endian_float32_and_the_same_numbers():
    async with serving() as server:
        floats = vectors(await server.call(EMBEDDINGS, embedding(TEXTS, encoding_format="float")))
        coded = vectors(await server.call(EMBEDDINGS, embedding(TEXTS, encoding_format="base64")))
    assert [list(struct.unpack("<32f", base64.b64decode(text, validate=True))) for text in coded] == [
        float32(vector) for vector in floats
    ]


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
async def test_dimensions_cut_vectors_to_unit_length(encoding_format):
    async with serving() as server:
        reply = await server.call(EMBEDDINGS, embedding("text", dimensions=7, encoding_format=encoding_format))
    (vector,) = vectors(reply)
    if encoding_format == "base64":
        vector = struct.unpack("<7f", base64.b64decode(vector))
    assert float32(vector) == expected("text", 7)
    assert math.hypot(*vector) == pytest.approx(1, abs=1e-6)


async def test_fields_that_are_null_or_without_effect():
    nothing = dict.fromkeys(["model", "encoding_format", "dimensions", "busy_timeout_ms", "user"])
    async with serving() as server:
        for fields in (nothing, {"user": "me", "stream": True, "model": "fake", "busy_timeout_ms": 100}):
            assert float32(vectors(await server.call(EMBEDDINGS, embedding(**fields)))[0]) == expected("text")


@pytest.mark.parametrize("number", [1e-45, -3.4e38, 1 / 3, -0.0, 1.0, 1e-5, 16777217])
def test_written_numbers_read_as_the_same_float32(number):
    vector = array.array("f", [number])
    assert float32(json.loads(embeddings._floats(vector))) == list(vector)


# Large answers


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
async def test_large_answers_are_written_off_the_event_loop_in_pieces(monkeypatch, encoding_format):
    monkeypatch.setattr(embeddings, "_INLINE_NUMBERS", 100)
    monkeypatch.setattr(embeddings, "_PIECE_NUMBERS", 100)
    threads, pieces = set(), []
    write, body = embeddings._Body._write, {"input": TEXTS, "encoding_format": encoding_format}

    def watched(self):
        threads.add(threading.get_ident())
        pieces.append(write(self))
        return pieces[-1]

    monkeypatch.setattr(embeddings._Body, "_write", watched)
    async with serving() as server:
        small = await server.call(EMBEDDINGS, embedding("text"))
        assert pieces == []
        large = await server.call(EMBEDDINGS, body)
        monkeypatch.setattr(embeddings, "_INLINE_NUMBERS", 10_000)
        assert vectors(large) == vectors(await server.call(EMBEDDINGS, body))
    assert b"".join(pieces) == large.body
    assert len(pieces) > 10
    assert threading.get_ident() not in threads
    assert "content-length" in small.headers
    assert "content-length" not in large.headers


async def test_a_client_that_leaves_in_the_middle_of_a_large_answer_frees_the_slot(monkeypatch):
    monkeypatch.setattr(embeddings, "_INLINE_NUMBERS", 0)
    monkeypatch.setattr(embeddings, "_PIECE_NUMBERS", 1)
    monkeypatch.setattr(embeddings, "_floats", lambda vector: b'"' + b"x" * 1_000_000 + b'"')
    async with serving() as server:
        async with await server.connect(SO_RCVBUF=4096) as client:
            await client.send(EMBEDDINGS, embedding(TEXTS))
            await client.head()
            assert server.status().active_slots == 1
        await server.free()


# What is refused


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "is required"),
        (embedding(None), "input", "is required"),
        (embedding(""), "input", "must be a non-empty string"),
        (embedding([]), "input", "holds 0 inputs, 1 to 2048"),
        (embedding(["a", ""]), "input", "[1] must be a non-empty string"),
        (embedding([[]]), "input", "[0] must be a non-empty string"),
        (embedding([[1], []]), "input", "[1] must be"),
        (embedding([[1], [1.5]]), "input", "[1] must be"),
        (embedding([1, True]), "input", "[0] must be"),
        (embedding([[["a"]]]), "input", "[0] must be"),
        (embedding(3), "input", "must be a non-empty string"),
        (embedding({"text": "a"}), "input", "must be a non-empty string"),
        (embedding(["a"] * 2049), "input", "holds 2049 inputs, 1 to 2048"),
        (embedding("\ud800"), "input", "lone surrogates"),
        (embedding([300]), "input", "input[0] is 300"),
        (embedding(["a", [300]]), "input", "input[1][0] is 300"),
        (embedding(encoding_format="hex"), "encoding_format", "must be 'float' or 'base64'"),
        (embedding(encoding_format=1), "encoding_format", "must be 'float' or 'base64'"),
        (embedding(dimensions=0), "dimensions", "1 or more"),
        (embedding(dimensions=33), "dimensions", "have 32"),
        (embedding(dimensions=2**40), "dimensions", "less than"),
        (embedding(dimensions="8"), "dimensions", "must be an integer"),
        (embedding(dimensions=True), "dimensions", "must be an integer"),
        (embedding(busy_timeout_ms=-1), "busy_timeout_ms", "0 or more"),
        (embedding(model=1), "model", "must be a string"),
    ],
)
async def test_what_is_wrong_with_a_request(body, param, words):
    async with serving() as server:
        error = assert_error(await server.call(EMBEDDINGS, body), 400, "invalid_request_error", param=param)
        assert words in error["message"]
        assert vectors(await server.call(EMBEDDINGS, embedding()))
        await server.free()
        tally = server.service.tally()
        assert (tally.finished, tally.rejected) == (1, 1)


async def test_an_input_that_does_not_fit_is_named_with_both_counts():
    async with serving(model={"n_ctx": 100}) as server:
        reply = await server.call(EMBEDDINGS, embedding(["a", "x" * 101]))
        error = assert_error(reply, 400, "invalid_request_error", code="context_length_exceeded", param="input")
        assert error["message"].startswith("input[1] has 101 tokens")
        assert "holds 100 (n_ctx)" in error["message"]
        assert vectors(await server.call(EMBEDDINGS, embedding("x" * 100)))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        (COMPLETIONS, completion(stream=True)),
        ("/v1/tasks/run", completion()),
        ("/v1/tasks/stream", chat()),
        ("/v1/tasks/batch", {"requests": [completion()]}),
    ],
)
async def test_a_model_that_embeds_answers_no_prompts(path, body):
    async with serving() as server:
        reply = await server.call(path, body)
        assert_error(reply, 400, "invalid_request_error", code="wrong_task", param="model")


async def test_a_model_that_generates_makes_no_vectors():
    async with running() as server:
        reply = await server.call(EMBEDDINGS, embedding())
        assert_error(reply, 400, "invalid_request_error", code="wrong_task", param="model")


async def test_models_tell_their_task_and_are_asked_by_name():
    async with running(models=[{"id": "talker"}, {"id": "embedder", "task": "embed"}]) as server:
        listed = (await server.call("/v1/models")).json["data"]
        assert [(model["id"], model["task"]) for model in listed] == [("talker", "generate"), ("embedder", "embed")]
        assert (await server.call(EMBEDDINGS, embedding(model="embedder"))).json["model"] == "embedder"
        assert_error(
            await server.call(EMBEDDINGS, embedding(model="talker")), 400, "invalid_request_error", code="wrong_task"
        )
        assert_error(await server.call(EMBEDDINGS, embedding(model="nobody")), 404, "model_not_found")


# How it ends


async def test_a_failing_step_is_an_error_and_the_next_request_is_answered():
    engine = FakeEngine()
    engine.failing_step = 2
    async with serving(engine, model={"batch_capacity": 2}) as server:
        assert_error(await server.call(EMBEDDINGS, embedding(["a", "b", "c"])), 500, "internal_error")
        assert float32(vectors(await server.call(EMBEDDINGS, embedding()))[0]) == expected("text")
        await server.free()
        assert server.service.tally().failed == 1


@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_a_client_that_leaves_frees_its_slot(how):
    engine = FakeEngine()
    engine.step_gate.shut()
    async with serving(engine) as server:
        client = await server.connect()
        await client.send(EMBEDDINGS, embedding(TEXTS))
        await engine.step_gate.arrived()
        await client.close(how)
        await server.free()
        assert server.service.tally().cancelled == 1
        engine.step_gate.open()
        assert vectors(await server.call(EMBEDDINGS, embedding()))


async def test_a_busy_server_says_so():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with serving(engine) as server, await server.connect() as first:
        await first.send(EMBEDDINGS, embedding())
        await engine.step_gate.arrived()
        assert_error(await server.call(EMBEDDINGS, embedding(busy_timeout_ms=0)), 503, "server_busy")
        engine.step_gate.open()
        assert vectors(await first.reply())


async def test_a_drain_waits_for_vectors_and_takes_no_new_request():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with serving(engine) as server, await server.connect() as first, await server.connect() as late:
        await first.send(EMBEDDINGS, embedding())
        await engine.step_gate.arrived()
        server.stop.set()
        await until(lambda: server.service.phase.value == "draining")
        assert_error(await late.call(EMBEDDINGS, embedding()), 503, "shutting_down")
        engine.step_gate.open()
        assert vectors(await first.reply())
        await server.returned.wait()
    assert (server.report.finished, server.report.complete) == (1, True)


async def test_a_drain_that_is_over_cuts_it_off():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with serving(engine, drain_timeout_ms=10) as server, await server.connect() as client:
        await client.send(EMBEDDINGS, embedding())
        await engine.step_gate.arrived()
        server.stop.set()
        assert_error(await client.reply(), 503, "shutting_down")
        engine.step_gate.open()
