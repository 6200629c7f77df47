"""The management routes over a real socket, while requests keep coming."""

from __future__ import annotations

import pytest
import trio
from http_harness import CHAT, COMPLETIONS, assert_error, chat, completion, expected, running, until

from trioserve.scheduling.lifecycle import ModelState
from trioserve.testing import FakeEngine

LOAD, UNLOAD = "/v1/models/load", "/v1/models/unload"
UNLOAD_MODELS, UNLOAD_ALL = "/v1/tasks/unload_models", "/v1/tasks/unload_all_models"
BODIES = {LOAD: {"id": "fake"}, UNLOAD: {"id": "fake"}, UNLOAD_MODELS: {"model_ids": ["fake"]}, UNLOAD_ALL: {}}
EACH = pytest.mark.parametrize("route", BODIES)


def managed(engine=None, **settings):
    return running(engine, management=True, **settings)


async def states(server):
    return {one["id"]: one["state"] for one in (await server.call("/v1/models")).json["data"]}


# Off


@EACH
@pytest.mark.parametrize("body", [None, b"no JSON", {"id": "nobody"}])
async def test_nothing_is_done_where_management_is_off(route, body):
    async with running() as server:
        reply = await server.call(route, body, method="POST")
        assert_error(reply, 403, "management_disabled", code="management_disabled")
        assert await states(server) == {"fake": "ready"}
        assert server.engine.closed == []


@EACH
async def test_the_routes_take_posts_only(route):
    async with managed() as server:
        reply = await server.call(route)
        if route in {LOAD, UNLOAD}:  # to look at, these are models' names
            assert_error(reply, 404, "model_not_found")
        else:
            assert_error(reply, 405, "invalid_request_error", code="method_not_allowed")


# Answers


async def test_a_load_answers_with_the_models_state():
    async with managed() as server:
        reply = await server.call(LOAD, {"id": "fake", "slots": 3, "n_ctx": 64})
        assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
        assert reply.json == {"id": "fake", "state": "ready", "loaded": True, "slots": 3}
        (model,) = (await server.call("/v1/models")).json["data"]
        assert (model["slots"], model["n_ctx"]) == (3, 64)
        assert len((await server.call("/v1/slots")).json["data"]) == 3


async def test_a_second_model_of_a_file_answers():
    async with managed() as server:
        path = str(server.config.models[0].path)
        assert (await server.call(LOAD, {"id": "a/b: é", "path": path})).json["id"] == "a/b: é"
        reply = await server.call(COMPLETIONS, completion(model="a/b: é"))
        assert (reply.json["model"], reply.text) == ("a/b: é", expected())
        assert_error(await server.call(COMPLETIONS, completion()), 400, "invalid_request_error", param="model")
        assert await states(server) == {"fake": "ready", "a/b: é": "ready"}


async def test_an_unload_answers_with_the_models_state_and_is_idempotent():
    async with managed() as server:
        for _ in range(2):
            reply = await server.call(UNLOAD, {"id": "fake"})
            assert (reply.status, reply.json) == (
                200,
                {"id": "fake", "state": "unloaded", "loaded": False, "slots": 1},
            )
        assert (await server.call(COMPLETIONS, completion())).text == expected()


async def test_bulk_unloads_tell_what_is_unloaded():
    async with managed(models=[{"id": "a"}, {"id": "b", "lazy": True}]) as server:
        reply = await server.call(UNLOAD_MODELS, {"model_ids": ["b", "no", "b"]})
        assert (reply.status, reply.json) == (200, {"unloaded": ["b"], "not_found": ["no"]})
        reply = await server.call(UNLOAD_ALL, None, method="POST")
        assert (reply.status, reply.json) == (200, {"unloaded": ["a", "b"]})
        assert await states(server) == {"a": "unloaded", "b": "unloaded"}


# Refusals


@pytest.mark.parametrize(
    ("route", "body", "param", "said"),
    [
        (LOAD, {"id": "fake", "slots": 17}, "slots", "slots: 17 is not an integer 1..16"),
        (LOAD, {"id": "fake", "slot": 2}, "slot", "unknown setting 'slot'; did you mean slots?"),
        (LOAD, {"id": "new"}, "path", "path: is required"),
        (LOAD, {"path": "/etc/passwd"}, "path", "model_roots"),
        (LOAD, {"id": "fake", "chat_template": "@/etc/passwd"}, "chat_template", "configuration only"),
        (UNLOAD, {}, "id", "id: is required"),
        (UNLOAD, {"id": ""}, "id", "1 or more characters"),
        (UNLOAD, {"id": "x" * 257}, "id", "256 characters or fewer"),
        (UNLOAD, {"id": 5}, "id", "id: must be a string"),
        (UNLOAD, {"id": "fake", "busy_timeout_ms": -1}, "busy_timeout_ms", "must be 0 or more"),
        (UNLOAD, {"id": "fake", "busy_timeout_ms": "1"}, "busy_timeout_ms", "must be an integer"),
        (UNLOAD_MODELS, {}, "model_ids", "is required"),
        (UNLOAD_MODELS, {"model_ids": []}, "model_ids", "1 or more items"),
        (UNLOAD_MODELS, {"model_ids": ["x"] * 4097}, "model_ids", "4096 items or fewer"),
        (UNLOAD_MODELS, {"model_ids": "fake"}, "model_ids", "must be a list"),
        (UNLOAD_MODELS, {"model_ids": ["fake", 5]}, "model_ids[1]", "must be a string"),
        (UNLOAD_ALL, {"busy_timeout_ms": 2**31}, "busy_timeout_ms", "must be less than 2147483648"),
    ],
)
async def test_wrong_bodies_are_refused_and_nothing_is_done(route, body, param, said):
    async with managed() as server:
        error = assert_error(await server.call(route, body), 400, "invalid_request_error", param=param)
        assert said in error["message"]
        assert await states(server) == {"fake": "ready"}
        assert server.engine.closed == []


@EACH
@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff"])
async def test_bodies_that_are_no_objects_are_refused(route, body):
    async with managed() as server:
        assert_error(await server.call(route, body), 400, "invalid_request_error")
        assert server.engine.closed == []


@pytest.mark.parametrize("route", [LOAD, UNLOAD, UNLOAD_MODELS])
async def test_a_body_is_needed_where_something_has_to_be_named(route):
    async with managed() as server:
        assert_error(await server.call(route, None, method="POST"), 400, "invalid_request_error")


@EACH
async def test_bodies_of_another_type_are_refused(route):
    async with managed() as server:
        reply = await server.call(route, b"a=b", headers=[("content-type", "application/x-www-form-urlencoded")])
        assert_error(reply, 415, "invalid_request_error", code="unsupported_media_type")


async def test_an_unknown_id_is_a_404():
    async with managed() as server:
        assert_error(await server.call(UNLOAD, {"id": "no"}), 404, "model_not_found", param="id")


async def test_a_file_that_is_refused_is_a_400_and_one_that_fails_to_load_a_503():
    async with managed(FakeEngine()) as server:
        path = str(server.config.models[0].path)
        server.engine.refused = "fake.gguf"
        reply = await server.call(LOAD, {"id": "new", "path": path})
        assert_error(reply, 400, "invalid_request_error", code="invalid_model", param="path")
        server.engine.refused, server.engine.failing_loads = None, 1
        reply = await server.call(LOAD, {"id": "new", "path": path, "mlock": True})
        assert_error(reply, 503, "model_load_failed", code="model_load_failed")
        assert await states(server) == {"fake": "ready", "new": "unloaded"}


@EACH
async def test_a_busy_model_is_a_503_where_the_call_may_not_wait(route):
    engine = FakeEngine()
    engine.step_gate.shut()
    async with managed(engine) as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.call, COMPLETIONS, completion())
        await engine.step_gate.arrived()
        body = {**BODIES[route], "busy_timeout_ms": 0}
        assert_error(await server.call(route, body), 503, "server_busy", code="server_busy")
        assert server.status().queued_requests == 0
        engine.step_gate.open()


async def test_too_many_busy_models_are_a_503():
    engine = FakeEngine()
    engine.step_gate.shut()
    models = [{"id": "a"}, {"id": "b", "lazy": True}]
    async with managed(engine, models=models, max_loaded_models=1) as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.call, COMPLETIONS, completion(model="a"))
        await engine.step_gate.arrived()
        for path, body in ((LOAD, {"id": "b"}), (COMPLETIONS, completion(model="b")), (CHAT, chat(model="b"))):
            error = assert_error(await server.call(path, body), 503, "server_busy")
            assert "max_loaded_models" in error["message"]
        engine.step_gate.open()


async def test_too_little_memory_is_a_503():
    async with managed(models=[{"lazy": True}], min_free_memory_mb=2**31 - 1) as server:
        for path, body in ((LOAD, {"id": "fake"}), (COMPLETIONS, completion()), (COMPLETIONS, completion(stream=True))):
            assert_error(await server.call(path, body), 503, "insufficient_memory", code="insufficient_memory")
        assert server.engine.loads == 0


@EACH
async def test_a_draining_server_changes_nothing(route):
    engine = FakeEngine()
    engine.step_gate.shut()
    async with managed(engine) as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.call, COMPLETIONS, completion())
        await engine.step_gate.arrived()
        server.stop.set()
        await until(lambda: server.service.phase.value == "draining")
        assert_error(await server.call(route, BODIES[route]), 503, "shutting_down", code="shutting_down")
        engine.step_gate.open()


# While requests keep coming


async def test_a_client_that_leaves_takes_its_operation_with_it():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with managed(engine, models=[{"slots": 2}]) as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.call, COMPLETIONS, completion())
        await engine.step_gate.arrived()
        client = await server.connect()
        await client.send(UNLOAD, {"id": "fake"})
        model = server.service.registry.get("fake")
        await until(lambda: model._gate.statistics().waiting_managers == 1)
        nursery.start_soon(server.call, COMPLETIONS, completion())
        await until(lambda: server.status().queued_requests == 1)
        await client.close("reset")
        await until(lambda: server.status().active_slots == 2)
        assert server.status().queued_requests == 0
        engine.step_gate.open()
    assert engine.loads == 1


async def test_a_stream_ends_whole_before_its_model_is_unloaded():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with managed(engine) as server, trio.open_nursery() as nursery:
        client = await server.connect()
        await client.send(COMPLETIONS, completion(stream=True))
        await engine.step_gate.arrived()
        unloads = []

        async def unload():
            unloads.append(await server.call(UNLOAD, {"id": "fake"}))

        nursery.start_soon(unload)
        model = server.service.registry.get("fake")
        await until(lambda: model._gate.statistics().waiting_managers == 1)
        assert server.status().state is ModelState.READY
        engine.step_gate.open()
        reply = await client.reply()
        assert reply.text == expected()
        await until(lambda: unloads)
        assert unloads[0].json["state"] == "unloaded"


async def test_answers_stay_whole_while_everything_changes():
    async with managed(models=[{"id": "a", "slots": 2}, {"id": "b", "lazy": True}]) as server:
        changes = [
            (LOAD, {"id": "a", "slots": 1}),
            (UNLOAD, {"id": "b"}),
            (LOAD, {"id": "a", "slots": 4, "n_ctx": 128}),
            (UNLOAD_MODELS, {"model_ids": ["b", "a"]}),
            (LOAD, {"id": "b", "slots": 2}),
            (UNLOAD_ALL, {}),
        ]
        going = True
        answered = 0

        async def client(number):
            nonlocal answered
            while going:
                stream = bool(number % 2)
                reply = await server.call(COMPLETIONS, completion(model="ab"[number % 3 == 0], stream=stream))
                assert (reply.status, reply.text) == (200, expected())
                answered += 1

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(client, number)
            for route, body in changes * 5:
                before = answered
                assert (await server.call(route, body)).status == 200
                await until(lambda before=before: answered > before)
            going = False
        await server.free()
    closed = server.engine.closed
    assert closed.count("fake") == server.engine.loads, "all weights are freed in the end"


async def test_a_new_model_does_not_make_the_server_unready():
    engine = FakeEngine()
    async with managed(engine) as server, trio.open_nursery() as nursery:
        engine.load_gate.shut()
        engine.failing_loads = 1
        body = {"id": "new", "path": str(server.config.models[0].path), "mlock": True}
        nursery.start_soon(server.call, LOAD, body)
        await engine.load_gate.arrived(2)
        assert (await server.call("/health/ready")).status == 200
        engine.load_gate.open()
        await until(lambda: server.status(1).state is ModelState.UNLOADED)
        assert (await server.call("/health/ready")).status == 200


async def test_a_load_never_holds_up_the_status_pages():
    engine = FakeEngine()
    async with managed(engine) as server, trio.open_nursery() as nursery:
        engine.session_gate.shut()
        nursery.start_soon(server.call, LOAD, {"id": "fake", "n_ctx": 64})
        await engine.session_gate.arrived(2)
        assert await states(server) == {"fake": "ready"}
        assert (await server.call(COMPLETIONS, completion())).text == expected()
        engine.session_gate.let()
        await engine.session_gate.arrived(3)
        assert await states(server) == {"fake": "loading"}
        assert (await server.call("/health/ready")).status == 200
        engine.session_gate.open()
