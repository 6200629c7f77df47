"""``python -m trioserve.bench``: arguments in, tables out."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from trioserve.bench.measures import NUMBERS, Sample, medians, ratios, summarise

if TYPE_CHECKING:
    from trioserve.bench.load import Target, Workload

EXIT_OK, EXIT_ERRORS, EXIT_USAGE = 0, 1, 2
_HEADS = {
    "tokens_per_s": "tokens/s",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p95_ms": "TTFT p95 ms",
    "gap_p50_ms": "gap p50 ms",
    "gap_p95_ms": "gap p95 ms",
}
Report = dict[int, dict[str, Sample]]
"""Client count -> name of the server -> median of its rounds."""


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m trioserve.bench",
        description="Load an OpenAI-compatible server with streaming chat requests, in a closed loop.",
    )
    add = parser.add_argument
    add("url", metavar="URL", help="base URL of the server, such as http://127.0.0.1:8080")
    add("model", metavar="MODEL", help="id of the model to ask")
    add("--clients", type=_counts, default=(1, 2, 4, 8), metavar="N,N", help="streams at a time (default: 1,2,4,8)")
    add("--requests", type=_positive, default=4, metavar="N", help="requests of each client (default: 4)")
    add("--tokens", type=_positive, default=64, metavar="N", help="tokens of each answer (default: 64)")
    add("--prompt-words", type=_positive, default=40, metavar="N", help="words of each prompt (default: 40)")
    add("--rounds", type=_positive, default=3, metavar="N", help="rounds; their median is printed (default: 3)")
    add("--against", metavar="URL", help="a second server; rounds alternate between the two")
    add("--against-model", metavar="MODEL", help="its model (default: the same)")
    add("--key", help="API key, sent to both")
    add("--plain", action="store_true", help="send OpenAI's own fields only: no ignore_eos, no cache_prompt")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


async def measure(arguments: argparse.Namespace) -> Report:
    """Run the whole benchmark. Errors of requests go to stderr, each kind once."""
    from trioserve.bench.load import Target, Workload, ask_once

    workload = Workload(arguments.tokens, arguments.prompt_words, extended=not arguments.plain)
    targets = {"server": Target(arguments.url, arguments.model, arguments.key)}
    if arguments.against:
        targets["against"] = Target(arguments.against, arguments.against_model or arguments.model, arguments.key)
    told: set[str] = set()
    for target in targets.values():
        _tell([await ask_once(target, workload)], told)  # not measured: a first request may load the model
    report: Report = {}
    seed = 1
    for clients in arguments.clients:
        rounds: dict[str, list[Sample]] = {name: [] for name in targets}
        for number in range(arguments.rounds):
            # Who goes first alternates too, so that neither always meets the warmer machine.
            for name in list(targets) if number % 2 == 0 else reversed(list(targets)):
                sample = await _one_round(targets[name], workload, clients, arguments.requests, seed, told)
                rounds[name].append(sample)
            seed += clients * arguments.requests
        report[clients] = {name: medians(samples) for name, samples in rounds.items()}
    return report


async def _one_round(
    target: Target, workload: Workload, clients: int, requests: int, seed: int, told: set[str]
) -> Sample:
    from trioserve.bench.load import run_load

    answers, seconds = await run_load(target, workload, clients=clients, requests=requests, first_seed=seed)
    _tell(answers, told)
    return summarise(answers, seconds)


def as_table(report: Report) -> str:
    """The report as a Markdown table, one row for each client count and server, and ratios between two servers."""
    rows = [["clients", "", *_HEADS.values(), "errors"]]
    for clients, samples in report.items():
        for name, sample in samples.items():
            rows.append([str(clients), name, *_numbers(asdict(sample)), str(sample.errors)])
        if "against" in samples:
            shares = ratios(samples["server"], samples["against"])
            rows.append([str(clients), "ratio", *_numbers(shares, digits=2), ""])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.rjust, row, widths))} |" for row in rows)


def as_json(report: Report) -> str:
    """The report as one JSON object; numbers without a value are null."""

    def finite(numbers: dict[str, Any]) -> dict[str, Any]:
        return {name: None if math.isnan(number) else round(number, 3) for name, number in numbers.items()}

    loads = []
    for clients, samples in report.items():
        load: dict[str, Any] = {"clients": clients}
        load |= {name: finite(asdict(sample)) for name, sample in samples.items()}
        if "against" in samples:
            load["ratio"] = finite(dict(ratios(samples["server"], samples["against"])))
        loads.append(load)
    return json.dumps({"loads": loads}, indent=2)


def _numbers(numbers: Any, digits: int = 1) -> Iterator[str]:
    for name in NUMBERS:
        yield "-" if math.isnan(numbers[name]) else f"{numbers[name]:.{digits}f}"


def _tell(answers: Sequence[Any], told: set[str]) -> None:
    for answer in answers:
        if answer.error is not None and answer.error not in told:
            told.add(answer.error)
            sys.stderr.write(f"a request failed: {answer.error}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0; 1 where any measured request failed; 2 where httpx is missing.
    """
    arguments = build_parser().parse_args(argv)
    if find_spec("httpx") is None:
        sys.stderr.write("trioserve.bench needs httpx: pip install 'trioserve[bench]', or pip install httpx\n")
        return EXIT_USAGE
    import trio

    report = trio.run(partial(measure, arguments))
    sys.stdout.write((as_json(report) if arguments.json else as_table(report)) + "\n")
    failed = any(sample.errors for samples in report.values() for sample in samples.values())
    return EXIT_ERRORS if failed else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
