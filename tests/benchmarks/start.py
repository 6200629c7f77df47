"""What a start costs: from the beginning of a process to its end, or to a server that is ready.

Prints a table in Markdown: the median and the quickest of several starts, and the processor time of the median one. The
kinds of start alternate, so that what else the machine does hits all of them; one start of each goes before that is not
counted, and leaves the bytecode that an installed package has. Linux only.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from trioserve.config.model_files import embedded_model_path

LISTENING, READY = re.compile(r"listening on (\S+)"), re.compile(r" info ready$")


class Start(NamedTuple):
    """One start: seconds on the wall, and of processor time."""

    wall: float
    cpu: float


class Checkout(NamedTuple):
    """Where the package lies, and the environment of its processes."""

    folder: Path
    environment: dict[str, str]


def until_end(where: Checkout, *arguments: str) -> dict[str, Start]:
    """Run Python to its end."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, cwd=where.folder, env=where.environment
    )
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"": Start(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)}


def until_ready(where: Checkout, model: str) -> dict[str, Start]:
    """Run the server until it has the model and has answered, and end it."""
    found = {}
    began = time.perf_counter()
    command = [sys.executable, "-m", "trioserve", "serve", model, "--port", "0"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=where.folder, env=where.environment
    ) as server:
        assert server.stderr is not None
        for line in server.stderr:
            if heard := LISTENING.search(line):
                url = heard[1]
                found["listening"] = Start(time.perf_counter() - began, cpu_seconds(server.pid))
            elif READY.search(line.rstrip()):
                found["ready"] = Start(time.perf_counter() - began, cpu_seconds(server.pid))
                break
        with urllib.request.urlopen(f"{url}/health/ready") as response:
            assert response.status == 200
        found["first answer"] = Start(time.perf_counter() - began, cpu_seconds(server.pid))
        server.terminate()
        server.stderr.read()
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def kinds(where: Checkout, model: str) -> dict[str, Callable[[], dict[str, Start]]]:
    """What is measured, by the command that it is about."""
    program = ("-m", "trioserve")
    return {
        "python -c pass": partial(until_end, where, "-c", "pass"),
        "import trioserve": partial(until_end, where, "-c", "import trioserve"),
        "trioserve --version": partial(until_end, where, *program, "--version"),
        "trioserve --help": partial(until_end, where, *program, "--help"),
        "trioserve serve --help": partial(until_end, where, *program, "serve", "--help"),
        "trioserve validate": partial(until_end, where, *program, "validate", model),
        "trioserve serve": partial(until_ready, where, model),
    }


def measure(checkouts: list[Checkout], model: str, rounds: int) -> dict[tuple[str, Path], list[Start]]:
    """The counted starts, by what they are and whose."""
    starts: dict[tuple[str, Path], list[Start]] = {}
    work = [(kind, where, run) for where in checkouts for kind, run in kinds(where, model).items()]
    work.sort(key=lambda entry: list(kinds(checkouts[0], model)).index(entry[0]))  # checkouts side by side
    for number in range(rounds + 1):
        for kind, where, run in work:
            for until, start in run().items():
                if number:
                    name = f"`{kind}`, {until}" if until else f"`{kind}`"
                    starts.setdefault((name, where.folder), []).append(start)
    return starts


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench_start", description=__doc__)
    parser.add_argument("model", nargs="?", help="a GGUF file (default: the one that comes with a package)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--against", type=Path, help="another checkout, whose starts alternate with those of this one")
    options = parser.parse_args()
    model = os.path.abspath(options.model or embedded_model_path())
    with tempfile.TemporaryDirectory() as bytecode:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment = inherited | {"PYTHONPYCACHEPREFIX": bytecode}
        folders = [Path.cwd(), *([options.against.resolve()] if options.against else [])]
        starts = measure([Checkout(folder, environment) for folder in folders], model, options.rounds)
    print("| start | median ms | quickest ms | processor ms |\n|---|---|---|---|")
    for (name, folder), found in starts.items():
        walls = [1000 * start.wall for start in found]
        cpu = 1000 * statistics.median(start.cpu for start in found)
        where = f" in {folder}" if options.against else ""
        print(f"| {name}{where} | {statistics.median(walls):.0f} | {min(walls):.0f} | {cpu:.0f} |")


if __name__ == "__main__":
    main()
