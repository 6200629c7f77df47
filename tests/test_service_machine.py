"""Random histories of requests and operations over several models: whatever happens, nothing is lost, cut or left."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from trioserve.config import Config, ModelConfig
from trioserve.errors import InvalidRequestError, ModelLoadError, ServerBusyError
from trioserve.scheduling.lifecycle import ModelState
from trioserve.service import GenerationRequest, TextDelta, TextPrompt, open_service
from trioserve.testing import FakeEngine, fake_answer

MODELS = "abc"
TOKENS = 4
ANSWER = fake_answer(b"prompt", TOKENS)
ALLOWED = (ServerBusyError, ModelLoadError)
SAFETY_SECONDS = 60
BREATH = 0.001  # a loop that never rests keeps the threads that it waits for from running

NAMES = st.sampled_from(MODELS)
WAITS = st.sampled_from([None, None, None, 0, 5])
INFER = st.tuples(st.just("infer"), NAMES, WAITS)
LOAD = st.tuples(
    st.just("load"), NAMES, st.sampled_from([{"n_ctx": 64}, {"n_ctx": 128}, {"slots": 1}, {"slots": 3}, {}])
)
SETTLE = st.just(("settle",))
SELDOM = st.one_of(
    st.tuples(st.just("refused"), NAMES, st.sampled_from([{"slots": 17}, {"slot": 1}, {"path": "/nowhere.gguf"}])),
    st.tuples(st.just("unload"), NAMES, WAITS),
    st.tuples(st.just("unload_many"), st.lists(NAMES, max_size=4), WAITS),
    st.tuples(st.just("unload_all"), WAITS),
    st.tuples(st.just("leave"), st.integers(0, 30)),
    st.just(("fail_load",)),
    st.tuples(st.just("fail_session"), st.integers(0, 3)),
)
TICK = st.tuples(st.just("tick"), st.integers(1, 20))
STEPS = st.one_of(INFER, INFER, LOAD, SETTLE, SETTLE, TICK, SELDOM)


@dataclass
class History:
    """A service that steps are played to, and what came of them."""

    service: object
    engine: FakeEngine
    nursery: trio.Nursery
    max_loaded: int
    callers: list = field(default_factory=list)
    outcomes: Counter = field(default_factory=Counter)
    failed_loads: int = 0

    async def play(self, step):
        name, *arguments = step
        await getattr(self, name)(*arguments)
        self.check()

    def call(self, operation):
        scope = trio.CancelScope()
        self.callers.append(scope)

        async def run():
            with scope:
                try:
                    await operation()
                    self.outcomes["done"] += 1
                except ALLOWED as error:
                    self.outcomes[type(error).__name__] += 1

        self.nursery.start_soon(run)

    async def infer(self, model, wait):
        async def answer():
            request = GenerationRequest(TextPrompt("prompt"), model=model, max_tokens=TOKENS, busy_timeout_ms=wait)
            async with self.service.generate(request) as generation:
                assert "".join([part.text async for part in generation if isinstance(part, TextDelta)]) == ANSWER

        self.call(answer)

    async def load(self, model, change):
        self.call(lambda: self.service.management.load({"id": model, **change}))

    async def refused(self, model, change):
        before = self.service.registry.get(model).config
        with pytest.raises(InvalidRequestError):
            await self.service.management.load({"id": model, **change})
        assert self.service.registry.get(model).config == before

    async def unload(self, model, wait):
        self.call(lambda: self.service.management.unload(model, wait))

    async def unload_many(self, models, wait):
        async def unload():
            told = await self.service.management.unload_many([*models, "nobody"], wait)
            assert list(told.unloaded) == list(dict.fromkeys(models))

        self.call(unload)

    async def unload_all(self, wait):
        self.call(lambda: self.service.management.unload_all(wait))

    async def leave(self, index):
        if self.callers:
            self.callers[index % len(self.callers)].cancel()

    async def fail_load(self):
        self.engine.failing_loads += 1
        self.failed_loads += 1

    async def fail_session(self, index):
        self.engine.failing_session = index

    async def tick(self, times):
        for _ in range(times):
            await trio.lowlevel.checkpoint()

    async def settle(self):
        await wait_all_tasks_blocked()

    def check(self):
        """What holds at every moment."""
        models = [self.service.registry.get(name) for name in MODELS]
        for model, status in zip(models, self.service.models(), strict=True):
            assert (status.state is ModelState.READY) == (model.pool is not None)
            assert 0 <= status.active_slots <= status.slots
            if model.pool is not None:
                assert len(model.pool.slots) == status.slots == model.config.slots
        if self.max_loaded:
            assert sum(status.loaded for status in self.service.models()) <= self.max_loaded

    async def end(self):
        """Nobody waits for ever, and everything can be used."""
        while self.nursery.child_tasks or not all(model._gate.idle for model in self.service.registry):
            await wait_all_tasks_blocked(BREATH)
            self.check()
        self.failed_loads -= self.engine.failing_loads
        self.engine.failing_loads, self.engine.failing_session = 0, None
        for name in MODELS:
            while not self.service.registry.get(name)._gate.idle:
                await wait_all_tasks_blocked(BREATH)
            done = self.outcomes["done"]
            await self.infer(name, None)
            while self.nursery.child_tasks:
                await wait_all_tasks_blocked(BREATH)
            assert self.outcomes["done"] == done + 1, self.outcomes
            await self.service.management.unload_all()


async def replay(path, max_loaded, slots, steps):
    engine = FakeEngine()
    models = tuple(ModelConfig(path=path, id=name, slots=slots, lazy=True, mlock=name == "c") for name in MODELS)
    config = Config(models=models, management=True, max_loaded_models=max_loaded)
    with trio.fail_after(SAFETY_SECONDS):
        async with open_service(config, engine=engine) as service, trio.open_nursery() as nursery:
            history = History(service, engine, nursery, max_loaded)
            for step in steps:
                await history.play(step)
            await history.end()
    assert sum("[" not in name for name in engine.closed) == engine.loads - history.failed_loads, "weights were kept"


@given(st.sampled_from([0, 1, 2]), st.integers(1, 3), st.lists(STEPS, min_size=20, max_size=40))
@settings(max_examples=25, derandomize=True)
def test_histories(tmp_path_factory, max_loaded, slots, steps):
    path = tmp_path_factory.getbasetemp() / "history.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + bytes(40))
    trio.run(replay, path, max_loaded, slots, steps)
