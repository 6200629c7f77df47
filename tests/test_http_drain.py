"""The end of the server with its sockets open: what newcomers, workers, idlers and stallers see of it."""

from __future__ import annotations

import contextlib
import json

import pytest
import trio
from http_harness import (
    CHAT,
    COMPLETIONS,
    H2Client,
    assert_error,
    assert_error_object,
    chat,
    completion,
    connect,
    expected,
    running,
    until,
)

from trioserve.http import listener
from trioserve.service import service as service_module
from trioserve.testing import FakeEngine

STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    """What has to run out in these tests is short; what must not play a part is long, so that a hang shows."""
    monkeypatch.setattr(service_module, "CUT_GRACE", 0.2)
    monkeypatch.setattr(listener, "CLOSING_SECONDS", 60)


@contextlib.asynccontextmanager
async def draining(**settings):
    """A server that drains, with one request at work in its only slot; the request's connection."""
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine, **settings) as server, await server.connect() as busy:
        await busy.send(COMPLETIONS, completion(stream=True))
        await engine.step_gate.arrived()
        server.stop.set()
        await until(lambda: server.service.phase == "draining")
        yield server, busy


# Newcomers


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (COMPLETIONS, completion(stream=True)), ("/nowhere", None)])
async def test_newcomers_are_turned_away_on_new_connections(path, body):
    async with draining() as (server, busy):
        async with await server.connect() as client:
            reply = await client.call(path, body)
            assert_error(reply, 503, "shutting_down", code="shutting_down")
            assert reply.headers["connection"] == "close"
            assert await client.eof() == b""
        server.engine.step_gate.open()
        assert (await busy.reply()).text == expected()
        await server.drained.wait()
        assert server.report.rejected == 1


async def test_newcomers_are_turned_away_on_open_connections():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server, await server.connect() as busy, await server.connect() as client:
        await client.call("/health")
        await busy.send(COMPLETIONS, completion())
        await engine.step_gate.arrived()
        server.stop.set()
        await until(lambda: server.service.phase == "draining")
        reply = await client.call(COMPLETIONS, completion())
        assert_error(reply, 503, "shutting_down")
        assert reply.headers["connection"] == "close"
        assert await client.eof() == b""
        engine.step_gate.open()
        assert (await busy.reply()).text == expected()


@pytest.mark.parametrize("chunked", [False, True])
async def test_newcomers_with_large_bodies_are_heard_out(chunked):
    async with draining() as (server, _), await server.connect() as client:
        headers = [("transfer-encoding", "chunked")] if chunked else []
        assert_error(await client.call(COMPLETIONS, completion("x" * 3_000_000), headers=headers), 503, "shutting_down")
        assert await client.eof() == b""


async def test_newcomers_with_bodies_in_crumbs_are_heard_out():
    async with draining() as (server, _), await server.connect() as client:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        await client.stream.send_all(head.encode() + b"1\r\na\r\n" * 1000 + b"0\r\n\r\n")
        assert (await client.eof()).startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize("target", ["/health/live", "/v1/models", "/v1/models/fake", "http://a/health/live"])
async def test_status_routes_answer_and_close(target):
    async with draining() as (server, _), await server.connect() as client:
        reply = await client.call(target)
        assert reply.status == 200
        assert reply.headers["connection"] == "close"
        assert await client.eof() == b""


async def test_readiness_is_red_without_being_an_error():
    async with draining() as (server, _):
        for path in ("/health", "/health/ready"):
            reply = await server.call(path)
            assert (reply.status, reply.json) == (503, {"status": "draining"})


async def test_after_the_drain_nobody_is_accepted():
    async with running() as server:
        await server.drain()
        with pytest.raises(OSError, match="refused"):
            await connect(server.port)


# Work under way


@STREAM
async def test_active_and_queued_requests_finish(stream):
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server:
        clients = [await server.connect() for _ in range(3)]
        for number, client in enumerate(clients):
            await client.send(COMPLETIONS, completion(str(number), stream=stream))
            await until(lambda number=number: server.status().queued_requests == number)
        await engine.step_gate.arrived()
        server.stop.set()
        await until(lambda: server.service.phase == "draining")
        engine.step_gate.open()
        for number, client in enumerate(clients):
            assert (await client.reply()).text == expected(str(number))
            assert await client.eof() == b""
        await server.returned.wait()
        assert (server.report.finished, server.report.cancelled, server.report.complete) == (3, 0, True)


async def test_requests_that_wait_for_a_load_finish():
    engine = FakeEngine()
    engine.load_gate.shut()
    async with running(engine, models=[{"lazy": True}]) as server, await server.connect() as client:
        await client.send(COMPLETIONS, completion())
        await engine.load_gate.arrived()
        server.stop.set()
        await until(lambda: server.service.phase == "draining")
        engine.load_gate.open()
        assert (await client.reply()).text == expected()


# The end of the drain


async def test_what_is_left_at_the_end_is_cut_and_told():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine, models=[{"slots": 2}], drain_timeout_ms=50) as server:
        stream, whole, queued = [await server.connect() for _ in range(3)]
        await stream.send(COMPLETIONS, completion(stream=True))
        await engine.step_gate.arrived(1)
        engine.step_gate.let(2)
        await stream.head()
        assert [json.loads(await stream.sse())["choices"][0]["text"] for _ in range(2)] == list(expected()[:2])
        await whole.send(COMPLETIONS, completion())
        await queued.send(COMPLETIONS, completion(stream=True))
        await until(lambda: (server.status().active_slots, server.status().queued_requests) == (2, 1))
        await server.drain()
        (event,) = [await stream.rest()]
        assert event.count(b"data: ") == 1
        assert_error_object(json.loads(event.removeprefix(b"data: "))["error"], "shutting_down")
        for client in (whole, queued):
            reply = await client.reply()
            assert_error(reply, 503, "shutting_down")
            assert reply.headers["connection"] == "close"
        for client in (stream, whole, queued):
            assert await client.eof() == b""
        report = server.report
        assert (report.finished, report.cancelled, report.failed, report.complete) == (0, 3, 0, False)


async def test_a_request_that_waits_for_a_load_is_cut_and_told():
    engine = FakeEngine()
    engine.load_gate.shut()
    async with (
        running(engine, models=[{"lazy": True}], drain_timeout_ms=50) as server,
        await server.connect() as client,
    ):
        await client.send(COMPLETIONS, completion(stream=True))
        await engine.load_gate.arrived()
        server.stop.set()
        assert_error(await client.reply(), 503, "shutting_down")
        await server.returned.wait()


async def test_somebody_in_a_hurry_cuts_the_drain_short():
    async with draining(drain_timeout_ms=3_600_000) as (server, busy):
        server.service.hurry()
        assert "shutting_down" in (await busy.reply()).events[-1]
        await server.returned.wait()
        assert not server.report.complete


async def test_a_request_whose_body_never_ends_gets_a_reply(monkeypatch):
    monkeypatch.setattr(listener, "CLOSING_SECONDS", 0.1)
    async with running() as server, await server.connect() as client:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n"
        await client.stream.send_all(head.encode() + b'{"prompt"')
        await until(lambda: server.calls == 1)
        await server.drain()
        data = await client.eof()
        assert data.startswith(b"HTTP/1.1 503 ")
        assert json.loads(data.partition(b"\r\n\r\n")[2])["error"]["code"] == "shutting_down"


# Connections without work


async def test_idle_connections_are_closed_and_delay_nothing():
    async with running(keep_alive_timeout_ms=600_000) as server:
        used = [await server.connect() for _ in range(3)]
        for client in used:
            await client.call(COMPLETIONS, completion())
        fresh = [await server.connect() for _ in range(3)]
        half = await server.connect()
        await half.stream.send_all(b"POST /v1/comp")
        async with await H2Client.open(server.port) as h2:
            await h2.reply(await h2.send("/health"))
            await server.drain()
            await h2.eof()
        for client in (*used, *fresh, half):
            assert await client.eof() == b""


async def test_keep_alive_connections_close_after_their_last_answer():
    async with draining() as (server, busy):
        server.engine.step_gate.open()
        assert (await busy.reply()).text == expected()
        assert await busy.eof() == b""
        await server.returned.wait()


@STREAM
async def test_a_reader_that_stalls_does_not_outlast_the_bounds(stream, monkeypatch):
    monkeypatch.setattr(listener, "CLOSING_SECONDS", 0.2)
    settings = {"send_timeout_ms": 3_600_000, "drain_timeout_ms": 50, "models": [{"n_ctx": 1_000_000}]}
    async with running(**settings) as server, await server.connect(SO_RCVBUF=4096) as client:
        # A whole answer stalls only when it is larger than all buffers: of the kernel, a few megabytes.
        tokens = 500_000 if stream else 900_000
        body = completion("never", stream=stream, max_tokens=tokens)
        await client.send(COMPLETIONS, body)
        if stream:
            session = server.service.registry.find(None).pool.slots[0].place.session
            steps = -1
            while steps != len(session.threads) or steps < 100:  # until the slot rests
                steps = len(session.threads)
                await trio.sleep(0.05)
        else:
            await until(lambda: server.status().active_slots == 1)
        with trio.fail_after(10):
            await server.drain()
        assert not server.report.complete
        assert server.report.cancelled == 1


# HTTP/2


async def test_newcomers_of_http_2_do_not_spoil_the_streams_of_their_connection():
    """Their bodies come in frames of their own, after the answer has begun."""
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server, await H2Client.open(server.port) as client:
        work = await client.send(COMPLETIONS, completion(stream=True))
        await engine.step_gate.arrived()
        server.stop.set()
        await until(lambda: server.service.phase == "draining")
        newcomer = await client.send(COMPLETIONS, completion("x" * 1000), end=False)
        while newcomer not in client.replies:
            await client.pump()
        for end in (False, True):
            client.http.send_data(newcomer, b" " * 1000, end_stream=end)
            await client.flush()
        assert_error(await client.reply(newcomer), 503, "shutting_down")
        engine.step_gate.open()
        assert (await client.reply(work)).text == expected()
        await server.returned.wait()
