"""The three ways to run the application, with the same short bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lifecycle.daemon import ONE_THREAD, Daemon, Process
from lifecycle.hypercorn import WORKERS, Hypercorn

SEND_SECONDS, DRAIN_SECONDS, IDLE_SECONDS = 2.0, 2.0, 3.0
CONTEXT = 512
ENDLESS = 450
"""Tokens of an answer that is never waited for; it fills the context but for a few."""

LONG_ID = "🌊" * 250
"""A model's name that makes each chunk of a stream longer than a kilobyte: buffers fill within a few dozen tokens."""

SETTINGS = {
    **ONE_THREAD,
    "TRIOSERVE_ID": LONG_ID,
    "TRIOSERVE_SLOTS": "2",
    "TRIOSERVE_N_CTX": str(CONTEXT),
    "TRIOSERVE_SEND_TIMEOUT_MS": str(int(1000 * SEND_SECONDS)),
    "TRIOSERVE_DRAIN_TIMEOUT_MS": str(int(1000 * DRAIN_SECONDS)),
    "TRIOSERVE_KEEP_ALIVE_TIMEOUT_MS": str(int(1000 * IDLE_SECONDS)),
}


_ESTABLISHED = "01"


@dataclass(frozen=True)
class Way:
    """One way to run the application.

    Attributes:
        name: the command.
        start: makes the server's process; takes settings.
        buffer: see ``Scene.buffer``.
    """

    name: str
    start: Callable[[dict[str, str]], Any]
    buffer: int = 0


def _hypercorn(worker: str) -> Callable[[dict[str, str]], Hypercorn]:
    patience = ("--graceful-timeout", f"{DRAIN_SECONDS:g}", "--keep-alive", f"{IDLE_SECONDS:g}")
    return lambda settings: Hypercorn(*WORKERS[worker], *patience, env=settings)


WAYS = {
    "serve": Way("trioserve serve", lambda settings: Daemon(env=settings)),
    "trio": Way("hypercorn -k trio", _hypercorn("trio")),
    # Trio lets a socket hold 16 KiB that are not sent; asyncio leaves that to the system. This is Linux on loopback.
    "asyncio": Way("hypercorn", _hypercorn("asyncio"), buffer=2_300_000),
}


def resident(process: Process) -> int:
    """Bytes in memory of all processes of a server."""
    return sum(_resident(pid) for pid in process.survivors())


def _resident(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # gone meanwhile
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def unsent(server_port: int, client_port: int) -> int:
    """Bytes in the server's send buffer for one connection that is not being closed."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        ends = [int(end.rpartition(":")[2], 16) for end in fields[1:3]]
        if ends == [server_port, client_port] and fields[3] == _ESTABLISHED:
            return int(fields[4].partition(":")[0], 16)
    return 0
