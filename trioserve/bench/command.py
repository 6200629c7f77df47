"""The command: a plan is worked off, round by round, and what came of it is printed and kept."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trioserve.bench.measures import summarise
from trioserve.bench.picture import write_picture
from trioserve.bench.plan import STDOUT, Plan, UsageError, plan_from
from trioserve.bench.report import Report, as_charts, as_json, as_table

if TYPE_CHECKING:
    from trioserve.bench.load import Target
    from trioserve.bench.measures import Answer

EXIT_OK, EXIT_ERRORS, EXIT_USAGE = 0, 1, 2
EXIT_SIGNAL = 128
"""And the number of the signal."""

Tell = Callable[[str], None]
"""Takes a line for somebody who waits."""


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print what was measured, also where a signal or the time puts an end to it.

    Arguments:
        arguments: of a parser that ``plan.add_arguments`` has made.

    Returns:
        0; 1 where any measured request failed or nothing could be measured; 128 and the signal's number after one.

    Raises:
        UsageError: an argument can't be used, or a package for it is not installed.
    """
    plan = plan_from(arguments)
    _check_packages(plan)
    try:
        return _run(Report(plan))
    except KeyboardInterrupt:  # while there was nothing yet, or no longer anything, to print
        return EXIT_SIGNAL + signal.SIGINT


def _run(report: Report) -> int:
    import trio

    received = trio.run(_measure_until_signal, report)
    if report.cut_short:
        _tell(f"{report.cut_short}: rounds that had not ended are left out")
    kept = _keep(report)
    if received:
        return EXIT_SIGNAL + received
    return EXIT_OK if kept and report.rounds and not report.failures else EXIT_ERRORS


async def measure(report: Report, tell: Tell) -> None:
    """Work off the plan of a report, and note its rounds there as they end.

    Arguments:
        report: with nothing in it.
        tell: is told of every round, and of every kind of failure once.
    """
    import trio

    with trio.move_on_after(report.plan.max_seconds) as scope:
        await _measure_all(report, tell)
    if scope.cancelled_caught:
        report.cut_short = f"stopped after {report.plan.max_seconds:g} s (--max-seconds)"


async def _measure_all(report: Report, tell: Tell) -> None:
    from trioserve.bench.load import NoTargetError, ask_once, find_target

    plan, targets = report.plan, {}
    for name, server in plan.servers.items():
        try:
            targets[name] = await find_target(server)
        except NoTargetError as error:
            _note_failures(report, [str(error)], tell)
            return
        report.models[name] = targets[name].model
        # Not measured: a first request may load the model. Where it fails there is nothing to measure.
        first = await ask_once(targets[name], plan.workload)
        if first.error is not None:
            _note_failures(report, [f"{server.url} does not answer: {first.error}"], tell)
            return
    await _measure_rounds(report, targets, tell)


async def _measure_rounds(report: Report, targets: dict[str, Target], tell: Tell) -> None:
    from trioserve.bench.load import run_load

    plan, seed = report.plan, 1
    for clients in plan.clients:
        for number in range(plan.rounds):
            # Who goes first alternates, so that neither always meets the warmer machine.
            for name in list(targets) if number % 2 == 0 else reversed(list(targets)):
                answers, seconds = await run_load(
                    targets[name], plan.workload, clients=clients, requests=plan.requests, first_seed=seed
                )
                sample = summarise(answers, seconds)
                report.note(clients, name, sample)
                _note_failures(report, _errors(answers), tell)
                where = f"clients {clients}, round {number + 1} of {plan.rounds}, {name}"
                tell(f"{where}: {sample.tokens_per_s:.1f} tokens/s")
            seed += clients * plan.requests


def _errors(answers: list[Answer]) -> list[str]:
    return [answer.error for answer in answers if answer.error is not None]


def _note_failures(report: Report, failures: list[str], tell: Tell) -> None:
    for failure in map(_one_line, failures):
        if failure not in report.failures:
            tell(f"failed: {failure}")
        report.failures[failure] += 1


def _one_line(said: str) -> str:
    """What a server said may be a page."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(said.split()))


async def _measure_until_signal(report: Report) -> int:
    """Measure; return the number of the signal that ended it, or 0."""
    import trio

    received = 0

    async def watch(signals: AsyncIterator[int]) -> None:
        nonlocal received
        async for received in signals:
            report.cut_short = f"stopped by {signal.Signals(received).name}"
            nursery.cancel_scope.cancel()

    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, signals)
            await measure(report, _tell)
            nursery.cancel_scope.cancel()
    return received


def _keep(report: Report) -> bool:
    """Print the report and write its files; False where that was not possible."""
    kept = True
    if report.plan.json == STDOUT:
        kept = _print(as_json(report))
    elif report.rounds:
        kept = _print(as_table(report))
    writers: list[tuple[Path, Callable[[Path], object]]] = []
    if report.plan.json not in {None, STDOUT}:
        writers.append((Path(str(report.plan.json)), lambda path: path.write_text(as_json(report) + "\n", "utf-8")))
    if report.plan.plot is not None and report.rounds:
        writers.append((report.plan.plot, lambda path: write_picture(path, as_charts(report))))
    for path, write in writers:
        try:
            write(path)
        except OSError as error:
            _tell(f"{path} can't be written: {error.strerror}")
            kept = False
    return kept


def _check_packages(plan: Plan) -> None:
    if find_spec("httpx") is None:
        raise UsageError("bench needs httpx: pip install 'trioserve[bench]', or pip install httpx")
    if plan.plot is not None and plan.plot.suffix.lower() == ".png" and find_spec("matplotlib") is None:
        raise UsageError("--plot: PNG needs matplotlib, which is not installed; a file that ends in .svg needs nothing")


def _print(text: str) -> bool:
    """Print, and say whether that was possible; Python has no output at all where it was closed."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except (OSError, AttributeError):
        return False
    return True


def _tell(line: str) -> None:
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write(f"bench: {line}\n")
        sys.stderr.flush()
