"""One fault on one server: what it costs, and whom."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from dataclasses import dataclass, field

import httpx
from lifecycle.client import ask, exactly, http
from lifecycle.daemon import Process

from .cases import SHORT, Case, Scene
from .ways import SETTINGS, Way, resident

FREED_SECONDS = 90.0
ENDED_SECONDS = 15.0
_POLL_SECONDS = 0.05
_NEIGHBOUR = "neighbour"
_MIB = 2**20


@dataclass
class Outcome:
    """What was seen.

    Attributes:
        freed: seconds from the fault until nobody but the neighbour had a slot or a place in the queue; None: never.
        neighbour: whether the answer beside it was the undisturbed one; None where there was none.
        growth: bytes of memory.
        ended: seconds from SIGTERM to the end; None: it had to be killed.
        code: the exit code.
        notes: of the fault itself, and of the server's log.
    """

    freed: float | None = None
    neighbour: bool | None = None
    growth: int = 0
    ended: float | None = None
    code: int | None = None
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = []
        if self.neighbour is not None:
            parts.append("slot never freed" if self.freed is None else f"freed {self.freed:.1f} s")
            parts.append("neighbour equal" if self.neighbour else "NEIGHBOUR DIFFERS")
            parts.append(f"{self.growth / _MIB:+.1f} MiB")
        parts.append("never ends" if self.ended is None else f"end {self.ended:.1f} s, code {self.code}")
        return "; ".join([*parts, *self.notes])


def probe(way: Way, case: Case) -> Outcome:
    """Play a fault and measure what comes of it."""
    outcome = Outcome()
    with (
        way.start({**SETTINGS, **case.settings}) as process,
        http(process.url) as client,
        contextlib.ExitStack() as stack,
    ):
        lazy = "TRIOSERVE_LAZY" in case.settings
        alone = "" if lazy else ask(client, exactly(SHORT)).text
        scene = Scene(process.port, way.buffer, client, alone, stack)
        before = resident(process)
        case.play(scene)
        scene.began = scene.began or time.monotonic()
        if case.at_once:
            _await_stuck(scene)
        else:
            _watch(scene, outcome)
            outcome.growth = resident(process) - before
        outcome.notes += scene.notes
        _end(process, outcome)
        log = process.log_text()
        outcome.notes += [word for word in ("Traceback", " error ") if word in log]
    return outcome


def _watch(scene: Scene, outcome: Outcome) -> None:
    freed: list[float] = []
    with http(f"http://127.0.0.1:{scene.port}") as status:
        watching = threading.Thread(target=_await_freed, args=(scene, status, freed))
        watching.start()
        text = ask(scene.client, exactly(SHORT), **{"x-request-id": _NEIGHBOUR}).text
        outcome.neighbour = text == scene.alone or not scene.alone
        watching.join()
    outcome.freed = scene.freed if scene.freed is not None else next(iter(freed), None)


def _await_freed(scene: Scene, status: httpx.Client, freed: list[float]) -> None:
    deadline = time.monotonic() + FREED_SECONDS
    reached = 0
    while (now := time.monotonic()) < deadline:
        if scene.progress is not None and (value := scene.progress()) > reached:
            reached, scene.began = value, now
        holders = {slot["request_id"] for slot in status.get("/v1/slots").json()["data"] if slot["state"] != "idle"}
        if not holders - {_NEIGHBOUR}:
            freed.append(now - scene.began)
            return
        time.sleep(_POLL_SECONDS)


def _await_stuck(scene: Scene, still: float = 0.5) -> None:
    """Return once the system has taken no byte more for a while, or after a while where that can't be seen."""
    reached, since = 0, time.monotonic()
    while time.monotonic() < since + still or (scene.progress is not None and not reached):
        if scene.progress is not None and (value := scene.progress()) > reached:
            reached, since = value, time.monotonic()
        time.sleep(_POLL_SECONDS)


def _end(process: Process, outcome: Outcome) -> None:
    began = time.monotonic()
    process.signal(signal.SIGTERM)
    with contextlib.suppress(AssertionError):
        outcome.code = process.finish(ENDED_SECONDS)
        outcome.ended = time.monotonic() - began
