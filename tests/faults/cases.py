"""The faults: each one a client that does something wrong, and what it is watched for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from lifecycle.client import COMPLETIONS, RawClient, ask, exactly, http, long_prompt, model, wait_active, wait_queued
from lifecycle.daemon import eventually

from .http2 import LARGEST_WINDOW, H2RawClient
from .ways import CONTEXT, ENDLESS, unsent

SMALL_BUFFER = 2048
IDLERS = 50
SHORT = 12
_PATIENT_SENDS = {"TRIOSERVE_SEND_TIMEOUT_MS": "60000"}
_PROMPT = long_prompt(CONTEXT - 50)
_LARGE = "/openapi.json"
_DEFAULT_WINDOW = 65535
_POST = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\n".encode()


@dataclass
class Scene:
    """Where a fault plays.

    Attributes:
        port: of the server.
        buffer: bytes that its system takes for a client that reads nothing, where that is much.
        client: a well-behaved one, for looking at the status.
        alone: the answer to ``exactly(SHORT)`` on the quiet server.
        stack: what is open until the server has ended.
        began: when the fault was complete, on the monotonic clock.
        freed: seconds until its place was free, where the fault measures that itself.
        progress: a number that grows as long as the fault is not complete; that is when it last grew.
        notes: what the fault itself has to tell.
    """

    port: int
    buffer: int
    client: httpx.Client
    alone: str
    stack: contextlib.ExitStack
    began: float = 0.0
    freed: float | None = None
    progress: Callable[[], int] | None = None
    notes: list[str] = field(default_factory=list)

    def raw(self, body: Mapping[str, Any] | None = None, *, small: bool = False, more: bytes = b"") -> RawClient:
        """An HTTP/1.1 client that has sent a request, if any."""
        raw = self.stack.enter_context(RawClient(self.port, receive_buffer=SMALL_BUFFER if small else None))
        if body is not None:
            raw.post(dict(body), more=more)
        return raw

    def http2(self, *, window: int | None = None, small: bool = False) -> H2RawClient:
        """An HTTP/2 client that has sent nothing yet."""
        buffer = SMALL_BUFFER if small else None
        return self.stack.enter_context(H2RawClient(self.port, window=window, receive_buffer=buffer))

    def until_full(self, client_port: int) -> None:
        """Count the fault from the moment when the system takes no more bytes for a client."""
        self.progress = lambda: unsent(self.port, client_port)

    def note_equal(self, text: str, what: str) -> None:
        """Tell whether an answer is the undisturbed one."""
        self.notes.append(f"{what} {'equal' if text == self.alone else 'DIFFERS'}")


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        name: of its line in the table.
        play: does it, up to the moment from which it is timed.
        settings: of the server, beside the usual ones.
        at_once: end the server in the middle of it, without waiting for the slot.
    """

    name: str
    play: Callable[[Scene], None]
    settings: Mapping[str, str] = field(default_factory=dict)
    at_once: bool = False


STREAM = exactly(ENDLESS, stream=True)


# -- readers that stop or are slow


def _stops_reading(scene: Scene) -> None:
    scene.until_full(_unread_stream(scene).port)


def _unread_stream(scene: Scene) -> RawClient:
    """A stream into a buffer that is nearly full: a large one would take the whole answer."""
    raw = scene.raw(small=True)
    size = len(scene.client.get(_LARGE).content)
    for _ in range(scene.buffer // size - 1):
        before = unsent(scene.port, raw.port)
        raw.send(f"GET {_LARGE} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
        eventually(lambda before=before: unsent(scene.port, raw.port) > before + size // 2, 5, "room in the buffer")
    raw.post(STREAM)
    return raw


def _trickles(scene: Scene) -> None:
    raw = _unread_stream(scene)
    gone = threading.Event()
    thread = threading.Thread(target=_read_drop_by_drop, args=(raw, gone))
    thread.start()
    scene.stack.callback(thread.join)
    scene.stack.callback(gone.set)
    scene.until_full(raw.port)


def _read_drop_by_drop(raw: RawClient, gone: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while not gone.wait(1) and raw.read_some(1):
            pass


def _vanishes_after_whole_answer(scene: Scene) -> None:
    """It neither reads the answer nor closes; the answer fits into the system's buffers."""
    raw = scene.raw(exactly(SHORT))
    eventually(lambda: unsent(scene.port, raw.port) or raw.readable())


# -- clients that close


def _half_closes(scene: Scene) -> None:
    raw = scene.raw(STREAM)
    raw.read_events(3)
    raw.half_close()


def _leave(phase: Callable[[Scene], RawClient], *, reset: bool = False) -> Callable[[Scene], None]:
    def play(scene: Scene) -> None:
        raw = phase(scene)
        if reset:
            raw.reset()
        else:
            raw.close()

    return play


def _closes_queued(scene: Scene) -> None:
    for _ in range(2):
        scene.raw(exactly(60))
    wait_active(scene.client, 2)
    raw = scene.raw(STREAM)
    wait_queued(scene.client, 1)
    raw.close()
    began = time.monotonic()
    wait_queued(scene.client, 0)
    scene.freed = time.monotonic() - began
    assert model(scene.client)["active_slots"] == 2, "the slots were free before"


def _loading(scene: Scene) -> RawClient:
    raw = scene.raw(STREAM)
    eventually(lambda: scene.client.get("/v1/models").json()["data"][0]["state"] == "loading", what="a load")
    return raw


def _prefill(scene: Scene) -> RawClient:
    raw = scene.raw(exactly(20, _PROMPT, stream=True))
    wait_active(scene.client, 1)
    return raw


def _decoding(scene: Scene) -> RawClient:
    raw = scene.raw(STREAM)
    raw.read_events(3)
    return raw


def _decoding_whole(scene: Scene) -> RawClient:
    raw = scene.raw(exactly(ENDLESS))
    eventually(lambda: any(slot["phase"] == "decode" for slot in scene.client.get("/v1/slots").json()["data"]))
    return raw


def _in_a_chunk(scene: Scene) -> RawClient:
    raw = scene.raw(STREAM, small=True)
    raw.read_events(1)
    raw.read_some(300)  # of more than a thousand
    return raw


def _around_the_first_byte(scene: Scene) -> None:
    """Close at moments just before, at and after the one at which a whole answer is ready."""
    began = time.monotonic()
    ask(scene.client, exactly(2))
    took = time.monotonic() - began
    for part in range(20):
        raw = scene.raw(exactly(2))
        time.sleep(took * (0.6 + 0.03 * part))
        raw.close()
    scene.notes.append("20 closes")


def _pipelines(scene: Scene) -> None:
    second = RawClient.message(exactly(SHORT), "raw-second")
    raw = scene.raw(exactly(SHORT, stream=True), more=second)
    eventually(lambda: raw.read_some(65536) and raw.received.count(b"HTTP/1.1 200") == 2, what="two answers")
    scene.notes.append("both answered")


def _pipelines_and_closes(scene: Scene) -> None:
    raw = scene.raw(exactly(ENDLESS), more=RawClient.message(exactly(SHORT), "raw-second"))
    wait_active(scene.client, 1)
    raw.close()


def _leaves_and_comes_back(scene: Scene) -> None:
    """One client with one pool: its connection is closed under the stream, and it asks again."""
    with http(f"http://127.0.0.1:{scene.port}") as client:
        with client.stream("POST", COMPLETIONS, json=STREAM) as response:
            next(response.iter_lines())
        scene.began = time.monotonic()
        scene.note_equal(ask(client, exactly(SHORT)).text, "next answer")


# -- HTTP/2


def _h2_stream(scene: Scene, **options: Any) -> tuple[H2RawClient, int]:
    client = scene.http2(**options)
    return client, client.post(STREAM)


def _h2_resets(scene: Scene) -> None:
    client, stream = _h2_stream(scene)
    client.read_data(stream, 4000)
    client.reset_stream(stream)
    scene.began = time.monotonic()
    answer = client.read_to_end(client.post(exactly(SHORT)))
    scene.notes.append("next answer came" if b'"finish_reason":"length"' in answer else f"next answer: {answer!r}")


def _h2_goes_away(scene: Scene) -> None:
    client, stream = _h2_stream(scene)
    client.read_data(stream, 4000)
    client.go_away()


def _h2_vanishes(scene: Scene) -> None:
    client, stream = _h2_stream(scene)
    client.read_data(stream, _DEFAULT_WINDOW)


def _h2_no_window(scene: Scene) -> None:
    _h2_stream(scene, window=0)


def _h2_no_window_whole(scene: Scene) -> None:
    client = scene.http2(window=0)
    client.post(exactly(SHORT))


def _h2_stops_reading(scene: Scene) -> None:
    client, _ = _h2_stream(scene, window=LARGEST_WINDOW, small=True)
    scene.until_full(client.port)


def _h2_closes(scene: Scene) -> None:
    client, stream = _h2_stream(scene)
    client.read_data(stream, 4000)
    client.close()


# -- those who never ask


def _idlers(scene: Scene) -> None:
    _await_closing(scene, [scene.raw() for _ in range(IDLERS)])


def _slow_head(scene: Scene) -> None:
    raw = scene.raw()
    raw.send(_POST)
    began = time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() < began + 10:
            raw.send(b"x: y\r\n")
            time.sleep(0.1)
    scene.notes.append(_closed(began, 10))


def _no_body(scene: Scene) -> None:
    raw = scene.raw()
    raw.send(_POST + b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{")
    _await_closing(scene, [raw])


def _await_closing(scene: Scene, clients: list[RawClient], seconds: float = 10) -> None:
    began = time.monotonic()
    with contextlib.suppress(AssertionError):
        eventually(lambda: all(one.readable() for one in clients), seconds)
    scene.notes.append(_closed(began, seconds))


def _closed(began: float, limit: float) -> str:
    took = time.monotonic() - began
    return f"closed after {took:.1f} s" if took < limit else f"not closed in {limit:g} s"


LAZY = {"TRIOSERVE_LAZY": "yes", "TRIOSERVE_SLOTS": "16"}

CASES = {
    "stops reading": Case("a stream's reader stops, its receive window small", _stops_reading),
    "stops, SIGTERM": Case("the same, SIGTERM while it holds its slot", _stops_reading, at_once=True),
    "trickles": Case("reads 1 byte a second", _trickles),
    "vanishes": Case("vanishes before a whole answer: no read, no FIN", _vanishes_after_whole_answer),
    "half-closes": Case("closes its sending side in a stream", _half_closes),
    "pipelines": Case("sends a second request while the first streams", _pipelines),
    "pipelines, closes": Case("the same behind a whole answer, and closes", _pipelines_and_closes),
    "closes queued": Case("closes in the queue", _closes_queued),
    "closes loading": Case("closes in the load", _leave(_loading), LAZY),
    "closes prefill": Case("closes in the prompt", _leave(_prefill)),
    "closes decode": Case("closes in a stream", _leave(_decoding)),
    "closes whole": Case("closes in a whole answer", _leave(_decoding_whole)),
    "closes at first byte": Case("closes between the end of the work and the first byte", _around_the_first_byte),
    "closes in chunk": Case("closes in the middle of a chunk", _leave(_in_a_chunk)),
    "resets": Case("resets (RST) in a stream", _leave(_decoding, reset=True)),
    "comes back": Case("leaves a stream and asks again", _leaves_and_comes_back),
    "h2 resets": Case("HTTP/2: RST_STREAM, and a next request on the connection", _h2_resets),
    "h2 goes away": Case("HTTP/2: GOAWAY in a stream, without closing", _h2_goes_away),
    "h2 closes": Case("HTTP/2: closes in a stream", _h2_closes),
    "h2 vanishes": Case("HTTP/2: gives no window back", _h2_vanishes),
    "h2 no window": Case("HTTP/2: a window of zero from the start", _h2_no_window),
    # Only where sends have longer than the drain does the drain have to end it, however fast the machine fills buffers.
    "h2 no window, SIGTERM": Case(
        "the same, `send_timeout_ms` 60000, SIGTERM while it holds its slot",
        _h2_no_window,
        _PATIENT_SENDS,
        at_once=True,
    ),
    "h2 no window whole": Case("HTTP/2: a window of zero for a whole answer", _h2_no_window_whole),
    "h2 stops reading": Case("HTTP/2: window open, reads nothing", _h2_stops_reading),
    "idlers": Case(f"{IDLERS} connections that say nothing", _idlers),
    "slow head": Case("a head that drips", _slow_head),
    "no body": Case("a body that never comes", _no_body),
}
