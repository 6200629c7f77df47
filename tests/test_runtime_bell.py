"""What one task waits for again and again."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.runtime.bell import Bell


async def test_a_ring_ends_a_wait(autojump_clock):
    bell = Bell()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bell.wait)
        await wait_all_tasks_blocked()
        bell.ring()
    await silent(bell)


async def test_rings_that_nobody_waits_for_end_one_wait(autojump_clock):
    bell = Bell()
    bell.ring()
    bell.ring()
    await bell.wait()
    await silent(bell)


async def test_a_ring_between_a_waiters_waking_and_its_next_wait_is_not_lost(autojump_clock):
    bell, waits = Bell(), 0

    async def wait_twice():
        nonlocal waits
        for _ in range(2):
            await bell.wait()
            waits += 1

    with trio.fail_after(1):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_twice)
            await wait_all_tasks_blocked()
            bell.ring()
            bell.ring()
    assert waits == 2


async def test_a_wait_that_is_cancelled_leaves_the_next_ring_to_the_next_wait(autojump_clock):
    bell = Bell()
    await silent(bell)
    bell.ring()
    with trio.fail_after(1):
        await bell.wait()


async def test_a_wait_that_is_over_at_once_can_be_cancelled_and_keeps_the_ring(autojump_clock):
    bell = Bell()
    bell.ring()
    with trio.CancelScope() as scope:
        scope.cancel()
        await bell.wait()
        pytest.fail("a checkpoint was left out")
    with trio.fail_after(1):
        await bell.wait()


async def test_a_second_waiter_is_a_mistake():
    bell = Bell()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bell.wait)
        await wait_all_tasks_blocked()
        with pytest.raises(AssertionError, match="one waiter"):
            await bell.wait()
        bell.ring()


async def silent(bell):
    with trio.move_on_after(1) as scope:
        await bell.wait()
    assert scope.cancelled_caught
