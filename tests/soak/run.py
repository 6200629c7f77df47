"""One soak, from the start of the daemon to its exit code."""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import trio
from lifecycle.daemon import Daemon

from trioserve.config.model_files import embedded_model_path

from . import answers, checks, plan
from .checks import Kind, Violation
from .clients import World, be_client, be_manager, be_newcomer, manage, place
from .tally import Tally
from .wire import Wire

PARTS = 4
"""Memory is looked at after each part of the time."""

LINE_SECONDS = 30.0
IDLE_SECONDS = 1.0
_ARRIVAL_SECONDS = 10.0
_NEWCOMERS = 3
_TRUSTWORTHY_SECONDS = 120.0  # memory is still finding its level before

Say = Callable[[str], object]


def soak(seconds: float, seed: int, shape: plan.Shape, say: Say) -> Tally:
    """Run a soak.

    Arguments:
        seconds: of load, beside the answers alone before it and the end.
        seed: of everything random.
        shape: how large it is.
        say: told each line for people.
    """
    with _daemon() as daemon:
        tally = Tally()
        trio.run(_soak, daemon, seconds, seed, shape, say, tally)
        log = daemon.log_text()
    problems = checks.log_problems(log, tally.outcomes)
    if seconds >= _TRUSTWORTHY_SECONDS and (growth := checks.grown(tally.memory)):
        problems.append(growth)
    tally.violate(*(Violation(Kind.CONTRACT, problem) for problem in problems))
    say(f"seed {seed}, {seconds / 60:g} minutes, {shape.clients} clients")
    for line in tally.report(checks.cut_phases(log), checks.reused_tokens(log)):
        say(line)
    return tally


@contextlib.contextmanager
def _daemon() -> Iterator[Daemon]:
    entries = [
        f'[[models]]\nid = "{name}"\npath = "{embedded_model_path()}"\nslots = {slots}\n'
        f"n_ctx = {plan.MIN_CONTEXT}\nthreads = 1\n" + ('task = "embed"\n' if name == plan.EMBEDDER else "")
        for name, slots in plan.SLOTS.items()
    ]
    # Nothing here is about how fast a crowded machine gets an answer out.
    server = "management = true\ndrain_timeout_ms = 240000\n"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "soak.toml")
        path.write_text(server + "".join(entries))
        with Daemon("--config", str(path)) as daemon:
            yield daemon


async def _soak(daemon: Daemon, seconds: float, seed: int, shape: plan.Shape, say: Say, tally: Tally) -> None:
    catalogue = plan.questions(seed, shape)
    words = plan.secret_words(seed, shape.clients)
    began = trio.current_time()
    expected = await _alone(daemon.port, catalogue)
    say(f"{len(expected)} answers alone in {trio.current_time() - began:.0f} s")
    asked = [question for own in catalogue for question in own]
    same, together, unlike = checks.in_company(asked, expected)
    say(f"{same} of {together} answers of batches are those of their requests alone")
    tally.violate(*(Violation(Kind.WRONG_BYTES, problem) for problem in unlike))
    for question in asked:
        problems = checks.broken_forms(question, expected[question.key])
        tally.violate(*(Violation(Kind.BROKEN_FORM, problem) for problem in problems))
    by_key = {question.key: words[question.owner] for question in asked}
    if problem := checks.toothless(expected, by_key):
        tally.violate(Violation(Kind.CONTRACT, problem))
    world = World(daemon.port, words, expected, tally)
    async with trio.open_nursery() as watching:
        watching.start_soon(world.watch.run, daemon.port)
        async with trio.open_nursery() as working:
            for number, own in enumerate(catalogue):
                working.start_soon(be_client, world, number, plan.orders(seed, number, own))
            working.start_soon(be_manager, world, plan.operations(seed, shape))
            await _go_through(world, daemon, seconds, say)
            working.cancel_scope.cancel()
        watching.cancel_scope.cancel()
    say(f"the slowest status took {world.watch.slowest:.2f} s")
    await _end(world, daemon, plan.farewell(seed, shape))


async def _alone(port: int, catalogue: list[list[plan.Question]]) -> dict[str, answers.Told]:
    """The answers of a quiet server to all that will be asked."""
    wire, found = Wire(port), {}
    for question in (question for own in catalogue for question in own):
        order = plan.Order(question, question.models[0], fresh=True)
        status, told = await wire.call("POST", question.route, order.body)
        assert status == 200, told
        found[question.key] = answers.read(order, told)
    wire.leave()
    return found


async def _go_through(world: World, daemon: Daemon, seconds: float, say: Say) -> None:
    """Let everybody work for so many seconds, and look at the memory after each part of them."""
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_tell, world, daemon, say)
        for part in range(1, PARTS + 1):
            await trio.sleep_until(began + seconds * part / PARTS)
            await world.pauses.pause()
            world.tally.memory.append(await _unloaded_memory(daemon))
            if part < PARTS:
                world.pauses.go_on()
        nursery.cancel_scope.cancel()


async def _tell(world: World, daemon: Daemon, say: Say) -> None:
    began = trio.current_time()
    while True:
        await trio.sleep(LINE_SECONDS)
        say(world.tally.line(trio.current_time() - began, resident(daemon)))


async def _unloaded_memory(daemon: Daemon) -> int:
    wire = Wire(daemon.port)
    status, told = await wire.call("POST", plan.UNLOAD_ALL)
    wire.leave()
    assert status == 200, told
    return resident(daemon)


async def _end(world: World, daemon: Daemon, farewell: list[plan.Order]) -> None:
    """See that the server is idle, serves once more, and drains in order."""
    wire, tally = Wire(daemon.port), world.tally
    tally.violate(*(Violation(Kind.CONTRACT, f"still busy: {problem}") for problem in await _still_busy(wire)))
    for operation in plan.patience():  # whoever waits at the signal shall be answered, too
        await manage(world, wire, operation)
    await place(world, wire, farewell[0], "soak-last")
    refused = 0
    async with trio.open_nursery() as nursery:
        for number, order in enumerate(farewell):
            nursery.start_soon(_say_farewell, world, order, number)
        await _all_taken(wire, len(farewell))
        daemon.signal(signal.SIGTERM)
        await trio.to_thread.run_sync(daemon.wait_for_log, "info draining active=")
        for number in range(_NEWCOMERS):
            refused += await be_newcomer(world, number)
    wire.leave()
    code = await trio.to_thread.run_sync(daemon.finish)
    if code != 0:
        tally.violate(Violation(Kind.CONTRACT, f"the exit code is {code}"))
    problems = checks.drain_problems(daemon.log_text(), len(farewell), refused)
    tally.violate(*(Violation(Kind.CONTRACT, problem) for problem in problems))


async def _say_farewell(world: World, order: plan.Order, number: int) -> None:
    wire = Wire(world.port)
    await place(world, wire, order, f"soak-farewell-{number}")
    wire.leave()


async def _still_busy(wire: Wire) -> list[str]:
    deadline = trio.current_time() + IDLE_SECONDS
    while True:
        models, slots = await wire.status("/v1/models"), await wire.status("/v1/slots")
        found = checks.busy_slots(models, slots)
        if not found or trio.current_time() > deadline:
            return found
        await trio.sleep(0.05)


async def _all_taken(wire: Wire, count: int) -> None:
    """Return once the server has so many requests, or some have ended before all had come."""
    with trio.move_on_after(_ARRIVAL_SECONDS):
        while True:
            models = await wire.status("/v1/models")
            if sum(one["active_slots"] + one["queued_requests"] for one in models) >= count:
                return
            await trio.sleep(0.02)


def resident(daemon: Daemon) -> int:
    """Bytes of the process that are in memory."""
    for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the system does not tell")
