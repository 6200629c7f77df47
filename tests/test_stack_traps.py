"""What Hypercorn, Quart, Quart-Trio and Trio do that would surprise, each with what we do about it.

The tests are named after the traps. A new version of a dependency that changes one of them shows here first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import signal
import socket
import sys
import types

import h2.settings
import pytest
import trio
import trio.testing
from http_harness import (
    CHAT,
    COMPLETIONS,
    SAFETY,
    H2Client,
    Reply,
    assert_error,
    chat,
    completion,
    expected,
    running,
    until,
    write_gguf,
)
from hypercorn.config import Config as HypercornConfig
from quart import Quart
from test_http_disconnect import driven, scope_of

from trioserve import asgi, logs
from trioserve.config import Config
from trioserve.errors import InvalidRequestError, ServerBusyError
from trioserve.http import app as app_module
from trioserve.http.body import decode_object
from trioserve.http.bounded_stream import BoundedStream, SendLimits
from trioserve.http.exchange import ClientStalledError
from trioserve.http.guard import Guard
from trioserve.http.listener import hypercorn_config
from trioserve.testing import FakeEngine

STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def quart_of(server):
    """The Quart application under the guard."""
    return server.app._app


# Quart-Trio cancels the last send of a response


@STREAM
async def test_connection_close_really_closes(stream):
    async with running(keep_alive_timeout_ms=600_000) as server, await server.connect() as client:
        reply = await client.call(CHAT, chat(stream=stream), headers=[("connection", "close")])
        assert reply.status == 200
        assert await client.eof() == b""


@STREAM
async def test_the_keep_alive_timeout_fires(stream):
    async with running(keep_alive_timeout_ms=100) as server, await server.connect() as client:
        for _ in range(2):
            assert (await client.call(COMPLETIONS, completion(stream=stream))).text == expected()
        assert await client.eof() == b""


async def test_the_keep_alive_timeout_does_not_fire_in_a_request():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine, keep_alive_timeout_ms=50) as server, await server.connect() as client:
        await client.send(COMPLETIONS, completion())
        await engine.step_gate.arrived()
        await trio.sleep(0.1)
        engine.step_gate.open()
        assert (await client.reply()).text == expected()


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
EMPTY_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
HALF_A_HEAD = bytes((0, 0, 1, 1, 0, 0, 0, 0, 1)) + b"\x82"  # HEADERS without END_HEADERS: more is to come


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"\r\n",
        b"POST /v1/compl",
        b"GET /health HTTP/1.1\r\nhost: a\r\n",
        PREFACE[:20],
        PREFACE,
        PREFACE + EMPTY_SETTINGS,
        PREFACE + EMPTY_SETTINGS + HALF_A_HEAD,
    ],
    ids=["nothing", "blank", "line", "headers", "half a preface", "preface", "settings", "half a head"],
)
async def test_a_head_that_never_ends_does_not_hold_its_connection(beginning):
    """Hypercorn stops its timer for idle connections at a preface of HTTP/2, and starts it after a first answer."""
    async with running(keep_alive_timeout_ms=200) as server, await server.connect() as client:
        await client.stream.send_all(beginning)
        await client.eof()
        assert (await server.call("/health")).status == 200


async def test_a_head_that_drips_is_cut_off_and_others_are_served():
    async with running(keep_alive_timeout_ms=200) as server, await server.connect() as client:
        await client.stream.send_all(b"GET /health HTTP/1.1\r\n")
        with trio.fail_after(SAFETY), contextlib.suppress(trio.BrokenResourceError):
            while True:
                await client.stream.send_all(b"x: y\r\n")
                assert (await server.call("/health")).status == 200


async def test_an_http_2_connection_lives_on_between_requests():
    async with running(keep_alive_timeout_ms=600_000) as server, await H2Client.open(server.port) as client:
        for _ in range(2):
            assert (await client.reply(await client.send("/health"))).status == 200


async def test_idle_connections_do_not_delay_the_shutdown(monkeypatch):
    monkeypatch.setattr("trioserve.http.listener.CLOSING_SECONDS", 600)
    async with running(keep_alive_timeout_ms=600_000) as server, await server.connect() as client:
        await client.call(COMPLETIONS, completion(stream=True))
        with trio.fail_after(SAFETY):
            await server.drain()


# Hypercorn's connections


async def test_a_client_that_closes_an_idle_connection_frees_its_socket_at_once(closed_streams):
    """Hypercorn's timer for idle connections holds them open for as long as the client would have been allowed to."""
    async with running(keep_alive_timeout_ms=600_000) as server:
        for path, body in (("/health", None), (COMPLETIONS, completion(stream=True))):
            async with await server.connect() as client:
                await client.call(path, body)
        await until(lambda: len(closed_streams) == 2)


async def h2_path_that_is_not_ascii(server):
    async with await H2Client.open(server.port) as client:
        await client.send(b"/\xff")
        await client.eof()


async def h2_connect(server):
    async with await H2Client.open(server.port) as client:
        client.http.send_headers(1, [(":method", "CONNECT"), (":authority", "a")])
        await client.flush()
        await client.eof()


async def h2_data_after_the_end(server):
    async with await H2Client.open(server.port) as client:
        number = await client.send("/nowhere", {}, end=False)
        await client.reply(number)
        client.http.send_data(number, b"x")
        await client.flush()
        await client.eof()


async def h2c_with_bad_settings(server):
    async with await server.connect() as client:
        upgrade = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAAA\r\n"
        await client.stream.send_all(b"GET /health HTTP/1.1\r\nhost: a\r\n" + upgrade + b"\r\n")
        await client.eof()


async def h2_data_on_no_stream(server):
    async with await server.connect() as client:
        await client.stream.send_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        await client.eof()


@pytest.mark.parametrize(
    "attack",
    [h2_path_that_is_not_ascii, h2_connect, h2_data_after_the_end, h2c_with_bad_settings, h2_data_on_no_stream],
)
async def test_a_connection_on_which_hypercorn_fails_does_not_end_the_server(attack):
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server, await server.connect() as client:
        await client.send(COMPLETIONS, completion(stream=True))
        await engine.step_gate.arrived()
        await attack(server)
        assert (await server.call("/health")).status == 200
        engine.step_gate.open()
        assert (await client.reply()).text == expected()


@pytest.mark.parametrize(("path", "status"), [("/nowhere", 404), ("/v1/models", 405), (COMPLETIONS, 413)])
async def test_an_early_answer_on_http_2_does_not_fail_the_connections_other_streams(path, status):
    """Hypercorn looks the stream of each frame of data up and raises where an answer has ended it already."""
    engine = FakeEngine()
    engine.step_gate.shut()
    async with (
        running(engine, max_request_body_bytes=1000) as server,
        await H2Client.open(server.port) as client,
    ):
        work = await client.send(COMPLETIONS, completion(stream=True))
        await engine.step_gate.arrived()
        early = await client.send(path, {}, end=False, headers=[("content-length", "4002")])
        while early not in client.replies:
            await client.pump()
        for size in (2000, 2000):
            client.http.send_data(early, b"x" * size, end_stream=False)
            await client.flush()
        client.http.end_stream(early)
        await client.flush()
        assert_error(await client.reply(early), status, "invalid_request_error")
        engine.step_gate.open()
        assert (await client.reply(work)).text == expected()


@pytest.mark.parametrize("leave", ["closes", "breaks the protocol", "is cut off"])
@STREAM
async def test_a_client_of_http_2_that_leaves_the_end_of_its_answer_frees_its_slot(leave, stream):
    """Hypercorn lets the end of an answer wait for a window that nobody will open any more."""
    async with (
        running(send_timeout_ms=40_000, drain_timeout_ms=100) as server,
        await H2Client.open(server.port) as client,
    ):
        client.http.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        number = await client.send(COMPLETIONS, completion(stream=stream))
        while number not in client.replies:
            await client.pump()
        await until(lambda: server.status().active_slots == 1 and server.calls == 1)
        if leave == "closes":
            await trio.aclose_forcefully(client.stream)
        elif leave == "breaks the protocol":
            await client.stream.send_all(bytes(9))
        else:
            server.stop.set()
        with trio.fail_after(10):
            await until(lambda: server.calls == 0)
            await server.free()


async def stalled_pair():
    """A stream into a socket that nobody reads and whose buffers are small, and that socket."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return trio.SocketStream(trio.socket.from_stdlib_socket(ours)), theirs


async def test_hypercorn_sends_inside_a_shield_without_a_bound():
    """So the bound has to lie inside, in the stream itself."""
    inner, theirs = await stalled_pair()
    with theirs:
        stream = BoundedStream(inner, SendLimits(0.05))
        with trio.fail_after(SAFETY), trio.CancelScope() as scope:
            scope.cancel()
            with trio.CancelScope(shield=True), pytest.raises(trio.BrokenResourceError, match="no data"):
                await stream.send_all(bytes(10_000_000))
        with pytest.raises(trio.ClosedResourceError):
            await stream.send_all(b"x")


async def test_under_hypercorn_itself_a_send_that_cannot_be_cancelled_holds_no_slot():
    """Where its own worker serves us there is no bounded stream."""
    stuck, free = trio.Event(), trio.Event()
    incoming = [json.dumps(completion(stream=True, max_tokens=4000)).encode()]

    async def receive():
        if incoming:
            return {"type": "http.request", "body": incoming.pop(), "more_body": False}
        return await trio.sleep_forever()

    async def send(message):
        if message.get("body"):
            stuck.set()
            with trio.CancelScope(shield=True):
                await free.wait()

    async with running(send_timeout_ms=100) as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.app, scope_of(), receive, send)
        try:
            await stuck.wait()
            assert server.status().active_slots == 1
            await server.free()
            assert server.service.tally().cancelled == 1
            assert (await server.call(COMPLETIONS, completion())).text == expected()
        finally:
            free.set()


async def test_the_shutdown_shortens_sends_that_are_under_way_and_later_ones():
    limits = SendLimits(3600)
    for _ in range(2):
        inner, theirs = await stalled_pair()
        with theirs, trio.fail_after(SAFETY):
            async with trio.open_nursery() as nursery:

                async def send(inner=inner):
                    with pytest.raises(trio.BrokenResourceError):
                        await BoundedStream(inner, limits).send_all(bytes(10_000_000))

                nursery.start_soon(send)
                await trio.testing.wait_all_tasks_blocked()
                limits.stop_at(trio.current_time())


async def test_a_bounded_stream_is_a_stream():
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    sent = bytes(range(256)) * 1000
    client = await trio.testing.open_stream_to_socket_listener(listener)
    stream = BoundedStream(await listener.accept(), SendLimits(3600))
    async with listener, client, stream, trio.open_nursery() as nursery:
        nursery.start_soon(stream.send_all, sent)
        received = b""
        while len(received) < len(sent):
            received += await client.receive_some()
        assert received == sent
        await client.send_all(b"back")
        assert await stream.receive_some() == b"back"
        await stream.wait_send_all_might_not_block()
        await stream.send_eof()
        assert await client.receive_some() == b""


# Defaults


def test_every_setting_of_hypercorn_that_would_surprise_is_set():
    theirs, default = hypercorn_config(Config(port=1)), HypercornConfig()
    assert default.keep_alive_max_requests == 1000  # then the connection is closed, whoever is using it
    assert theirs.keep_alive_max_requests > 10**9
    assert default.keep_alive_timeout == 5
    assert theirs.keep_alive_timeout == 75
    assert default.errorlog == "-"
    assert theirs.errorlog is theirs.accesslog is None
    assert default.include_server_header
    assert not theirs.include_server_header
    assert theirs.h2_max_concurrent_streams == 256
    assert theirs.bind == ["127.0.0.1:1"]
    assert theirs.read_timeout is None  # it would cut streams whose client has nothing to say


@pytest.mark.parametrize(
    ("host", "bound"),
    [("::1", "[::1]:1"), ("localhost", "localhost:1"), ("unix:/tmp/socket", "unix:/tmp/socket")],
)
def test_addresses_are_spelt_as_hypercorn_reads_them(host, bound):
    assert hypercorn_config(Config(host=host, port=1)).bind == [bound]


async def test_every_setting_of_quart_that_would_surprise_is_set():
    default = Quart("default").config
    assert default["MAX_CONTENT_LENGTH"] == 16 * 1024 * 1024
    assert default["BODY_TIMEOUT"] == 60
    assert default["RESPONSE_TIMEOUT"] == 60
    async with running(max_request_body_bytes=12345) as server:
        app = quart_of(server)
        assert app.config["MAX_CONTENT_LENGTH"] == 12345
        assert app.config["BODY_TIMEOUT"] == app_module.BODY_TIMEOUT_SECONDS
        assert app.config["RESPONSE_TIMEOUT"] is None
        assert not app.url_map.strict_slashes
        assert not app.url_map.merge_slashes
        assert app.static_folder is None


@STREAM
async def test_the_response_timeout_of_quart_cuts_no_stream(stream):
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server, await server.connect() as client:
        if stream:
            quart_of(server).config["RESPONSE_TIMEOUT"] = 0.05
        await client.send(COMPLETIONS, completion(stream=stream))
        await engine.step_gate.arrived()
        await trio.sleep(0.1)
        engine.step_gate.open()
        assert (await client.reply()).text == expected()


async def test_the_body_timeout_of_quart_is_told_in_our_shape():
    async with running() as server, await server.connect() as client:
        quart_of(server).config["BODY_TIMEOUT"] = 0.05
        await client.stream.send_all(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{{".encode())
        data = await client.eof()
        assert data.startswith(b"HTTP/1.1 408 ")
        assert json.loads(data.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


# Errors arrive as groups


async def test_an_error_in_a_group_is_answered_as_itself():
    async with running() as server:

        @quart_of(server).get("/group")
        async def group():
            async with trio.open_nursery():
                raise ServerBusyError("busy")

        @quart_of(server).get("/deep")
        async def deep():
            raise ExceptionGroup("a", [ExceptionGroup("b", [InvalidRequestError("wrong", param="field")])])

        assert_error(await server.call("/group"), 503, "server_busy")
        assert_error(await server.call("/deep"), 400, "invalid_request_error", param="field")


async def guarded(server, application, *, held=False):
    """Run an application of our own under a guard and return what it sent."""
    sent = []
    incoming = [] if held else [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive():
        return incoming.pop() if incoming else await trio.sleep_forever()

    async def send(message):
        sent.append(message)

    await Guard(application, server.service)(scope_of(), receive, send)
    return sent


def reply_of(sent):
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Reply(sent[0]["status"], headers, b"".join(message["body"] for message in sent[1:]))


@pytest.mark.parametrize(
    "wrap", [lambda error: error, lambda error: ExceptionGroup("a", [ExceptionGroup("b", [error])])]
)
async def test_a_stalled_client_in_a_group_is_no_fault(wrap, caplog):
    async def application(scope, receive, send):
        raise wrap(ClientStalledError("stalled"))

    async with running() as server:
        assert await guarded(server, application) == []
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("wrap", [lambda error: error, lambda error: ExceptionGroup("a", [error])])
async def test_what_the_framework_itself_raises_is_an_internal_error(wrap, caplog):
    async def application(scope, receive, send):
        await receive()
        raise wrap(LookupError("secret"))

    async with running() as server:
        error = assert_error(reply_of(await guarded(server, application)), 500, "internal_error")
        assert "secret" not in error["message"]
        assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == ["request failed"]


async def test_what_the_framework_raises_after_the_answer_is_logged_only():
    async def application(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"all", "more_body": False})
        raise LookupError

    async with running() as server:
        assert [message.get("body") for message in await guarded(server, application)] == [None, b"all"]


# A cancel between the response and its body


async def test_a_cancel_between_response_and_body_never_enters_the_body(monkeypatch):
    """What a body would free in its ``finally`` would be kept for ever: the request's scope frees it."""
    entered = []
    monkeypatch.setattr("trioserve.http.sse.EventStream.__aenter__", lambda self: entered.append(self))
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server:
        body = completion(stream=True)
        async with driven(server, body, hold=lambda message: message["type"] == "http.response.start") as (_, gone):
            gone.set()
        await server.free()
        assert entered == []


# Python's json


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_python_reads_numbers_that_json_does_not_have(word):
    assert json.loads(word) != 0
    with pytest.raises(InvalidRequestError):
        decode_object(b'{"a": ' + word.encode() + b"}")


def test_python_reads_numbers_that_no_float_holds():
    assert json.loads("1e999") == float("inf")


# The lifespan


@pytest.fixture
def stub_engine(monkeypatch, tmp_path):
    """The ASGI application's surroundings: a fake engine in llama.cpp's place, and a model in the environment."""
    engine = FakeEngine()
    module = types.ModuleType("trioserve.engine.llama")
    module.LlamaEngine = lambda: engine
    monkeypatch.setitem(sys.modules, "trioserve.engine.llama", module)
    monkeypatch.setattr(logs, "configure_logging", lambda *_, **__: None)
    for name in list(asgi.os.environ):
        if name.startswith("TRIOSERVE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TRIOSERVE_MODEL", str(write_gguf(tmp_path)))
    return engine


class Lifespan:
    """The server's end of a lifespan."""

    def __init__(self, application):
        self.application = application
        self.to_app, self._incoming = trio.open_memory_channel(5)
        self._outgoing, self.from_app = trio.open_memory_channel(5)
        self.ended = trio.Event()

    async def run(self):
        await self.application({"type": "lifespan"}, self._incoming.receive, self._outgoing.send)
        self.ended.set()

    async def say(self, kind):
        await self.to_app.send({"type": f"lifespan.{kind}"})

    async def hear(self):
        with trio.fail_after(SAFETY):
            return await self.from_app.receive()


async def call(application, body):
    """One request, as a server makes it."""
    sent = []
    incoming = [json.dumps(body).encode()]

    async def receive():
        if incoming:
            return {"type": "http.request", "body": incoming.pop(), "more_body": False}
        return await trio.sleep_forever()

    async def send(message):
        sent.append(message)

    await application(scope_of(), receive, send)
    return reply_of(sent)


async def test_the_service_lives_as_long_as_the_lifespan(stub_engine, nursery):
    application = asgi.Application()
    lifespan = Lifespan(application)
    nursery.start_soon(lifespan.run)
    await lifespan.say("startup")
    assert await lifespan.hear() == {"type": "lifespan.startup.complete"}
    assert (await call(application, completion())).text == expected()
    assert stub_engine.closed == []
    await lifespan.say("shutdown")
    assert await lifespan.hear() == {"type": "lifespan.shutdown.complete"}
    assert stub_engine.closed == ["fake[0]", "fake"]
    await lifespan.ended.wait()


async def test_shutdown_waits_for_requests_and_frees_everything_before_it_is_complete(stub_engine, nursery):
    application = asgi.Application()
    lifespan = Lifespan(application)
    stub_engine.step_gate.shut()
    replies = []

    async def request():
        replies.append(await call(application, completion(stream=True)))

    nursery.start_soon(lifespan.run)
    await lifespan.say("startup")
    await lifespan.hear()
    nursery.start_soon(request)
    await stub_engine.step_gate.arrived()
    await lifespan.say("shutdown")
    await trio.testing.wait_all_tasks_blocked()
    assert stub_engine.closed == []
    assert_error(await call(application, completion()), 503, "shutting_down")
    stub_engine.step_gate.open()
    assert await lifespan.hear() == {"type": "lifespan.shutdown.complete"}
    assert replies[0].text == expected()
    assert stub_engine.closed == ["fake[0]", "fake"]


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("TRIOSERVE_MODEL", "/no/such/model.gguf", "/no/such/model.gguf"),
        ("TRIOSERVE_SLOTS", "17", "slots"),
        ("TRIOSERVE_SLOT", "2", "TRIOSERVE_SLOT"),
    ],
)
async def test_a_failed_startup_is_told_with_its_reason(stub_engine, monkeypatch, nursery, variable, value, words):
    monkeypatch.setenv(variable, value)
    lifespan = Lifespan(asgi.Application())
    nursery.start_soon(lifespan.run)
    await lifespan.say("startup")
    message = await lifespan.hear()
    assert message["type"] == "lifespan.startup.failed"
    assert words in message["message"]
    await lifespan.ended.wait()


async def test_a_lifespan_may_follow_another_one(stub_engine, nursery):
    application = asgi.Application()
    for _ in range(2):
        lifespan = Lifespan(application)
        nursery.start_soon(lifespan.run)
        await lifespan.say("startup")
        await lifespan.hear()
        assert (await call(application, completion())).text == expected()
        await lifespan.say("shutdown")
        await lifespan.hear()
        await lifespan.ended.wait()


async def test_requests_without_a_lifespan_are_refused_with_a_reason():
    with pytest.raises(RuntimeError, match="lifespan"):
        await call(asgi.Application(), completion())


def test_a_worker_leaves_sigterm_to_its_parent(monkeypatch):
    set_to = {}
    monkeypatch.setattr(signal, "signal", lambda number, action: set_to.update({number: action}))
    asgi._leave_sigterm_to_the_parent()
    assert set_to == {}
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    asgi._leave_sigterm_to_the_parent()
    assert set_to == {signal.SIGTERM: signal.SIG_IGN}
