"""Every route over a real socket: answers, and errors in one shape."""

from __future__ import annotations

import json
from urllib.parse import quote

import pytest
import trio
from http_harness import (
    CHAT,
    COMPLETIONS,
    HOST,
    assert_error,
    chat,
    choice_text,
    completion,
    expected,
    running,
    until,
)

from trioserve.testing import FakeEngine

BOTH = pytest.mark.parametrize(("path", "body"), [(CHAT, chat), (COMPLETIONS, completion)], ids=["chat", "completions"])
STATUS_ROUTES = ("/health/live", "/health/ready", "/health", "/v1/models", "/v1/models/fake")


# Answers


@BOTH
async def test_an_answer_in_one_piece(path, body):
    async with running() as server:
        reply = await server.call(path, body())
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    answer = reply.json
    prefix, kind = ("chatcmpl-", "chat.completion") if path == CHAT else ("cmpl-", "text_completion")
    assert answer["id"].startswith(prefix)
    assert answer["object"] == kind
    assert answer["model"] == "fake"
    assert isinstance(answer["created"], int)
    (choice,) = answer["choices"]
    assert choice["index"] == 0
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    usage = answer["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    if path == CHAT:
        assert choice["message"]["role"] == "assistant"
    else:
        assert choice["text"] == expected()
        assert usage["prompt_tokens"] == 4


@BOTH
async def test_a_streamed_answer(path, body):
    async with running() as server:
        reply = await server.call(path, body(stream=True))
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers["x-accel-buffering"] == "no"
    chunks = reply.chunks
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == ("chat.completion.chunk" if path == CHAT else "text_completion")
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert "usage" not in chunks[0]
    if path == CHAT:
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
        assert chunks[-1]["choices"][0]["delta"] == {}


@BOTH
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 1},
        {"max_tokens": 300},
        {"max_tokens": 300, "stop": ["a", "77"]},
        {"stop": "zzz"},
        {"seed": 1},
    ],
)
async def test_streamed_and_whole_answers_are_the_same(path, body, fields):
    async with running() as server:
        whole = await server.call(path, body(**fields))
        streamed = await server.call(path, body(**fields, stream=True, stream_options={"include_usage": True}))
    assert streamed.text == whole.text
    *pieces, usage = streamed.chunks
    assert pieces[-1]["choices"][0]["finish_reason"] == whole.json["choices"][0]["finish_reason"]
    assert usage["usage"] == whole.json["usage"]


@BOTH
async def test_include_usage_adds_one_last_chunk(path, body):
    async with running() as server:
        reply = await server.call(path, body(stream=True, stream_options={"include_usage": True}))
    *others, last = reply.chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in others)


@BOTH
@pytest.mark.parametrize("stream", [False, True])
async def test_the_model_ends_its_answer(path, body, stream):
    async with running(FakeEngine(answer_tokens=5)) as server:
        reply = await server.call(path, body(stream=stream))
        last = reply.chunks[-1] if stream else reply.json
    assert last["choices"][0]["finish_reason"] == "stop"
    assert len(reply.text) == 5


@BOTH
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_never_appears(path, body, stream):
    async with running() as server:
        free = (await server.call(path, body(max_tokens=40))).text
        stop = free[10:13]
        reply = await server.call(path, body(max_tokens=40, stop=["never", stop], stream=stream))
    assert reply.text == free[: free.index(stop)]
    if stream:
        assert not any(stop[0] == choice_text(chunk["choices"][0])[-1:] for chunk in reply.chunks[-2:])
    last = reply.chunks[-1] if stream else reply.json
    assert last["choices"][0]["finish_reason"] == "stop"


async def test_text_parts_are_the_same_prompt_as_their_text():
    async with running() as server:
        parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
        replies = [await server.call(CHAT, chat(content)) for content in ("hi", parts)]
    assert replies[0].text == replies[1].text
    assert replies[0].json["usage"] == replies[1].json["usage"]


async def test_an_answer_that_is_continued_begins_alike_in_text_and_in_parts():
    async with running() as server:
        parts = [{"type": "text", "text": "Su"}, {"type": "text", "text": "re"}]
        question = {"role": "user", "content": "hi"}
        replies = [
            await server.call(CHAT, chat(messages=[question, {"role": "assistant", "content": content}]))
            for content in ("Sure", parts)
        ]
        prompt = await server.call("/apply-template", {"messages": [question, {"role": "assistant", "content": parts}]})
    assert replies[0].text == replies[1].text
    assert replies[0].json["usage"] == replies[1].json["usage"]
    assert prompt.json["prompt"].endswith("Sure"), "the turn was closed"


async def test_text_beyond_ascii_goes_through_as_utf_8():
    async with running(models=[{"id": "Zürich/\U0001f600"}]) as server:
        reply = await server.call(COMPLETIONS, completion("Grüße \U0001f600"))
        assert reply.json["model"] == "Zürich/\U0001f600"
        assert reply.text == expected("Grüße \U0001f600")
        assert "Zürich/\U0001f600".encode() in reply.body


@BOTH
async def test_many_requests_on_one_connection(path, body):
    async with running() as server, await server.connect() as client:
        texts = {(await client.call(path, body(stream=bool(number % 2)))).text for number in range(20)}
        assert len(texts) == 1
        await server.free()
        assert server.service.tally().finished == 20


async def test_a_large_body_is_decoded_off_the_event_loop_and_answered():
    async with running(models=[{"n_ctx": 400_000}]) as server:
        prompt = "x" * 300_000
        reply = await server.call(COMPLETIONS, completion(prompt))
    assert reply.text == expected(prompt)
    assert reply.json["usage"]["prompt_tokens"] == 300_000


# Length of the prompt


@BOTH
@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_around_the_context_length(path, body, stream):
    async with running(models=[{"n_ctx": 100}]) as server:
        template = 0 if path == COMPLETIONS else await prompt_tokens(server) - 2
        for tokens in (99, 100, 101, 1000):
            reply = await server.call(path, body("x" * (tokens - template), stream=stream))
            if tokens < 100:
                assert reply.status == 200
                last = reply.chunks[-1] if stream else reply.json
                assert last["choices"][0]["finish_reason"] == "length"
            else:
                param = "messages" if path == CHAT else "prompt"
                error = assert_error(reply, 400, "invalid_request_error", code="context_length_exceeded", param=param)
                assert str(tokens) in error["message"]
                assert "100" in error["message"]


async def prompt_tokens(server):
    return (await server.call(CHAT, chat("hi"))).json["usage"]["prompt_tokens"]


# Models


async def test_models_are_listed_in_order_with_their_state():
    models = [{"id": "a", "slots": 3}, {"id": "org/b:q4", "lazy": True}]
    async with running(models=models) as server:
        reply = await server.call("/v1/models")
        listed = reply.json
        assert listed["object"] == "list"
        first, second = listed["data"]
        assert first == {
            "id": "a",
            "object": "model",
            "created": first["created"],
            "owned_by": "trioserve",
            "task": "generate",
            "state": "ready",
            "loaded": True,
            "slots": 3,
            "active_slots": 0,
            "queued_requests": 0,
            "queued_operations": 0,
            "max_parallel_slots": 16,
            "n_ctx": 4096,
            "stalled_slots": 0,
        }
        assert (second["id"], second["state"], second["loaded"]) == ("org/b:q4", "unloaded", False)
        assert second["max_parallel_slots"] is second["n_ctx"] is None


@pytest.mark.parametrize(
    "model_id", ["fake", "org/model:q4_0", "a b", "Zürich", "100%", "a?b#c", "..", "a//b", "/models/a", "a/"]
)
async def test_one_model_by_its_id(model_id):
    async with running(models=[{"id": model_id}, {"id": "other"}]) as server:
        for spelling in (quote(model_id), quote(model_id, safe="")):
            reply = await server.call(f"/v1/models/{spelling}")
            assert reply.status == 200, spelling
            assert reply.json["id"] == model_id
        assert (await server.call(COMPLETIONS, completion(model=model_id))).json["model"] == model_id


@pytest.mark.parametrize("model_id", ["no", "fake/", "fake/x", "FAKE", "%2Fx", "%ff", "a%00b", "x" * 1000])
async def test_an_unknown_model(model_id):
    async with running() as server:
        assert_error(await server.call(f"/v1/models/{model_id}"), 404, "model_not_found", code="model_not_found")


@BOTH
@pytest.mark.parametrize("model_id", ["no", "", "fake ", "\U0001f600", "x" * 100_000])
async def test_an_unknown_model_is_never_another_ones_answer(path, body, model_id):
    async with running() as server:
        reply = await server.call(path, body(model=model_id))
        error = assert_error(reply, 404, "model_not_found", code="model_not_found", param="model")
        assert len(error["message"]) < 300
        tally = server.service.tally()
        assert (tally.rejected, tally.accepted) == (1, 1)


async def test_the_model_may_be_left_out_only_where_there_is_one():
    async with running(models=[{"id": "a"}, {"id": "b"}]) as server:
        error = assert_error(await server.call(CHAT, chat()), 400, "invalid_request_error", param="model")
        assert "a, b" in error["message"]
        assert (await server.call(CHAT, chat(model="b"))).json["model"] == "b"


async def test_status_shows_active_and_queued_requests():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server, await server.connect() as first, await server.connect() as second:
        await first.send(COMPLETIONS, completion())
        await engine.step_gate.arrived()
        await second.send(COMPLETIONS, completion())
        await until(lambda: server.status().queued_requests == 1)
        (status,) = (await server.call("/v1/models")).json["data"]
        assert (status["active_slots"], status["queued_requests"]) == (1, 1)
        engine.step_gate.open()
        assert (await first.reply()).text == (await second.reply()).text == expected()
        await server.free()


# Health


async def test_health_from_loading_to_ready_to_draining():
    engine = FakeEngine()
    engine.load_gate.shut()
    engine.step_gate.shut()
    async with running(engine, started=False) as server, await server.connect() as busy:

        async def statuses():
            replies = [await server.call(path) for path in ("/health/live", "/health/ready", "/health")]
            return [(reply.status, reply.json["status"]) for reply in replies]

        assert await statuses() == [(200, "ok"), (503, "loading"), (503, "loading")]
        engine.load_gate.open()
        await server.service.wait_started()
        assert await statuses() == [(200, "ok"), (200, "ok"), (200, "ok")]
        await busy.send(COMPLETIONS, completion())
        await engine.step_gate.arrived()
        server.stop.set()
        await until(lambda: server.service.phase == "draining")
        assert await statuses() == [(200, "ok"), (503, "draining"), (503, "draining")]
        engine.step_gate.open()
        assert (await busy.reply()).text == expected()


async def test_lazy_models_do_not_keep_the_server_from_being_ready():
    async with running(models=[{"lazy": True}]) as server:
        assert (await server.call("/health/ready")).status == 200
        assert server.engine.loads == 0


@pytest.mark.parametrize("path", STATUS_ROUTES)
async def test_status_routes_answer_while_every_slot_is_busy(path):
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server, await server.connect() as busy:
        await busy.send(COMPLETIONS, completion())
        await engine.step_gate.arrived()
        assert (await server.call(path)).status == 200
        head = await server.call(path, method="HEAD")
        assert (head.status, head.body) == (200, b"")


# Identity of requests


@pytest.mark.parametrize("path", [*STATUS_ROUTES, "/nowhere", "/v1/models/no"])
async def test_every_response_carries_the_clients_own_id(path):
    async with running() as server:
        reply = await server.call(path, headers=[("X-Request-Id", "abc-123/é".encode("ascii", "ignore"))])
        assert reply.headers["x-request-id"] == "abc-123/"


@pytest.mark.parametrize("given", [None, "", "has space", "é".encode(), "x" * 129])
async def test_a_missing_or_unusable_id_is_replaced_by_a_fresh_one(given):
    async with running() as server:
        headers = [] if given is None else [("x-request-id", given)]
        ids = {(await server.call("/health", headers=headers)).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert all(request_id.startswith("req-") for request_id in ids)


async def test_a_stream_carries_its_id_in_its_headers():
    async with running() as server:
        reply = await server.call(CHAT, chat(stream=True), headers=[("x-request-id", "mine")])
        assert reply.headers["x-request-id"] == "mine"


# Errors


@pytest.mark.parametrize("path", ["/", "/v1", "/v2/models", "/v1/rerank", "/v1//models", "/%ff%00", "*", "?", "/é"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "BREW"])
async def test_unknown_routes(path, method):
    async with running() as server:
        body = b"{}" if method == "POST" else None
        reply = await server.call(quote(path, safe="/%*?"), body, method=method)
        error = assert_error(reply, 404, "invalid_request_error", code="route_not_found")
        assert method in error["message"]


@pytest.mark.parametrize(
    "target", ["http://somewhere/health", "http://[x/health", "/health/", "//health", "/health?a=b"]
)
async def test_targets_of_other_forms_reach_the_same_route(target):
    async with running() as server:
        assert (await server.call(target)).status == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, {"POST", "OPTIONS"}),
        ("GET", COMPLETIONS, {"POST", "OPTIONS"}),
        ("DELETE", CHAT, {"POST", "OPTIONS"}),
        ("POST", "/v1/models", {"GET", "HEAD", "OPTIONS"}),
        ("POST", "/v1/models/fake", {"GET", "HEAD", "OPTIONS"}),
        ("PUT", "/health", {"GET", "HEAD", "OPTIONS"}),
    ],
)
async def test_wrong_methods_are_told_the_right_ones(method, path, allowed):
    async with running() as server:
        reply = await server.call(path, None if method == "GET" else b"{}", method=method)
        assert_error(reply, 405, "invalid_request_error", code="method_not_allowed")
        assert set(reply.headers["allow"].replace(" ", "").split(",")) == allowed


@BOTH
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_beyond_the_limit(path, body, chunked):
    async with running(max_request_body_bytes=2000) as server:
        headers = [("transfer-encoding", "chunked")] if chunked else []
        reply = await server.call(path, body("x" * 2000), headers=headers)
        error = assert_error(reply, 413, "invalid_request_error", code="request_too_large")
        assert "2000 bytes" in error["message"]
        assert (await server.call(path, body("x" * 100), headers=headers)).status == 200


async def test_a_body_beyond_the_limit_is_refused_by_its_header_alone():
    async with running(max_request_body_bytes=2000) as server, await server.connect() as client:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\ncontent-length: 9999999\r\n\r\n"
        )
        await client.stream.send_all(head.encode())
        data = b""
        while not data.endswith(b"}"):
            data += await client.stream.receive_some()
        assert data.startswith(b"HTTP/1.1 413 ")
        assert json.loads(data.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"


async def test_the_limit_is_the_largest_body():
    data = json.dumps(completion()).encode()
    async with running(max_request_body_bytes=len(data)) as server:
        assert (await server.call(COMPLETIONS, data)).status == 200
        assert_error(await server.call(COMPLETIONS, data + b" "), 413, "invalid_request_error")


@BOTH
@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_bodies_of_other_media_types(path, body, media_type):
    async with running() as server:
        reply = await server.call(path, body(), headers=[("content-type", media_type)])
        error = assert_error(reply, 415, "invalid_request_error", code="unsupported_media_type")
        assert media_type in error["message"]


@BOTH
@pytest.mark.parametrize("media_type", ["application/json; charset=utf-8", "application/vnd.api+json", ""])
async def test_bodies_of_good_media_types(path, body, media_type):
    async with running() as server:
        assert (await server.call(path, body(), headers=[("content-type", media_type)])).status == 200


async def test_a_busy_server_says_so():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server, await server.connect() as busy:
        await busy.send(COMPLETIONS, completion())
        await engine.step_gate.arrived()
        for stream in (False, True):
            reply = await server.call(COMPLETIONS, completion(busy_timeout_ms=0, stream=stream))
            assert_error(reply, 503, "server_busy", code="server_busy")
        await until(lambda: server.service.tally().rejected == 2)
        engine.step_gate.open()
        assert (await busy.reply()).text == expected()


async def test_a_full_queue_says_so():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine, max_queued_requests=0) as server, await server.connect() as busy:
        await busy.send(COMPLETIONS, completion())
        await engine.step_gate.arrived()
        assert_error(await server.call(COMPLETIONS, completion()), 503, "server_busy")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_load_is_told_and_tried_again(stream):
    engine = FakeEngine()
    engine.failing_loads = 1
    async with running(engine, models=[{"lazy": True}]) as server:
        reply = await server.call(COMPLETIONS, completion(stream=stream))
        assert_error(reply, 503, "model_load_failed", code="model_load_failed")
        assert (await server.call(COMPLETIONS, completion(stream=stream))).text == expected()


async def test_inference_that_fails_is_an_internal_error():
    engine = FakeEngine()
    engine.failing_step = 3
    async with running(engine) as server:
        reply = await server.call(COMPLETIONS, completion())
        error = assert_error(reply, 500, "internal_error", code="internal_error")
        assert "fake" not in error["message"]
        assert (await server.call(COMPLETIONS, completion())).text == expected()
        await server.free()
        assert (server.service.tally().failed, server.service.tally().finished) == (1, 1)


async def test_a_websocket_is_refused():
    key = [("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="), ("sec-websocket-version", "13")]
    async with running() as server:
        reply = await server.call("/v1/models", headers=[("connection", "upgrade"), ("upgrade", "websocket"), *key])
        assert_error(reply, 404, "invalid_request_error", code="route_not_found")


# Hostile bodies


HOSTILE = {
    "empty": b"",
    "blank": b" \r\n",
    "no json": b"prompt=x",
    "binary": bytes(range(256)),
    "nul": b"\0" * 100,
    "half": b'{"prompt": "a',
    "utf-16": '{"prompt": "a"}'.encode("utf-16"),
    "bom": b"\xef\xbb\xbf{}",
    "list": b"[]",
    "number": b"1e999",
    "deep": b'{"prompt":' + b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "many digits": b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}",
    "a huge token": b'{"prompt": [' + b"9" * 4000 + b"]}",
    "a negative token": b'{"prompt": [-1]}',
    "nan": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": 1e999}',
    "surrogate": rb'{"prompt": "\ud800"}',
    "surrogate content": rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
    "surrogate part": rb'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}]}',
    "surrogate key": rb'{"messages": [{"role": "user", "content": "a", "\ud800": 1}]}',
    "surrogate model": rb'{"prompt": "a", "messages": [], "model": "\ud800"}',
    "surrogate part type": rb'{"messages": [{"role": "user", "content": [{"type": "\ud800"}]}]}',
    "image": b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
    "empty prompt": b'{"prompt": "", "messages": []}',
    "empty list": b'{"prompt": [], "messages": {}}',
    "list of empty": b'{"prompt": [""], "messages": [{}]}',
    "list of empty lists": b'{"prompt": [[]], "messages": [[]]}',
    "null": b'{"prompt": null, "messages": null}',
    "no tokens": b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 0}',
    "many stops": json.dumps({"prompt": "a", "messages": [{"role": "user"}], "stop": ["x"] * 10_000}).encode(),
    "too long": json.dumps({"prompt": "x" * 9000, "messages": [{"role": "user", "content": "x" * 9000}]}).encode(),
    "mixed tokens": b'{"prompt": [1, "a", null, 1e400]}',
}


@BOTH
@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_body_is_a_400_and_the_next_call_works(path, body, data):
    async with running() as server, await server.connect() as client:
        for stream in (b"", b',"stream":true'):
            spoiled = data.removesuffix(b"}") + stream + b"}" if data.endswith(b"}") and stream else data
            assert_error(await client.call(path, spoiled), 400, "invalid_request_error")
        assert (await client.call(path, body())).status == 200
        await server.free()
        assert server.service.tally().finished == 1
        assert server.service.tally().failed == 0


@pytest.mark.parametrize("lazy", [False, True])
async def test_a_prompt_that_is_found_bad_only_after_a_load_leaves_the_slot_free(lazy):
    async with running(models=[{"lazy": lazy}]) as server:
        reply = await server.call(CHAT, chat("\ud800"))
        assert_error(reply, 400, "invalid_request_error", param="messages[0].content")
        await server.free()
        assert (await server.call(CHAT, chat())).status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\0\xff garbage\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n",
        b"A" * 70_000,
        b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: " + b"y" * 70_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: " + b"9" * 30 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_no_http_gets_a_4xx_and_the_connection_closed(data):
    async with running() as server:
        async with await server.connect() as client:
            await client.stream.send_all(data)
            assert (await client.eof()).startswith(b"HTTP/1.1 4")
        assert (await server.call("/health")).status == 200
        await until(lambda: server.calls == 0)


async def test_slow_and_early_clients_do_not_hold_others_up():
    """One sends half a head, one half a body, one a body long after its head was answered."""
    async with running() as server:
        clients = [await server.connect() for _ in range(3)]
        await clients[0].stream.send_all(b"POST /v1/comp")
        half = b'{"prompt": "On'
        rest = b'ce", "max_tokens": 8}'
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: {HOST}\r\ncontent-length: {len(half + rest)}\r\n\r\n".encode()
        await clients[1].stream.send_all(head + half)
        await clients[2].stream.send_all(head.replace(b"/v1/", b"/v3/"))
        assert (await clients[2].stream.receive_some()).startswith(b"HTTP/1.1 404 ")
        assert (await server.call(COMPLETIONS, completion())).text == expected()
        await clients[1].stream.send_all(rest)
        with trio.fail_after(5):
            assert (await clients[1].stream.receive_some()).startswith(b"HTTP/1.1 200 ")
        for client in clients:
            await client.close()
