"""The end of the process in bounded time, without the end of the process."""

import logging
import threading
import time

import pytest
import trio

from trioserve import last_resort
from trioserve.last_resort import LastResort

SAFETY_SECONDS = 20


@pytest.fixture
def left(monkeypatch):
    """What was done, in order: lines of the log, the flush, and the exit code."""
    done, over = [], threading.Event()

    class Done(list):
        def wait(self, seconds=SAFETY_SECONDS):
            return over.wait(seconds)

    done = Done()

    def leave(code):
        done.append(code)
        over.set()

    class Handler(logging.Handler):
        def emit(self, record):
            done.append(record.getMessage())

    handler, logger = Handler(), logging.getLogger("trioserve")
    logger.addHandler(handler)
    monkeypatch.setattr(last_resort.os, "_exit", leave)
    yield done
    logger.removeHandler(handler)


def resort(done, unfinished=("slot 0 is stuck",)):
    return LastResort(lambda: 3, lambda: unfinished, lambda: done.append("flush"))


def test_the_process_is_left_with_a_word_about_what_held_it_up(left):
    resort(left).within(0.01)
    assert left.wait()
    assert left == ["the end is forced; not done yet: slot 0 is stuck", "flush", 3]


def test_of_several_bounds_the_earliest_counts(left):
    last = resort(left)
    last.within(3600)
    last.within(0.01)
    last.within(3600)
    assert last.seconds_left < 1
    assert left.wait()


def test_an_end_that_came_by_itself_is_left_alone(left):
    last = resort(left)
    assert last.seconds_left == float("inf")
    last.within(0.05)
    last.call_off()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "trioserve-last-resort"]
    thread.join(SAFETY_SECONDS)
    assert left == []


def test_it_waits_for_nothing_but_its_time(left):
    """Not for the event loop, which may be what hangs."""

    async def hang():
        resort(left, ()).within(0.01)
        while not left.wait(0.01):
            time.sleep(0.01)

    trio.run(hang)
    assert left[0].endswith("the event loop")


async def test_threads_that_no_model_knows_of_are_told_by_name(left):
    gate = threading.Event()

    def prepare():
        gate.wait(SAFETY_SECONDS)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, prepare)
        await trio.testing.wait_all_tasks_blocked(0.01)
        resort(left, ()).leave()
        gate.set()
    assert "prepare from" in left[0]
