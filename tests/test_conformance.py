"""What every operation does in every state of a model: the table of docs/contract.md, row by row.

Each row brings a model into a state with the fake engine's gates, lets an operation arrive there, looks at what happens
at once, opens the gates, and looks at what came of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.config import Config, ModelConfig
from trioserve.errors import ServerBusyError, ShuttingDownError
from trioserve.scheduling.lifecycle import ModelState
from trioserve.service import GenerationRequest, Service, TextPrompt, open_service
from trioserve.testing import FakeEngine, fake_answer

PROMPT, TOKENS = "say something", 3
SLOTS = (1, 2, 4)
SAFETY_SECONDS = 40


@dataclass
class Stage:
    """A service on the fake engine with one model ``m`` under test and a model ``other`` beside it."""

    service: Service
    engine: FakeEngine
    nursery: trio.Nursery
    results: dict[str, object]

    def model_state(self, model_id: str = "m") -> ModelState:
        return next(status.state for status in self.service.models() if status.id == model_id)

    def start(self, name: str, operation: Callable[[], Awaitable[object]]) -> None:
        async def run() -> None:
            try:
                self.results[name] = await operation()
            except Exception as error:
                self.results[name] = error

        self.nursery.start_soon(run, name=name)

    async def infer(self, busy_timeout_ms: int | None = None, *, model_id: str = "m") -> str:
        request = GenerationRequest(
            TextPrompt(PROMPT), model=model_id, max_tokens=TOKENS, busy_timeout_ms=busy_timeout_ms
        )
        async with self.service.generate(request) as generation:
            return "".join([part.text async for part in generation if hasattr(part, "text")])

    async def load(self, busy_timeout_ms: int | None = None) -> object:
        return await self.service.management.load({"id": "m", "n_ctx": 512, "busy_timeout_ms": busy_timeout_ms})

    async def unload(self, busy_timeout_ms: int | None = None) -> object:
        return await self.service.management.unload("m", busy_timeout_ms)

    async def unload_many(self, busy_timeout_ms: int | None = None) -> object:
        return await self.service.management.unload_many(["m", "other", "m", "nobody"], busy_timeout_ms)

    async def unload_all(self, busy_timeout_ms: int | None = None) -> object:
        return await self.service.management.unload_all(busy_timeout_ms)

    async def evict(self) -> object:
        model = self.service.registry.get("m")
        assert model is not None
        return await model.try_unload()

    def gates(self) -> list[object]:
        """Who holds and who waits, of every model."""
        return [model._gate.statistics() for model in self.service.registry]

    def open_all(self) -> None:
        for gate in (self.engine.load_gate, self.engine.session_gate, self.engine.step_gate, self.engine.close_gate):
            gate.open()

    async def quiet(self) -> None:
        """Return when nobody holds or waits for a slot: a lease ends a moment after its answer."""
        with trio.fail_after(SAFETY_SECONDS):
            while any(status.active_slots or status.queued_requests for status in self.service.models()):
                await trio.sleep(0.001)

    async def waiting(self, count: int) -> None:
        """Return when so many requests and managers wait for the model's turn."""
        model = self.service.registry.get("m")
        with trio.fail_after(SAFETY_SECONDS):
            while (now := model._gate.statistics()).queued + now.waiting_managers < count:
                await trio.sleep(0.001)

    async def settled(self, *names: str) -> None:
        """Return when these operations have ended."""
        with trio.fail_after(SAFETY_SECONDS):
            while not all(name in self.results for name in names):
                await trio.sleep(0.001)


@pytest.fixture
async def stage(tmp_path: Path, request: pytest.FixtureRequest):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + bytes(16))
    settings = getattr(request, "param", 1)
    settings = settings if isinstance(settings, dict) else {"slots": settings}
    models = tuple(ModelConfig(path=path, id=name, lazy=True, **settings) for name in ("m", "other"))
    engine = FakeEngine()
    config = Config(models=models, management=True)
    async with open_service(config, engine=engine) as service, trio.open_nursery() as nursery:
        stage = Stage(service, engine, nursery, {})
        yield stage
        stage.open_all()


ANSWER = fake_answer(PROMPT.encode(), TOKENS)

# -- bringing the model into a state; "first" is whoever brought it there


async def unloaded(stage: Stage) -> None:
    assert stage.model_state() is ModelState.UNLOADED


async def loading(stage: Stage) -> None:
    stage.engine.load_gate.shut()
    stage.start("first", stage.infer)
    await stage.engine.load_gate.arrived(1)
    assert stage.model_state() is ModelState.LOADING


async def idle(stage: Stage) -> None:
    assert await stage.infer() == ANSWER
    await stage.quiet()
    assert stage.model_state() is ModelState.READY


async def busy(stage: Stage) -> None:
    await idle(stage)
    stage.engine.step_gate.shut()
    for number in range(stage.service.models()[0].slots):
        stage.start(f"first{number}", stage.infer)
    await stage.engine.step_gate.arrived(TOKENS + stage.service.models()[0].slots)
    assert stage.model_state() is ModelState.READY


async def unloading(stage: Stage) -> None:
    await idle(stage)
    stage.engine.close_gate.shut()
    stage.start("first", stage.unload)
    await stage.engine.close_gate.arrived(1)
    assert stage.model_state() is ModelState.UNLOADING


async def reconfiguring(stage: Stage) -> None:
    await idle(stage)
    stage.engine.close_gate.shut()
    stage.start("first", stage.load)
    await stage.engine.close_gate.arrived(1)  # the session that was tried out
    stage.engine.close_gate.let()
    await stage.engine.close_gate.arrived(2)  # the old pool
    assert stage.model_state() is ModelState.RECONFIGURING


async def draining(stage: Stage) -> None:
    await busy(stage)
    stage.start("drain", stage.service.drain)
    await wait_all_tasks_blocked()


# -- what came of an operation


def answered(result: object) -> bool:
    return result == ANSWER


def configured(result: object) -> bool:
    return getattr(result, "n_ctx", None) == 512 and getattr(result, "loaded", False)


def gone(result: object) -> bool:
    return getattr(result, "state", None) is ModelState.UNLOADED


def listed_once(result: object) -> bool:
    return getattr(result, "unloaded", None) == ["m", "other"]


def skipped(result: object) -> bool:
    return result is False


def freed(result: object) -> bool:
    return result is True


def refused(result: object) -> bool:
    return isinstance(result, ShuttingDownError)


READY, UNLOADED = ModelState.READY, ModelState.UNLOADED
# state, operation, whether it waits for what is under way, what comes of it, and the model's state after all
TABLE = [
    (unloaded, "infer", False, answered, READY),
    (unloaded, "load", False, configured, READY),
    (unloaded, "unload", False, gone, UNLOADED),
    (unloaded, "unload_all", False, listed_once, UNLOADED),
    (unloaded, "evict", False, skipped, UNLOADED),
    (loading, "infer", True, answered, READY),
    (loading, "load", True, configured, READY),
    (loading, "unload", True, gone, UNLOADED),
    (loading, "unload_all", True, listed_once, UNLOADED),
    (loading, "evict", False, skipped, READY),
    (idle, "infer", False, answered, READY),
    (idle, "load", False, configured, READY),
    (idle, "unload", False, gone, UNLOADED),
    (idle, "unload_all", False, listed_once, UNLOADED),
    (idle, "evict", False, freed, UNLOADED),
    (busy, "infer", True, answered, READY),
    (busy, "load", True, configured, READY),
    (busy, "unload", True, gone, UNLOADED),
    (busy, "unload_all", True, listed_once, UNLOADED),
    (busy, "evict", False, skipped, READY),
    (reconfiguring, "infer", True, answered, READY),
    (reconfiguring, "load", True, configured, READY),
    (reconfiguring, "unload", True, gone, UNLOADED),
    (reconfiguring, "unload_all", True, listed_once, UNLOADED),
    (reconfiguring, "evict", False, skipped, READY),
    (unloading, "infer", True, answered, READY),
    (unloading, "load", True, configured, READY),
    (unloading, "unload", True, gone, UNLOADED),
    (unloading, "unload_all", True, listed_once, UNLOADED),
    (unloading, "evict", False, skipped, UNLOADED),
    (draining, "infer", False, refused, READY),
    (draining, "load", False, refused, READY),
    (draining, "unload", False, refused, READY),
    (draining, "unload_all", False, refused, READY),
    (draining, "unload_many", False, refused, READY),
    *(
        (state, "unload_many", waits, listed_once, UNLOADED)
        for state, waits in (
            (unloaded, False),
            (loading, True),
            (idle, False),
            (busy, True),
            (reconfiguring, True),
            (unloading, True),
        )
    ),
]


@pytest.mark.parametrize("stage", SLOTS, indirect=True)
@pytest.mark.parametrize(
    ("state", "operation", "waits", "came_of_it", "after"),
    TABLE,
    ids=[f"{row[0].__name__}-{row[1]}" for row in TABLE],
)
async def test_operation_in_state(stage, state, operation, waits, came_of_it, after):
    await state(stage)
    stage.start("operation", getattr(stage, operation))
    if waits:
        await wait_all_tasks_blocked()
        assert "operation" not in stage.results
    else:
        await stage.settled("operation")
    stage.open_all()
    names = ["operation", *(name for name in _under_way(stage))]
    await stage.settled(*names)
    assert came_of_it(stage.results["operation"]), stage.results
    assert stage.model_state() is after
    assert not any(isinstance(result, Exception) for name, result in stage.results.items() if name != "operation")
    await stage.quiet()


def _under_way(stage: Stage) -> list[str]:
    return [task.name for task in stage.nursery.child_tasks if task.name not in stage.results]


# -- no waiting at all


def turned_away(result: object) -> bool:
    return isinstance(result, ServerBusyError)


AT_ONCE = {"infer": answered, "load": configured, "unload": gone, "unload_many": listed_once, "unload_all": listed_once}


@pytest.mark.parametrize("operation", AT_ONCE)
@pytest.mark.parametrize(
    ("state", "free"),
    [(unloaded, True), (loading, False), (idle, True), (busy, False), (reconfiguring, False), (unloading, False)],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_who_may_not_wait_is_served_or_turned_away_at_once(stage, state, free, operation):
    await state(stage)
    before = stage.gates()
    stage.start("operation", lambda: getattr(stage, operation)(0))
    await stage.settled("operation")
    assert (AT_ONCE[operation] if free else turned_away)(stage.results["operation"]), stage.results
    if not free:
        assert stage.gates() == before, "it left a trace"
    stage.open_all()
    await stage.settled(*_under_way(stage))
    await stage.quiet()


@pytest.mark.parametrize("stage", [2], indirect=True)
async def test_a_spare_slot_of_a_loading_model_is_had_at_once(stage):
    await loading(stage)
    stage.start("operation", lambda: stage.infer(0))
    await wait_all_tasks_blocked()
    assert (stage.service.models()[0].active_slots, "operation" in stage.results) == (2, False)
    stage.open_all()
    await stage.settled("operation", "first")
    assert answered(stage.results["operation"])


# -- a full queue


@pytest.mark.parametrize("stage", [{"slots": 1, "max_queued_requests": 1}], indirect=True)
@pytest.mark.parametrize("state", [loading, busy, reconfiguring, unloading], ids=lambda state: state.__name__)
async def test_a_full_queue_turns_requests_away_and_no_operation(stage, state):
    await state(stage)
    await arrive(stage, "infer")
    before = stage.gates()
    with pytest.raises(ServerBusyError, match="max_queued_requests"):
        await stage.infer()
    assert stage.gates() == before
    stage.start("manager", stage.unload)
    await stage.waiting(2)
    stage.open_all()
    await stage.settled("0-infer", "manager")
    assert answered(stage.results["0-infer"])
    assert gone(stage.results["manager"])
    await stage.quiet()


@pytest.mark.parametrize("stage", [{"slots": 1, "max_queued_requests": 0}], indirect=True)
async def test_a_queue_of_nobody_still_lets_through_who_need_not_wait(stage):
    await idle(stage)
    assert answered(await stage.infer())
    await busy_again(stage)
    with pytest.raises(ServerBusyError, match="max_queued_requests"):
        await stage.infer()
    stage.open_all()
    await stage.settled("first")


async def busy_again(stage: Stage) -> None:
    await stage.quiet()
    stage.engine.step_gate.shut()
    stage.start("first", stage.infer)
    await stage.engine.step_gate.arrived(2 * TOKENS + 1)


# -- orders of arrival, at a model whose slots are all taken


def ended_in_order(stage: Stage) -> list[str]:
    return [name for name in stage.results if not name.startswith("first")]


async def arrive(stage: Stage, *operations: str) -> None:
    """Let operations arrive one after another, each named by its place and what it is."""
    for place, operation in enumerate(operations):
        stage.start(f"{place}-{operation}", getattr(stage, operation))
        await stage.waiting(place + 1)  # a load is tried out before it takes its place


ORDERS = [
    ("infer", "unload"),
    ("unload", "infer"),
    ("load", "unload"),
    ("unload", "load"),
    ("unload", "unload"),
    ("infer", "load", "infer", "unload", "infer"),
    ("unload_all", "infer", "unload_all"),
    ("infer", "unload_all", "load"),
]


@pytest.mark.parametrize("stage", [1], indirect=True)
@pytest.mark.parametrize("order", ORDERS, ids=["-".join(order) for order in ORDERS])
async def test_operations_run_in_the_order_of_their_arrival(stage, order):
    await busy(stage)
    await arrive(stage, *order)
    assert ended_in_order(stage) == []
    stage.open_all()
    names = [f"{place}-{operation}" for place, operation in enumerate(order)]
    await stage.settled(*names)
    assert ended_in_order(stage) == names
    assert not any(isinstance(result, Exception) for result in stage.results.values())


@pytest.mark.parametrize("stage", [2, 4], indirect=True)
async def test_spare_slots_behind_an_unload_stay_free(stage):
    await idle(stage)
    stage.engine.step_gate.shut()
    stage.start("first", stage.infer)
    await stage.engine.step_gate.arrived(TOKENS + 1)
    await arrive(stage, "unload", "infer")
    status = stage.service.models()[0]
    assert (status.active_slots, status.queued_requests, status.queued_operations) == (1, 1, 1)
    stage.open_all()
    await stage.settled("0-unload", "1-infer")
    assert stage.results["1-infer"] == ANSWER
    assert stage.model_state() is READY


@pytest.mark.parametrize("stage", [2], indirect=True)
async def test_what_was_queued_sees_the_new_configuration(stage):
    await busy(stage)
    await arrive(stage, "load", "infer")
    stage.open_all()
    await stage.settled("0-load", "1-infer")
    model = stage.service.registry.get("m")
    assert model.pool.n_ctx == 512
    assert stage.results["1-infer"] == ANSWER


# -- two models: what happens to one never waits for the other


@pytest.mark.parametrize("state", [loading, busy, unloading, reconfiguring], ids=lambda state: state.__name__)
async def test_a_ready_model_answers_whatever_the_other_does(stage, state):
    assert await stage.infer(model_id="other") == ANSWER
    await state(stage)
    if state is busy:
        stage.engine.step_gate.let(TOKENS)  # the steps of the other model; those of this one came first
        stage.engine.step_gate.open()
    stage.start("beside", lambda: stage.infer(model_id="other"))
    await stage.settled("beside")
    assert stage.results["beside"] == ANSWER


async def test_bulk_unload_frees_the_idle_model_before_the_busy_one(stage):
    assert await stage.infer(model_id="other") == ANSWER
    await busy(stage)
    stage.start("bulk", stage.unload_all)
    with trio.fail_after(SAFETY_SECONDS):
        while stage.model_state("other") is not UNLOADED:
            await trio.sleep(0.001)
    assert "bulk" not in stage.results
    stage.open_all()
    await stage.settled("bulk")
    assert listed_once(stage.results["bulk"])


async def test_bulk_unloads_in_opposite_orders_both_end(stage):
    assert await stage.infer(model_id="other") == ANSWER
    await busy(stage)
    manage = stage.service.management
    stage.start("forth", lambda: manage.unload_many(["m", "other", "m"]))
    stage.start("back", lambda: manage.unload_many(["other", "nobody", "m"]))
    await wait_all_tasks_blocked()
    stage.open_all()
    await stage.settled("forth", "back")
    assert list(stage.results["forth"].unloaded) == ["m", "other"]
    assert list(stage.results["back"].unloaded) == ["other", "m"]
    assert list(stage.results["back"].not_found) == ["nobody"]


async def test_status_is_one_moment_and_never_waits(stage):
    await reconfiguring(stage)
    stage.start("queued", stage.infer)
    await wait_all_tasks_blocked()
    status = stage.service.models()[0]
    assert (status.state, status.loaded, status.queued_requests) == (ModelState.RECONFIGURING, False, 1)
    assert [slot.state for slot in stage.service.slots() if slot.model == "m"] == ["idle"]


@pytest.mark.parametrize("stage", [2], indirect=True)
async def test_slots_tell_who_has_them(stage):
    await busy(stage)
    slots = [slot for slot in stage.service.slots() if slot.model == "m"]
    assert [(slot.slot, slot.state, slot.prompt_tokens) for slot in slots] == [
        (0, "busy", len(PROMPT)),
        (1, "busy", len(PROMPT)),
    ]
    assert all(slot.age >= 0 and slot.request_id == "-" and slot.phase == "prefill" for slot in slots)
