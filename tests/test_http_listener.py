"""TLS at the listener, with a certificate made for the occasion, and what a stream does at the end."""

from __future__ import annotations

import contextlib
import shutil
import ssl
import subprocess

import h2.settings
import pytest
import trio
import trio.testing
from http_harness import COMPLETIONS, Client, H2Client, completion, connect, expected, running, until

from trioserve.config import Config
from trioserve.errors import ConfigError
from trioserve.http.bounded_stream import BoundedStream, SendLimits
from trioserve.http.connection import Connection
from trioserve.http.exchange import CHUNKS
from trioserve.http.listener import bind, url

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def make_certificate(folder, name="server"):
    """A certificate for localhost that vouches for itself, and its key."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    kind = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", *kind.split(), *names, "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    return {"certfile": certificate, "keyfile": key}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


async def secure_stream(server, certificate, *protocols):
    context = ssl.create_default_context(cafile=certificate["certfile"])
    context.set_alpn_protocols(protocols)
    stream = trio.SSLStream(await connect(server.port), context, server_hostname="localhost", https_compatible=True)
    with trio.fail_after(20):
        await stream.do_handshake()
    return stream


async def test_chunks_may_be_sent_where_a_client_expects_them(monkeypatch):
    lent = []
    async with running() as server:
        app = server.app

        async def looking_on(scope, receive, send):
            lent.append((scope["method"], scope["http_version"], CHUNKS in scope["extensions"]))
            await app(scope, receive, send)

        monkeypatch.setattr(server, "app", looking_on)
        for method in ("GET", "HEAD"):
            await server.call("/health", method=method)
        async with Client(await connect(server.port)) as client:
            await client.stream.send_all(b"GET /health HTTP/1.0\r\n\r\n")
            assert b" 200 " in await client.eof()
        async with await H2Client.open(server.port) as client:
            await client.reply(await client.send("/health"))
    assert lent == [("GET", "1.1", True), ("HEAD", "1.1", False), ("GET", "1.0", False), ("GET", "2", False)]


@needs_openssl
async def test_http_1_over_tls(certificate):
    async with running(**certificate) as server:
        stream = await secure_stream(server, certificate, "http/1.1")
        assert stream.selected_alpn_protocol() == "http/1.1"
        assert stream.version() in ("TLSv1.2", "TLSv1.3")
        async with Client(stream) as client:
            for _ in range(2):
                assert (await client.call(COMPLETIONS, completion(stream=True))).text == expected()


@needs_openssl
async def test_http_2_over_tls(certificate):
    async with running(**certificate, api_keys=("sk",)) as server:
        stream = await secure_stream(server, certificate, "h2")
        assert stream.selected_alpn_protocol() == "h2"
        client = H2Client(stream)
        client.http.initiate_connection()
        await client.flush()
        async with client:
            assert (await client.reply(await client.send(COMPLETIONS, completion()))).status == 401
            reply = await client.reply(await client.send(COMPLETIONS, completion(), headers=[("x-api-key", "sk")]))
            assert reply.text == expected()


@needs_openssl
async def test_clients_that_speak_no_tls_hurt_nobody(certificate):
    async with running(**certificate) as server:
        stream = await secure_stream(server, certificate)
        async with Client(stream) as client:
            for noise in (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01" + bytes(100), b""):
                plain = await connect(server.port)
                await plain.send_all(noise)
                await plain.send_eof()
                async with Client(plain) as stranger:
                    assert b"HTTP/1.1 200" not in await stranger.eof()
            assert (await client.call("/health/ready")).status == 200


@needs_openssl
async def test_a_drain_ends_connections_over_tls(certificate):
    async with running(**certificate) as server, Client(await secure_stream(server, certificate)) as client:
        assert (await client.call("/health/ready")).status == 200
        with trio.fail_after(5):
            await server.drain()


@needs_openssl
def test_the_address_says_that_it_is_secure(certificate):
    config = Config(port=0, **certificate)
    with bind(config) as sock:
        assert url(config, sock).startswith("https://127.0.0.1:")


@needs_openssl
@pytest.mark.parametrize("wrong", ["another key", "no certificate", "an empty key"])
def test_files_that_do_not_go_together_are_refused(certificate, tmp_path, wrong):
    files = dict(certificate)
    if wrong == "another key":
        files["keyfile"] = make_certificate(tmp_path)["keyfile"]
    else:
        name = "certfile" if wrong == "no certificate" else "keyfile"
        files[name] = tmp_path / "wrong.pem"
        files[name].write_text("")
    with pytest.raises(ConfigError, match="certfile and keyfile can't be used"):
        bind(Config(port=0, **files))


async def test_a_send_into_a_connection_that_is_being_closed_meets_a_broken_one():
    """Which Hypercorn expects, and not that somebody else is at the stream."""
    async with bounded_pair() as (stream, _), trio.open_nursery() as nursery:
        nursery.start_soon(stream.send_all, bytes(2**24))
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BrokenResourceError, match="being closed"):
            await stream.send_all(b"late")
        nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def bounded_pair():
    """One of our streams and the socket of its peer."""
    listener = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = listener[0].socket.getsockname()
    async with (
        listener[0],
        await trio.open_tcp_stream(*address) as peer,
        BoundedStream(await listener[0].accept(), SendLimits(20)) as stream,
    ):
        yield stream, peer


async def test_what_a_socket_does_not_take_at_once_is_sent_after_it():
    data = bytes(range(256)) * 2**16
    async with bounded_pair() as (stream, peer), trio.open_nursery() as nursery:
        left = stream.send_now(data)
        while (less := stream.send_now(left)) != left:
            left = less
        assert 0 < len(left) < len(data), "the peer reads nothing yet"

        async def send_the_rest():
            await stream.send_all(left)
            await stream.aclose()

        nursery.start_soon(send_the_rest)
        received = bytearray()
        async for piece in peer:
            received += piece
        assert received == data


async def test_a_send_says_whether_the_connection_was_closed_here_or_there():
    async with bounded_pair() as (stream, peer):
        await trio.aclose_forcefully(peer)

        async def send_on():
            while True:
                await stream.send_all(b"x")

        with trio.fail_after(20), pytest.raises(trio.BrokenResourceError, match="is broken"):
            await send_on()
        await stream.aclose()
        for data in (b"x", b""):
            with pytest.raises(trio.ClosedResourceError):
                await stream.send_all(data)


async def test_a_send_ends_when_the_connection_is_closed_meanwhile():
    async with bounded_pair() as (stream, _), trio.open_nursery() as nursery:

        async def send():
            with pytest.raises(trio.ClosedResourceError):
                await stream.send_all(bytes(2**24))

        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        await trio.aclose_forcefully(stream)


@pytest.mark.parametrize("lasts", [1, 5])
async def test_a_send_lasts_for_as_long_as_the_peer_takes_something(lasts, mock_clock, monkeypatch):
    """Which nothing but the length of the queue tells: a buffer can't be written to before a third of it is free."""
    queue = 10**6
    monkeypatch.setattr("trioserve.http.bounded_stream.untaken", lambda descriptor: queue)
    async with bounded_pair() as (stream, _), trio.open_nursery() as nursery:
        broken = []

        async def send():
            with pytest.raises(trio.BrokenResourceError, match="no data for too long"):
                await stream.send_all(bytes(2**24))
            broken.append(trio.current_time())

        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(lasts):
            queue -= 1
            mock_clock.jump(20)
            await trio.testing.wait_all_tasks_blocked()
            assert not broken
        mock_clock.jump(20)
        await trio.testing.wait_all_tasks_blocked()
        assert broken


async def test_a_send_ends_a_timeout_after_the_last_look_that_found_something_taken(mock_clock, monkeypatch):
    queue = 10**6
    monkeypatch.setattr("trioserve.http.bounded_stream.untaken", lambda descriptor: queue)
    async with bounded_pair() as (stream, _), trio.open_nursery() as nursery:
        broken = trio.Event()

        async def send():
            with pytest.raises(trio.BrokenResourceError, match="no data for too long"):
                await stream.send_all(bytes(2**24))
            broken.set()

        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        queue -= 1
        for _ in range(5):  # a quarter of the timeout each
            assert not broken.is_set()
            mock_clock.jump(5)
            await trio.testing.wait_all_tasks_blocked()
        assert broken.is_set()


async def test_what_a_peer_takes_is_told():
    async with bounded_pair() as (stream, peer):
        left = stream.send_now(bytes(2**24))
        before = stream.taken
        assert before < 2**24 - len(left), "some of it waits"
        with trio.fail_after(20):
            while stream.taken == before:
                await peer.receive_some(2**16)
        with trio.fail_after(20):
            while stream.taken < 2**24 - len(left):
                await peer.receive_some(2**20)
    assert stream.taken == 2**24 - len(left), "also of one that is closed"


async def test_a_client_of_http2_that_leaves_before_the_end_of_its_answer_frees_its_socket_at_once(closed_streams):
    async with running(keep_alive_timeout_ms=600_000) as server:
        async with await H2Client.open(server.port) as client:
            client.http.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 50})
            session = server.service.registry.find(None).pool.slots[0].place.session
            await client.send(COMPLETIONS, completion(stream=True, max_tokens=7))
            await until(lambda: len(session.threads) == 7)
            await trio.testing.wait_all_tasks_blocked()
        await until(lambda: len(closed_streams) == 1)


async def test_nothing_is_sent_into_the_midst_of_what_is_being_sent():
    async with bounded_pair() as (stream, peer), trio.open_nursery() as nursery:
        nursery.start_soon(stream.send_all, bytes(2**24))
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(20):
            for _ in range(8):
                await peer.receive_some(2**20)  # now there is room
        assert stream.send_now(b"x") == b"x"
        nursery.cancel_scope.cancel()


async def test_a_cancelled_task_finishes_the_chunk_that_it_has_begun():
    """Or what it says at last would be taken for the rest of that chunk."""
    body, received = bytes(2**24), bytearray()
    async with bounded_pair() as (stream, peer), trio.open_nursery() as nursery:
        connection = Connection(None, None, None, None, stream)

        async def speak():
            with trio.CancelScope() as scope:
                scope.cancel()
                await said(connection, body)
            with trio.CancelScope(shield=True):
                await said(connection, b"last words")
            await stream.aclose()

        nursery.start_soon(speak)
        async for piece in peer:
            received += piece
    assert received == b"1000000\r\n" + body + b"\r\na\r\nlast words\r\n"


async def test_a_connection_that_is_gone_is_left_to_the_send_that_tells():
    async with bounded_pair() as (stream, _):
        await stream.aclose()
        assert stream.send_now(b"x") == b"x"
        with pytest.raises(trio.ClosedResourceError):
            await stream.send_all(b"x")


async def test_a_connection_that_sends_and_sends_lets_others_have_their_turn(monkeypatch):
    monkeypatch.setattr("trioserve.http.connection.MOST_UNYIELDED", 100)
    async with bounded_pair() as (stream, _):
        connection = Connection(None, None, None, None, stream)
        turns = []
        for _ in range(6):
            rest = connection.send_chunk(bytes(40))  # 46 with its frame
            turns.append(rest is not None)
            if rest is not None:
                await rest
    assert turns == [False, False, True] * 2


async def said(connection, body):
    if (rest := connection.send_chunk(body)) is not None:
        await rest
