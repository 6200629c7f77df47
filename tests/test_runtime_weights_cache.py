"""Weights are loaded once for all who ask, and freed with the last of them."""

import os

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.engine.base import LoadOptions, UnusableFile
from trioserve.errors import InvalidModelError, ModelLoadError
from trioserve.testing import FakeWeights, ThreadGate

OPTIONS = LoadOptions()


class User:
    """A task that asks for weights, in a cancel scope of its own."""

    def __init__(self, cache, path, options=OPTIONS):
        self.cache, self.path, self.options = cache, path, options
        self.scope = trio.CancelScope()
        self.weights = self.error = None

    async def __call__(self):
        with self.scope:
            try:
                self.weights = await self.cache.acquire(self.path, self.options)
            except Exception as error:
                self.error = error

    async def leave(self):
        await self.cache.release(self.weights)


async def ask(nursery, cache, path, count=1):
    users = [User(cache, path) for _ in range(count)]
    for user in users:
        nursery.start_soon(user)
        await wait_all_tasks_blocked()
    return users


async def test_concurrent_first_users_share_one_load(engine, cache, model_file):
    engine.load_gate.shut()
    async with trio.open_nursery() as nursery:
        users = await ask(nursery, cache, model_file, 5)
        await engine.load_gate.arrived()
        engine.load_gate.open()
    assert engine.loads == 1
    assert {id(user.weights) for user in users} == {id(users[0].weights)}


async def test_weights_are_freed_with_their_last_user(engine, cache, model_file):
    first, second = await cache.acquire(model_file, OPTIONS), await cache.acquire(model_file, OPTIONS)
    assert first is second
    await cache.release(first)
    assert engine.closed == []
    await cache.release(second)
    assert engine.closed == ["tiny"]


async def test_freed_weights_are_loaded_anew(engine, cache, model_file):
    first = await cache.acquire(model_file, OPTIONS)
    await cache.release(first)
    second = await cache.acquire(model_file, OPTIONS)
    assert second is not first
    assert engine.loads == 2
    await cache.release(second)
    assert engine.closed == ["tiny", "tiny"]


async def test_other_options_are_other_weights(engine, cache, model_file):
    plain = await cache.acquire(model_file, OPTIONS)
    locked = await cache.acquire(model_file, LoadOptions(mlock=True))
    assert plain is not locked
    await cache.release(locked)
    assert engine.closed == ["tiny"]
    await cache.release(plain)


async def test_a_link_names_the_same_weights(engine, cache, model_file, tmp_path):
    link = tmp_path / "link.gguf"
    link.symlink_to(model_file)
    assert await cache.acquire(model_file, OPTIONS) is await cache.acquire(link, OPTIONS)
    assert engine.loads == 1


async def test_a_file_that_was_replaced_is_loaded_beside_the_old_one(engine, cache, model_file):
    old = await cache.acquire(model_file, OPTIONS)
    os.utime(model_file, ns=(1, 1))
    new = await cache.acquire(model_file, OPTIONS)
    assert new is not old
    await cache.release(old)
    assert await cache.acquire(model_file, OPTIONS) is new


async def test_a_failed_load_fails_for_all_who_wait_and_is_tried_again_by_the_next(engine, cache, model_file):
    engine.failing_loads = 1
    engine.load_gate.shut()
    async with trio.open_nursery() as nursery:
        users = await ask(nursery, cache, model_file, 3)
        engine.load_gate.open()
    assert [type(user.error) for user in users] == [ModelLoadError] * 3
    assert engine.loads == 1
    assert await cache.acquire(model_file, OPTIONS) is not None
    assert engine.loads == 2


async def test_a_load_that_raises_something_unforeseen_leaves_nobody_waiting(engine, cache, model_file, monkeypatch):
    engine.load_gate.shut()

    def load(*_):
        engine.load_gate.wait()
        raise ValueError("unforeseen")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "load", load)
        async with trio.open_nursery() as nursery:
            first, second = await ask(nursery, cache, model_file, 2)
            engine.load_gate.open()
    assert isinstance(first.error, ValueError)
    assert isinstance(second.error, ModelLoadError)
    assert await cache.acquire(model_file, OPTIONS) is not None


async def test_a_missing_file_is_a_load_error_without_a_load(engine, cache, tmp_path):
    with pytest.raises(ModelLoadError, match=r"nowhere\.gguf"):
        await cache.acquire(tmp_path / "nowhere.gguf", OPTIONS)
    assert engine.loads == 0


async def test_a_load_goes_on_for_the_others_when_its_starter_is_cancelled(engine, cache, model_file):
    engine.load_gate.shut()
    async with trio.open_nursery() as nursery:
        starter, other = await ask(nursery, cache, model_file, 2)
        await engine.load_gate.arrived()
        starter.scope.cancel()
        await wait_all_tasks_blocked()
        engine.load_gate.open()
    assert (starter.weights, other.error) == (None, None)
    assert engine.closed == []
    await other.leave()
    assert engine.closed == ["tiny"]


@pytest.mark.parametrize("leavers", [(0,), (0, 1), (1, 0)])
async def test_a_load_is_given_up_when_nobody_is_left_who_waits_for_it(engine, cache, model_file, leavers):
    engine.load_gate.shut()
    async with trio.open_nursery() as nursery:
        users = await ask(nursery, cache, model_file, len(leavers))
        await engine.load_gate.arrived()
        for leaver in leavers:
            users[leaver].scope.cancel()
            await wait_all_tasks_blocked()
        engine.load_gate.open()
    assert [(user.weights, user.error) for user in users] == [(None, None)] * len(leavers)
    assert (engine.closed, cache._entries) == ([], {}), "there never were weights"


async def test_whoever_comes_while_a_load_is_given_up_waits_and_loads_anew(engine, cache, model_file):
    engine.load_gate.shut()
    async with trio.open_nursery() as nursery:
        (leaver,) = await ask(nursery, cache, model_file)
        await engine.load_gate.arrived()
        leaver.scope.cancel()
        await wait_all_tasks_blocked()
        (newcomer,) = await ask(nursery, cache, model_file)
        assert engine.loads == 1
        engine.load_gate.open()
    assert newcomer.weights is not None
    assert engine.loads == 2
    await newcomer.leave()
    assert engine.closed == ["tiny"]


async def test_weights_that_come_though_nobody_wants_them_are_freed(engine, cache, model_file, monkeypatch):
    load = engine.load
    monkeypatch.setattr(engine, "load", lambda path, options, progress: load(path, options))
    engine.load_gate.shut()
    async with trio.open_nursery() as nursery:
        (leaver,) = await ask(nursery, cache, model_file)
        await engine.load_gate.arrived()
        leaver.scope.cancel()
        await wait_all_tasks_blocked()
        engine.load_gate.open()
    assert (engine.closed, cache._entries, cache._keys) == (["tiny"], {}, {})


async def test_a_load_that_waits_for_other_loads_goes_on_as_well(engine, cache, make_model_file):
    engine.load_gate.shut()
    async with trio.open_nursery() as nursery:
        for number in range(4):  # as many as load side by side
            await ask(nursery, cache, make_model_file(f"{number}.gguf"))
        starter, other = await ask(nursery, cache, make_model_file("last.gguf"), 2)
        await engine.load_gate.arrived(4)
        starter.scope.cancel()
        await wait_all_tasks_blocked()
        engine.load_gate.open()
    assert other.weights.name == "last"


async def test_a_cancelled_waiter_does_not_keep_the_weights(engine, cache, model_file):
    engine.load_gate.shut()
    async with trio.open_nursery() as nursery:
        starter, waiter = await ask(nursery, cache, model_file, 2)
        waiter.scope.cancel()
        await wait_all_tasks_blocked()
        engine.load_gate.open()
    assert waiter.weights is None
    await starter.leave()
    assert engine.closed == ["tiny"]


async def test_weights_survive_a_starter_that_gives_them_back_before_the_others_woke_up(engine, cache, model_file):
    engine.load_gate.shut()

    async def hasty():
        await cache.release(await cache.acquire(model_file, OPTIONS))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hasty)
        await wait_all_tasks_blocked()
        (waiter,) = await ask(nursery, cache, model_file)
        engine.load_gate.open()
    assert engine.closed == []
    await waiter.leave()
    assert engine.closed == ["tiny"]


async def test_a_waiter_cancelled_after_the_starter_left_frees_the_weights(engine, cache, model_file):
    engine.load_gate.shut()
    waiter = User(cache, model_file)

    async def hasty():
        weights = await cache.acquire(model_file, OPTIONS)
        waiter.scope.cancel()
        await cache.release(weights)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hasty)
        await wait_all_tasks_blocked()
        nursery.start_soon(waiter)
        await wait_all_tasks_blocked()
        engine.load_gate.open()
    if waiter.weights is not None:  # it had been woken already
        await waiter.leave()
    assert engine.closed == ["tiny"]


async def test_a_release_is_finished_though_its_caller_is_cancelled(engine, cache, model_file):
    weights = await cache.acquire(model_file, OPTIONS)
    with trio.CancelScope() as scope:
        scope.cancel()
        await cache.release(weights)
    assert engine.closed == ["tiny"]


@pytest.fixture
def slow_free(monkeypatch):
    """The gate that weights pass on their way out."""
    gate = ThreadGate(is_open=False)
    close = FakeWeights.close
    monkeypatch.setattr(FakeWeights, "close", lambda self: gate.wait() and close(self))
    return gate


async def test_whoever_comes_while_weights_are_freed_waits_and_loads_anew(engine, cache, model_file, slow_free):
    weights = await cache.acquire(model_file, OPTIONS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cache.release, weights)
        await slow_free.arrived()
        users = await ask(nursery, cache, model_file, 2)
        assert engine.loads == 1, "two copies at once"
        slow_free.open()
    assert engine.loads == 2
    assert users[0].weights is users[1].weights is not weights
    for user in users:
        await user.leave()
    assert engine.closed == ["tiny", "tiny"]


async def test_whoever_leaves_while_waiting_for_weights_to_be_freed_leaves_nothing(
    engine, cache, model_file, slow_free
):
    weights = await cache.acquire(model_file, OPTIONS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cache.release, weights)
        await slow_free.arrived()
        (leaver,) = await ask(nursery, cache, model_file)
        leaver.scope.cancel()
        slow_free.open()
    assert (leaver.weights, engine.loads) == (None, 1)
    assert cache._entries == {}


async def test_weights_that_cannot_be_freed_are_forgotten(engine, cache, model_file, monkeypatch, caplog):
    def refuse(_):
        raise RuntimeError("they will not go")

    weights = await cache.acquire(model_file, OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(FakeWeights, "close", refuse)
        await cache.release(weights)
    assert "could not be freed" in caplog.text
    assert await cache.acquire(model_file, OPTIONS) is not weights


async def test_weights_are_freed_beside_any_number_of_loads(engine, cache, make_model_file):
    weights = await cache.acquire(make_model_file("done.gguf"), OPTIONS)
    engine.load_gate.shut()
    async with trio.open_nursery() as nursery:
        for number in range(4):  # as many as load side by side
            await ask(nursery, cache, make_model_file(f"{number}.gguf"))
        await engine.load_gate.arrived(5)
        await cache.release(weights)
        assert engine.closed == ["done"]
        engine.load_gate.open()


async def test_a_file_at_fault_is_told_from_a_load_that_failed(engine, cache, model_file, monkeypatch):
    def refuse(*_):
        raise UnusableFile("it is of another kind")

    monkeypatch.setattr(engine, "load", refuse)
    with pytest.raises(InvalidModelError, match=r"tiny\.gguf.*another kind") as caught:
        await cache.acquire(model_file, OPTIONS)
    assert caught.value.param == "path"
