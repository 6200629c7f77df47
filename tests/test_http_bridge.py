"""The bridge: a Trio application under asyncio servers, driven with a fake server and with Hypercorn's own worker.

The asyncio side runs in ``asyncio.run`` inside plain functions. Fake servers and applications wait for each other by
ASGI messages: what the application sends is what the test awaits, so no test sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
from collections import Counter

import pytest
import trio
import trio.testing
from hypercorn.asyncio import serve
from hypercorn.config import Config
from quart import Response, request
from quart_trio import QuartTrio

from trioserve.http.bridge import Bridge

SAFETY = 30  # seconds: only a hang meets it
THREAD = "trioserve-trio"


def run(main):
    """Run `main` under asyncio and see that no thread of a bridge is left."""
    try:
        return asyncio.run(asyncio.wait_for(main(), SAFETY))
    finally:
        assert bridge_threads() == []


def bridge_threads():
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


class Server:
    """The asyncio server's end of one ASGI call: two queues, and the task that awaits the bridge."""

    def __init__(self, bridge, kind="http", *, receive=None, send=None, **scope):
        self.to_app = asyncio.Queue()
        self.from_app = asyncio.Queue()
        self.task = asyncio.create_task(
            bridge({"type": kind, **scope}, receive or self.to_app.get, send or self.from_app.put)
        )

    def put(self, kind, **fields):
        self.to_app.put_nowait({"type": kind, **fields})

    async def sent(self):
        """The type of the next message from the application; a call that ends without one is an error of the test."""
        getter = asyncio.create_task(self.from_app.get())
        await asyncio.wait({getter, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if not getter.done():
            getter.cancel()
            self.task.result()
            raise AssertionError("the call ended without a message")
        return getter.result()["type"]


@contextlib.asynccontextmanager
async def lifespan(bridge):
    """A whole lifespan around the block."""
    server = Server(bridge, "lifespan")
    server.put("lifespan.startup")
    assert await server.sent() == "lifespan.startup.complete"
    yield server
    server.put("lifespan.shutdown")
    await server.task
    assert await server.from_app.get() == {"type": "lifespan.shutdown.complete"}


async def serve_lifespan(receive, send):
    """The application's end of a lifespan in which nothing happens."""
    assert (await receive())["type"] == "lifespan.startup"
    await send({"type": "lifespan.startup.complete"})
    assert (await receive())["type"] == "lifespan.shutdown"
    await send({"type": "lifespan.shutdown.complete"})


def bridged(handler):
    """A bridge to an application with an empty lifespan and `handler` for everything else."""

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            await serve_lifespan(receive, send)
        else:
            await handler(scope, receive, send)

    return Bridge(app)


async def until_disconnect(receive, work, *args):
    """What a Trio framework does: run `work` until it ends or the client goes."""
    async with trio.open_nursery() as nursery:

        async def watch():
            while (await receive())["type"] != "http.disconnect":
                pass
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        await work(*args)
        nursery.cancel_scope.cancel()


# Messages and their order


def test_echo_runs_under_trio_in_the_bridge_thread():
    async def echo(scope, receive, send):
        assert threading.current_thread().name == THREAD
        assert not threading.current_thread().daemon
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        await trio.lowlevel.checkpoint()
        await send({"type": "http.response.body", "body": scope["path"] + body})

    async def main():
        bridge = bridged(echo)
        async with lifespan(bridge):
            server = Server(bridge, path=b"/")
            server.put("http.request", body=b"ab", more_body=True)
            server.put("http.request", body=b"c", more_body=False)
            await server.task
            assert server.from_app.get_nowait() == {"type": "http.response.body", "body": b"/abc"}

    run(main)


def test_streaming_is_flushed_message_by_message_and_feels_backpressure():
    log = []

    async def stream(scope, receive, send):
        for number in range(3):
            log.append(f"app {number}")
            await send({"type": f"chunk {number}"})

    async def main():
        gates = asyncio.Queue()
        arrived = asyncio.Queue()

        async def send(message):
            arrived.put_nowait(message["type"])
            await gates.get()

        bridge = bridged(stream)
        async with lifespan(bridge):
            server = Server(bridge, send=send)
            for number in range(3):
                assert await arrived.get() == f"chunk {number}"
                assert log[-1] == f"app {number}"
                gates.put_nowait(None)
            await server.task

    run(main)


def test_websocket_scopes_are_delegated():
    async def refuse(scope, receive, send):
        await send({"type": f"{scope['type']}.close"})

    async def main():
        bridge = bridged(refuse)
        async with lifespan(bridge):
            server = Server(bridge, "websocket")
            assert await server.sent() == "websocket.close"
            await server.task

    run(main)


# Cancellation, both ways


def test_disconnect_cancels_the_application():
    log = []

    async def work(send):
        try:
            await send({"type": "working"})
            await trio.sleep_forever()
        except trio.Cancelled:
            log.append("Cancelled")
            raise
        finally:
            log.append("finally")

    async def handler(scope, receive, send):
        await until_disconnect(receive, work, send)

    async def main():
        bridge = bridged(handler)
        async with lifespan(bridge):
            server = Server(bridge)
            assert await server.sent() == "working"
            server.put("http.disconnect")
            await server.task
            assert log == ["Cancelled", "finally"]

    run(main)


def test_server_side_cancel_waits_for_the_application_however_often_it_is_repeated():
    log = []

    async def handler(scope, receive, send):
        try:
            await send({"type": "working"})
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await send({"type": "cleaning"})
                await receive()
                log.append("clean")

    async def main():
        bridge = bridged(handler)
        async with lifespan(bridge):
            server = Server(bridge)
            assert await server.sent() == "working"
            server.task.cancel()
            assert await server.sent() == "cleaning"
            server.task.cancel()
            await asyncio.wait({server.task}, timeout=0)
            assert not server.task.done()
            server.put("go")
            with pytest.raises(asyncio.CancelledError):
                await server.task
            assert log == ["clean"]

    run(main)


def test_an_error_on_the_way_out_takes_the_place_of_the_cancellation():
    async def handler(scope, receive, send):
        try:
            await send({"type": "working"})
            await trio.sleep_forever()
        finally:
            raise KeyError("cleanup")

    async def main():
        bridge = bridged(handler)
        async with lifespan(bridge):
            server = Server(bridge)
            assert await server.sent() == "working"
            server.task.cancel()
            with pytest.raises(KeyError, match="cleanup"):
                await server.task

    run(main)


@pytest.mark.parametrize("which", ["receive", "send"])
def test_trio_side_cancel_cancels_the_servers_coroutine_and_waits_for_it(which):
    log = []

    async def handler(scope, receive, send):
        async with trio.open_nursery() as nursery:

            async def pending():
                try:
                    await (receive() if which == "receive" else send({"type": "stuck"}))
                finally:
                    log.append("app")

            nursery.start_soon(pending)
            await send({"type": "when stuck"})
            nursery.cancel_scope.cancel()

    async def main():
        stuck, cancelled, release = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def get_stuck():
            stuck.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
                await release.wait()
                log.append("server")

        async def send(message):
            await (get_stuck() if message["type"] == "stuck" else stuck.wait())

        bridge = bridged(handler)
        async with lifespan(bridge):
            server = Server(bridge, receive=get_stuck, send=send)
            await cancelled.wait()
            assert log == []
            release.set()
            await server.task
            assert log == ["server", "app"]

    run(main)


def test_a_cancelled_receive_takes_no_message():
    log = []

    async def handler(scope, receive, send):
        with trio.CancelScope() as scope:
            scope.cancel()
            with pytest.raises(trio.Cancelled):
                await receive()
        log.append(await receive())

    async def main():
        bridge = bridged(handler)
        async with lifespan(bridge):
            server = Server(bridge)
            server.put("http.request")
            await server.task
            assert log == [{"type": "http.request"}]

    run(main)


def test_a_hundred_concurrent_requests_half_of_them_cancelled():
    count = Counter()

    async def work(send):
        count["starts"] += 1
        try:
            await send({"type": "working"})
            await trio.sleep_forever()
        finally:
            count["exits"] += 1

    async def handler(scope, receive, send):
        await until_disconnect(receive, work, send)

    async def main():
        bridge = bridged(handler)
        async with lifespan(bridge):
            servers = [Server(bridge) for _ in range(100)]
            for server in servers:
                assert await server.sent() == "working"
            assert count == {"starts": 100}
            for server in servers[::2]:
                server.task.cancel()
            for server in servers[1::2]:
                server.put("http.disconnect")
            results = await asyncio.gather(*(server.task for server in servers), return_exceptions=True)
            assert Counter(map(type, results)) == {asyncio.CancelledError: 50, type(None): 50}
            assert count == {"starts": 100, "exits": 100}

    run(main)


def test_requests_cancelled_at_any_moment_leave_nothing_behind():
    count = Counter()

    async def handler(scope, receive, send):
        count["starts"] += 1
        try:
            for _ in range(20):
                await send({"type": "chunk"})
        finally:
            count["exits"] += 1

    async def main():
        bridge = bridged(handler)
        async with lifespan(bridge):
            servers = []
            for number in range(100):
                servers.append(Server(bridge))
                for _ in range(number % 13):
                    await asyncio.sleep(0)
                servers[number // 2].task.cancel()
            results = await asyncio.gather(*(server.task for server in servers), return_exceptions=True)
            assert {type(result) for result in results} <= {asyncio.CancelledError, type(None)}
            assert count["starts"] == count["exits"]

    run(main)


# Errors, both ways


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ValueError("a"), ValueError),
        (ExceptionGroup("one", [ExceptionGroup("one", [ValueError("a")])]), ValueError),
        (ExceptionGroup("two", [ValueError("a"), KeyError("b")]), ExceptionGroup),
    ],
    ids=["plain", "group of one", "group of two"],
)
def test_an_application_error_reaches_the_server(raised, expected):
    async def handler(scope, receive, send):
        raise raised

    async def main():
        bridge = bridged(handler)
        async with lifespan(bridge):
            (result,) = await asyncio.gather(Server(bridge).task, return_exceptions=True)
            assert type(result) is expected
            (result,) = await asyncio.gather(Server(bridge).task, return_exceptions=True)
            assert type(result) is expected  # the run is none the worse

    run(main)


@pytest.mark.parametrize("error", [OSError("gone"), ConnectionResetError("reset"), RuntimeError("closed")], ids=repr)
def test_an_error_of_the_servers_send_reaches_the_application(error):
    log = []

    async def handler(scope, receive, send):
        try:
            await send({"type": "http.response.start"})
        except Exception as caught:
            log.append(caught)

    async def main():
        async def send(message):
            raise error

        bridge = bridged(handler)
        async with lifespan(bridge):
            await Server(bridge, send=send).task
            assert log == [error]

    run(main)


def test_a_send_that_the_server_cancels_cancels_the_call():
    log = []

    async def handler(scope, receive, send):
        with trio.CancelScope(shield=True):
            try:
                await send({"type": "shielded"})
            except OSError as error:
                log.append(str(error))
        await trio.sleep_forever()

    async def main():
        async def send(message):
            raise asyncio.CancelledError

        bridge = bridged(handler)
        async with lifespan(bridge):
            with pytest.raises(RuntimeError, match="stopped"):
                await Server(bridge, send=send).task
            assert log == ["the server cancelled the operation"]

    run(main)


# Lifespan


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_without_a_lifespan_a_call_says_what_is_missing(kind):
    async def main():
        with pytest.raises(RuntimeError, match="only while its ASGI lifespan does"):
            await Server(bridged(None), kind).task

    run(main)


def test_a_failed_startup_is_told_when_the_thread_is_gone():
    told = []

    async def app(scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no"})
        await receive()

    async def main():
        async def send(message):
            told.append((message, bridge_threads()))
            raise LookupError("the server's own way to stop")

        server = Server(Bridge(app), "lifespan", send=send)
        server.put("lifespan.startup")
        with pytest.raises(LookupError, match="own way"):
            await server.task
        assert told == [({"type": "lifespan.startup.failed", "message": "no"}, [])]

    run(main)


@pytest.mark.parametrize("last", ["lifespan.shutdown.complete", "lifespan.shutdown.failed"])
def test_the_end_of_shutdown_is_told_when_the_thread_is_gone(last):
    log = []

    async def background(send):
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await send({"type": "cleaning"})
            log.append("background")

    async def app(scope, receive, send):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(background, send)
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": last})
            log.append("app")

    async def main():
        async def send(message):
            log.append((message["type"], len(bridge_threads())))

        server = Server(Bridge(app), "lifespan", send=send)
        server.put("lifespan.startup")
        server.put("lifespan.shutdown")
        await server.task
        assert log == [("lifespan.startup.complete", 1), "app", ("cleaning", 1), "background", (last, 0)]

    run(main)


@pytest.mark.parametrize("when", ["startup", "serving"])
def test_a_crash_in_the_lifespan_is_raised_when_the_thread_is_gone(when):
    async def app(scope, receive, send):
        async with trio.open_nursery():
            await receive()
            if when == "serving":
                await send({"type": "lifespan.startup.complete"})
            raise ValueError("crash")

    async def main():
        bridge = Bridge(app)
        server = Server(bridge, "lifespan")
        server.put("lifespan.startup")
        with pytest.raises(ValueError, match="crash"):
            await server.task
        assert bridge_threads() == []
        with pytest.raises(RuntimeError, match="lifespan"):
            await Server(bridge).task

    run(main)


async def _report_stop(scope, receive, send, log):
    try:
        await send({"type": "working"})
        await trio.sleep_forever()
    finally:
        log.append("stopped")


def test_requests_left_at_the_end_of_the_lifespan_are_cancelled():
    log = []

    async def main():
        bridge = bridged(lambda *asgi: _report_stop(*asgi, log))
        async with lifespan(bridge):
            server = Server(bridge)
            assert await server.sent() == "working"
        with pytest.raises(RuntimeError, match="was stopped before"):
            await server.task
        assert log == ["stopped"]

    run(main)


def test_requests_are_refused_while_the_run_ends():
    async def handler(scope, receive, send):
        try:
            await send({"type": "working"})
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await send({"type": "cleaning"})
                await receive()

    async def main():
        bridge = bridged(handler)
        async with lifespan(bridge) as life:
            server = Server(bridge)
            assert await server.sent() == "working"
            life.put("lifespan.shutdown")
            assert await server.sent() == "cleaning"
            with pytest.raises(RuntimeError, match="was stopped before"):
                await Server(bridge).task
            server.put("go")
        with pytest.raises(RuntimeError, match="was stopped before"):
            await server.task

    run(main)


def test_a_cancelled_lifespan_cancels_the_run_and_joins_the_thread():
    log = []

    async def main():
        bridge = bridged(lambda *asgi: _report_stop(*asgi, log))
        life = Server(bridge, "lifespan")
        life.put("lifespan.startup")
        await life.sent()
        server = Server(bridge)
        assert await server.sent() == "working"
        life.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await life.task
        assert (log, bridge_threads()) == (["stopped"], [])
        with pytest.raises(RuntimeError, match="was stopped before"):
            await server.task

    run(main)


@pytest.mark.parametrize("turns", range(4))
def test_a_lifespan_may_be_cancelled_while_its_thread_starts(turns):
    async def main():
        life = Server(bridged(None), "lifespan")
        for _ in range(turns):
            await asyncio.sleep(0)
        life.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await life.task
        assert bridge_threads() == []

    run(main)


def test_a_loop_that_cancels_all_its_tasks_cancels_the_application():
    log = []

    async def handler(scope, receive, send):
        try:
            await send({"type": "working"})
            await receive()
        except BaseException as error:
            log.append(type(error))
            raise

    async def main():
        bridge = bridged(handler)
        life = Server(bridge, "lifespan")
        life.put("lifespan.startup")
        await life.sent()
        server = Server(bridge)
        assert await server.sent() == "working"
        return life, server

    life, server = run(main)  # asyncio.run cancels them all, the two coroutines awaited for the application too
    assert log == [trio.Cancelled]
    assert life.task.cancelled()
    assert server.task.cancelled()


def test_a_loop_closed_without_ado_is_noticed_at_the_next_crossing():
    log = []
    token = []

    async def handler(scope, receive, send):
        wake = trio.Event()
        token.extend((trio.lowlevel.current_trio_token(), wake.set))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await wake.wait()
            try:
                await send({"type": "too late"})
            except OSError as error:
                log.append(str(error))

    async def main():
        first = [{"type": "lifespan.startup"}]
        waiting = asyncio.Queue()

        async def receive():  # not a queue's get, which wants its loop when it is destroyed
            if first:
                return first.pop()
            waiting.put_nowait(None)
            return await loop.create_future()

        bridge = bridged(handler)
        life = Server(bridge, "lifespan", receive=receive)
        await life.sent()
        await waiting.get()
        server = Server(bridge, receive=receive)
        await waiting.get()
        return life, server

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)  # "Task was destroyed but it is pending", rightly
    kept = loop.run_until_complete(asyncio.wait_for(main(), SAFETY))
    loop.close()
    (thread,) = bridge_threads()
    token[0].run_sync_soon(token[1])
    thread.join(SAFETY)
    assert not thread.is_alive()
    assert log == ["the server's event loop is closed"]
    assert not any(server.task.done() for server in kept)
    del kept
    gc.collect()  # what the loop's tasks leave behind would be told here


def test_a_run_that_trio_itself_gives_up_loses_no_caller():
    def break_trio():
        raise KeyError("in a callback of Trio's own")

    async def handler(scope, receive, send):
        await send({"type": "working"})
        if scope["path"] == "/break":
            trio.lowlevel.current_trio_token().run_sync_soon(break_trio)
        await trio.sleep_forever()

    async def main():
        bridge = bridged(handler)
        life = Server(bridge, "lifespan")
        life.put("lifespan.startup")
        await life.sent()
        server = Server(bridge, path="/")
        await server.sent()
        breaker = Server(bridge, path="/break")
        results = await asyncio.gather(life.task, server.task, breaker.task, return_exceptions=True)
        assert [type(result) for result in results] == [trio.TrioInternalError, RuntimeError, RuntimeError]

    run(main)


@pytest.mark.parametrize("cancel", [False, True])
def test_a_run_that_cannot_start_is_an_error_of_the_lifespan(monkeypatch, cancel):
    def refuse(*args):
        raise OSError("no file descriptors left")

    async def main():
        life = Server(bridged(None), "lifespan")
        if cancel:
            await asyncio.sleep(0)
            life.task.cancel()
        with pytest.raises(OSError, match="descriptors"):
            await life.task

    monkeypatch.setattr(trio, "run", refuse)
    run(main)


def test_two_lifespans_in_sequence_have_a_thread_each():
    threads = []

    async def handler(scope, receive, send):
        threads.append(threading.current_thread())

    async def main():
        for _ in range(2):
            async with lifespan(bridge):
                await Server(bridge).task

    bridge = bridged(handler)
    run(main)
    run(main)
    assert len(set(threads)) == 4


def test_a_second_lifespan_on_the_same_loop_is_refused():
    async def main():
        bridge = bridged(None)
        async with lifespan(bridge):
            with pytest.raises(RuntimeError, match="already running"):
                await Server(bridge, "lifespan").task

    run(main)


def test_two_loops_do_not_meet():
    both = threading.Barrier(2)
    threads = []

    async def handler(scope, receive, send):
        threads.append(threading.current_thread())

    async def main():
        async with lifespan(bridge):
            both.wait(SAFETY)
            await Server(bridge).task
            both.wait(SAFETY)

    bridge = bridged(handler)
    loops = [threading.Thread(target=asyncio.run, args=(main(),)) for _ in range(2)]
    for thread in loops:
        thread.start()
    for thread in loops:
        thread.join(SAFETY)
    assert len(set(threads)) == 2
    assert bridge_threads() == []


# Under Trio


async def test_under_trio_the_application_is_called_directly():
    async def app(*asgi):
        called.append((asgi, trio.lowlevel.current_task()))

    called = []
    asgi = ({"type": "http"}, object(), object())
    await Bridge(app)(*asgi)
    assert called == [(asgi, trio.lowlevel.current_task())]


# Hypercorn's asyncio worker


def quart_app(notify):
    """A QuartTrio application; `notify` is called with what happens to its handlers."""
    app = QuartTrio(__name__)

    @app.before_serving
    async def start():
        app.nursery.start_soon(background)

    async def background():
        try:
            await trio.sleep_forever()
        finally:
            notify("background stopped")

    @app.post("/echo")
    async def echo():
        await trio.lowlevel.checkpoint()
        return await request.get_data()

    @app.get("/stream")
    async def stream():
        async def events():
            try:
                for number in range(3):
                    yield f"data: {number}\n\n".encode()
                await trio.sleep_forever()
            except trio.Cancelled:
                notify("stream cancelled")
                raise

        return Response(events(), mimetype="text/event-stream")

    @app.get("/forever")
    async def forever():
        notify("handler started")
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            notify("handler cancelled")
            raise

    return app


@contextlib.asynccontextmanager
async def hypercorn(app):
    """Hypercorn's asyncio worker for `app` on a free port, which is given to the block; shut down after it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        config = Config()
        config.bind = [f"fd://{listener.detach()}"]
        config.errorlog = None
        config.graceful_timeout = SAFETY
    stop = asyncio.Event()
    worker = asyncio.create_task(serve(app, config, shutdown_trigger=stop.wait))
    try:
        yield port
    finally:
        stop.set()
        await worker


@contextlib.asynccontextmanager
async def connection(port, head):
    """A client's connection on which `head` has been sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.replace(b"\n", b"\r\n"))
    try:
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()


def test_hypercorns_asyncio_worker_serves_a_quart_trio_application():
    async def main():
        notes = asyncio.Queue()
        loop = asyncio.get_running_loop()
        app = quart_app(lambda note: loop.call_soon_threadsafe(notes.put_nowait, note))

        async with hypercorn(Bridge(app)) as port:
            head = b"POST /echo HTTP/1.1\nhost: localhost\nconnection: close\ncontent-length: 5\n\nhello"
            async with connection(port, head) as reader:
                answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.endswith(b"hello")

            async with connection(port, b"GET /stream HTTP/1.1\nhost: localhost\n\n") as reader:
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                for number in range(3):
                    await reader.readuntil(f"data: {number}\n\n".encode())
            assert await notes.get() == "stream cancelled"

            async with connection(port, b"GET /forever HTTP/1.1\nhost: localhost\n\n"):
                assert await notes.get() == "handler started"
            assert await notes.get() == "handler cancelled"
        assert await notes.get() == "background stopped"
        assert notes.empty()

    run(main)


def test_hypercorns_asyncio_worker_stops_at_a_failed_startup():
    async def main():
        app = QuartTrio(__name__)

        @app.before_serving
        async def start():
            raise ValueError("no model")

        with pytest.raises(Exception, match="no model"):
            async with hypercorn(Bridge(app)):
                pass

    run(main)
