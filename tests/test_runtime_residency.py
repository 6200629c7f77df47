"""Models that come and go: who makes room for whom, who never has to, and who leaves by itself."""

import contextlib
from dataclasses import dataclass, field

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.config import ModelConfig
from trioserve.engine.base import Finished, Footprint, SequenceRequest
from trioserve.errors import InsufficientMemoryError, ModelLoadError, ServerBusyError
from trioserve.runtime.model import Model
from trioserve.runtime.residency import MIB, Residency
from trioserve.scheduling.lifecycle import ModelState
from trioserve.scheduling.residency import Resident
from trioserve.testing import ThreadGate

READY, UNLOADED, LOADING = ModelState.READY, ModelState.UNLOADED, ModelState.LOADING


class Town:
    """Models of one house, by id."""

    def __init__(self):
        self.models = {}
        self.free = self.free_device = 1000 * MIB

    def __getitem__(self, name):
        return self.models[name]

    def loaded(self):
        return [name for name, model in self.models.items() if model.status().loaded]

    async def use(self, *names):
        for name in names:
            async with self.lease(name) as lease:
                await lease.ready()

    @contextlib.asynccontextmanager
    async def lease(self, name, wait=None):
        lease = await self[name].admit(wait)
        try:
            yield lease
        finally:
            lease.release()


@pytest.fixture
def town_for(house_for, make_model_file):
    @contextlib.asynccontextmanager
    async def open_town(*names, max_loaded=0, min_free_mb=0, idle_unload=0, **settings):
        town = Town()
        residency = Residency(
            max_loaded, min_free_mb, lambda: town.models.values(), lambda: town.free, lambda: town.free_device
        )
        house = house_for(residency=residency, idle_unload=idle_unload)
        async with trio.open_nursery() as nursery:
            for name in names:
                model = Model(ModelConfig(path=make_model_file(f"{name}.gguf"), **settings), house)
                town.models[name] = model
                await nursery.start(model.run)
            yield town
            nursery.cancel_scope.cancel()

    return open_town


# -- the bound on loaded models


async def test_the_model_that_was_unused_longest_goes(town_for, engine):
    async with town_for("a", "b", "c", max_loaded=2) as town:
        await town.use("a", "b", "a", "c")
        assert town.loaded() == ["a", "c"]
        assert engine.closed == ["b[0]", "b"]
        await town.use("b")
        assert town.loaded() == ["b", "c"]


async def test_a_bound_of_zero_is_none(town_for, engine):
    async with town_for("a", "b", "c") as town:
        await town.use("a", "b", "c")
        assert town.loaded() == ["a", "b", "c"]


async def test_the_old_one_is_gone_before_the_new_one_is_loaded(town_for, engine):
    async with town_for("a", "b", max_loaded=1) as town, trio.open_nursery() as nursery:
        await town.use("a")
        engine.close_gate.shut()
        nursery.start_soon(town.use, "b")
        await engine.close_gate.arrived()
        assert (town["a"].status().state, town["b"].status().state) == (ModelState.UNLOADING, LOADING)
        assert engine.loads == 1
        engine.close_gate.open()
    assert town.models["b"].was_ready


async def test_a_leased_model_never_goes(town_for, engine):
    async with town_for("a", "b", max_loaded=1) as town:
        async with town.lease("a") as lease:
            pool = await lease.ready()
            with pytest.raises(ServerBusyError, match="max_loaded_models is 1"):
                await town.use("b")
            assert town["b"].status().state is UNLOADED
            assert town["a"].pool is pool
        assert engine.closed == []
        await town.use("b")
        assert town.loaded() == ["b"]


async def test_a_model_whose_answer_is_under_way_never_goes(town_for, engine, eventually):
    engine.step_gate.shut()
    async with town_for("a", "b", max_loaded=1) as town:
        async with town.lease("a") as lease:
            job = lease.start(await lease.ready(), SequenceRequest(prompt=[1], max_tokens=3))
            await engine.step_gate.arrived()
            with pytest.raises(ServerBusyError):
                await town.use("b")
            engine.step_gate.open()
            while not isinstance((await job.next_events())[-1][1], Finished):
                pass
        await eventually(lambda: town["a"].status().active_slots == 0)
        await town.use("b")
        assert engine.closed == ["a[0]", "a"]


async def test_a_model_that_loads_never_goes_though_nobody_waits_for_it(town_for, engine):
    engine.load_gate.shut()
    async with town_for("a", "b", max_loaded=1) as town:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(town.use, "a")
            await engine.load_gate.arrived()
            nursery.cancel_scope.cancel()
        assert town["a"].status().active_slots == 0
        with pytest.raises(ServerBusyError):
            await town.use("b")
        assert town["a"].status().state is LOADING
        engine.load_gate.open()
        await town.use("a")
        assert engine.loads == 1


async def test_too_few_idle_models_cost_nobody_anything(town_for, engine):
    async with town_for("a", "b", "c", "d", max_loaded=2) as town:
        await town.use("a", "b")
        # A limit that is lower than what is loaded: two would have to go, one can.
        town["c"]._house.residency._max_loaded = 1
        async with town.lease("a"):
            with pytest.raises(ServerBusyError):
                await town.use("c")
            assert town.loaded() == ["a", "b"]
        await town.use("c")
        assert town.loaded() == ["c"]


async def test_a_newcomer_waits_for_one_that_is_leaving_anyway(town_for, engine):
    async with town_for("a", "b", max_loaded=1) as town, trio.open_nursery() as nursery:
        await town.use("a")
        engine.close_gate.shut()
        nursery.start_soon(town["a"].unload)
        await engine.close_gate.arrived()
        nursery.start_soon(town.use, "b")
        await wait_all_tasks_blocked()
        assert (town["b"].status().state, engine.loads) == (LOADING, 1)
        engine.close_gate.open()
    assert town["b"].was_ready


async def test_of_two_loads_for_one_place_one_gets_it(town_for, engine, eventually):
    async with town_for("a", "b", max_loaded=1) as town:
        outcomes = []

        async def use(name):
            try:
                await town.use(name)
                outcomes.append("used")
            except ServerBusyError:
                outcomes.append("busy")

        for _ in range(20):
            outcomes.clear()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(use, "a")
                nursery.start_soon(use, "b")
            # The second one is refused where it comes too early, and unloads the first one where it comes later.
            assert outcomes in (["used", "used"], ["used", "busy"], ["busy", "used"]), outcomes
            assert len(town.loaded()) == 1


@pytest.fixture
def inspections(engine, monkeypatch):
    """A gate for each file's inspection, open unless it is shut."""
    gates, inspect = {name: ThreadGate() for name in "abc"}, engine.inspect
    monkeypatch.setattr(engine, "inspect", lambda path, adapters: gates[path.stem].wait() and inspect(path, adapters))
    return gates


async def test_a_load_that_has_not_asked_for_a_place_takes_nobodys(town_for, engine, inspections):
    async with town_for("a", "b", max_loaded=1) as town, trio.open_nursery() as nursery:
        for name in "ab":
            inspections[name].shut()
        errors = {}

        async def use(name):
            try:
                await town.use(name)
            except ServerBusyError as error:
                errors[name] = error

        engine.load_gate.shut()
        for name in "ab":
            nursery.start_soon(use, name)
            await inspections[name].arrived()
        inspections["a"].open()
        await engine.load_gate.arrived()
        assert (errors, town["a"].status().state, town["b"].status().state) == ({}, LOADING, LOADING)
        inspections["b"].open()
        while "b" not in errors:
            await trio.lowlevel.checkpoint()
        engine.load_gate.open()
    assert list(errors) == ["b"]
    assert town["a"].was_ready


async def test_a_load_keeps_the_place_for_which_it_unloads_another(town_for, engine, eventually):
    async with town_for("a", "b", "c", max_loaded=1) as town, trio.open_nursery() as nursery:
        await town.use("a")
        engine.close_gate.shut()
        nursery.start_soon(town.use, "b")
        await engine.close_gate.arrived()
        refused = []

        async def use():
            with pytest.raises(ServerBusyError):
                await town.use("c")
            refused.append("c")

        nursery.start_soon(use)
        await wait_all_tasks_blocked()
        assert refused == [], "whether there is a place is known when the one that leaves has left"
        engine.load_gate.shut()
        engine.close_gate.open()
        await eventually(lambda: refused)
        engine.load_gate.open()
    assert town["b"].was_ready


async def test_a_model_that_is_reconfigured_keeps_its_place(town_for, engine, inspections):
    async with town_for("a", "b", max_loaded=1) as town, trio.open_nursery() as nursery:
        await town.use("a")
        town.free = None  # nothing is tried beside what is loaded
        engine.close_gate.shut()
        nursery.start_soon(town["a"].reconfigure, lambda config: config.model_copy(update={"n_ctx": 512}))
        await engine.close_gate.arrived()
        inspections["a"].shut()
        engine.close_gate.open()
        await inspections["a"].arrived(3)
        with pytest.raises(ServerBusyError):
            await town.use("b")
        inspections["a"].open()
    assert town["a"].status().n_ctx == 512


async def test_many_clients_switch_between_more_models_than_fit(town_for, engine):
    async with town_for("a", "b", "c", max_loaded=2, slots=2) as town, trio.open_nursery() as nursery:
        most = 0

        async def client(offset):
            nonlocal most
            for turn in range(30):
                with contextlib.suppress(ServerBusyError):
                    await town.use("abc"[(offset + turn) % 3])
                most = max(most, len(town.loaded()))

        for offset in range(6):
            nursery.start_soon(client, offset)
    assert most == 2
    assert all(model.status().active_slots == model.status().queued_requests == 0 for model in town.models.values())


# -- the memory guard


async def test_a_load_that_would_leave_too_little_is_refused_before_it_begins(town_for, engine):
    async with town_for("a", min_free_mb=100) as town:
        town.free = 101 * MIB  # the fake says that it takes about 2 MiB
        with pytest.raises(
            InsufficientMemoryError, match=r"about 1 MiB of memory, of 101 MiB.* 100 MiB must stay free"
        ):
            await town.use("a")
        assert (engine.loads, town["a"].status().state) == (0, UNLOADED)
        town.free = 102 * MIB
        await town.use("a")
        assert town.loaded() == ["a"]


async def test_more_slots_need_more(town_for):
    async with town_for("a", min_free_mb=100, slots=16) as town:
        town.free = 102 * MIB
        with pytest.raises(InsufficientMemoryError):
            await town.use("a")


async def test_idle_models_go_where_that_is_enough(town_for, engine, monkeypatch):
    async with town_for("a", "b", "c", min_free_mb=100) as town:
        await town.use("a", "b")
        town.free = 101 * MIB
        try_unload = town["a"].try_unload

        async def frees():
            town.free += 2 * MIB
            return await try_unload()

        monkeypatch.setattr(town["a"], "try_unload", frees)
        await town.use("c")
        assert town.loaded() == ["b", "c"]


async def test_idle_models_stay_where_that_would_not_be_enough(town_for, engine):
    async with town_for("a", "b", "c", min_free_mb=100) as town:
        await town.use("a", "b")
        town.free = 1 * MIB
        with pytest.raises(InsufficientMemoryError):
            await town.use("c")
        assert town.loaded() == ["a", "b"]


async def test_busy_models_stay_whatever_the_memory(town_for, engine):
    async with town_for("a", "b", min_free_mb=100) as town, town.lease("a") as lease:
        await lease.ready()
        town.free = 101 * MIB
        with pytest.raises(InsufficientMemoryError):
            await town.use("b")
        assert town.loaded() == ["a"]


async def test_weights_that_are_loaded_already_need_no_memory_again(town_for, engine):
    async with town_for("a", "b", min_free_mb=100) as town:
        await town.use("a")
        await town["b"].reconfigure(lambda config: config.model_copy(update={"path": town["a"].config.path}))
        await town["b"].unload()
        town.free = 101 * MIB  # one slot takes less than that, and the weights with one slot more
        async with town.lease("a"):
            await town.use("b")
        assert town.loaded() == ["a", "b"]
        assert town["b"].resident().nbytes == 1_000_000


async def test_weights_that_went_to_make_room_for_their_user_need_memory_after_all(town_for, engine):
    async with town_for("a", "b", max_loaded=1, min_free_mb=100) as town:
        await town["b"].reconfigure(lambda config: config.model_copy(update={"path": town["a"].config.path}))
        await town.use("a")
        town.free = 101 * MIB
        with pytest.raises(InsufficientMemoryError):
            await town.use("b")
        assert (town.loaded(), engine.loads) == ([], 2)


async def test_a_reconfiguration_over_the_same_weights_needs_none_for_them(town_for, engine):
    async with town_for("a", min_free_mb=100) as town:
        await town.use("a")
        town.free = 101 * MIB
        await town["a"].reconfigure(lambda config: config.model_copy(update={"n_ctx": 512}))
        assert (town["a"].status().n_ctx, engine.loads) == (512, 1)


@pytest.mark.parametrize("min_free_mb", [0, 100])
async def test_memory_that_cannot_be_told_refuses_nothing(town_for, min_free_mb):
    async with town_for("a", min_free_mb=min_free_mb) as town:
        town.free = None if min_free_mb else 0
        await town.use("a")


async def test_two_loads_do_not_spend_the_same_memory(town_for, engine, eventually):
    async with town_for("a", "b", min_free_mb=100, slots=2) as town, trio.open_nursery() as nursery:
        town.free = 104 * MIB  # enough for one of about 3 MiB
        engine.load_gate.shut()
        nursery.start_soon(town.use, "a")
        await engine.load_gate.arrived()
        assert not town["a"]._house.residency.has_room_for(Footprint(2 * MIB))
        refused = []

        async def use():
            with pytest.raises(InsufficientMemoryError):
                await town.use("b")
            refused.append("b")

        async with town.lease("a"):
            nursery.start_soon(use)
            await wait_all_tasks_blocked()
            town.free = 101 * MIB
            engine.load_gate.open()
            await eventually(lambda: refused)
    assert engine.loads == 1


async def test_a_load_that_fails_gives_its_memory_back(town_for, engine):
    async with town_for("a", "b", min_free_mb=100) as town:
        town.free = 103 * MIB
        engine.failing_loads = 1
        with pytest.raises(ModelLoadError):
            await town.use("a")
        await town.use("b")
        assert town.loaded() == ["b"]


# -- Residency alone


@dataclass(eq=False)
class Stub:
    """A tenant that does what it is told."""

    id: str
    idle: bool = True
    loaded: bool = True
    last_used: float = 0.0
    refuses: int = 0
    asked: list = field(default_factory=list)

    def resident(self):
        return Resident(self.id, self.idle, self.last_used) if self.loaded else None

    async def try_unload(self):
        self.asked.append(self.id)
        if self.refuses:
            self.refuses -= 1
            self.idle = False
            return False
        self.loaded = False
        return True

    async def wait_unloaded(self):
        raise AssertionError("nobody is leaving")


async def test_a_victim_that_a_request_takes_first_is_spared_and_another_one_goes():
    taken, other = Stub("taken", last_used=1, refuses=1), Stub("other", last_used=2)
    newcomer = Stub("new", loaded=False)
    await Residency(2, 0, lambda: [taken, other, newcomer]).make_room(newcomer, Footprint())
    assert (taken.asked, other.asked) == (["taken"], ["other"])
    assert (taken.loaded, other.loaded) == (True, False)


async def test_a_last_victim_that_a_request_takes_first_leaves_no_room():
    taken, newcomer = Stub("taken", refuses=1), Stub("new", loaded=False)
    with pytest.raises(ServerBusyError, match="1 models are loaded or loading"):
        await Residency(1, 0, lambda: [taken, newcomer]).make_room(newcomer, Footprint())
    assert taken.loaded


@pytest.mark.parametrize(("free", "needed", "fits"), [(100, 99, True), (100, 101, False), (None, 1, False)])
def test_room_beside_what_is_loaded(free, needed, fits):
    residency = Residency(0, 1, list, lambda: None if free is None else free + MIB)
    assert residency.has_room_for(Footprint(needed)) is fits


# -- models that nobody uses


async def test_an_unused_model_is_unloaded_when_its_time_is_over(town_for, mock_clock, eventually, caplog):
    async with town_for("a", idle_unload=60) as town:
        await town.use("a")
        await wait_all_tasks_blocked()
        mock_clock.jump(59)
        await wait_all_tasks_blocked()
        assert town["a"].status().state is READY
        mock_clock.jump(2)
        await eventually(lambda: town["a"].status().state is UNLOADED)
        await town.use("a")
        assert town.loaded() == ["a"]


async def test_use_starts_the_time_anew(town_for, mock_clock):
    async with town_for("a", idle_unload=60) as town:
        for _ in range(3):
            await town.use("a")
            mock_clock.jump(50)
            await wait_all_tasks_blocked()
        assert town["a"].status().state is READY


async def test_a_model_in_use_stays_however_long_that_takes(town_for, mock_clock, eventually):
    async with town_for("a", idle_unload=60) as town:
        async with town.lease("a") as lease:
            await lease.ready()
            mock_clock.jump(1000)
            await wait_all_tasks_blocked()
            assert town["a"].status().state is READY
        await wait_all_tasks_blocked()
        assert town["a"].status().state is READY, "the time begins with the end of the use"
        mock_clock.jump(61)
        await eventually(lambda: town["a"].status().state is UNLOADED)


async def test_a_model_that_was_loaded_and_never_used_goes_as_well(town_for, mock_clock, eventually):
    async with town_for("a", idle_unload=60) as town:
        await town["a"].ensure_loaded()
        await wait_all_tasks_blocked()
        mock_clock.jump(61)
        await eventually(lambda: town["a"].status().state is UNLOADED)


async def test_a_waiter_that_is_granted_as_it_leaves_starts_the_time(town_for, mock_clock, eventually):
    async with town_for("a", idle_unload=60) as town, trio.open_nursery() as nursery:
        lease = await town["a"].admit(None)
        await lease.ready()
        nursery.start_soon(town.use, "a")
        await wait_all_tasks_blocked()
        mock_clock.jump(61)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        lease.release()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
            assert town["a"].status().state is READY
            mock_clock.jump(61)
            await eventually(lambda: town["a"].status().state is UNLOADED)


async def test_an_operation_that_leaves_last_starts_the_time(town_for, mock_clock, eventually):
    async with town_for("a", idle_unload=60) as town:
        await town.use("a")
        await wait_all_tasks_blocked()
        ticket = town["a"].begin_unload()
        mock_clock.jump(61)
        await wait_all_tasks_blocked()
        town["a"].cancel_unload(ticket)
        await wait_all_tasks_blocked()
        mock_clock.jump(61)
        await eventually(lambda: town["a"].status().state is UNLOADED)


@pytest.mark.parametrize(
    ("server", "model", "stays"), [(0, None, True), (60, 0, True), (0, 60_000, False), (9000, 60_000, False)]
)
async def test_a_models_own_time_counts(town_for, mock_clock, eventually, server, model, stays):
    async with town_for("a", idle_unload=server, keep_alive_ms=model) as town:
        await town.use("a")
        await wait_all_tasks_blocked()
        mock_clock.jump(61)
        await wait_all_tasks_blocked()
        if stays:
            assert town["a"].status().state is READY
        else:
            await eventually(lambda: town["a"].status().state is UNLOADED)


async def test_a_new_configuration_brings_its_own_time(town_for, mock_clock, eventually):
    async with town_for("a", idle_unload=60) as town:
        await town.use("a")
        await town["a"].reconfigure(lambda config: config.model_copy(update={"keep_alive_ms": 5000}))
        await wait_all_tasks_blocked()
        mock_clock.jump(6)
        await eventually(lambda: town["a"].status().state is UNLOADED)


async def test_a_request_at_the_moment_of_retirement_is_answered(town_for, engine, mock_clock):
    async with town_for("a", idle_unload=60) as town, trio.open_nursery() as nursery:
        await town.use("a")
        await wait_all_tasks_blocked()
        engine.close_gate.shut()
        mock_clock.jump(61)
        await engine.close_gate.arrived()
        nursery.start_soon(town.use, "a")
        await wait_all_tasks_blocked()
        assert town["a"].status().queued_requests == 1
        engine.close_gate.open()
    assert engine.loads == 2


# -- memory of the GPUs


async def test_a_model_on_the_gpu_must_leave_memory_there_as_well(town_for, engine):
    async with town_for("a", "b", min_free_mb=100, gpu_layers=-1) as town:
        town.free_device = 103 * MIB
        await town.use("a")
        assert town["a"].resident().device_nbytes == 2_000_000
        assert town["a"].resident().nbytes == 0
        town.free_device = 1 * MIB
        with pytest.raises(InsufficientMemoryError, match="GPU memory"):
            await town.use("b")
        assert town.loaded() == ["a"]


async def test_an_idle_model_goes_for_its_gpu_memory(town_for, engine, monkeypatch):
    async with town_for("a", "b", min_free_mb=100, gpu_layers=-1) as town:
        town.free_device = 103 * MIB
        await town.use("a")
        town.free_device = 101 * MIB
        try_unload = town["a"].try_unload

        async def frees():
            town.free_device += 2 * MIB
            return await try_unload()

        monkeypatch.setattr(town["a"], "try_unload", frees)
        await town.use("b")
        assert town.loaded() == ["b"]


async def test_gpu_memory_that_cannot_be_told_refuses_nothing(town_for, engine):
    async with town_for("a", min_free_mb=100, gpu_layers=-1) as town:
        town.free_device = None
        await town.use("a")


async def test_a_model_on_the_host_needs_no_gpu_memory(town_for, engine):
    async with town_for("a", min_free_mb=100) as town:
        town.free_device = 0
        await town.use("a")


@pytest.mark.parametrize(
    ("host", "device", "fits"), [(10, 10, True), (9, 10, False), (10, 9, False), (None, 10, None), (10, None, None)]
)
@pytest.mark.parametrize("unknown", [False, True])
def test_room_of_both_kinds(host, device, fits, unknown):
    residency = Residency(0, 0, list, lambda: host, lambda: device)
    assert residency.has_room_for(Footprint(10, 10), unknown=unknown) is (unknown if fits is None else fits)
