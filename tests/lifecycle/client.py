"""Clients: well-behaved ones over httpx, and one that holds its socket in its own hands."""

from __future__ import annotations

import json
import select
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
from openai import OpenAI

from .daemon import eventually

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CALL_SECONDS = 180  # only a hang meets it


def chat(text: str = "Say hello.", **fields: Any) -> dict[str, Any]:
    """Body of a greedy chat."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **fields}


def completion(prompt: Any = "Once upon a time", **fields: Any) -> dict[str, Any]:
    """Body of a greedy completion."""
    return {"prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}


def exactly(tokens: int, prompt: Any = "Once upon a time", **fields: Any) -> dict[str, Any]:
    """Body of a completion whose answer has just so many tokens."""
    return completion(prompt, max_tokens=tokens, ignore_eos=True, **fields)


def long_prompt(tokens: int) -> list[int]:
    """A prompt of just so many tokens."""
    return [300 + index % 500 for index in range(tokens)]


@dataclass
class Answer:
    """A finished answer, streamed or not."""

    text: str
    finish_reason: str | None
    usage: dict[str, int] | None
    chunks: int = 1


def http(url: str, **options: Any) -> httpx.Client:
    """A client for a server; proxies of the environment are none of its business."""
    if url.startswith("unix:"):
        options["transport"] = httpx.HTTPTransport(uds=url.removeprefix("unix:"))
        url = "http://localhost"
    return httpx.Client(base_url=url, timeout=CALL_SECONDS, trust_env=False, **options)


def openai(url: str) -> OpenAI:
    """The official client; close it after use."""
    inner = httpx.Client(trust_env=False)
    return OpenAI(base_url=f"{url}/v1", api_key="none", http_client=inner, max_retries=0, timeout=CALL_SECONDS)


def route(body: dict[str, Any]) -> str:
    """Where a body belongs."""
    return CHAT if "messages" in body else COMPLETIONS


def ask(client: httpx.Client, body: dict[str, Any], **headers: str) -> Answer:
    """Send a body where it belongs and return the whole answer."""
    if body.get("stream"):
        with client.stream("POST", route(body), json=body, headers=headers) as response:
            response.read()
            assert response.status_code == 200, response.text
            return streamed(response.text)
    response = client.post(route(body), json=body, headers=headers)
    assert response.status_code == 200, response.text
    return whole(response.json())


def whole(body: dict[str, Any]) -> Answer:
    """An answer from a JSON object."""
    (choice,) = body["choices"]
    return Answer(choice_text(choice), choice["finish_reason"], body["usage"])


def streamed(text: str) -> Answer:
    """An answer from an event stream that ended well."""
    *data, done = events(text)
    assert done == "[DONE]", text
    chunks = [json.loads(item) for item in data]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(reasons) == 1, text
    return Answer("".join(map(choice_text, choices)), reasons[0], usages[0] if usages else None, len(chunks))


def choice_text(choice: dict[str, Any]) -> str:
    """Text of one choice of any shape."""
    if "text" in choice:
        return choice["text"]
    return (choice.get("message") or choice["delta"]).get("content") or ""


def events(text: str) -> list[str]:
    """Data of the events of a whole event stream."""
    assert text.endswith("\n\n"), text
    blocks = [block for block in text[:-2].split("\n\n") if not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks), text
    return [block.removeprefix("data: ") for block in blocks]


def each_event(response: httpx.Response) -> Iterator[str]:
    """Data of the events of a stream, as they arrive."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def model(client: httpx.Client, index: int = 0) -> dict[str, Any]:
    """Status of one model."""
    return client.get("/v1/models").json()["data"][index]


def idle(client: httpx.Client) -> bool:
    """Whether no slot is taken and nobody waits, for any model."""
    models = client.get("/v1/models").json()["data"]
    return all(one["active_slots"] == one["queued_requests"] == 0 for one in models)


def wait_idle(client: httpx.Client, within: float = 30) -> None:
    """Return once no slot is taken and nobody waits."""
    eventually(lambda: idle(client), within, "an idle server")


def wait_active(client: httpx.Client, count: int) -> None:
    """Return once so many slots are taken."""
    eventually(lambda: model(client)["active_slots"] == count, what=f"{count} active slots")


def wait_queued(client: httpx.Client, count: int) -> None:
    """Return once so many requests wait."""
    eventually(lambda: model(client)["queued_requests"] == count, what=f"{count} queued requests")


def assert_error(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    """See that a response is an error in OpenAI's shape; return the error object."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == kind
    return error


class RawClient:
    """One HTTP/1.1 connection that can be broken off at any moment.

    Arguments:
        port: of the server.
        receive_buffer: bytes that the kernel takes for us unread; as it comes where left out.
    """

    def __init__(self, port: int, receive_buffer: int | None = None) -> None:
        self.request_id = f"raw-{uuid.uuid4().hex}"
        self.received = b""
        self._socket = socket.socket()
        self._socket.settimeout(CALL_SECONDS)
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.connect(("127.0.0.1", port))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def port(self) -> int:
        """Our end's."""
        return self._socket.getsockname()[1]

    @staticmethod
    def message(body: dict[str, Any], request_id: str) -> bytes:
        """The bytes of a request."""
        data = json.dumps(body).encode()
        head = (
            f"POST {route(body)} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"x-request-id: {request_id}\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data

    def post(self, body: dict[str, Any], *, cut: int = 0, more: bytes = b"") -> None:
        """Send a request, without its last ``cut`` bytes, or with more behind it."""
        message = self.message(body, self.request_id)
        self.send(message[: len(message) - cut] + more)

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self._socket.sendall(data)

    def readable(self) -> bool:
        """Whether there are bytes to read, or the server has closed."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def read_some(self, size: int) -> bytes:
        """Read up to so many bytes; none means that the server has closed."""
        data = self._socket.recv(size)
        self.received += data
        return data

    def read_events(self, count: int) -> None:
        """Read until so many events have arrived."""
        while self.received.count(b"\n\n") < count:  # the head ends with CR LF, which this does not match
            data = self._socket.recv(65536)
            assert data, "the server closed the connection"
            self.received += data

    def read_to_end(self) -> str:
        """Read until the server closes; return everything as text."""
        while data := self._socket.recv(65536):
            self.received += data
        return self.received.decode()

    def half_close(self) -> None:
        """Send no more, and read on."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Leave in an orderly way."""
        self._socket.close()

    def reset(self) -> None:
        """Leave with a TCP reset."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self._socket.close()
