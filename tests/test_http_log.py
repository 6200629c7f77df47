"""The lines of the log about requests: what each tells, and the trace that all lines of a request carry."""

from __future__ import annotations

import io
import json
import logging
from contextlib import ExitStack

import pytest
from http_harness import CHAT, COMPLETIONS, chat, completion, running, until

from trioserve.errors import EngineError
from trioserve.logs import configure_logging
from trioserve.origin import Origin, as_origin
from trioserve.service import GenerationRequest, TextPrompt
from trioserve.service import service as service_module
from trioserve.testing import FakeEngine

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = [("traceparent", f"00-{TRACE}-{PARENT}-01"), ("x-request-id", "mine")]
BATCH = "/v1/tasks/batch"


@pytest.fixture
def lines():
    """All events so far, as objects."""
    found = logging.getLogger("trioserve")
    before = (list(found.handlers), found.level, found.propagate)
    configure_logging("json", "info")
    stream = io.StringIO()
    (handler,) = found.handlers
    handler.setStream(stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    found.handlers[:], found.level, found.propagate = before
    found.manager._clear_cache()


def ending(lines):
    """The line of the lone request that has ended."""
    (line,) = [line for line in lines() if line["message"].startswith("request ") and "total_ms" in line]
    return line


def fields(line, *without):
    return {name: value for name, value in line.items() if name not in {"time", "level", *without}}


async def test_a_finished_request(lines):
    async with running() as server:
        await server.call(CHAT, chat("hello", stream=True), headers=TRACED)
        await server.free()
    line = ending(lines)
    assert all(line[name] >= 0 for name in ("queue_ms", "prefill_ms", "decode_ms", "total_ms"))
    assert fields(line, "queue_ms", "prefill_ms", "decode_ms", "total_ms", "prompt_tokens") == {
        "message": "request finished",
        "request_id": "mine",
        "route": CHAT,
        "status": 200,
        "model": "fake",
        "slot": 0,
        "completion_tokens": 8,
        "cached_tokens": 0,
        "finish_reason": "length",
        "trace_id": TRACE,
        "parent_id": PARENT,
    }


async def test_a_finished_batch(lines):
    async with running() as server:
        await server.call(BATCH, {"requests": [completion("a", max_tokens=2), completion("b", max_tokens=3)]})
        await server.free()
    line = ending(lines)
    assert (line["route"], line["prompts"], line["failed_prompts"]) == (BATCH, 2, 0)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (2, 5)
    assert 0 <= line["prefill_ms"] + line["decode_ms"] <= line["total_ms"]
    assert "finish_reason" not in line


async def test_a_failed_request(lines):
    engine = FakeEngine()
    engine.raising_step = 3
    async with running(engine) as server:
        reply = await server.call(COMPLETIONS, completion(), headers=TRACED)
        await server.free()
    assert reply.status == 500
    line = ending(lines)
    assert line["message"] == "request failed"
    assert (line["status"], line["error"], line["detail"]) == (500, EngineError.code, "inference failed")
    assert (line["completion_tokens"], line["slot"]) == (2, 0)
    assert line["prefill_ms"] >= 0
    assert line["decode_ms"] >= 0
    # The slot's own line, from a task that lives longer than the request, and the edge's.
    others = {line["message"]: line for line in lines() if line["level"] == "error"}
    assert others.keys() == {"slot failed", "request failed"}
    assert ["exception" in others[name] for name in ("slot failed", "request failed")] == [True, False]
    assert all((line["trace_id"], line["parent_id"]) == (TRACE, PARENT) for line in others.values())


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
async def test_a_cancelled_request(lines, phase):
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server, await server.connect() as client:
        if phase == "queued":
            (model,) = server.service.registry
            lease = await model.admit(None)
        await client.send(COMPLETIONS, completion(stream=True), headers=TRACED)
        if phase == "queued":
            await until(lambda: server.status().queued_requests == 1)
        else:
            await engine.step_gate.arrived()
        if phase == "decode":
            engine.step_gate.let(1)
            await client.head()
            await client.sse()
        await client.close("reset")
        await until(lambda: server.service.tally().cancelled == 1)
        if phase == "queued":
            lease.release()
    line = ending(lines)
    assert (line["message"], line["cancelled_in"], line["trace_id"]) == ("request cancelled", phase, TRACE)
    assert ("queue_ms" in line) == ("prefill_ms" in line) == ("slot" in line) == (phase != "queued")
    assert ("decode_ms" in line) == (phase == "decode")
    assert line.get("status") == (None if phase == "queued" else 200)


async def test_a_request_that_the_drain_cuts_off(lines, monkeypatch):
    monkeypatch.setattr(service_module, "CUT_GRACE", 0.2)
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine, drain_timeout_ms=10) as server, await server.connect() as client:
        await client.send(COMPLETIONS, completion(), headers=TRACED)
        await engine.step_gate.arrived()
        server.stop.set()
        assert (await client.reply()).status == 503
    line = ending(lines)
    assert (line["message"], line["cancelled_in"]) == ("request cancelled", "prefill")
    assert (line["status"], line["error"], line["trace_id"]) == (503, "shutting_down", TRACE)
    assert line["prefill_ms"] > 0


async def test_a_request_that_somebody_else_closes(lines, service_for):
    """At the end of a drain: what can't be told its end any more is closed from the drain's own task."""
    trace = {"trace_id": TRACE, "parent_id": PARENT}
    async with service_for() as service:
        with ExitStack() as resources:
            with as_origin(Origin("mine", CHAT, trace=trace)):
                await service.start(GenerationRequest(TextPrompt("x"), request_id="mine"), resources)
            await service.close()
            line = ending(lines)
    assert (line["message"], line["request_id"]) == ("request cancelled", "mine")
    assert (line["trace_id"], line["parent_id"]) == (TRACE, PARENT)


async def test_a_rejected_request(lines):
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server, await server.connect() as busy:
        await busy.send(COMPLETIONS, completion(stream=True))
        await engine.step_gate.arrived()
        await server.call(CHAT, chat(busy_timeout_ms=0), headers=TRACED)
        await until(lambda: server.service.tally().rejected == 1)
        line = ending(lines)
        engine.step_gate.open()
    assert (line["message"], line["route"], line["status"]) == ("request rejected", CHAT, 503)
    assert (line["error"], line["request_id"], line["trace_id"]) == ("server_busy", "mine", TRACE)
    assert "busy_timeout_ms is 0" in line["detail"]
    assert not line.keys() & {"slot", "queue_ms", "prefill_ms", "decode_ms"}


@pytest.mark.parametrize(
    ("body", "status", "end"), [({"id": "fake"}, 200, "finished"), ({"id": "fake", "slots": 17}, 400, None)]
)
async def test_an_operation(lines, body, status, end):
    async with running(management=True) as server:
        assert (await server.call("/v1/models/load", body, headers=TRACED)).status == status
    if end is None:
        assert not [line for line in lines() if "operation" in line]
        return
    line = ending(lines)
    assert (line["message"], line["operation"], line["model"]) == (f"request {end}", "load", "fake")
    assert (line["request_id"], line["status"], line["trace_id"]) == ("mine", status, TRACE)


async def test_an_operation_that_fails(lines):
    engine = FakeEngine()
    async with running(engine, management=True, models=[{"lazy": True}]) as server:
        engine.failing_loads = 1
        assert (await server.call("/v1/models/load", {"id": "fake"})).status == 503
    line = ending(lines)
    assert (line["message"], line["status"], line["error"]) == ("request failed", 503, "model_load_failed")


@pytest.mark.parametrize("path", ["/health", "/nowhere", "/v1/models", "/metrics"])
async def test_calls_that_ask_no_model_have_no_line(lines, path):
    async with running() as server:
        await server.call(path)
        await server.call(path, b"{", method="POST")
        assert [line["message"] for line in lines() if "request" in line["message"]] == []


@pytest.mark.parametrize(
    "value", [f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE.upper()}-{PARENT}-01", "", "\x7f"]
)
async def test_an_invalid_trace_is_ignored(lines, value):
    async with running() as server:
        assert (await server.call(CHAT, chat(), headers=[("traceparent", value)])).status == 200
        await server.free()
    line = ending(lines)
    assert line["message"] == "request finished"
    assert not line.keys() & {"trace_id", "parent_id"}


async def test_a_trace_stays_with_its_request(lines):
    async with running() as server, await server.connect() as client:
        await client.call(CHAT, chat(), headers=TRACED)
        await client.call(CHAT, chat(), headers=[("x-request-id", "other")])
        await server.free()
    traces = {line["request_id"]: line.get("trace_id") for line in lines() if "total_ms" in line}
    assert traces == {"mine": TRACE, "other": None}
    assert [line["message"] for line in lines() if "trace_id" in line] == ["request finished"]
