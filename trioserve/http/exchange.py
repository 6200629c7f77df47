"""One request and its response, from the first byte to the last, and whatever it holds meanwhile."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from typing import Any, Protocol

import trio

from trioserve.errors import TrioserveError
from trioserve.http.bounded_stream import LOOKS
from trioserve.http.dialect import dialect_of
from trioserve.http.routing import UNMATCHED
from trioserve.http.trace import trace_of
from trioserve.origin import Origin

logger = logging.getLogger("trioserve.http")

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]
SendChunk = Callable[[bytes], Awaitable[None] | None]

CHUNKS = "trioserve.chunks"
"""Name of the extension to ASGI by which a piece of a response that goes out in chunks is sent as one, a ``SendChunk``.
It returns what is to be awaited, where there is something to wait for. The server that offers it frames responses of no
given length in chunks."""

TAKEN = "trioserve.taken"
"""Name of the extension to ASGI by which a response learns how many bytes its client has taken so far, a function. The
server that offers it breaks connections whose clients take nothing for the send timeout."""

_KEY = "trioserve.exchange"
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_FAREWELL_SECONDS = 1.0
_LINGER_SECONDS = 0.5
_LENIENCE_SECONDS = 0.05
RETRY_AFTER = {"server_busy": b"1", "shutting_down": b"5", "model_load_failed": b"5", "insufficient_memory": b"5"}


def error_headers(error: TrioserveError) -> list[Header]:
    """Headers of an error's response."""
    headers = [(b"content-type", b"application/json")]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.code in RETRY_AFTER:
        headers.append((b"retry-after", RETRY_AFTER[error.code]))
    return headers


class Witness(Protocol):
    """Told of responses and errors, to count them."""

    def response_begun(self, route: str, status: int) -> None:
        """A response has begun."""
        ...

    def note_error(self, error: TrioserveError) -> None:
        """A call for work ends with an error."""
        ...


class Exchange:
    """Wraps the server's ``receive`` and ``send`` for one request.

    Arguments:
        scope: of the ASGI call.
        receive: of the ASGI call.
        send: of the ASGI call.
        send_timeout: seconds for which the client may take nothing of a message; where the server does not tell that,
            seconds that one may take to be handed to the transport.
        silence: seconds after which ``ping`` is sent in the midst of a response; infinity sends nothing.
        closing: tells whether the connection shall close after this response.
        headers: added to those of the response.
        witness: told how it goes.
        route: name of the request's route.

    Attributes:
        origin: what log lines and counts tell of the request.
        dialect: in which errors are told.
        tell: makes the event that tells an error in the midst of a stream; a stream may have one of its own.
        ping: what is sent in silence, by whoever has a body that may be silent.
    """

    def __init__(
        self,
        scope: Message,
        receive: Receive,
        send: Send,
        send_timeout: float,
        silence: float,
        closing: Callable[[], bool],
        headers: Iterable[Header] = (),
        *,
        witness: Witness,
        route: str,
    ) -> None:
        self.resources = ExitStack()
        self.request_id = _request_id(scope["headers"])
        trace = trace_of(scope["headers"])
        self.origin = Origin(self.request_id, route, trace={} if trace is None else trace._asdict())
        self.dialect = dialect_of(scope["path"])
        self.tell = self.dialect.event
        self.ping = b""
        self._witness = witness
        self._wants_work = scope.get("method") == "POST" and route != UNMATCHED
        self.started = self.finished = False
        self._is_stream = False
        self._http1 = scope["http_version"].startswith("1")
        self._heard_out = trio.Event()
        self._raw_receive = receive
        self._raw_send = send
        extensions = scope.get("extensions") or {}
        self._lent: SendChunk | None = extensions.get(CHUNKS)
        self._taken: Callable[[], int] | None = extensions.get(TAKEN)
        self._had_taken = 0  # by the last look, or when the present send began
        self._took_at = 0.0  # when a look has found that something was taken since
        self._send_chunk: SendChunk | None = None  # from the head of a response in chunks to its end
        self._send_timeout = send_timeout
        self._closing = closing
        self._more_headers = list(headers)
        self._silence = silence
        self._sending_since: float | None = None
        self._sent_at = trio.current_time()
        self._watched = False
        self._told_of_stall = False
        self._leaving = False
        scope[_KEY] = self

    @classmethod
    def of(cls, scope: Any) -> Exchange:
        """The exchange that an ASGI scope belongs to."""
        exchange = scope[_KEY]
        assert isinstance(exchange, cls), "routes are called through the guard"
        return exchange

    async def receive(self) -> Message:
        """Take the next message from the server."""
        message = await self._raw_receive()
        if not message.get("more_body", False):  # the end of the body, or of the client
            self._heard_out.set()
        return message

    async def send(self, message: Message) -> None:
        """Hand a message to the server. A client that takes nothing for the send timeout counts as gone.

        Raises:
            ClientStalledError: it does, and nobody watches.
        """
        if self._send_chunk is not None and self._watched and message.get("more_body") and message["body"]:
            self._sent_at = trio.current_time()
            rest = self._send_chunk(message["body"])  # nearly always, for a stream comes here for every token
            if rest is not None:
                self._note_sending()
                try:
                    await rest
                finally:
                    self._sending_since = None
            return
        if message["type"] == "http.response.start":
            self._begin(message)
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if last:
            self._send_chunk = None
            # An answer may come before the request is complete. To end it then would make the rest of the body arrive
            # at a stream that is gone: HTTP/1 resets the connection, and Hypercorn's HTTP/2 fails with all its streams.
            with trio.move_on_after(_LINGER_SECONDS):
                await self._heard_out.wait()
        self.finished = self.finished or last
        self._sent_at = self._note_sending()
        if self._watched and not last:
            await self._raw_send(message)
        else:
            await self._send_in_time(message, last=last)
        self._sending_since = None

    async def _send_in_time(self, message: Message, *, last: bool) -> None:
        # Hypercorn answers the last message with a disconnect, upon which Quart-Trio cancels the very send that
        # delivers it: shielded, or connections would be neither closed nor kept alive as they should.
        bound = self._send_timeout if self._taken is None or self._leaving else math.inf  # or the server has its own
        with trio.move_on_after(bound, shield=last) as scope:
            await self._raw_send(message)
        if scope.cancelled_caught:
            raise self._stall()

    def _note_sending(self) -> float:
        """Note that the client has something to take from now on, and return the time."""
        self._sending_since = now = trio.current_time()
        if self._taken is not None:
            self._had_taken = self._taken()
        return now

    def _has_taken(self) -> bool:
        """Whether the client has taken something since the last look, or since the present send began."""
        had_taken = self._had_taken
        if self._taken is not None:
            self._had_taken = self._taken()
        return self._had_taken > had_taken

    def _stall(self) -> ClientStalledError:
        if not self._told_of_stall:
            self._told_of_stall = True
            logger.info("client stalled", extra={"fields": {"request_id": self.request_id}})
        return ClientStalledError(f"the client took no data for {self._send_timeout:g} s")

    async def watch(self) -> None:
        """Send something in silence, and free what the request holds when a send takes too long.

        Then the request ends as well, where it can be cancelled: Hypercorn's Trio worker shields its sends without a
        bound, and a client that stops reading would hold its slot.

        One task for the whole request, and no scope for each message: a stream sends one for every token.

        Raises:
            ClientStalledError: a send took too long.
        """
        self._watched = True
        try:
            async with trio.open_nursery() as nursery:
                due = self._look(nursery)
                while True:
                    await trio.sleep_until(due)
                    due = self._look(nursery)
        finally:
            self._watched = False

    def _look(self, nursery: trio.Nursery) -> float:
        """See to what is due, and return when to look again: no send that begins meanwhile can be too long by then."""
        now = trio.current_time()
        since = now if self._sending_since is None else max(self._sending_since, self._took_at)
        if self._sending_since is not None and self._has_taken():
            self._took_at = since = now
        if since + self._send_timeout <= now:
            self.resources.close()
            raise self._stall()
        if now >= self._sent_at + self._silence:
            self._sent_at = now
            if self.ping and self.started and not self.finished:
                nursery.start_soon(self._send_ping)
        next_look = math.inf if self._taken is None else now + self._send_timeout / LOOKS
        return min(self._sent_at + self._silence, since + self._send_timeout + _LENIENCE_SECONDS, next_look)

    async def _send_ping(self) -> None:
        if self._sending_since is None and not self.finished:
            self._sending_since = since = self._note_sending()
            await self._raw_send({"type": "http.response.body", "body": self.ping, "more_body": True})
            if self._sending_since == since:  # or it is the body's own by now
                self._sending_since = None

    def note_error(self, error: TrioserveError) -> None:
        """Have an error counted that is this request's answer. What only looks at something isn't counted."""
        if self._wants_work:
            self._witness.note_error(error)

    async def refuse(self, error: TrioserveError) -> None:
        """Answer with an error, without the application."""
        self.note_error(error)
        body = self.dialect.body(error)
        await self.reply(error.status, [*error_headers(error), (b"content-length", str(len(body)).encode())], body)

    async def reply(self, status: int, headers: Iterable[Header], body: bytes = b"") -> None:
        """Answer without the application."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hear_out)
            await self.send({"type": "http.response.start", "status": status, "headers": list(headers)})
            await self.send({"type": "http.response.body", "body": body, "more_body": True})
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})
            nursery.cancel_scope.cancel()

    async def give_up(self, error: TrioserveError) -> None:
        """Tell the client how its request ended when the application can't any more, also in a cancelled task.

        One that takes nothing is not told: the server wants this task to end.
        """
        if self.finished:
            return
        self._leaving = True
        self._send_timeout = min(self._send_timeout, _FAREWELL_SECONDS)  # that of the last message stands for itself
        farewell = trio.CancelScope(shield=True, deadline=trio.current_time() + _FAREWELL_SECONDS)
        with farewell, contextlib.suppress(ClientStalledError):
            if not self.started:
                await self.refuse(error)
            else:
                body = self.tell(error) if self._is_stream else b""
                await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def _hear_out(self) -> None:
        while not self._heard_out.is_set():
            await self.receive()

    def _begin(self, message: Message) -> None:
        self.started = True
        self.origin.status = message["status"]
        self._witness.response_begun(self.origin.route, message["status"])
        headers = list(message.get("headers", []))
        fields = {name.lower(): value for name, value in headers}
        self._is_stream = b"event-stream" in fields.get(b"content-type", b"")
        if self._is_stream and b"content-length" not in fields:
            self._send_chunk = self._lent
        headers += [(b"x-request-id", self.request_id.encode()), *self._more_headers]
        if self._http1 and self._closing():
            headers.append((b"connection", b"close"))
        message["headers"] = headers


class ClientStalledError(Exception):
    """The client has stopped reading."""


def _request_id(headers: Iterable[Header]) -> str:
    """The client's own id where it gave a usable one, else a fresh one."""
    for name, value in headers:
        if name.lower() == b"x-request-id" and _ID.fullmatch(value):
            return value.decode()
    return f"req-{uuid.uuid4().hex}"
