"""A model's life: one load for all, a pool that is whole or not there, an unload that waits its turn."""

import contextlib

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.config import ModelConfig
from trioserve.engine.base import Finished, SequenceRequest
from trioserve.errors import InvalidModelError, ModelLoadError, ServerBusyError
from trioserve.runtime.model import Model
from trioserve.scheduling.lifecycle import ModelState
from trioserve.testing import fake_answer


@contextlib.asynccontextmanager
async def leased(model, wait=None):
    lease = await model.admit(wait)
    try:
        yield lease
    finally:
        lease.release()


async def answer(model, prompt=b"prompt", tokens=5):
    async with leased(model) as lease:
        pool = await lease.ready()
        job = lease.start(pool, SequenceRequest(prompt=list(prompt), max_tokens=tokens))
        text = ""
        while True:
            events = [event for _, event in await job.next_events()]
            text += "".join(event.text for event in events)
            if isinstance(events[-1], Finished):
                return text


class Asker:
    """A task that wants an answer, in a cancel scope of its own."""

    def __init__(self, model, prompt=b"prompt"):
        self.model, self.prompt = model, prompt
        self.scope = trio.CancelScope()
        self.text = self.error = None

    async def __call__(self):
        with self.scope:
            try:
                self.text = await answer(self.model, self.prompt)
            except Exception as error:
                self.error = error


def ask(nursery, model, count=1):
    askers = [Asker(model) for _ in range(count)]
    for asker in askers:
        nursery.start_soon(asker)
    return askers


# -- the first load


async def test_a_model_is_unloaded_until_its_first_request(model_for, engine):
    async with model_for(id="lazy", slots=3) as model:
        status = model.status()
        assert (status.state, status.loaded, status.max_parallel_slots, status.n_ctx) == (
            ModelState.UNLOADED,
            False,
            None,
            None,
        )
        assert engine.loads == 0
        await answer(model)
        status = model.status()
        assert (status.id, status.state, status.loaded) == ("lazy", ModelState.READY, True)
        assert (status.slots, status.max_parallel_slots, status.n_ctx) == (3, 16, 4096)


async def test_concurrent_first_requests_share_one_load(model_for, engine):
    engine.load_gate.shut()
    async with model_for(slots=2) as model, trio.open_nursery() as nursery:
        askers = ask(nursery, model, 4)
        await engine.load_gate.arrived()
        await wait_all_tasks_blocked()
        status = model.status()
        assert status.state is ModelState.LOADING
        assert (status.active_slots, status.queued_requests) == (2, 2), "spare slots wait for the load, others queue"
        engine.load_gate.open()
    assert engine.loads == 1
    assert [asker.text for asker in askers] == [fake_answer(b"prompt", 5)] * 4


async def test_a_load_goes_on_without_those_who_waited_for_it_and_is_kept(model_for, engine, eventually):
    engine.load_gate.shut()
    async with model_for(slots=2) as model:
        async with trio.open_nursery() as nursery:
            ask(nursery, model, 2)
            await engine.load_gate.arrived()
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        status = model.status()
        assert (status.state, status.active_slots) == (ModelState.LOADING, 0), "the leases go back at once"
        engine.load_gate.open()
        await eventually(lambda: model.status().loaded)
        assert await answer(model) == fake_answer(b"prompt", 5)
        assert engine.loads == 1


async def test_one_waiter_that_leaves_does_not_disturb_the_others(model_for, engine):
    engine.load_gate.shut()
    async with model_for(slots=2) as model, trio.open_nursery() as nursery:
        leaver, stayer = ask(nursery, model, 2)
        await engine.load_gate.arrived()
        await wait_all_tasks_blocked()
        leaver.scope.cancel()
        await wait_all_tasks_blocked()
        engine.load_gate.open()
    assert leaver.text is None
    assert stayer.text == fake_answer(b"prompt", 5)


async def test_a_failed_load_fails_for_all_who_wait_and_the_next_request_retries(model_for, engine):
    engine.failing_loads = 1
    engine.load_gate.shut()
    async with model_for(slots=3) as model:
        async with trio.open_nursery() as nursery:
            askers = ask(nursery, model, 3)
            await engine.load_gate.arrived()
            await wait_all_tasks_blocked()
            engine.load_gate.open()
        assert [type(asker.error) for asker in askers] == [ModelLoadError] * 3
        assert len({id(asker.error) for asker in askers}) == 3, "each waiter has an exception of its own"
        status = model.status()
        assert (status.state, status.active_slots, model.was_ready) == (ModelState.UNLOADED, 0, False)
        assert await answer(model) == fake_answer(b"prompt", 5)
        assert (engine.loads, model.was_ready) == (2, True)


async def test_those_who_queued_during_a_failing_load_try_again_themselves(model_for, engine):
    engine.failing_loads = 1
    engine.load_gate.shut()
    async with model_for(slots=1) as model:
        async with trio.open_nursery() as nursery:
            first, second = ask(nursery, model, 2)
            await engine.load_gate.arrived()
            await wait_all_tasks_blocked()
            engine.load_gate.open()
        assert {type(first.error), type(second.error)} == {type(None), ModelLoadError}
        assert engine.loads == 2


async def test_something_unforeseen_in_a_load_is_a_load_error(model_for, engine, monkeypatch):
    def load(*_):
        raise ValueError("unforeseen")

    async with model_for() as model:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "load", load)
            with pytest.raises(ModelLoadError) as caught:
                await answer(model)
        assert "unforeseen" not in caught.value.message
        assert model.status().state is ModelState.UNLOADED
        assert await answer(model) == fake_answer(b"prompt", 5)


@pytest.mark.parametrize("content", [None, b"", b"not a model", b"GGUF"])
async def test_a_file_that_is_no_model_is_refused_before_the_engine_sees_it(model_for, engine, tmp_path, content):
    path = tmp_path / "odd.gguf"
    if content is not None:
        path.write_bytes(content)
    async with model_for(path=path) as model:
        with pytest.raises(InvalidModelError):
            await answer(model)
        assert engine.loads == 0
        assert model.status().active_slots == 0


async def test_more_slots_than_the_model_can_have_are_refused_and_nothing_is_left(model_for, engine):
    engine.max_sessions = 1
    async with model_for(slots=2) as model:
        with pytest.raises(InvalidModelError, match="1 at most") as caught:
            await answer(model)
        assert caught.value.param == "slots"
        assert engine.closed == ["tiny"]


async def test_loads_are_reported_as_they_go(model_file, house_for):
    told = []
    model = Model(ModelConfig(path=model_file), house_for(progress=lambda *args: told.append(args)))
    async with trio.open_nursery() as nursery:
        await nursery.start(model.run)
        await answer(model)
        nursery.cancel_scope.cancel()
    assert told == [("tiny", 1.0)]


# -- whole or not at all


@pytest.mark.parametrize("failing", range(4))
async def test_a_session_that_cannot_be_made_takes_the_others_with_it_clones_first(model_for, engine, failing):
    engine.failing_session = failing
    async with model_for(slots=4) as model:
        with pytest.raises(ModelLoadError, match=f"slot {failing}"):
            await answer(model)
        assert engine.closed == [f"tiny[{index}]" for index in reversed(range(failing))] + ["tiny"]
        status = model.status()
        assert (status.state, status.active_slots, model.pool) == (ModelState.UNLOADED, 0, None)
        assert await answer(model) == fake_answer(b"prompt", 5)
        assert len(model.pool.slots) == 4


async def test_a_pool_is_not_seen_before_its_last_session_is_made(model_for, engine):
    engine.session_gate.shut()
    async with model_for(slots=3) as model, trio.open_nursery() as nursery:
        (asker,) = ask(nursery, model)
        for made in range(3):
            await engine.session_gate.arrived(made + 1)
            assert (model.pool, model.status().state) == (None, ModelState.LOADING)
            assert asker.text is None
            engine.session_gate.let()
    assert asker.text is not None


# -- unload


async def test_sessions_close_clones_first_and_weights_last(model_for, engine):
    async with model_for(slots=3) as model:
        await answer(model)
        await model.unload()
        assert engine.closed == ["tiny[2]", "tiny[1]", "tiny[0]", "tiny"]
        assert model.status().state is ModelState.UNLOADED


@pytest.mark.parametrize("failing", range(3))
async def test_a_session_that_cannot_be_freed_keeps_nothing_else(model_for, engine, monkeypatch, caplog, failing):
    def refuse():
        raise RuntimeError("it will not go")

    async with model_for(slots=3) as model:
        await answer(model)
        monkeypatch.setattr(model.pool.slots[failing].place.session, "close", refuse)
        await model.unload()
        kept = f"tiny[{failing}]"
        assert engine.closed == [name for name in ("tiny[2]", "tiny[1]", "tiny[0]", "tiny") if name != kept]
        assert model.status().state is ModelState.UNLOADED
        assert "could not be freed" in caplog.text
        assert await answer(model) == fake_answer(b"prompt", 5)


async def test_a_teardown_waits_for_no_other_thread_of_the_process(model_for, engine):
    async with model_for(slots=2) as model:
        await answer(model)
        default = trio.to_thread.current_default_thread_limiter()
        for holder in range(default.total_tokens):
            default.acquire_on_behalf_of_nowait(holder)
        await model.unload()
        assert engine.closed == ["tiny[1]", "tiny[0]", "tiny"]
        for holder in range(default.total_tokens):
            default.release_on_behalf_of(holder)


async def test_a_model_whose_task_is_cancelled_closes_in_the_same_order(model_for, engine):
    async with model_for(slots=3) as model:
        await answer(model)
    assert engine.closed == ["tiny[2]", "tiny[1]", "tiny[0]", "tiny"]


async def test_unloading_what_is_unloaded_has_no_effect(model_for, engine):
    async with model_for() as model:
        await model.unload()
        await model.unload()
        assert engine.closed == []
        assert model.status().state is ModelState.UNLOADED


async def test_an_unload_lets_earlier_work_finish_and_later_requests_load_again(model_for, engine):
    engine.step_gate.shut()
    async with model_for(slots=2) as model, trio.open_nursery() as nursery:
        (earlier,) = ask(nursery, model)
        await engine.step_gate.arrived()
        nursery.start_soon(model.unload)
        await wait_all_tasks_blocked()
        (later,) = ask(nursery, model)
        await wait_all_tasks_blocked()
        status = model.status()
        assert (status.active_slots, status.queued_requests, status.loaded) == (1, 1, True)
        assert engine.closed == []
        engine.step_gate.open()
    assert earlier.text == later.text == fake_answer(b"prompt", 5)
    assert engine.closed[:3] == ["tiny[1]", "tiny[0]", "tiny"]
    assert engine.loads == 2


async def test_a_wait_behind_a_slow_teardown_ends_at_its_bound(model_for, engine):
    async with model_for() as model, trio.open_nursery() as nursery:
        await answer(model)
        engine.close_gate.shut()
        nursery.start_soon(model.unload)
        await engine.close_gate.arrived(1)
        with pytest.raises(ServerBusyError, match="busy_timeout_ms"):
            await model.admit(0.02)
        assert (model.status().state, model.status().queued_requests) == (ModelState.UNLOADING, 0)
        engine.close_gate.open()


async def test_a_request_during_a_slow_teardown_waits_and_is_answered(model_for, engine, monkeypatch):
    async with model_for() as model:
        await answer(model)
        close = model.pool.weights.close
        engine.load_gate.shut()  # used by the teardown here

        def slow_close():
            engine.load_gate.wait()
            close()

        monkeypatch.setattr(model.pool.weights, "close", slow_close)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(model.unload)
            await engine.load_gate.arrived(2)
            status = model.status()
            assert (status.state, status.loaded, model.pool) == (ModelState.UNLOADING, False, None)
            (asker,) = ask(nursery, model)
            await wait_all_tasks_blocked()
            assert model.status().queued_requests == 1
            engine.load_gate.open()
    assert asker.text == fake_answer(b"prompt", 5)
    assert engine.loads == 2


async def test_an_unload_waits_for_a_load_that_is_under_way(model_for, engine):
    engine.load_gate.shut()
    async with model_for() as model, trio.open_nursery() as nursery:
        (asker,) = ask(nursery, model)
        await engine.load_gate.arrived()
        nursery.start_soon(model.unload)
        await wait_all_tasks_blocked()
        engine.load_gate.open()
    assert asker.text == fake_answer(b"prompt", 5)
    assert model.status().state is ModelState.UNLOADED


async def test_an_unload_waits_for_a_load_that_nobody_waits_for(model_for, engine):
    engine.load_gate.shut()
    async with model_for() as model, trio.open_nursery() as nursery:
        (asker,) = ask(nursery, model)
        await engine.load_gate.arrived()
        asker.scope.cancel()
        nursery.start_soon(model.unload)
        await wait_all_tasks_blocked()
        assert model.status().state is ModelState.LOADING
        engine.load_gate.open()
    assert model.status().state is ModelState.UNLOADED
    assert engine.closed == ["tiny[0]", "tiny"]


async def test_an_unload_after_a_failing_load_returns(model_for, engine):
    engine.failing_loads = 1
    engine.load_gate.shut()
    async with model_for() as model, trio.open_nursery() as nursery:
        (asker,) = ask(nursery, model)
        await engine.load_gate.arrived()
        asker.scope.cancel()
        nursery.start_soon(model.unload)
        await wait_all_tasks_blocked()
        engine.load_gate.open()
    assert model.status().state is ModelState.UNLOADED


async def test_an_unload_after_a_failing_request_returns(model_for, engine):
    engine.raising_step = 1
    async with model_for() as model:
        async with trio.open_nursery() as nursery:
            (asker,) = ask(nursery, model)
        assert asker.error is not None
        await model.unload()
        assert engine.closed == ["tiny[0]", "tiny"]


async def test_overlapping_unloads_take_turns(model_for, engine):
    async with model_for() as model:
        await answer(model)
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(model.unload)
        assert engine.closed == ["tiny[0]", "tiny"]


async def test_an_unload_that_may_not_wait_is_refused_while_a_request_runs(model_for, engine):
    async with model_for() as model:
        async with leased(model):
            with pytest.raises(ServerBusyError):
                await model.unload(wait=0)
        await model.unload(wait=0)


async def test_an_unload_that_is_cancelled_in_its_teardown_finishes_it(model_for, engine, eventually):
    async with model_for() as model:
        await answer(model)
        await eventually(lambda: model.status().active_slots == 0)
        with trio.CancelScope() as scope:
            scope.cancel()
            await model.unload()
        assert engine.closed == ["tiny[0]", "tiny"]
        assert model.status().state is ModelState.UNLOADED
        assert await answer(model) == fake_answer(b"prompt", 5)


async def test_an_unload_that_gives_up_lets_those_behind_it_in(model_for):
    async with (
        model_for(slots=2) as model,
        leased(model),
        trio.open_nursery() as askers,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(model.unload)
        await wait_all_tasks_blocked()
        (asker,) = ask(askers, model)
        await wait_all_tasks_blocked()
        assert model.status().queued_requests == 1
        nursery.cancel_scope.cancel()
    assert asker.text == fake_answer(b"prompt", 5)


async def test_twenty_rounds_of_load_and_unload_leave_nothing_open(model_for, engine):
    async with model_for(slots=2) as model:
        for _ in range(20):
            await answer(model)
            await model.unload()
        assert engine.closed == ["tiny[1]", "tiny[0]", "tiny"] * 20


async def test_many_tiny_requests_and_unloads_lose_no_slot(model_for, eventually):
    async with model_for(slots=2) as model:
        async with trio.open_nursery() as nursery:

            async def client():
                for _ in range(50):
                    await answer(model, tokens=1)

            async def operator():
                for _ in range(10):
                    await model.unload()

            for _ in range(3):
                nursery.start_soon(client)
            nursery.start_soon(operator)
        await eventually(lambda: model.status().active_slots == 0)
        assert model.status().queued_requests == 0
        await model.unload()


async def test_ten_thousand_tiny_requests_for_one_slot_less_than_they_need_lose_none(model_for, eventually):
    async with model_for(slots=2) as model:
        left = iter(range(10_000))

        async def client():
            for number in left:
                async with leased(model) as lease:
                    pool = await lease.ready()
                    if number % 10 == 0:  # the others leave before they have asked anything
                        job = lease.start(pool, SequenceRequest(prompt=[number % 256], max_tokens=1))
                        if number % 20 == 0:  # and half of these before they are answered
                            await job.next_events()

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(client)
        await eventually(lambda: model.status().active_slots == model.status().queued_requests == 0)
        await model.unload()


# -- the end of everything


async def test_a_load_cut_off_by_the_end_of_its_model_leaves_nobody_waiting(model_file, house_for, engine):
    """A caller outside of the model's own nursery, shielded as a shutdown is."""
    model = Model(ModelConfig(path=model_file), house_for())
    engine.load_gate.shut()
    async with trio.open_nursery() as outer, trio.open_nursery() as nursery:
        await nursery.start(model.run)
        (asker,) = ask(outer, model)
        await engine.load_gate.arrived()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
        engine.load_gate.open()
    assert isinstance(asker.error, ModelLoadError)
    assert model.status().state is ModelState.UNLOADED
    assert engine.closed == [], "there never were weights"


async def test_a_closing_model_gives_up_its_load(model_for, engine):
    engine.load_gate.shut()
    async with model_for() as model, trio.open_nursery() as nursery:
        (asker,) = ask(nursery, model)
        await engine.load_gate.arrived()
        asker.scope.cancel()
        nursery.start_soon(model.close)
        await wait_all_tasks_blocked()
        engine.load_gate.open()
    assert model.status().state is ModelState.UNLOADED
    assert engine.closed == [], "there never were weights"


# -- two models, one file


@pytest.fixture
def pair_for(model_file, house_for):
    """Two models of the same file."""

    @contextlib.asynccontextmanager
    async def open_pair(**second):
        house = house_for()
        first = Model(ModelConfig(id="first", path=model_file), house)
        other = Model(ModelConfig(id="other", path=model_file, **second), house)
        async with trio.open_nursery() as nursery:
            await nursery.start(first.run)
            await nursery.start(other.run)
            yield first, other
            nursery.cancel_scope.cancel()

    return open_pair


async def test_two_models_of_one_file_share_its_weights_and_free_them_with_the_last(pair_for, engine):
    async with pair_for() as (first, other):
        await answer(first)
        await answer(other)
        assert engine.loads == 1
        assert first.pool.weights is other.pool.weights
        await first.unload()
        assert engine.closed == ["tiny[0]"]
        assert await answer(other) == fake_answer(b"prompt", 5)
        await other.unload()
        assert engine.closed == ["tiny[0]", "tiny[1]", "tiny"]


async def test_two_models_of_one_file_that_load_at_once_load_once(pair_for, engine):
    engine.load_gate.shut()
    async with pair_for() as models, trio.open_nursery() as nursery:
        askers = [asker for model in models for asker in ask(nursery, model)]
        await engine.load_gate.arrived()
        await wait_all_tasks_blocked()
        engine.load_gate.open()
    assert engine.loads == 1
    assert all(asker.text for asker in askers)


async def test_other_load_options_are_other_weights(pair_for, engine):
    async with pair_for(mlock=True) as (first, other):
        await answer(first)
        await answer(other)
        assert engine.loads == 2


async def test_a_neighbour_that_fails_after_a_shared_load_does_not_take_the_weights_away(
    pair_for, engine, cache, eventually
):
    engine.max_sessions = 1
    engine.load_gate.shut()
    async with pair_for(slots=2) as (first, other), trio.open_nursery() as nursery:
        (too_many,) = ask(nursery, other)
        await engine.load_gate.arrived()
        await wait_all_tasks_blocked()
        (asker,) = ask(nursery, first)
        await eventually(lambda: [entry.users for entry in cache._entries.values()] == [2])
        engine.load_gate.open()
    assert isinstance(too_many.error, InvalidModelError)
    assert asker.text == fake_answer(b"prompt", 5)
    assert engine.closed == ["tiny[0]", "tiny"]


async def test_models_do_not_wait_for_each_other(house_for, make_model_file, engine):
    engine.step_gate.shut()
    house = house_for()
    busy, free = (Model(ModelConfig(path=make_model_file(name)), house) for name in ("a.gguf", "b.gguf"))
    async with trio.open_nursery() as nursery:
        await nursery.start(busy.run)
        await nursery.start(free.run)
        async with trio.open_nursery() as askers:
            ask(askers, busy)
            await engine.step_gate.arrived()
            askers.start_soon(busy.unload)
            await wait_all_tasks_blocked()
            async with leased(free) as lease:
                await lease.ready()
            await free.unload()
            assert engine.closed == ["b[0]", "b"]
            engine.step_gate.open()
        nursery.cancel_scope.cancel()


# -- options
