"""A program around the server that is cancelled, and what its clients see of that."""

from __future__ import annotations

import contextlib
import json
import ssl
from dataclasses import dataclass, field

import pytest
import trio
from http_harness import (
    COMPLETIONS,
    HOST,
    SAFETY,
    Client,
    H2Client,
    assert_error_object,
    completion,
    connect,
    until,
    write_gguf,
)
from test_http_listener import make_certificate, needs_openssl
from test_http_streams import small_buffers

from trioserve.config import Config, ModelConfig
from trioserve.http.app import create_app
from trioserve.http.listener import bind, serve_http
from trioserve.service import open_service
from trioserve.testing import FakeEngine

SECONDS = 2  # for an end that takes half of one, on a machine that is busy with something else
STATUS = "/health/live"
UNFINISHED = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 50\r\n\r\n"


@dataclass
class Program:
    """Something with a server in it: ``scope`` cancels it, ``closed`` is set when no connection is left."""

    engine: FakeEngine
    port: int
    service: object = None
    calls: int = 0  # of the application, so far
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    started: trio.Event = field(default_factory=trio.Event)
    closed: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)

    async def run(self, config, sock):
        with self.scope:
            async with open_service(config, engine=self.engine) as self.service:
                await self.service.wait_started()
                self.started.set()
                app = create_app(self.service)

                async def counted(*call):
                    self.calls += 1
                    await app(*call)

                try:
                    await serve_http(counted, config, sock, trio.sleep_forever)
                finally:
                    self.closed.set()
        self.ended.set()

    async def client(self, **options):
        return Client(await connect(self.port, **options))


@contextlib.asynccontextmanager
async def program(folder, *, prepare=lambda sock: None, **settings):
    engine = FakeEngine()
    models = (ModelConfig(path=write_gguf(folder), slots=2, n_ctx=1_000_000),)
    config = Config(port=0, models=models, **settings)
    with bind(config) as sock:
        prepare(sock)
        async with trio.open_nursery() as nursery:
            running = Program(engine, sock.getsockname()[1])
            nursery.start_soon(running.run, config, sock)
            try:
                await running.started.wait()
                yield running
            finally:
                running.scope.cancel()
                engine.step_gate.open()


async def seen_by(clients):
    """Everything that clients still receive until their connections end in order, soon."""
    received = {}

    async def read(name, stream):
        received[name] = b"".join([data async for data in stream])
        await trio.aclose_forcefully(stream)

    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            for name, client in clients.items():
                nursery.start_soon(read, name, client.stream)
    return received


def told(response):
    """The error object of a response in one piece."""
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    return assert_error_object(json.loads(body)["error"], "shutting_down")


@pytest.mark.parametrize("deaf", [False, True], ids=["steps end", "steps hang"])
async def test_every_client_sees_the_end_and_who_waits_is_told(tmp_path, deaf):
    """Also while threads are still at work on what was asked: the program waits for them, its clients don't."""
    async with program(tmp_path) as running:
        engine, service = running.engine, running.service
        engine.step_gate.shut()
        engine.deaf = deaf
        names = ("stream", "whole", "queued", "idle", "silent", "uploading", "pipelining")
        clients = {name: await running.client() for name in names}
        for name in ("stream", "whole"):
            await clients[name].send(COMPLETIONS, completion(stream=name == "stream"))
        await engine.step_gate.arrived(2)
        await clients["stream"].head()
        await clients["queued"].send(COMPLETIONS, completion(stream=True))
        assert (await clients["idle"].call(STATUS)).status == 200
        await clients["uploading"].stream.send_all(UNFINISHED + b'{"prompt": ')
        await clients["pipelining"].send(COMPLETIONS, completion())
        await clients["pipelining"].stream.send_all(b"GET /health/live HTTP/1.1\r\nhost: a\r\n\r\n")
        for name, path, body in (("h2 stream", COMPLETIONS, completion(stream=True)), ("h2 idle", STATUS, None)):
            clients[name] = await H2Client.open(running.port)
            number = await clients[name].send(path, body)
        await clients["h2 idle"].reply(number)
        await until(lambda: service.models()[0].queued_requests == 3 and running.calls == len(clients) - 1)

        running.scope.cancel()
        h2 = clients.pop("h2 stream")
        received = await seen_by(clients)
        with trio.fail_after(SECONDS):
            await h2.eof()
            await running.closed.wait()
        await trio.aclose_forcefully(h2.stream)
        assert h2.replies[1].status == 503
        for name in ("whole", "queued", "pipelining", "uploading"):
            told(received[name])
        event, end = received["stream"].partition(b"data: ")[2].split(b"\n\n")
        assert_error_object(json.loads(event)["error"], "shutting_down")
        assert end.endswith(b"\r\n0\r\n\r\n"), "the response did not end in order"
        assert received["idle"] == received["silent"] == b""
        if deaf:
            await trio.testing.wait_all_tasks_blocked()
            assert not running.ended.is_set(), "a thread is still at work on what is being freed"
        engine.step_gate.open()
        with trio.fail_after(SAFETY):
            await running.ended.wait()
        assert service.tally().active == 0


async def test_a_client_that_reads_nothing_holds_nothing_up(tmp_path):
    """However long a send may take in other times."""
    settings = {"prepare": small_buffers, "send_timeout_ms": 30_000}
    async with program(tmp_path, **settings) as running:
        stalled, idle = await running.client(SO_RCVBUF=4096), await running.client()
        await stalled.send(COMPLETIONS, completion(stream=True, max_tokens=100_000))
        assert (await idle.call(STATUS)).status == 200
        slots = running.service.registry.find(None).pool.slots
        await until_at_rest(lambda: sum(len(slot.place.session.threads) for slot in slots))
        running.scope.cancel()
        await seen_by({"idle": idle})
        with trio.fail_after(SECONDS):
            await running.ended.wait()
        await trio.aclose_forcefully(stalled.stream)


async def until_at_rest(steps):
    """Return once the work has begun and goes on no more."""
    before = 0
    with trio.fail_after(SAFETY):
        while before == 0 or steps() > before:
            before = steps()
            await trio.sleep(0.05)


@needs_openssl
async def test_connections_over_tls_end_as_well(tmp_path):
    certificate = make_certificate(tmp_path)
    context = ssl.create_default_context(cafile=certificate["certfile"])
    async with program(tmp_path, **certificate) as running:
        idle = Client(trio.SSLStream(await connect(running.port), context, server_hostname=HOST, https_compatible=True))
        assert (await idle.call(STATUS)).status == 200
        running.scope.cancel()
        assert await seen_by({"idle": idle}) == {"idle": b""}
