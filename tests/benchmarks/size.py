"""What things cost as they get bigger: more slots, longer prompts, longer queues, more models.

Prints tables in Markdown; ``--json`` and ``--plot`` keep the figures. Everything but the queue inside the process is
the real server over HTTP with a small model of random weights, one thread for each slot: what is seen is mostly the
server's own work and llama.cpp's for each call, and little arithmetic. Takes about three minutes on two cores. Linux
only.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import trio

from tests.lifecycle.daemon import Daemon
from tests.tiny_models import tiny_model
from trioserve.bench.load import Target, run_load
from trioserve.bench.measures import percentile, read_chunk, summarise
from trioserve.bench.picture import write_picture
from trioserve.bench.plan import Workload
from trioserve.bench.plot import Chart, Series
from trioserve.config import Config, ModelConfig
from trioserve.service import GenerationRequest, Service, TextPrompt, open_service
from trioserve.testing import FakeEngine

MODEL = {"dim": 256, "ff": 1024, "layers": 2, "quantised": True, "n_ctx_train": 16384}
SLOTS = (1, 2, 4, 8, 16)
PROMPTS = (16, 128, 512, 2048, 8000)
WAITING = (100, 1_000, 10_000)
CONNECTED = (100, 300, 1_000)
MODELS = (1, 50, 200)

PROMPT_ROUNDS = 3
PROMPT_CONTEXT = 8192
ANSWER = 32  # tokens
STATUS_ROUNDS = 20
QUEUE_SLOTS = 4
MIB = 1 << 20


def memory(pid: int | str, field: str = "VmRSS") -> int:
    """Bytes of a field of a process's status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def mib(nbytes: float) -> float:
    return nbytes / MIB


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[Daemon, float]]:
    """A server, and the seconds until it listened."""
    began = time.perf_counter()
    with Daemon(*arguments, ready=False) as daemon:
        listening = time.perf_counter() - began
        daemon.wait_for_log(" info ready")
        yield daemon, listening
        assert daemon.stop() == 0


# -- slots


@dataclass(frozen=True)
class Slots:
    """So many slots, and as many clients.

    Attributes:
        tokens_per_s: of all clients together.
        ttft_p50_ms: from the sending of a request to its first text.
        token_ms: of each further token of a client.
        idle_mib: memory of the server before any request.
        loaded_mib: and after the load.
    """

    slots: int
    tokens_per_s: float
    ttft_p50_ms: float
    token_ms: float
    idle_mib: float
    loaded_mib: float


async def measure_slots(model: Path, slots: int) -> Slots:
    """Keep every slot busy."""
    with serving(str(model), "--slots", str(slots), "--n-ctx", "1024") as (daemon, _):
        idle = memory(daemon.pid)
        workload = Workload(tokens=ANSWER, prompt_words=16)
        target = Target(daemon.url, model.stem)
        await run_load(target, workload, clients=slots, requests=1, first_seed=1)
        answers, seconds = await run_load(target, workload, clients=slots, requests=4, first_seed=100)
        sample = summarise(answers, seconds)
        assert not sample.errors
        paces = [1000 * (answer.texts[-1] - answer.texts[0]) / (ANSWER - 1) for answer in answers if answer.texts]
        return Slots(
            slots,
            sample.tokens_per_s,
            sample.ttft_p50_ms,
            statistics.median(paces),
            mib(idle),
            mib(memory(daemon.pid)),
        )


# -- prompts


@dataclass(frozen=True)
class Prompts:
    """A prompt of so many tokens, alone.

    Attributes:
        ttft_ms: from the sending of the request to the first text.
        again_ms: the same when the slot has kept the prompt.
        token_ms: of each further token.
        memory_mib: of the server.
    """

    tokens: int
    ttft_ms: float
    again_ms: float
    token_ms: float
    memory_mib: float


async def measure_prompts(model: Path, sizes: Sequence[int]) -> list[Prompts]:
    """Ask one slot, the shorter prompts first."""
    arguments = ["--slots", "1", "--n-ctx", str(PROMPT_CONTEXT)]
    with serving(str(model), *arguments) as (daemon, _):
        async with httpx.AsyncClient(base_url=daemon.url, timeout=300, trust_env=False) as client:
            await ask(client, words(16, 0))
            return [await measure_prompt(client, daemon, tokens) for tokens in sizes]


async def measure_prompt(client: httpx.AsyncClient, daemon: Daemon, tokens: int) -> Prompts:
    """Medians of some prompts of a length, each asked twice."""
    firsts, again, paces = [], [], []
    for number in range(PROMPT_ROUNDS):
        text = words(tokens, number)
        times = await ask(client, text)
        firsts.append(times[0])
        paces.append((times[-1] - times[0]) / (ANSWER - 1))  # events may come several at a time
        again.append((await ask(client, text))[0])
    return Prompts(
        tokens,
        1000 * statistics.median(firsts),
        1000 * statistics.median(again),
        1000 * statistics.median(paces),
        mib(memory(daemon.pid)),
    )


def words(tokens: int, number: int) -> str:
    """A text of so many tokens, the one that begins every text among them: letters, which the model has no pairs of."""
    chosen = random.Random(number)
    return "".join(chosen.choices(string.ascii_letters, k=tokens - 1))


async def ask(client: httpx.AsyncClient, prompt: str, model: str | None = None) -> list[float]:
    """Seconds from the sending of a request to each piece of its text."""
    body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "stream": True}
    if model is not None:
        body["model"] = model
    began = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = response.aiter_lines()
        return [time.perf_counter() - began async for line in lines if read_chunk(line) is not None]


# -- queues


@dataclass(frozen=True)
class Queue:
    """So many requests for one model at a moment.

    Attributes:
        enter_us: from a request's beginning to its place in the queue, over all of them.
        serve_us: of each request, from the first slot that frees to the last answer.
        status_us: of one look at all models meanwhile.
        waiting_kib: memory that each one takes while it waits.
    """

    waiting: int
    enter_us: float
    serve_us: float
    status_us: float
    waiting_kib: float


async def measure_queue(folder: Path, waiting: int) -> Queue:
    """The service alone, in this process: a fake engine, answers of one token, and no HTTP."""
    path = folder / "fake.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + bytes(40))
    engine = FakeEngine()
    config = Config(
        models=(ModelConfig(path=path, slots=QUEUE_SLOTS),),
        max_queued_requests=waiting,
        busy_timeout_ms=None,
    )
    async with open_service(config, engine=engine) as service:
        await service.wait_started()
        engine.step_gate.shut()
        before = memory("self")
        began = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for number in range(waiting + QUEUE_SLOTS):
                nursery.start_soon(generate, service, f"{number}")
            await until(lambda: service.models()[0].queued_requests == waiting)
            entered = time.perf_counter() - began
            kept = memory("self") - before
            status = timed(service.models)
            engine.step_gate.open()
            began = time.perf_counter()
        served = time.perf_counter() - began
        assert service.tally().finished == waiting + QUEUE_SLOTS
    return Queue(waiting, 1e6 * entered / waiting, 1e6 * served / waiting, 1e6 * status, kept / 1024 / waiting)


async def generate(service: Service, prompt: str) -> None:
    """A request, to its end."""
    async with service.generate(GenerationRequest(TextPrompt(prompt), max_tokens=1)) as generation:
        async for _ in generation:
            pass


async def until(condition: Callable[[], bool]) -> None:
    """Look now and then, and leave the loop to the others meanwhile."""
    with trio.fail_after(120):
        while not condition():
            await trio.sleep(0.01)


def timed(action: Callable[[], object]) -> float:
    """Median of some runs, in seconds."""
    times = []
    for _ in range(STATUS_ROUNDS):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@dataclass(frozen=True)
class Connected:
    """So many clients of the real server at a moment, each on a connection of its own, for one slot.

    Attributes:
        request_us: of each request, over all of them; the clients, in one process beside the server, included.
        p50_ms, p95_ms: from a request's beginning to its answer.
        waiting_kib: memory of the server for each client, at most.
    """

    clients: int
    request_us: float
    p50_ms: float
    p95_ms: float
    waiting_kib: float


async def measure_connected(model: Path, clients: int) -> Connected:
    """Answers of one token, and everybody at once."""
    arguments = ["--slots", "1", "--n-ctx", "512", "--max-queued-requests", str(clients)]
    with serving(str(model), *arguments) as (daemon, _):
        target = Target(daemon.url, model.stem)
        workload = Workload(tokens=1, prompt_words=1)
        await run_load(target, workload, clients=4, requests=2, first_seed=1)
        before = memory(daemon.pid)
        answers, seconds = await run_load(target, workload, clients=clients, requests=1, first_seed=100)
        peak = memory(daemon.pid, "VmHWM")
    assert [answer.error for answer in answers if answer.error] == []
    waits = [1000 * (answer.texts[0] - answer.sent) for answer in answers if answer.texts]
    return Connected(
        clients,
        1e6 * seconds / clients,
        percentile(waits, 50),
        percentile(waits, 95),
        (peak - before) / 1024 / clients,
    )


# -- models


@dataclass(frozen=True)
class Models:
    """So many registered models, of which one is loaded.

    Attributes:
        listening_ms: from the start of the process to its listening.
        list_ms: of ``GET /v1/models``.
        request_ms: from the sending of a request to the last model to its first text.
        memory_mib: of the server.
    """

    models: int
    listening_ms: float
    list_ms: float
    request_ms: float
    memory_mib: float


async def measure_models(folder: Path, model: Path, count: int) -> Models:
    """A server whose configuration has so many entries."""
    entries = [{"id": f"m{number}", "path": str(model), "lazy": True, "n_ctx": 512} for number in range(count)]
    config = folder / f"{count}.json"
    config.write_text(json.dumps({"models": entries}))
    with serving("--config", str(config)) as (daemon, listening):
        async with httpx.AsyncClient(base_url=daemon.url, timeout=60, trust_env=False) as client:
            last = f"m{count - 1}"
            await ask(client, words(16, 0), last)
            lists = [await timed_call(partial(client.get, "/v1/models")) for _ in range(STATUS_ROUNDS)]
            requests = [(await ask(client, words(16, number), last))[0] for number in range(STATUS_ROUNDS)]
            nbytes = memory(daemon.pid)
    return Models(
        count, 1000 * listening, 1000 * statistics.median(lists), 1000 * statistics.median(requests), mib(nbytes)
    )


async def timed_call(call: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await call()
    return time.perf_counter() - began


# -- all of it


def measure(parts: Sequence[str]) -> dict[str, list[Any]]:
    """The figures, by part."""
    model = tiny_model(**MODEL)
    found: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        works: dict[str, Callable[[], list[Any]]] = {
            "slots": lambda: [trio.run(measure_slots, model, slots) for slots in SLOTS],
            "prompts": lambda: trio.run(measure_prompts, model, PROMPTS),
            "queue": lambda: [trio.run(measure_queue, folder, waiting) for waiting in WAITING],
            "connected": lambda: [trio.run(measure_connected, model, clients) for clients in CONNECTED],
            "models": lambda: [trio.run(measure_models, folder, model, count) for count in MODELS],
        }
        for part in parts:
            began = time.perf_counter()
            found[part] = works[part]()
            sys.stderr.write(f"{part}: {time.perf_counter() - began:.0f} s\n")
    return found


PARTS = ("slots", "prompts", "queue", "connected", "models")


def as_table(rows: Sequence[Any]) -> str:
    """Figures of one part in Markdown."""
    records = [asdict(row) for row in rows]
    lines = [" | ".join(name.replace("_", " ") for name in records[0]), "|".join("---" for _ in records[0])]
    lines += [" | ".join(shown(value) for value in record.values()) for record in records]
    return "\n".join(f"| {line} |" for line in lines)


def shown(value: float) -> str:
    """A figure with three digits that mean something, or all of those before the point."""
    return f"{value:,.0f}" if value >= 100 or isinstance(value, int) else f"{value:.3g}"


def line(label: str, rows: Sequence[Any], name: str) -> Series:
    """One figure over the size, which is a record's first field."""
    return Series(label, [(next(iter(asdict(row).values())), getattr(row, name)) for row in rows])


def as_charts(found: dict[str, list[Any]]) -> list[Chart]:
    """Two charts in a row."""
    charts = []
    if slots := found.get("slots"):
        charts.append(
            Chart("tokens per second, all slots", "slots, and clients", [line("together", slots, "tokens_per_s")])
        )
        latency = [line("to the first token", slots, "ttft_p50_ms"), line("each further token", slots, "token_ms")]
        charts.append(Chart("latency, median, ms", "slots, and clients", latency, log_y=True))
        lines = [line("before any request", slots, "idle_mib"), line("after a load", slots, "loaded_mib")]
        charts.append(Chart("memory of the server, MiB", "slots", lines))
    if prompts := found.get("prompts"):
        lines = [
            line("to the first token", prompts, "ttft_ms"),
            line("the same, asked again", prompts, "again_ms"),
            line("each further token", prompts, "token_ms"),
        ]
        charts.append(Chart("latency, median, ms", "tokens of the prompt", lines, log_y=True))
    lines = []
    if queue := found.get("queue"):
        lines += [
            line("to enter, no HTTP", queue, "enter_us"),
            line("to be served, no HTTP", queue, "serve_us"),
        ]
    if connected := found.get("connected"):
        lines.append(line("all, over HTTP, with its client", connected, "request_us"))
    if lines:
        charts.append(Chart("cost of a request, µs", "requests at a moment", lines, log_y=True))
    if models := found.get("models"):
        lines = [
            line("start to listening", models, "listening_ms"),
            line("GET /v1/models", models, "list_ms"),
            line("a request to its first token", models, "request_ms"),
        ]
        charts.append(Chart("time, ms", "registered models", lines, log_y=True))
    return charts


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(prog="bench_size", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="only these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw them")
    options = parser.parse_args()
    found = measure(options.parts)
    for part, rows in found.items():
        print(f"\n{part}\n\n{as_table(rows)}")
    if options.json:
        figures = {part: [asdict(row) for row in rows] for part, rows in found.items()}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if options.plot:
        write_picture(options.plot, as_charts(found))


if __name__ == "__main__":
    main()
