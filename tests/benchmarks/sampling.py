"""What it costs to choose the next tokens of a step, with and without a look at the likeliest ones alone.

Made-up logits, and the chooser and the samplers of the server. The two ways alternate; medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trioserve.engine.llama import sampler as sampler_module
from trioserve.engine.llama.chooser import Chooser, Row
from trioserve.engine.llama.sampler import Sampler
from trioserve.engine.llama.shortlist import shortlist
from trioserve.engine.sampling import Sampling

USUAL = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1)
KINDS = {
    "`top_k` 40, `top_p` 0.95": USUAL,
    "and `repeat_penalty` 1.1": dataclasses.replace(USUAL, repeat_penalty=1.1),
}
PROMPT = list(range(100))
CHOICES = 40


class _Context:
    """Stands for a context whose logits have been computed."""

    pointer = None

    def __init__(self, table: npt.NDArray[np.float32]) -> None:
        self._table = table

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        return self._table[row]


def microseconds(table: npt.NDArray[np.float32], sampling: Sampling, threads: int, *, short: bool) -> float:
    """The median time to choose a token for each row."""
    every = np.arange(table.shape[1])
    cast(Any, sampler_module).shortlist = shortlist if short else lambda *_: every
    cast(Any, Sampler).quick = short  # the others are worth threads
    rows = [
        Row(Sampler(cast(Any, SimpleNamespace(size=table.shape[1], pointer=None)), sampling, PROMPT, 2048), row, row)
        for row in range(len(table))
    ]
    chooser = Chooser(cast(Any, _Context(table)))
    times = []
    for _ in range(CHOICES):
        began = time.perf_counter()
        chooser.choose(rows, len(rows), threads)
        times.append(time.perf_counter() - began)
    chooser.close()
    for row in rows:
        row.sampler.close()
    return 1e6 * statistics.median(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.sampling", description=__doc__)
    parser.add_argument("--vocab", type=int, default=128256, help="tokens")
    parser.add_argument("--rows", type=lambda text: list(map(int, text.split(","))), default=[1, 4, 16])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print("| rows | sampling | all tokens, us | the likeliest, us |")
    print("|---|---|---|---|")
    for count in arguments.rows:
        table = np.random.default_rng(0).standard_normal((count, arguments.vocab)).astype(np.float32) * 3
        for name, sampling in KINDS.items():
            times: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(arguments.rounds):
                for short, found in times.items():
                    found.append(microseconds(table, sampling, arguments.threads, short=short))
            print(
                f"| {count} | {name} | {statistics.median(times[False]):,.0f} | {statistics.median(times[True]):,.0f} |"
            )


if __name__ == "__main__":
    main()
