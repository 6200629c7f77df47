"""The file of a Unix socket: never taken from a server that lives, never left behind by one that ends in order."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from trioserve.errors import ConfigError

__all__ = ["check_unused", "removed_at_the_end"]

_PROBE_SECONDS = 1.0


def check_unused(path: Path) -> None:
    """See that nobody listens on a socket. What a killed server left behind counts as unused.

    Raises:
        ConfigError: somebody does, or may.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except OSError:  # a full queue, another user's socket: not known to be dead
            pass
    raise ConfigError(f"cannot listen on unix:{path}: another server does", param="host")


@contextlib.contextmanager
def removed_at_the_end(sock: socket.socket) -> Iterator[None]:
    """Remove the file of a listening Unix socket at the end of the block, in which the socket stays open.

    A socket that is open keeps its file's number, so another server's file at the same place is told from ours. With
    other sockets nothing happens.
    """
    if sock.family != socket.AF_UNIX:
        yield
        return
    path = sock.getsockname()
    ours = _identity(path)
    try:
        yield
    finally:
        if ours is not None and _identity(path) == ours:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
