"""Clients that leave: in each phase of a request, in each way, beside a neighbour whose answer must not suffer."""

from __future__ import annotations

import contextlib
import json

import pytest
import trio
from http_harness import (
    COMPLETIONS,
    SAFETY,
    H2Client,
    Server,
    completion,
    expected,
    running,
    until,
)

from trioserve.service.ledger import Tally
from trioserve.testing import FakeEngine

PROMPTS = {"leaving": "Twice", "staying": "Once"}
HOW = pytest.mark.parametrize("how", ["fin", "reset", "half"])
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


class Scene:
    """A client about to leave, in a known phase, and one that stays."""

    def __init__(self, server, leaving, staying):
        self.server = server
        self.engine = server.engine
        self.leaving = leaving
        self.staying = staying

    async def begin(self, name, *, stream):
        client = getattr(self, name)
        await client.send(COMPLETIONS, completion(PROMPTS[name], stream=stream))

    async def leave(self, how):
        """Leave, and see that nothing is left of the request while the neighbour is still at work."""
        await self.leaving.close(how)
        await until(lambda: self.server.service.tally().cancelled == 1)
        await until(lambda: self.server.status().queued_requests == 0 and self.server.status().active_slots == 1)
        assert self.server.service.tally() == Tally(active=1, finished=0, failed=0, cancelled=1, rejected=0)

    async def finish(self):
        """Let everybody go on; the neighbour's answer is whole, and all slots are free."""
        self.engine.load_gate.open()
        self.engine.step_gate.open()
        reply = await self.staying.reply()
        assert reply.text == expected(PROMPTS["staying"])
        await self.server.free()
        assert self.server.service.tally() == Tally(active=0, finished=1, failed=0, cancelled=1, rejected=0)
        assert (await self.server.call(COMPLETIONS, completion())).text == expected()


@contextlib.asynccontextmanager
async def scene(*, slots=2, load=True):
    engine = FakeEngine()
    engine.step_gate.shut()
    if not load:
        engine.load_gate.shut()
    async with (
        running(engine, models=[{"slots": slots, "lazy": not load}]) as server,
        await server.connect() as leaving,
        await server.connect() as staying,
    ):
        yield Scene(server, leaving, staying)


@HOW
@STREAM
async def test_leaving_the_queue(how, stream):
    async with scene(slots=1) as at:
        await at.begin("staying", stream=stream)
        await at.engine.step_gate.arrived()
        await at.begin("leaving", stream=stream)
        await until(lambda: at.server.status().queued_requests == 1)
        await at.leave(how)
        await at.finish()


@HOW
@STREAM
async def test_leaving_while_the_model_loads(how, stream):
    async with scene(load=False) as at:
        await at.begin("leaving", stream=stream)
        await at.engine.load_gate.arrived()
        await at.begin("staying", stream=stream)
        await until(lambda: at.server.status().active_slots == 2)
        await at.leave(how)
        assert at.server.status().state == "loading"
        await at.finish()
        assert at.engine.loads == 1


@HOW
@STREAM
async def test_a_load_that_nobody_waits_for_any_more_is_kept(how, stream):
    async with scene(load=False) as at:
        await at.begin("leaving", stream=stream)
        await at.engine.load_gate.arrived()
        await at.leaving.close(how)
        await at.server.free()
        at.engine.load_gate.open()
        await until(lambda: at.server.status().loaded)
        await at.begin("staying", stream=stream)
        await at.finish()
        assert at.engine.loads == 1


@HOW
@STREAM
async def test_leaving_before_the_first_token(how, stream):
    async with scene() as at:
        await at.begin("leaving", stream=stream)
        await at.begin("staying", stream=stream)
        await at.engine.step_gate.arrived(2)
        await at.leave(how)
        await at.finish()


@HOW
async def test_leaving_after_the_headers(how):
    async with scene() as at:
        await at.begin("leaving", stream=True)
        assert (await at.leaving.head()).status == 200
        await at.begin("staying", stream=True)
        await at.engine.step_gate.arrived(2)
        await at.leave(how)
        await at.finish()


@HOW
@STREAM
async def test_leaving_in_the_middle_of_the_answer(how, stream):
    async with scene() as at:
        await at.begin("leaving", stream=stream)
        at.engine.step_gate.let(3)
        await at.engine.step_gate.arrived(4)
        if stream:
            await at.leaving.head()
            letters = [json.loads(await at.leaving.sse())["choices"][0]["text"] for _ in range(3)]
            assert "".join(letters) == expected(PROMPTS["leaving"])[:3]
        await at.begin("staying", stream=stream)
        await at.engine.step_gate.arrived(5)
        await at.leave(how)
        await at.finish()


@HOW
async def test_leaving_in_the_middle_of_the_body(how):
    async with scene() as at:
        half = b'{"prompt": "Tw'
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-length: {2 * len(half)}\r\n\r\n".encode()
        await at.leaving.stream.send_all(head + half)
        await until(lambda: at.server.calls == 1)
        await at.leaving.close(how)
        await until(lambda: at.server.calls == 0)
        assert at.server.service.tally().accepted == 0


async def test_five_that_left_the_queue_are_never_generated():
    async with scene(slots=1) as at:
        await at.begin("staying", stream=False)
        await at.engine.step_gate.arrived()
        clients = [await at.server.connect() for _ in range(5)]
        for client in clients:
            await client.send(COMPLETIONS, completion())
        await until(lambda: at.server.status().queued_requests == 5)
        for client in clients:
            await client.close()
        await until(lambda: at.server.status().queued_requests == 0)
        at.engine.step_gate.let(8)
        assert (await at.staying.reply()).text == expected()
        await at.server.free()
        # All eight permits went to the one that stayed: a ninth step, of anybody, would wait at the gate.
        assert at.server.service.tally() == Tally(active=0, finished=1, failed=0, cancelled=5, rejected=0)


async def test_a_client_that_leaves_the_head_of_the_queue_lets_the_next_one_move_up():
    async with scene(slots=1) as at, await at.server.connect() as third:
        await at.begin("staying", stream=False)
        await at.engine.step_gate.arrived()
        await at.begin("leaving", stream=False)
        await until(lambda: at.server.status().queued_requests == 1)
        await third.send(COMPLETIONS, completion("Thrice"))
        await until(lambda: at.server.status().queued_requests == 2)
        await at.leaving.close()
        await until(lambda: at.server.status().queued_requests == 1)
        at.engine.step_gate.open()
        assert (await at.staying.reply()).text == expected()
        assert (await third.reply()).text == expected("Thrice")


async def test_fifty_streams_in_a_row_interleaved_with_disconnects():
    async with running(models=[{"slots": 2}]) as server:

        async def whole():
            reply = await server.call(COMPLETIONS, completion(stream=True, max_tokens=40))
            assert reply.text == expected(tokens=40)

        async def abandoned(how):
            async with await server.connect() as client:
                await client.send(COMPLETIONS, completion(stream=True, max_tokens=4000))
                await client.head()
                await client.sse()
                await client.close(how)

        async def client(first):
            for number in range(first, 50, 2):
                if number % 4 < 2:
                    await whole()
                else:
                    await abandoned(["fin", "reset"][number % 3 == 0])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(client, 0)
            nursery.start_soon(client, 1)
        await server.free()
        tally = server.service.tally()
        assert tally.accepted == 50
        assert tally.failed == tally.rejected == 0
        assert tally.finished >= 25
        await whole()


# Exactly between two steps of the stack


def scope_of(path=COMPLETIONS):
    headers = [(b"host", b"a"), (b"content-type", b"application/json")]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {},
        "extensions": {},
    }


@contextlib.asynccontextmanager
async def driven(server: Server, body, *, hold):
    """Call the application without a server: it is held in the sending of one kind of message until it is cancelled.

    Arguments:
        server: whose application.
        body: of the request.
        hold: tells of a message whether its sending is held.
    """
    held, gone = trio.Event(), trio.Event()
    sent = []
    incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive():
        if incoming:
            return incoming.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if hold(message):
            held.set()
            await trio.sleep_forever()
        sent.append(message)

    with trio.fail_after(SAFETY):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.app, scope_of(), receive, send)
            await held.wait()
            yield sent, gone


@STREAM
async def test_leaving_between_the_handlers_return_and_the_body(stream):
    """Quart then never enters the body, so nothing may hang on that for its release."""
    engine = FakeEngine()
    if stream:
        engine.step_gate.shut()
    async with running(engine) as server:
        is_start = {"type": "http.response.start"}
        async with driven(server, completion(stream=stream), hold=lambda m: m["type"] == is_start["type"]) as (
            sent,
            gone,
        ):
            assert server.status().active_slots == 1
            gone.set()
        assert sent == []
        await server.free()
        tally = server.service.tally()
        assert (tally.cancelled, tally.finished) == ((1, 0) if stream else (0, 1))
        engine.step_gate.open()
        assert (await server.call(COMPLETIONS, completion())).text == expected()


async def test_leaving_while_a_chunk_is_being_sent():
    engine = FakeEngine()
    engine.step_gate.shut()
    engine.step_gate.let(2)
    async with running(engine) as server:
        async with driven(server, completion(stream=True), hold=lambda m: bool(m.get("body"))) as (sent, gone):
            assert [message["type"] for message in sent] == ["http.response.start"]
            gone.set()
        await server.free()
        assert server.service.tally().cancelled == 1


async def test_a_server_that_cancels_a_request_lets_it_say_so():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server:
        sent = []

        async def receive():
            if not sent and engine.loads and not received:
                received.append(1)
                return {"type": "http.request", "body": json.dumps(completion()).encode(), "more_body": False}
            return await trio.sleep_forever()

        async def send(message):
            sent.append(message)

        received = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.app, scope_of(), receive, send)
            await engine.step_gate.arrived()
            nursery.cancel_scope.cancel()
        assert sent[0]["status"] == 503
        body = b"".join(message.get("body", b"") for message in sent)
        assert json.loads(body)["error"]["code"] == "shutting_down"
        await server.free()


async def test_a_server_that_cancels_a_request_does_not_wait_for_a_client_that_takes_no_farewell():
    """Under a server whose sends can be cancelled the last message has a bound of its own, and a shorter one here."""
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server:  # with a send timeout of half a minute
        farewells, begun = [], trio.Event()
        incoming = [{"type": "http.request", "body": json.dumps(completion(stream=True)).encode()}]

        async def receive():
            return incoming.pop() if incoming else await trio.sleep_forever()

        async def send(message):
            begun.set()
            if not message.get("more_body", True):
                farewells.append(message["body"])
                await trio.sleep_forever()

        with trio.fail_after(SAFETY / 2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.app, scope_of(), receive, send)
                await begun.wait()
                await engine.step_gate.arrived()
                nursery.cancel_scope.cancel()
        assert len(farewells) == 1
        assert b"shutting_down" in farewells[0]
        await server.free()


# HTTP/2


async def test_a_reset_stream_is_cancelled_and_its_neighbours_are_not():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine, models=[{"slots": 3}]) as server, await H2Client.open(server.port) as client:
        numbers = [await client.send(COMPLETIONS, completion(str(n), stream=n < 2)) for n in range(3)]
        await engine.step_gate.arrived(3)
        await client.reset(numbers[1])
        await until(lambda: server.service.tally().cancelled == 1)
        await until(lambda: server.status().active_slots == 2)
        engine.step_gate.open()
        for n in (0, 2):
            assert (await client.reply(numbers[n])).text == expected(str(n))
        await server.free()
        assert server.service.tally() == Tally(active=0, finished=2, failed=0, cancelled=1, rejected=0)
        again = await client.send(COMPLETIONS, completion("again"))
        assert (await client.reply(again)).text == expected("again")


async def test_a_closed_connection_cancels_all_its_streams():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine, models=[{"slots": 2}]) as server:
        async with await H2Client.open(server.port) as client:
            for n in range(4):
                await client.send(COMPLETIONS, completion(str(n), stream=n % 2 == 0))
            await until(lambda: (server.status().active_slots, server.status().queued_requests) == (2, 2))
        await server.free()
        assert server.service.tally().cancelled == 4


async def test_fifty_streams_of_one_connection_interleaved_with_resets():
    async with running(models=[{"slots": 2}]) as server, await H2Client.open(server.port) as client:
        for n in range(50):
            number = await client.send(COMPLETIONS, completion(stream=True, max_tokens=4000 if n % 2 else 20))
            if n % 2:
                while number not in client.replies:
                    await client.pump()
                await client.reset(number)
            else:
                assert (await client.reply(number)).text == expected(tokens=20)
        await server.free()
        tally = server.service.tally()
        assert tally.accepted == 50
        assert tally.failed == tally.rejected == 0
        assert tally.finished >= 25
