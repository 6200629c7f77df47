"""Worker threads by purpose: who has none left keeps nobody else waiting, and the server needs nobody else's."""

from __future__ import annotations

import contextlib
import threading

import pytest
import trio
from http_harness import COMPLETIONS, completion, expected, running, until, write_gguf
from test_http_fuzz import BODIES

from trioserve.http import body, embeddings, text
from trioserve.http.operation import Operation
from trioserve.service import prepare
from trioserve.testing import FakeEngine
from trioserve.workers import Workers

STATUS = ("/health/live", "/health/ready", "/health", "/v1/models", "/v1/models/fake", "/v1/slots", "/metrics")
LOAD, UNLOAD, TOKENIZE = "/v1/models/load", "/v1/models/unload", "/tokenize"


@contextlib.contextmanager
def none_left():
    """Take all of the threads that Trio has for everybody."""
    limiter = trio.to_thread.current_default_thread_limiter()
    takers = [object() for _ in range(int(limiter.total_tokens))]
    for taker in takers:
        limiter.acquire_on_behalf_of_nowait(taker)
    try:
        yield
    finally:
        for taker in takers:
            limiter.release_on_behalf_of(taker)


async def test_as_many_as_there_are_work_at_a_time():
    workers, gate, at_work = Workers("test", 2), threading.Event(), []

    def work(number):
        at_work.append(number)
        assert gate.wait(30)
        return number

    done = []

    async def ask(number):
        done.append(await workers.run(work, number))

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(ask, number)
        await until(lambda: len(at_work) >= 2)
        await trio.testing.wait_all_tasks_blocked()
        together = len(at_work)
        gate.set()
    assert together == 2
    assert sorted(done) == [0, 1, 2]


def test_each_run_has_its_own():
    workers = Workers("test", 1)
    assert [trio.run(workers.run, str, number) for number in (1, 2)] == ["1", "2"]


async def test_purposes_do_not_wait_for_each_other():
    one, other, gate = Workers("one", 1), Workers("other", 1), threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run, gate.wait, 30)
        with trio.fail_after(20):
            await other.run(gate.set)


async def test_no_route_needs_a_thread_that_everybody_may_take(monkeypatch):
    """Each way to a thread is taken: nothing is small enough for the event loop."""
    monkeypatch.setattr(body, "_INLINE_BYTES", 0)
    monkeypatch.setattr(text, "_INLINE_TOKENS", 1)
    monkeypatch.setattr(embeddings, "_INLINE_NUMBERS", 0)
    monkeypatch.setattr(prepare, "_is_short", lambda request: False)
    models = [{"id": "fake", "lazy": True}, {"id": "vectors", "lazy": True, "task": "embed"}]
    async with running(models=models, management=True) as server:
        app = server.app._app
        described = [rule.rule for rule in app.url_map.iter_rules() if Operation.of(app.view_functions[rule.endpoint])]
        assert {path.replace("<model_id:model_id>", "fake") for path in described} == {
            *BODIES,
            *STATUS,
            "/openapi.json",
        }
        with none_left():
            for path in (*STATUS, "/openapi.json"):
                assert (await server.call(path)).status == 200, path
            for path, (_, fields) in BODIES.items():
                named = "id" in fields or "model_ids" in fields or not fields
                model = "vectors" if path == "/v1/embeddings" else "fake"
                reply = await server.call(path, fields if named else {**fields, "model": model})
                assert reply.status == 200, (path, reply)


@pytest.mark.parametrize("how", ["first request", "management"])
async def test_sixteen_busy_slots_keep_no_load_no_status_and_no_text_waiting(how, tmp_path):
    engine = FakeEngine()
    engine.step_gate.shut()
    models = [{"id": "busy", "slots": 16}, {"id": "other", "lazy": True, "path": write_gguf(tmp_path, "other")}]
    async with running(engine, models=models, management=True, model_roots=(tmp_path,)) as server:
        clients = [await server.connect() for _ in range(16)]
        for number, client in enumerate(clients):
            await client.send(COMPLETIONS, completion(str(number), model="busy"))
        await engine.step_gate.arrived(16)
        with none_left():
            status = (await server.call("/v1/models")).json["data"]
            assert [one["active_slots"] for one in status] == [16, 0]
            assert (await server.call(TOKENIZE, {"content": "Once", "model": "busy"})).json["tokens"]
            if how == "management":
                assert (await server.call(LOAD, {"id": "other", "slots": 2})).json["state"] == "ready"
                assert (await server.call(UNLOAD, {"id": "other"})).json["state"] == "unloaded"
            else:
                assert (await server.call(TOKENIZE, {"content": "Once", "model": "other"})).json["tokens"]
        assert [one.active_slots for one in server.service.models()] == [16, 0]
        engine.step_gate.open()
        answers = [(await client.reply()).text for client in clients]
    assert answers == [expected(str(number)) for number in range(16)]
