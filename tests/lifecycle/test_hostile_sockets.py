"""Clients that don't speak HTTP, or not to the end: what they get, and what is left of them."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from .client import CHAT, COMPLETIONS, ask, chat, exactly, http, wait_idle
from .daemon import well_behaved

HEAD_SECONDS = 2  # the server waits no longer for a head
CLOSING_SECONDS = 20  # only a hang meets it
MAY_GROW_MB = 64
POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(189))


def noise(size, seed=7):
    """Bytes without any sense, the same ones in every run."""
    return random.Random(seed).randbytes(size)


def target(path):
    """A request for a path that is taken as it is."""
    return b"GET " + path + b" HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"


ATTACKS = {
    **{f"noise {seed}": noise(size, seed) for seed, size in enumerate((1, 20, 300, 5000, 100_000))},
    "noise in lines": b"\r\n".join(noise(40, seed) for seed in range(40)),
    "a long line": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
    "a long header": b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 200_000 + b"\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 30_000 + b"\r\n",
    "no length": POST + b'\r\n{"prompt": "a"}',
    "a negative length": POST + b"content-length: -5\r\n\r\nhello",
    "a huge length": POST + b"content-length: 99999999999999\r\n\r\n{}",
    "a length of 400 digits": POST + b"content-length: " + b"9" * 400 + b"\r\n\r\n{}",
    "a length in words": POST + b"content-length: five\r\n\r\nhello",
    "two lengths": POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "a length and chunks": POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "no chunks": POST + b"transfer-encoding: chunked\r\n\r\n" + noise(200),
    "a negative chunk": POST + b"transfer-encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
    "a chunk of 400 digits": POST + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 400 + b"\r\n{}",
    "half a chunk": POST + b"transfer-encoding: chunked\r\n\r\n64\r\n{}",
    "an unknown coding": POST + b"transfer-encoding: gzip\r\n\r\n" + noise(50),
    "half a body": POST + b'content-length: 100\r\n\r\n{"prompt',
    "half a head": POST,
    "HTTP/0.9": b"GET /health\r\n",
    "HTTP/7.3": b"GET /health HTTP/7.3\r\nhost: a\r\n\r\n",
    "no version": b"GET /health HTTP\r\n\r\n",
    "a folded header": b"GET /health HTTP/1.1\r\nhost: a\r\n b\r\nconnection: close\r\n\r\n",
    "a header without a name": b"GET /health HTTP/1.1\r\nhost: a\r\n: b\r\n\r\n",
    "a NUL in a header": b"GET /health HTTP/1.1\r\nhost: a\r\nx: a\0b\r\n\r\n",
    "a NUL in the path": target(b"/health\0"),
    "bytes in the path": target(b"/\xff\xfe"),
    **{
        f"a path of {path!r}": target(path)
        for path in (b"/%", b"/%zz", b"/%00", b"/%ff%fe", b"/%2e%2e%2f", b"//", b"*")
    },
    "a model of NULs": target(b"/v1/models/%00%0d%0a%ff"),
    "a query of noise": target(b"/health?%00=%ff&&&==" + b"%" * 1000),
    "another one's URL": target(b"http://[::1/%00"),
    "a tunnel": b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
    "TLS": CLIENT_HELLO,
    "a preface and noise": PREFACE + noise(3000),
    "half a preface": PREFACE[:20] + noise(30),
    "a preface and a huge frame": PREFACE + b"\xff\xff\xff\0\0\0\0\0\0",
    "a preface and 2,000 pings": PREFACE
    + bytes(9)[:3]
    + b"\x04"
    + bytes(5)
    + (b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)) * 2000,
    "an upgrade to HTTP/2": b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
    b"http2-settings: %%%\r\n\r\n" + noise(100),
}


@pytest.fixture(scope="module")
def server():
    """A server of its own: it has to end well, and without an error in its log."""
    settings = {"TRIOSERVE_KEEP_ALIVE_TIMEOUT_MS": str(1000 * HEAD_SECONDS)}
    with well_behaved("--slots", "1", "--n-ctx", "256", env=settings) as daemon:
        with http(daemon.url) as client:
            ask(client, chat())
        yield daemon


@contextlib.contextmanager
def connection(port):
    with socket.create_connection(("127.0.0.1", port), CLOSING_SECONDS) as sock:
        yield sock


def exchange(port, data):
    """Send bytes, close our side behind them, and return whatever comes; the server may close before it has all."""
    received = b""
    with connection(port) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(data)
        with contextlib.suppress(OSError):  # ENOTCONN, which is no ConnectionError, where the server reset it already
            sock.shutdown(socket.SHUT_WR)
        while more := sock.recv(65536):
            received += more
    return received


def throw(port, data):
    """Send bytes and leave, without a look at what comes."""
    with connection(port) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(data)


def memory_mb(daemon):
    """Resident memory of the server."""
    with open(f"/proc/{daemon.pid}/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+) kB", status.read())[1]) / 1024


def test_what_is_no_http_harms_nobody(server):
    before = memory_mb(server)
    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            answers = threads.map(lambda data: exchange(server.port, data), ATTACKS.values())
            for name, received in zip(ATTACKS, answers, strict=True):
                assert re.match(rb"$|HTTP/1\.1 ([124]\d\d|501) |\0\0", received), (name, received[:300])
                assert b"Traceback" not in received, name
                assert b"trioserve/" not in received, name
            list(threads.map(lambda data: throw(server.port, data), ATTACKS.values()))
    answers_as_ever(server)
    assert memory_mb(server) - before < MAY_GROW_MB


def answers_as_ever(server):
    with http(server.url) as client:
        assert client.get("/health/ready").status_code == 200
        wait_idle(client)
        assert ask(client, chat()).text


def test_a_head_that_drips_ends_its_own_connection_only(server):
    with connection(server.port) as sock, http(server.url) as client:
        started = time.monotonic()
        with contextlib.suppress(ConnectionError):
            sock.sendall(f"POST {CHAT} HTTP/1.1\r\n".encode())
            while time.monotonic() < started + CLOSING_SECONDS:
                sock.sendall(b"x: y\r\n")
                assert client.get("/health").status_code == 200
                time.sleep(0.05)
        assert HEAD_SECONDS - 0.1 < time.monotonic() - started < CLOSING_SECONDS
    answers_as_ever(server)


def test_connections_that_are_opened_and_left_hold_nobody_up(server):
    with contextlib.ExitStack() as stack:
        beginnings = (b"", b"GET /hea", POST + b"content-length: 10\r\n\r\n{", PREFACE, CLIENT_HELLO)
        left = [stack.enter_context(connection(server.port)) for _ in range(50)]
        for index, sock in enumerate(left):
            sock.sendall(beginnings[index % len(beginnings)])
        with http(server.url) as client:
            assert ask(client, exactly(4)).usage["completion_tokens"] == 4
            assert client.get("/v1/models").json()["data"][0]["queued_requests"] == 0
        answers_as_ever(server)
    answers_as_ever(server)


def test_a_body_that_is_shorter_than_announced_takes_no_slot(server):
    with http(server.url) as client:
        data = b'{"prompt": "Once", "max_tokens": 200}'
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(data) + 1}\r\n\r\n".encode()
        with connection(server.port) as sock:
            sock.sendall(head + data)
            assert ask(client, exactly(1)).usage["completion_tokens"] == 1
            wait_idle(client)
    answers_as_ever(server)
