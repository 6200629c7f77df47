"""A decode that does not come back: what its client hears, what others see, and how the server gets over it."""

from __future__ import annotations

import contextlib
import json

import pytest
import trio
from http_harness import COMPLETIONS, assert_error, assert_error_object, completion, expected, running, until

from trioserve.errors import ServerBusyError
from trioserve.http.schemas.responses import Health, ModelList, SlotList
from trioserve.testing import FakeEngine, ThreadGate

STALL_MS = 100
QUICK = 2  # seconds; only a hang meets it


@contextlib.asynccontextmanager
async def wedged(models=({"slots": 1},), **settings):
    """A server whose steps don't come back, with as many of them under way as the first model has slots."""
    engine = FakeEngine()
    engine.deaf = True
    async with running(engine, models=models, stall_timeout_ms=STALL_MS, **settings) as server:
        engine.step_gate.shut()
        yield server


async def stalled(server, count=1):
    await until(lambda: len(server.status().ailments) == count)


@pytest.mark.parametrize("tokens", [0, 2])
async def test_the_client_of_a_stalled_slot_gets_an_error(tokens):
    async with wedged() as server, await server.connect() as client:
        server.engine.step_gate.let(tokens)
        assert_error(await client.call(COMPLETIONS, completion()), 500, "internal_error", code="internal_error")
        await until(lambda: server.service.tally().failed == 1)
        server.engine.step_gate.open()


async def test_a_stream_from_a_stalled_slot_ends_with_an_error():
    async with wedged() as server, await server.connect() as client:
        server.engine.step_gate.let(2)
        await client.send(COMPLETIONS, completion(stream=True))
        *chunks, last = (await client.reply()).events
        assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == expected()[:2]
        error = json.loads(last)["error"]
        assert_error_object(error, "internal_error")
        assert "doesn't answer" in error["message"]
        server.engine.step_gate.open()


async def test_status_and_readiness_tell_of_a_stall_and_of_its_end():
    async with wedged([{"slots": 2}]) as server, trio.open_nursery() as nursery:
        for number in range(2):
            nursery.start_soon(server.call, COMPLETIONS, completion())
            await server.engine.step_gate.arrived(number + 1)
            if number == 0:
                await stalled(server)
                assert (await server.call("/health/ready")).status == 200, "the other slot can serve"
        await stalled(server, 2)
        with trio.fail_after(QUICK):
            ready, health, live, models, slots = [
                await server.call(path)
                for path in ("/health/ready", "/health", "/health/live", "/v1/models", "/v1/slots")
            ]
        assert (ready.status, ready.json) == (503, {"status": "stalled", "models": ["fake"]})
        assert (health.status, health.json) == (ready.status, ready.json)
        assert live.status == 200
        assert (models.json["data"][0]["stalled_slots"], models.json["data"][0]["active_slots"]) == (2, 2)
        assert [slot["state"] for slot in slots.json["data"]] == ["stalled"] * 2
        for reply, schema in ((ready, Health), (models, ModelList), (slots, SlotList)):
            schema.model_validate(reply.json)
        assert b'trioserve_slots_stalled{model="fake"} 2' in (await server.call("/metrics")).body
        server.engine.step_gate.open()
        await server.free()
        assert (await server.call("/health/ready")).json == {"status": "ok"}
        assert [slot["state"] for slot in (await server.call("/v1/slots")).json["data"]] == ["idle"] * 2
        assert (await server.call(COMPLETIONS, completion())).text == expected()


async def test_newcomers_and_those_who_wait_are_turned_away():
    async with wedged() as server, trio.open_nursery() as nursery, await server.connect() as waiting:
        nursery.start_soon(server.call, COMPLETIONS, completion())
        await server.engine.step_gate.arrived()
        await waiting.send(COMPLETIONS, completion())
        await until(lambda: server.status().queued_requests == 1)
        for reply in (await waiting.reply(), await server.call(COMPLETIONS, completion())):
            assert "stalled" in assert_error(reply, 503, "server_busy", code="server_busy")["message"]
        server.engine.step_gate.open()


async def test_other_models_go_on(monkeypatch):
    async with wedged([{"id": "stuck"}, {"id": "well"}]) as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.call, COMPLETIONS, completion(model="stuck"))
        await server.engine.step_gate.arrived()
        await stalled(server)
        with monkeypatch.context() as patch:
            patch.setattr(server.engine, "step_gate", ThreadGate())
            assert (await server.call(COMPLETIONS, completion(model="well"))).text == expected()
        assert server.status().out_of_order
        server.engine.step_gate.open()


async def test_lazy_models_that_stall_leave_the_server_ready():
    async with wedged([{"lazy": True}]) as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.call, COMPLETIONS, completion())
        await server.engine.step_gate.arrived()
        await stalled(server)
        assert (await server.call("/health/ready")).status == 200
        server.engine.step_gate.open()


async def test_a_stalled_model_is_not_unloaded_and_says_so_at_once():
    async with wedged(management=True) as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.call, COMPLETIONS, completion())
        await server.engine.step_gate.arrived()
        await stalled(server)
        with trio.fail_after(QUICK), pytest.raises(ServerBusyError, match="stalled"):
            await server.service.management.unload("fake")
        server.engine.step_gate.open()
