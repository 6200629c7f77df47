"""Streams under stress: long silences, failures in the middle, readers that are slow or never read."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import socket

import httpx
import openai
import pytest
import trio
import trio.testing
from http_harness import (
    CHAT,
    COMPLETIONS,
    SAFETY,
    H2Client,
    assert_error,
    assert_error_object,
    chat,
    completion,
    connect,
    expected,
    running,
    sse_events,
    until,
)
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER
from hypercorn.trio.worker_context import EventWrapper
from test_http_disconnect import scope_of

from trioserve.errors import EngineError, ShuttingDownError
from trioserve.http.connection import BoundedBuffer
from trioserve.http.exchange import CHUNKS, TAKEN, ClientStalledError, Exchange
from trioserve.http.sse import DONE, PING, EventStream, frame
from trioserve.runtime.job import BUFFERED_EVENTS
from trioserve.service import Generation
from trioserve.testing import FakeEngine

BOTH = pytest.mark.parametrize(("path", "body"), [(CHAT, chat), (COMPLETIONS, completion)], ids=["chat", "completions"])
EVENTS = (b"Content-Type", b"text/event-stream; charset=utf-8")
HUGE = 50_000  # tokens of an answer that no buffer holds


# Silence


@BOTH
async def test_a_long_prefill_is_bridged_by_comments(path, body):
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine, sse_ping_interval_ms=50) as server, await server.connect() as client:
        await client.send(path, body(stream=True))
        assert (await client.head()).status == 200
        received = b""
        while received.count(PING) < 3:
            received += bytes((await client.event()).data)
        engine.step_gate.open()
        received += await client.rest()
        events = sse_events(received, comments=True)
        comments = [event for event in events if event.startswith(":")]
        assert comments[:3] == [": keep-alive"] * 3
        assert [event for event in events if event not in comments][-1] == "[DONE]"
        if path == CHAT:
            assert json.loads(events[0])["choices"][0]["delta"]["role"] == "assistant"


async def test_comments_between_tokens_lose_none_of_them():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine, sse_ping_interval_ms=1) as server, await server.connect() as client:
        await client.send(COMPLETIONS, completion(stream=True, max_tokens=30))
        await client.head()
        received = b""
        for number in range(30):
            pings = received.count(PING)
            while received.count(PING) == pings:
                received += bytes((await client.event()).data)
            engine.step_gate.let()
            await engine.step_gate.arrived(number + 1)
        received += await client.rest()
        *chunks, done = sse_events(received)
        assert done == "[DONE]"
        assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == expected(tokens=30)


class Slow:
    """A source with a pause before each of its frames."""

    def __init__(self, *steps):
        self.steps = list(steps)

    async def next_frames(self):
        if not self.steps:
            return b""
        await trio.sleep(self.steps[0][0])
        step = self.steps.pop(0)[1]
        if isinstance(step, Exception):
            raise step
        return step


async def collected(stream):
    async with stream as body:
        return [part async for part in body]


class Wire:
    """What an exchange sends, and when; a send takes as long as it is told."""

    def __init__(self, send_timeout=60.0, silence=15.0, *, chunks=False, tells=False):
        scope = {"headers": [], "path": "/", "method": "POST", "http_version": "1.1", "extensions": {}}
        if chunks:
            scope["extensions"] |= {CHUNKS: self.take_chunk}
        if tells:
            scope["extensions"] |= {TAKEN: lambda: self.taken}
        self.taken = 0
        self.sent, self.chunks, self.seconds = [], [], 0.0
        self.exchange = Exchange(
            scope, None, self.take, send_timeout, silence, lambda: False, witness=Indifferent(), route="/"
        )
        self.exchange.ping = PING

    async def take(self, message):
        await trio.sleep(self.seconds)
        self.sent.append((trio.current_time(), message.get("body")))

    def take_chunk(self, body):
        self.chunks.append(body)
        return trio.sleep(self.seconds) if self.seconds else None

    async def begin(self, *headers):
        await self.exchange.send({"type": "http.response.start", "status": 200, "headers": list(headers)})
        self.sent.clear()

    async def say(self, body, *, more_body=True):
        await self.exchange.send({"type": "http.response.body", "body": body, "more_body": more_body})

    async def hear_out(self):
        self.exchange._heard_out.set()


class Indifferent:
    def response_begun(self, route, status):
        pass


async def test_comments_come_at_the_interval_and_not_beside_frames(autojump_clock):
    wire, start = Wire(), trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.exchange.watch)
        await trio.sleep(20)
        await wire.begin()
        await trio.sleep(10)
        await wire.say(b"a")
        await trio.sleep(40)
        await wire.say(b"b")
        nursery.cancel_scope.cancel()
    times = [(round(at - start), body) for at, body in wire.sent]
    assert times == [(30, b"a"), (45, PING), (60, PING), (70, b"b")]


@pytest.mark.parametrize("without", ["an interval", "a stream", "an end"])
async def test_there_are_no_comments_without(without, autojump_clock):
    wire = Wire(silence=math.inf if without == "an interval" else 15)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.exchange.watch)
        if without != "a stream":
            await wire.begin()
        if without == "an end":
            wire.exchange.finished = True
        await trio.sleep(1000)
        nursery.cancel_scope.cancel()
    assert wire.sent == []


async def test_a_comment_that_nobody_takes_ends_the_request(autojump_clock):
    wire = Wire(send_timeout=30)

    async def be_silent():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wire.exchange.watch)
            await wire.begin()
            wire.seconds = math.inf
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as caught:
        await be_silent()
    assert caught.group_contains(ClientStalledError)
    assert trio.current_time() == pytest.approx(15 + 30, abs=0.1)


@pytest.mark.parametrize("chunks", [False, True])
async def test_a_body_that_waits_behind_a_comment_is_bounded_too(chunks, autojump_clock):
    wire = Wire(send_timeout=30, chunks=chunks)

    async def speak_late():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wire.exchange.watch)
            await wire.begin(EVENTS)
            wire.seconds = math.inf
            await trio.sleep(20)
            await wire.say(b"never")

    with pytest.raises(BaseExceptionGroup) as caught:
        await speak_late()
    assert caught.group_contains(ClientStalledError)
    assert trio.current_time() == pytest.approx(20 + 30, abs=0.1)


@pytest.mark.parametrize("chunks", [False, True])
async def test_a_client_that_takes_a_little_all_the_time_is_not_stalled(chunks, autojump_clock):
    wire = Wire(send_timeout=30, silence=7, chunks=chunks, tells=True)

    async def speak():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wire.exchange.watch)
            await wire.begin(EVENTS)
            wire.seconds = math.inf
            await wire.say(b"long")

    async def take():
        for _ in range(10):  # the last time after 205 seconds
            await trio.sleep(20.5)
            wire.taken += 1

    async def do_both():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            nursery.start_soon(speak)

    start = trio.current_time()
    with pytest.raises(BaseExceptionGroup) as caught:
        await do_both()
    assert caught.group_contains(ClientStalledError)
    assert 205 + 30 <= trio.current_time() - start <= 205 + 38, "looks are 7.5 seconds apart"


async def test_what_was_taken_of_an_earlier_piece_is_no_sign_of_life_in_a_later_one(autojump_clock):
    wire = Wire(send_timeout=30, silence=math.inf, chunks=True, tells=True)

    async def speak():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wire.exchange.watch)
            await wire.begin(EVENTS)
            await wire.say(b"one")
            wire.taken += 3
            wire.seconds = math.inf
            await wire.say(b"two")

    start = trio.current_time()
    with pytest.raises(BaseExceptionGroup) as caught:
        await speak()
    assert caught.group_contains(ClientStalledError)
    assert trio.current_time() - start == pytest.approx(30, abs=0.1)


@pytest.mark.parametrize("tells", [False, True])
async def test_the_last_message_is_bounded_by_whoever_knows_what_is_taken(tells, autojump_clock):
    wire = Wire(send_timeout=30, tells=tells)
    wire.exchange._heard_out.set()
    await wire.begin()
    wire.seconds = 100
    with contextlib.nullcontext() if tells else pytest.raises(ClientStalledError):
        await wire.say(b"", more_body=False)


async def test_a_farewell_is_short_also_where_a_server_tells_what_is_taken(autojump_clock):
    wire = Wire(send_timeout=30, tells=True)
    wire.exchange._heard_out.set()
    await wire.begin()
    wire.seconds, start = math.inf, trio.current_time()
    await wire.exchange.give_up(ShuttingDownError("over"))
    assert trio.current_time() - start == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("given_up", [False, True])
async def test_a_piece_that_took_its_time_is_not_held_against_the_silence_after_it(given_up, autojump_clock):
    wire = Wire(send_timeout=30, silence=math.inf, chunks=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.exchange.watch)
        await trio.testing.wait_all_tasks_blocked()
        await wire.begin(EVENTS)
        wire.seconds = 20
        with trio.move_on_after(1 if given_up else math.inf):
            await wire.say(b"slow")
        await trio.sleep(100)
        wire.seconds = 0
        await wire.say(b"quick")
        nursery.cancel_scope.cancel()
    assert wire.chunks == [b"slow", b"quick"]


async def test_pieces_of_a_stream_are_sent_as_chunks_where_the_server_lets_them():
    wire = Wire(chunks=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.exchange.watch)
        await trio.testing.wait_all_tasks_blocked()
        await wire.begin(EVENTS)
        for body in (b"a", b"", b"b"):  # an empty chunk would be the last one
            await wire.say(body)
        await wire.hear_out()
        await wire.say(b"c", more_body=False)
        nursery.cancel_scope.cancel()
    assert wire.chunks == [b"a", b"b"]
    assert [body for _, body in wire.sent] == [b"", b"c"]
    assert wire.exchange.finished


@pytest.mark.parametrize("headers", [[], [EVENTS, (b"Content-Length", b"2")], [(b"content-type", b"application/json")]])
async def test_what_may_not_go_out_in_chunks_is_left_to_the_server(headers):
    wire = Wire(chunks=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.exchange.watch)
        await trio.testing.wait_all_tasks_blocked()
        await wire.begin(*headers)
        await wire.say(b"ab")
        nursery.cancel_scope.cancel()
    assert (wire.chunks, [body for _, body in wire.sent]) == ([], [b"ab"])


async def test_only_between_head_and_end_are_there_chunks():
    """Where the server would refuse a message, a chunk must not go to whatever comes next on the connection."""
    wire = Wire(chunks=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.exchange.watch)
        await trio.testing.wait_all_tasks_blocked()
        await wire.say(b"early")
        assert [body for _, body in wire.sent] == [b"early"]
        await wire.begin(EVENTS)
        await wire.hear_out()
        await wire.say(b"", more_body=False)
        await wire.say(b"late")
        nursery.cancel_scope.cancel()
    assert (wire.chunks, [body for _, body in wire.sent]) == ([], [b"", b"late"])


async def test_a_client_that_knows_no_chunks_gets_none():
    body = json.dumps({"model": "fake", "stream": True, **completion()}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    async with running() as server:
        stream = await connect(server.port)
        async with stream:
            await stream.send_all(head.encode() + body)
            received = b""
            while data := await stream.receive_some():
                received += data
    _, _, events = received.partition(b"\r\n\r\n")
    *chunks, done = sse_events(events)
    assert done == "[DONE]"
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == expected()


async def test_an_error_is_the_last_thing_that_a_stream_tells():
    parts = await collected(EventStream(Slow((0, b"a"), (0, EngineError("broken")), (0, b"never"))))
    assert parts[0] == b"a"
    assert json.loads(parts[1].removeprefix(b"data: "))["error"]["message"] == "broken"
    assert len(parts) == 2


def test_a_frame_is_one_line_of_data_and_a_blank_one():
    assert frame(b"{}") == b"data: {}\n\n"


# Failures


@BOTH
@pytest.mark.parametrize("how", ["failing_step", "raising_step"])
async def test_a_failure_in_the_middle_is_one_error_event_and_the_end(path, body, how):
    engine = FakeEngine()
    setattr(engine, how, 6)
    async with running(engine) as server:
        reply = await server.call(path, body(stream=True, stream_options={"include_usage": True}))
        assert reply.status == 200
        *chunks, last = map(json.loads, reply.events)
        assert_error_object(last["error"], "internal_error")
        assert list(last) == ["error"]
        assert not any("error" in chunk for chunk in chunks)
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert len(chunks) == 5 + (path == CHAT)
        await server.free()
        assert server.service.tally().failed == 1
        assert (await server.call(path, body(stream=True))).chunks


async def test_the_client_of_openai_raises_at_a_failure_in_the_middle():
    engine = FakeEngine()
    engine.failing_step = 6
    pieces = []

    def read(url):
        with (
            httpx.Client(trust_env=False) as transport,
            openai.OpenAI(base_url=url, api_key="none", http_client=transport, max_retries=0) as client,
        ):
            for chunk in client.completions.create(model="fake", stream=True, **completion()):
                pieces.append(chunk.choices[0].text)  # noqa: PERF401 - the loop ends with an error

    async with running(engine) as server:
        with pytest.raises(openai.APIError) as caught:
            await trio.to_thread.run_sync(read, f"http://127.0.0.1:{server.port}/v1")
    assert caught.value.type == "internal_error"
    assert "".join(pieces) == expected()[:5]


async def test_a_failure_hits_one_stream_only():
    engine = FakeEngine()
    engine.failing_step = 6  # of a session: the other one is given shorter answers
    engine.step_gate.shut()
    async with (
        running(engine, models=[{"slots": 2}]) as server,
        await server.connect() as failing,
        await server.connect() as other,
    ):
        await failing.send(COMPLETIONS, completion(stream=True))
        await other.send(COMPLETIONS, completion(stream=True, max_tokens=5))
        await engine.step_gate.arrived(2)
        engine.step_gate.open()
        assert (await other.reply()).text == expected(tokens=5)
        assert "error" in json.loads((await failing.reply()).events[-1])


@BOTH
@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_of_ours_is_told_without_its_details_and_logged(path, body, stream, monkeypatch, caplog):
    original = Generation.next_parts
    calls = []

    async def faulty(self):
        calls.append(1)
        if len(calls) == 2:
            raise LookupError("secret")
        return await original(self)

    engine = FakeEngine()
    engine.step_gate.shut()
    engine.step_gate.let(1)
    async with running(engine) as server:
        monkeypatch.setattr(Generation, "next_parts", faulty)
        reply = await server.call(path, body(stream=stream), headers=[("x-request-id", "mine")])
        if stream:
            error = json.loads(reply.events[-1])["error"]
            assert "[DONE]" not in reply.events
            assert_error_object(error, "internal_error")
        else:
            error = assert_error(reply, 500, "internal_error")
        assert b"secret" not in reply.body
        (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert record.fields["request_id"] == "mine"
        assert "secret" in str(record.exc_info[1].args) or "secret" in repr(record.exc_info[1])
        await server.free()
        engine.step_gate.open()
        assert (await server.call(path, body())).status == 200


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"prompt": "x" * 5000}, 400, "invalid_request_error"),
        ({"prompt": [999]}, 400, "invalid_request_error"),
        ({"prompt": ""}, 400, "invalid_request_error"),
        ({"model": "no"}, 404, "model_not_found"),
        ({"temperature": 3}, 400, "invalid_request_error"),
    ],
)
@pytest.mark.parametrize("lazy", [False, True])
async def test_an_error_before_the_stream_is_a_plain_response(fields, status, kind, lazy):
    async with running(models=[{"lazy": lazy}]) as server:
        assert_error(await server.call(COMPLETIONS, completion(stream=True, **fields)), status, kind)


async def test_busy_is_told_before_the_stream_and_not_in_it():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server, await server.connect() as busy:
        await busy.send(COMPLETIONS, completion(stream=True))
        await busy.head()
        reply = await server.call(COMPLETIONS, completion(stream=True, busy_timeout_ms=50))
        assert_error(reply, 503, "server_busy")
        engine.step_gate.open()
        assert (await busy.rest()).endswith(DONE)


# Readers


async def test_pieces_that_piled_up_come_in_order_each_in_its_own_chunk():
    """The transport holds the first message back until the slot has paused for its reader."""
    tokens = 3 * BUFFERED_EVENTS
    engine = FakeEngine()
    messages = []

    async with running(engine) as server:
        incoming = [json.dumps(completion(stream=True, max_tokens=tokens)).encode()]

        async def receive():
            if incoming:
                return {"type": "http.request", "body": incoming.pop(), "more_body": False}
            return await trio.sleep_forever()

        async def send(message):
            if message["type"] == "http.response.body" and not messages:
                await engine.step_gate.arrived(BUFFERED_EVENTS)
            if message.get("body"):
                messages.append(message["body"])

        with trio.fail_after(SAFETY):
            await server.app(scope_of(), receive, send)
    assert len(messages) < tokens / 2
    *chunks, done = sse_events(b"".join(messages))
    assert done == "[DONE]"
    assert len(chunks) == tokens + 1
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == expected(tokens=tokens)


def small_buffers(sock):
    """Connections inherit this from the listening socket."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_never_reads_holds_its_slot_no_longer_than_the_send_timeout(stream):
    models = [{"n_ctx": 1_000_000, "slots": 2}]
    async with (
        running(models=models, send_timeout_ms=200, prepare=small_buffers) as server,
        await server.connect(SO_RCVBUF=4096) as client,
    ):
        slots = server.service.registry.find(None).pool.slots
        await client.send(COMPLETIONS, completion("never", stream=stream, max_tokens=HUGE if stream else HUGE // 2))
        await until(lambda: server.status().active_slots == 1)
        for _ in range(5):
            assert (await server.call(COMPLETIONS, completion(stream=True))).text == expected()
        await server.free()
        await until(lambda: server.calls == 0)
        if stream:
            assert server.service.tally().cancelled == 1
            # What was computed is what fits into the buffers between slot and socket, not the whole answer.
            steps = sum(len(slot.place.session.threads) for slot in slots)
            assert steps < HUGE / 5
        assert server.service.tally().finished == 5 + (not stream)
        assert (await server.call(COMPLETIONS, completion())).text == expected()


async def test_a_slow_reader_pauses_its_own_slot_and_gets_everything():
    tokens = 5000
    async with (
        running(models=[{"n_ctx": 1_000_000}], prepare=small_buffers) as server,
        await server.connect(SO_RCVBUF=4096) as client,
    ):
        session = server.service.registry.find(None).pool.slots[0].place.session
        await client.send(COMPLETIONS, completion(stream=True, max_tokens=tokens))
        await client.head()
        steps = -1
        while steps != len(session.threads):  # until the slot rests
            steps = len(session.threads)
            await trio.sleep(0.05)
        assert steps < tokens / 2
        *chunks, done = sse_events(await client.rest())
        assert done == "[DONE]"
        assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == expected(tokens=tokens)


async def test_a_stream_of_http_2_whose_window_is_never_opened_frees_its_slot():
    """Hypercorn's own buffers would take the whole answer in."""
    models = [{"n_ctx": 1_000_000, "slots": 2}]
    async with running(models=models, send_timeout_ms=200) as server, await H2Client.open(server.port) as client:
        slots = server.service.registry.find(None).pool.slots
        await client.send(COMPLETIONS, completion("never", stream=True, max_tokens=HUGE))
        await until(lambda: server.status().active_slots == 1)
        assert (await server.call(COMPLETIONS, completion(stream=True))).text == expected()
        await server.free()
        await until(lambda: server.calls == 0)
        assert server.service.tally().cancelled == 1
        assert sum(len(slot.place.session.threads) for slot in slots) < HUGE / 5
        assert (await server.call(COMPLETIONS, completion())).text == expected()


async def test_a_slow_reader_of_http_2_pauses_its_own_slot_and_gets_everything():
    tokens = 5000
    models = [{"n_ctx": 1_000_000}]
    async with running(models=models) as server, await H2Client.open(server.port) as client:
        session = server.service.registry.find(None).pool.slots[0].place.session
        number = await client.send(COMPLETIONS, completion(stream=True, max_tokens=tokens))
        steps = -1
        while steps != len(session.threads):  # until the slot rests
            steps = len(session.threads)
            await trio.sleep(0.05)
        assert steps < tokens / 2
        assert (await client.reply(number)).text == expected(tokens=tokens)


@pytest.mark.parametrize("size", [1000, BUFFER_HIGH_WATER - 1, BUFFER_HIGH_WATER, 3 * BUFFER_HIGH_WATER])
async def test_a_buffer_of_http_2_takes_no_more_than_two_messages_beyond_its_bound(size, autojump_clock):
    buffer = BoundedBuffer(EventWrapper)
    with trio.move_on_after(1) as scope:
        for _ in range(100):
            assert await buffer.pop(0) == b""  # as Hypercorn does after each message, window or not
            await buffer.push(bytes(size))
    assert scope.cancelled_caught
    assert len(buffer.buffer) <= BUFFER_HIGH_WATER + 2 * size
    await buffer.pop(len(buffer.buffer))
    with trio.fail_after(1):
        await buffer.push(b"more")
