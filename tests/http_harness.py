"""A server in the test's own process, and clients that say and hear every byte themselves."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import h11
import trio

from trioserve.config import Config, ModelConfig
from trioserve.http.app import create_app
from trioserve.http.listener import bind, serve_http
from trioserve.runtime.model import ModelStatus
from trioserve.scheduling.statistics import DrainReport
from trioserve.service import open_service
from trioserve.testing import FakeEngine, fake_answer

SAFETY = 20  # seconds: only a hang meets it
HOST = "127.0.0.1"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = "Once"


# -- bodies and what is expected of them


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """Body of a chat completion."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}


def completion(prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    """Body of a text completion."""
    return {"prompt": prompt, "max_tokens": 8, **fields}


def expected(prompt: str = PROMPT, tokens: int = 8) -> str:
    """What the fake answers to a text completion."""
    return fake_answer(prompt.encode(), tokens)


def write_gguf(folder: Path, name: str = "fake") -> Path:
    """A file that passes for a model as long as nobody loads it in earnest."""
    path = folder / f"{name}.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + bytes(40))
    return path


async def until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds."""
    with trio.fail_after(SAFETY):
        while not condition():
            await trio.sleep(0.001)


# -- the server


@dataclass
class Server:
    """A running server. `stop` begins its drain; `returned` is set when ``serve_http`` has returned."""

    config: Config
    engine: FakeEngine
    service: Any
    app: Any
    port: int
    stop: trio.Event = field(default_factory=trio.Event)
    drained: trio.Event = field(default_factory=trio.Event)
    returned: trio.Event = field(default_factory=trio.Event)
    report: DrainReport | None = None
    calls: int = 0  # of the application, under way
    clients: list[Client] = field(default_factory=list)

    def status(self, index: int = 0) -> ModelStatus:
        return self.service.models()[index]

    async def free(self) -> None:
        """Return once no request is under way and every slot is free."""
        await until(
            lambda: (
                self.service.tally().active == 0
                and all(status.active_slots == status.queued_requests == 0 for status in self.service.models())
            )
        )

    async def connect(self, **options: int) -> Client:
        """A connection of HTTP/1.1."""
        client = Client(await connect(self.port, **options))
        self.clients.append(client)
        return client

    async def call(self, path: str, body: Any = None, **request: Any) -> Reply:
        """One request on a connection of its own."""
        async with await self.connect() as client:
            return await client.call(path, body, **request)

    async def drain(self) -> None:
        """Tell the server to stop and wait until it has."""
        self.stop.set()
        await self.returned.wait()

    async def _until(self) -> None:
        await self.stop.wait()
        self.report = await self.service.drain()
        self.drained.set()

    async def _serve(self, sock: socket.socket) -> None:
        await serve_http(self._counted, self.config, sock, self._until)
        self.returned.set()

    async def _counted(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.calls -= 1


@contextlib.asynccontextmanager
async def running(
    engine: FakeEngine | None = None,
    *,
    models: Iterable[dict[str, Any]] = ({},),
    started: bool = True,
    prepare: Callable[[socket.socket], None] = lambda sock: None,
    **settings: Any,
) -> AsyncIterator[Server]:
    """Serve for the length of the block, then drain. Leaving the block opens all gates and closes all clients.

    Arguments:
        engine: a fresh fake one where it is left out.
        models: what each model's configuration says beyond its path.
        started: wait for the models that load at the start.
        prepare: works on the listening socket before it is served.
        settings: of the server.
    """
    engine = engine or FakeEngine()
    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(Path(folder))
        config = Config(port=0, models=tuple(ModelConfig(**{"path": path, **model}) for model in models), **settings)
        with bind(config) as sock:
            prepare(sock)
            port = sock.getsockname()[1]
            async with open_service(config, engine=engine) as service, trio.open_nursery() as nursery:
                server = Server(config, engine, service, create_app(service), port)
                if started:
                    await service.wait_started()
                nursery.start_soon(server._serve, sock)
                try:
                    yield server
                finally:
                    if isinstance(engine, FakeEngine):
                        for gate in (engine.load_gate, engine.session_gate, engine.step_gate):
                            gate.open()
                    with trio.CancelScope(shield=True), trio.fail_after(SAFETY):
                        await server.drain()
                        for client in server.clients:
                            await client.close()


async def connect(port: int, **options: int) -> trio.SocketStream:
    """Connect, with socket options set before.

    Arguments:
        port: of the server.
        options: names of socket-level options, such as ``SO_RCVBUF``, with their values.
    """
    sock = trio.socket.socket()
    for name, value in options.items():
        sock.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    try:
        await sock.connect((HOST, port))
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


# -- HTTP/1.1


@dataclass
class Reply:
    """A response as it came."""

    status: int
    headers: dict[str, str]
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """Text of the answer, whole or streamed."""
        if not self.headers["content-type"].startswith("text/event-stream"):
            return choice_text(self.json["choices"][0])
        return "".join(choice_text(chunk["choices"][0]) for chunk in self.chunks if chunk["choices"])

    @property
    def events(self) -> list[str]:
        return sse_events(self.body)

    @property
    def chunks(self) -> list[Any]:
        """Decoded events; sees to it that the stream ended well."""
        *chunks, done = self.events
        assert done == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]


def choice_text(choice: dict[str, Any]) -> str:
    """Text of one choice of any shape."""
    if "text" in choice:
        return choice["text"]
    return (choice.get("message") or choice["delta"]).get("content", "")


def sse_events(body: bytes, *, comments: bool = False) -> list[str]:
    """Data of the events of a whole event stream; comments, on request, with their colon."""
    text = body.decode("utf-8", "strict")
    assert text.endswith("\n\n")
    events = []
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            events += [block] if comments else []
        else:
            assert block.startswith("data: "), block
            assert "\n" not in block
            events.append(block.removeprefix("data: "))
    return events


class Client:
    """One connection of HTTP/1.1; aborting it is part of the interface."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.http = h11.Connection(h11.CLIENT)
        self._events = b""

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, how: str = "fin") -> None:
        """Leave: in good order, by a reset, or only as a speaker."""
        if how == "half":
            await self.stream.send_eof()
            return
        if how == "reset":
            self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await trio.aclose_forcefully(self.stream)

    async def send(self, path: str, body: Any = None, *, method: str = "", headers: Iterable[Any] = ()) -> None:
        """Send one request. A body that isn't bytes goes as JSON."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        all_headers = [("host", HOST), *headers]
        names = {name.lower() for name, _ in all_headers}
        if body is not None and "content-type" not in names:
            all_headers.append(("content-type", "application/json"))
        if not names & {"content-length", "transfer-encoding"}:
            all_headers.append(("content-length", str(len(data))))
        method = method or ("GET" if body is None else "POST")
        await self._put(h11.Request(method=method, target=path, headers=all_headers))
        if data:
            await self._put(h11.Data(data=data))
        await self._put(h11.EndOfMessage())

    async def call(self, path: str, body: Any = None, **request: Any) -> Reply:
        """Send one request and read the whole reply."""
        with trio.fail_after(SAFETY):
            await self.send(path, body, **request)
            return await self.reply()

    async def head(self) -> Reply:
        """Read status and headers."""
        while True:
            event = await self.event()
            if isinstance(event, h11.Response):
                headers = {name.decode().lower(): value.decode() for name, value in event.headers}
                return Reply(event.status_code, headers)
            assert isinstance(event, h11.InformationalResponse), event

    async def reply(self) -> Reply:
        """Read a whole reply and make the connection ready for the next one."""
        reply = await self.head()
        reply.body = await self.rest()
        if self.http.our_state is h11.DONE and self.http.their_state is h11.DONE:
            self.http.start_next_cycle()
        return reply

    async def rest(self) -> bytes:
        """Read what is left of the body."""
        body = self._events
        while not isinstance(event := await self.event(), h11.EndOfMessage):
            assert isinstance(event, h11.Data), event
            body += event.data
        self._events = b""
        return body

    async def sse(self) -> str:
        """Read the next event of a stream; comments are skipped."""
        while True:
            block, found, self._events = self._events.partition(b"\n\n")
            if found and block.startswith(b"data: "):
                return block.decode().removeprefix("data: ")
            if not found:
                event = await self.event()
                assert isinstance(event, h11.Data), event
                self._events = block + bytes(event.data)

    async def eof(self) -> bytes:
        """Read until the server closes."""
        with trio.fail_after(SAFETY):
            return b"".join([data async for data in self.stream])

    async def event(self) -> Any:
        """The next event of h11."""
        with trio.fail_after(SAFETY):
            while (event := self.http.next_event()) is h11.NEED_DATA:
                self.http.receive_data(await self.stream.receive_some(65536))
        return event

    async def _put(self, event: Any) -> None:
        # The server may answer and close before it has read everything; the reply is there all the same.
        data = self.http.send(event)
        with contextlib.suppress(trio.BrokenResourceError):
            await self.stream.send_all(data)


# -- HTTP/2 without TLS, with prior knowledge


class H2Client:
    """One connection of HTTP/2."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.http = h2.connection.H2Connection(
            h2.config.H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
        )
        self.replies: dict[int, Reply] = {}
        self.ended: set[int] = set()

    @classmethod
    async def open(cls, port: int) -> H2Client:
        client = cls(await connect(port))
        client.http.initiate_connection()
        await client.flush()
        return client

    async def __aenter__(self) -> H2Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await trio.aclose_forcefully(self.stream)

    async def send(self, path: str, body: Any = None, *, end: bool = True, headers: Iterable[Any] = ()) -> int:
        """Send one request and return its stream's number."""
        number = self.http.get_next_available_stream_id()
        pseudo = [
            (":method", "GET" if body is None else "POST"),
            (":scheme", "http"),
            (":authority", HOST),
            (":path", path),
        ]
        typed = [] if body is None else [("content-type", "application/json")]
        self.http.send_headers(number, [*pseudo, *typed, *headers], end_stream=body is None)
        if body is not None:
            self.http.send_data(number, json.dumps(body).encode(), end_stream=end)
        await self.flush()
        return number

    async def reset(self, number: int) -> None:
        self.http.reset_stream(number)
        await self.flush()

    async def flush(self) -> None:
        await self.stream.send_all(self.http.data_to_send())

    async def reply(self, number: int) -> Reply:
        """Read until one stream has ended."""
        with trio.fail_after(SAFETY):
            while number not in self.ended:
                await self.pump()
        return self.replies[number]

    async def eof(self) -> None:
        """Read until the server closes."""
        with contextlib.suppress(EOFError):
            while True:
                await self.pump()

    async def pump(self) -> None:
        """Take in what comes next."""
        with trio.fail_after(SAFETY):
            data = await self.stream.receive_some(65536)
        if not data:
            raise EOFError("the server closed the connection")
        for event in self.http.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                headers = {name.decode(): value.decode() for name, value in event.headers}
                self.replies[event.stream_id] = Reply(int(headers[":status"]), headers)
            elif isinstance(event, h2.events.DataReceived):
                self.replies[event.stream_id].body += event.data
                if event.flow_controlled_length:
                    self.http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, (h2.events.StreamEnded, h2.events.StreamReset)):
                self.ended.add(event.stream_id)
        await self.flush()


# -- the shape of errors


def assert_error(reply: Reply, status: int, kind: str, *, code: str | None = None, **more: Any) -> dict[str, Any]:
    """See that a reply is an error in OpenAI's shape, with everything that goes with it; return the error object.

    Arguments:
        reply: to look at.
        status: that it has.
        kind: the error's ``type``.
        code: the error's ``code``, where it matters.
        more: ``param`` where it matters.
    """
    assert reply.status == status, reply
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    assert list(reply.json) == ["error"]
    error = assert_error_object(reply.json["error"], kind)
    assert code is None or error["code"] == code
    assert "param" not in more or error["param"] == more["param"]
    if status == 503:
        assert int(reply.headers["retry-after"]) > 0
    if status == 405:
        assert reply.headers["allow"]
    return error


def assert_error_object(error: dict[str, Any], kind: str) -> dict[str, Any]:
    """See that an error object is whole and tells nothing of our insides."""
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == kind
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["code"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert "Traceback" not in error["message"]
    return error
