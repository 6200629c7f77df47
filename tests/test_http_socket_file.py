"""Unix sockets: one server each, and nothing left behind."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest
import trio
from http_harness import Client, running

from trioserve.config import Config
from trioserve.errors import ConfigError
from trioserve.http.listener import bind, url
from trioserve.http.socket_file import removed_at_the_end


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # such paths may have a hundred characters at most
        yield Path(folder, "s")


def bound(path):
    return bind(Config(host=f"unix:{path}"))


def left_behind(path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()


def test_what_a_dead_server_left_behind_is_replaced(path):
    left_behind(path)
    with bound(path) as sock, socket.socket(socket.AF_UNIX) as client:
        assert url(Config(), sock) == f"unix:{path}"
        client.connect(str(path))


def test_a_living_servers_socket_is_not_taken(path):
    with bound(path) as living:
        with pytest.raises(ConfigError, match="another server does") as caught:
            bound(path)
        assert str(path) in caught.value.message
        living.accept()[0].close()  # the look at it
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            living.accept()[0].close()


def test_a_server_too_busy_to_take_connections_lives(path):
    with socket.socket(socket.AF_UNIX) as living, socket.socket(socket.AF_UNIX) as waiting:
        living.bind(str(path))
        living.listen(0)
        waiting.connect(str(path))
        with pytest.raises(ConfigError, match="another server does"):
            bound(path)


def test_a_socket_of_another_kind_is_not_taken(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(ConfigError, match="another server does"):
            bound(path)
    assert path.exists()


# Hypercorn drops the socket that it could not bind, and leaves closing it to the collector.
dropped_socket = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@dropped_socket
@pytest.mark.parametrize("make", [lambda path: path.write_text("precious"), lambda path: path.mkdir()])
def test_what_is_no_socket_stays(path, make):
    make(path)
    with pytest.raises(ConfigError, match=f"cannot listen on unix:{path}"):
        bound(path)
    assert path.exists()


@dropped_socket
def test_a_folder_that_is_not_there(path):
    with pytest.raises(ConfigError, match="No such file"):
        bound(path / "none" / "s")


def test_a_file_is_removed_at_the_end(path):
    with bound(path) as sock, removed_at_the_end(sock):
        assert path.is_socket()
    assert not path.exists()


def test_a_file_is_removed_while_its_socket_still_listens(path):
    """Nobody can have put another one there meanwhile."""
    with bound(path) as sock:
        with removed_at_the_end(sock), socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        assert not path.exists()
        sock.accept()[0].close()


def test_another_servers_file_at_the_same_place_stays(path):
    with bound(path) as sock:
        with removed_at_the_end(sock):
            os.unlink(path)
            other = bound(path)
        with other:
            assert path.is_socket()


def test_a_file_that_is_gone_is_no_trouble(path):
    with bound(path) as sock, removed_at_the_end(sock):
        os.unlink(path)


def test_other_sockets_have_no_file():
    with bind(Config(port=0)) as sock, removed_at_the_end(sock):
        pass


async def test_a_server_that_ends_in_order_removes_its_file(path):
    async with running(host=f"unix:{path}") as server:
        async with Client(await trio.open_unix_socket(str(path))) as client:
            assert (await client.call("/health/ready")).status == 200
        await server.drain()
        assert not path.exists()
