"""Where work came from is known in the tasks and threads that do it, and nowhere else."""

import pytest
import trio

from trioserve.config import ModelConfig
from trioserve.origin import Origin, as_origin, current_origin
from trioserve.runtime.model import Model
from trioserve.service import GenerationRequest, TextPrompt
from trioserve.testing import FakeSession, FakeWeights

MINE, OTHERS = Origin("mine"), Origin("others")


async def test_tasks_and_threads_inherit_it():
    found = []

    async def task():
        found.append(current_origin())
        found.append(await trio.to_thread.run_sync(current_origin))

    async with trio.open_nursery() as nursery:
        with as_origin(MINE):
            nursery.start_soon(task)
        assert current_origin() is None
    assert found == [MINE, MINE]


async def test_side_by_side_nobody_sees_the_other():
    async def task(origin):
        with as_origin(origin):
            for _ in range(3):
                await trio.lowlevel.checkpoint()
                assert current_origin() is origin

    async with trio.open_nursery() as nursery:
        for origin in (MINE, OTHERS):
            nursery.start_soon(task, origin)


@pytest.fixture
def seen(monkeypatch):
    """The origins that sessions were made and stepped in, in their threads."""
    found = {"open": [], "step": []}
    open_session, step = FakeWeights.open_session, FakeSession.step

    def opened(self, options):
        found["open"].append(current_origin())
        return open_session(self, options)

    def stepped(self, threads):
        found["step"].append(current_origin())
        return step(self, threads)

    monkeypatch.setattr(FakeWeights, "open_session", opened)
    monkeypatch.setattr(FakeSession, "step", stepped)
    return found


async def answer(service, origin):
    with as_origin(origin):
        async with service.generate(GenerationRequest(TextPrompt("x"), max_tokens=2)) as generation:
            assert [part async for part in generation]


async def test_a_slot_works_for_its_job_and_not_for_whoever_had_it_loaded(service_for, seen):
    async with service_for() as service:
        await answer(service, MINE)
        await answer(service, OTHERS)
        await answer(service, None)
    # The load is the model's own: others wait for it too, and its slots outlive them all.
    assert seen == {"open": [None], "step": [MINE, MINE, OTHERS, OTHERS, None, None]}


async def test_a_model_outlives_the_call_that_registered_it(service_for, model_file, make_model_file, monkeypatch):
    found = []
    run = Model.run

    def noted(self, **options):
        found.append(current_origin())
        return run(self, **options)

    async with service_for(ModelConfig(path=model_file), model_roots=(model_file.parent,)) as service:
        monkeypatch.setattr(Model, "run", noted)
        with as_origin(MINE):
            await service.management.load({"id": "new", "path": str(make_model_file("new.gguf"))})
    assert found == [None]
