"""Applications under Hypercorn's own Trio worker: one that has asked for our connections, and others."""

from __future__ import annotations

import contextlib
import copy
import math
import ssl

import hypercorn.trio
import hypercorn.trio.run
import pytest
import trio
from http_harness import SAFETY, Client, H2Client, connect, until
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio.tcp_server import TCPServer
from test_http_listener import make_certificate, needs_openssl

from trioserve.http.exchange import CHUNKS, TAKEN
from trioserve.http.hypercorn_worker import our_connections

ENDLESS = "/endless"


class Application:
    """Answers at once, or at ``ENDLESS`` without an end.

    Arguments:
        send_timeout: of our connections; None doesn't ask for them.
    """

    def __init__(self, send_timeout: float | None) -> None:
        self._send_timeout = send_timeout
        self.scopes = []
        self.calls = 0
        self._sending_since = math.inf

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        self.scopes.append(scope)
        self.calls += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            if scope["path"] == ENDLESS:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send_on, send)
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    nursery.cancel_scope.cancel()
            await send({"type": "http.response.body", "body": b"here", "more_body": False})
        finally:
            self.calls -= 1

    async def _send_on(self, send):
        while True:
            self._sending_since = trio.current_time()
            await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})

    def has_sent_for(self, seconds: float) -> bool:
        """Whether the piece that is on its way has been so for so long."""
        return trio.current_time() >= self._sending_since + seconds

    @property
    def has_ours(self) -> bool:
        """Whether the last call came over one of our connections."""
        return TAKEN in self.scopes[-1]["extensions"]

    async def _live(self, receive, send):
        await receive()
        ours = (
            contextlib.nullcontext()
            if self._send_timeout is None
            else our_connections(receive, self._send_timeout, self)
        )
        with ours:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


@contextlib.asynccontextmanager
async def worker(app, *, graceful=0.1, **settings):
    """Hypercorn's worker for the length of the block; its port, and what to set for its end."""
    config = HypercornConfig()
    config.bind, config.errorlog, config.graceful_timeout = ["127.0.0.1:0"], None, graceful
    for name, value in settings.items():
        setattr(config, name, value)
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(lambda *, task_status: _serve(app, config, stop, task_status))
        yield int(url.rpartition(":")[2]), stop
        stop.set()
        with trio.fail_after(SAFETY):
            while nursery.child_tasks:
                await trio.sleep(0.001)


async def _serve(app, config, stop, task_status):
    await hypercorn.trio.serve(app, config, shutdown_trigger=stop.wait, task_status=task_status)


async def look(port):
    async with Client(await connect(port)) as client:
        return (await client.call("/")).body


async def test_an_application_gets_ours_and_others_beside_it_theirs():
    app, other, late = Application(3600), Application(None), Application(None)
    async with worker(other) as (others, _), worker(app) as (port, _), worker(late) as (lates, _):
        for served, where, ours in ((app, port, True), (other, others, False), (late, lates, False)):
            assert await look(where) == b"here"
            assert served.has_ours is ours
        assert CHUNKS in app.scopes[-1]["extensions"]
    assert hypercorn.trio.run.TCPServer is TCPServer


async def test_under_another_server_nothing_is_changed():
    async def receive():
        raise AssertionError("nobody asks")

    with our_connections(receive, 1, None):
        assert hypercorn.trio.run.TCPServer is TCPServer


async def test_who_wraps_the_lifespan_keeps_hypercorns():
    app = Application(3600)

    async def around(scope, receive, send):
        async def wrapped():
            return await receive()

        await app(scope, wrapped, send)

    async with worker(around) as (port, _):
        assert await look(port) == b"here"
        assert not app.has_ours


async def test_middleware_sees_all_that_is_sent_and_can_copy_the_scope():
    app = Application(3600)

    async def around(scope, receive, send):
        await app(scope if scope["type"] == "lifespan" else copy.deepcopy(scope), receive, send)

    async with worker(around) as (port, _):
        assert hypercorn.trio.run.TCPServer is not TCPServer
        assert await look(port) == b"here"
        assert not {TAKEN, CHUNKS} & set(app.scopes[-1]["extensions"])


async def test_lifespans_may_end_in_any_order():
    first, second = Application(3600), Application(3600)
    async with trio.open_nursery() as nursery:
        ports, stops = {}, {}

        async def serve(app, *, task_status):
            async with worker(app) as (port, stop):
                ports[app], stops[app] = port, stop
                task_status.started()
                await stop.wait()

        await nursery.start(serve, first)
        await nursery.start(serve, second)
        stops[first].set()
        await until(lambda: len(nursery.child_tasks) == 1)
        assert await look(ports[second]) == b"here"
        assert second.has_ours
        stops[second].set()
    assert hypercorn.trio.run.TCPServer is TCPServer


async def test_a_connection_that_has_ended_well_stops_no_sends():
    app = Application(3600)
    async with worker(app) as (port, stop):
        await look(port)
        async with await unread(port):
            await until(lambda: app.has_sent_for(0.5))
            assert app.calls == 1
            stop.set()
            await until(lambda: app.calls == 0)


async def test_a_connection_that_fails_does_not_end_the_worker():
    app = Application(3600)
    async with worker(app) as (port, _), Client(await connect(port)) as client:
        await client.send("/")
        assert (await client.reply()).body == b"here"
        async with await H2Client.open(port) as attacker:
            await attacker.send(b"/\xff")
            await attacker.eof()
        assert (await client.call("/")).body == b"here"


async def unread(port):
    """A client that asks for an endless answer and reads nothing of it."""
    client = Client(await connect(port, SO_RCVBUF=4096))
    await client.send(ENDLESS)
    return client


async def test_a_client_that_stops_reading_is_let_go():
    app = Application(0.2)
    async with worker(app) as (port, _), await unread(port):
        await until(lambda: app.calls == 1)
        await until(lambda: app.calls == 0)


async def test_a_client_that_stops_reading_does_not_hold_up_the_end():
    app = Application(math.inf)
    async with worker(app) as (port, stop), await unread(port):
        await until(lambda: app.has_sent_for(0.2))
        stop.set()
        await until(lambda: app.calls == 0)
    assert hypercorn.trio.run.TCPServer is TCPServer


@needs_openssl
async def test_over_tls(tmp_path):
    app = Application(0.2)
    certificate = make_certificate(tmp_path)
    files = {name: str(path) for name, path in certificate.items()}
    async with worker(app, **files) as (port, _):
        context = ssl.create_default_context(cafile=certificate["certfile"])
        stream = trio.SSLStream(await connect(port), context, server_hostname="localhost", https_compatible=True)
        async with Client(stream) as client:
            assert (await client.call("/")).body == b"here"
            assert app.has_ours
            await client.send(ENDLESS)
            await until(lambda: app.calls == 1)
            await until(lambda: app.calls == 0)


@pytest.mark.parametrize("seconds", [None, 0.2])
async def test_its_bound_on_reads_holds(seconds):
    async with worker(Application(3600), read_timeout=seconds, keep_alive_timeout=1) as (port, _):
        began = trio.current_time()
        async with Client(await connect(port)) as client:
            await client.eof()
        assert (trio.current_time() - began < 0.9) is (seconds is not None)
