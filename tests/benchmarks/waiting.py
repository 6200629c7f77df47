"""What it costs that the threads of a step wait for each other: tokens per second for several bounds of the waiting.

Prints a table in Markdown. Each setting has a process of its own, which lives through all rounds; the rounds of the
settings alternate. All of it stays on the first cores of the machine, one for each thread. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from trioserve.engine.base import LoadOptions, SequenceRequest, SessionOptions
from trioserve.engine.llama import LlamaEngine
from trioserve.runtime.pace import Pace

SETTINGS = {
    "libgomp's own": {"GOMP_SPINCOUNT": "300000"},
    **{f"{count:,}": {"GOMP_SPINCOUNT": str(count)} for count in (10_000, 1_000, 100, 0)},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # importing the engine has set one of them here
PROMPT = 32  # tokens
LONGEST = 900  # tokens of an answer


def decode_on_request(model: str, threads: int, tokens: int, seconds: float, tried: bool) -> None:
    """Answer each line of standard input with the speed of one answer."""
    session = LlamaEngine().load(Path(model), LoadOptions()).open_session(SessionOptions(n_ctx=1024))
    pace = Pace()
    prompt = [100 + number for number in range(PROMPT)]
    print(flush=True)
    for _ in sys.stdin:
        sequence = session.add(SequenceRequest(prompt, LONGEST, ignore_eos=True, reuse=False))
        while not session.step(threads):
            pass
        began, count = time.perf_counter(), 0
        while count < tokens and time.perf_counter() < began + seconds:
            before = time.perf_counter()
            chosen = pace.threads(threads) if tried else threads
            count += len(session.step(chosen))
            pace.note(chosen, time.perf_counter() - before)
        speed = count / (time.perf_counter() - began)
        session.remove(sequence)
        print(speed, flush=True)


@contextlib.contextmanager
def process(arguments: list[str], settings: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A Python process that ends with the block."""
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    with subprocess.Popen(
        [sys.executable, *arguments],
        env=inherited | settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Speeds of each setting, one for each round."""
    speeds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    # Children inherit it, and libgomp asks how many cores there are.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    with contextlib.ExitStack() as stack:
        workers = {
            name: stack.enter_context(process([__file__, *sys.argv[1:], "--worker"], settings))
            for name, settings in SETTINGS.items()
        }
        for worker in workers.values():
            ask(worker, "")
        if options.beside:
            stack.enter_context(process(["-c", "while True: pass"], {}))
        for _ in range(options.rounds):
            for name, worker in workers.items():
                speeds[name].append(float(ask(worker, "go\n")))
    return speeds


def ask(worker: subprocess.Popen[str], line: str) -> str:
    """Send a line and read one."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(line)
    worker.stdin.flush()
    return worker.stdout.readline()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--threads", type=int, default=2, help="threads, and cores that they get")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=1.0, help="the longest time for an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", action="store_true", help="let another program run on those cores that never rests")
    parser.add_argument("--tried", action="store_true", help="take fewer threads where they are faster, as a slot does")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        decode_on_request(options.model, options.threads, options.tokens, options.seconds, options.tried)
        return
    speeds = measure(options)
    print("| " + " | ".join(speeds) + " |\n" + "|---" * len(speeds) + "|")
    print("| " + " | ".join(f"{statistics.median(found):.1f}" for found in speeds.values()) + " |")


if __name__ == "__main__":
    main()
