"""What was measured, as a table, as JSON, and as charts. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trioserve.bench.measures import NUMBERS, Sample, medians, ratios
from trioserve.bench.plan import OURS, THEIRS, Plan
from trioserve.bench.plot import Chart, Series

_HEADS = {
    "tokens_per_s": "tokens/s",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p95_ms": "TTFT p95 ms",
    "gap_p50_ms": "gap p50 ms",
    "gap_p95_ms": "gap p95 ms",
}
_CHARTS = {"tokens_per_s": "tokens per second", "ttft_p50_ms": "time to first token, median, ms"}


@dataclass(slots=True)
class Report:
    """The rounds of a benchmark, as they come.

    Attributes:
        plan: what was to be measured.
        models: name of the server -> id of the model that was asked.
        rounds: count of clients -> name of the server -> its rounds.
        failures: why requests failed, and how many did so.
        cut_short: why the benchmark ended before its plan; empty where it didn't.
    """

    plan: Plan
    models: dict[str, str] = field(default_factory=dict)
    rounds: dict[int, dict[str, list[Sample]]] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    cut_short: str = ""

    def note(self, clients: int, name: str, sample: Sample) -> None:
        """Take in a round of a server."""
        self.rounds.setdefault(clients, {}).setdefault(name, []).append(sample)

    @property
    def loads(self) -> Mapping[int, Mapping[str, Sample]]:
        """Count of clients -> name of the server -> median of its rounds."""
        return {
            clients: {name: medians(rounds[name]) for name in self.plan.servers if name in rounds}
            for clients, rounds in self.rounds.items()
        }


def as_table(report: Report) -> str:
    """The report as a Markdown table, one row for each client count and server, and ratios between two servers."""
    rows = [["clients", "", *_HEADS.values(), "errors"]]
    for clients, samples in report.loads.items():
        for name, sample in samples.items():
            rows.append([str(clients), name, *_numbers(asdict(sample)), str(sample.errors)])
        if len(samples) > 1:
            shares = ratios(samples[OURS], samples[THEIRS])
            rows.append([str(clients), "ratio", *_numbers(shares, digits=2), ""])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.rjust, row, widths))} |" for row in rows)


def as_json(report: Report) -> str:
    """The report as one JSON object; numbers without a value are null. Keys are no part of it."""

    def finite(numbers: Mapping[str, float]) -> dict[str, Any]:
        return {name: None if math.isnan(number) else round(number, 3) for name, number in numbers.items()}

    plan, loads = report.plan, []
    for clients, samples in report.loads.items():
        load: dict[str, Any] = {"clients": clients}
        for name, sample in samples.items():
            load[name] = {**finite(asdict(sample)), "rounds": len(report.rounds[clients][name])}
        if len(samples) > 1:
            load["ratio"] = finite(ratios(samples[OURS], samples[THEIRS]))
        loads.append(load)
    whole = {
        "servers": {
            name: {"url": server.url, "model": report.models.get(name)} for name, server in plan.servers.items()
        },
        "requests": plan.requests,
        "rounds": plan.rounds,
        "tokens": plan.workload.tokens,
        "prompt_words": plan.workload.prompt_words,
        "most_prompt_words": plan.workload.most_prompt_words or plan.workload.prompt_words,
        "plain": not plan.workload.extended,
        "cut_short": report.cut_short or None,
        "failures": dict(report.failures),
        "loads": loads,
    }
    return json.dumps(whole, indent=2)


def as_charts(report: Report) -> list[Chart]:
    """Throughput and latency over the count of clients, one line for each server."""
    labels = {name: f"{report.models.get(name, name)} at {server.url}" for name, server in report.plan.servers.items()}
    return [
        Chart(
            title,
            "clients",
            [
                Series(
                    label,
                    [
                        (clients, getattr(samples[name], number))
                        for clients, samples in sorted(report.loads.items())
                        if name in samples
                    ],
                )
                for name, label in labels.items()
            ],
        )
        for number, title in _CHARTS.items()
    ]


def _numbers(numbers: Mapping[str, float], digits: int = 1) -> Iterator[str]:
    for name in NUMBERS:
        yield "-" if math.isnan(numbers[name]) else f"{numbers[name]:.{digits}f}"
