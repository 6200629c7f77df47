"""What one streamed token costs, from the engine's thread to the socket: processor time of a server without inference.

The real server in this process with the fake engine: at each step all streams get a token, and a step sleeps for as
long as inference would take. A program of its own reads them. Measured is the processor time of the event loop's
thread, and of all threads together, what the engine takes to make the tokens included and not included. To begin a
stream is part of it, and with many tokens to each a small one.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import trio

from trioserve.config import Config, ModelConfig
from trioserve.engine.base import StepEvent
from trioserve.http.app import create_app
from trioserve.http.listener import bind, serve_http
from trioserve.service import open_service
from trioserve.testing import FakeEngine
from trioserve.testing.fake_engine import FakeSession

WARM_UP = 20  # tokens
READER = """
import socket, sys, threading

port, streams, tokens = map(int, sys.argv[1:])
body = b'{"messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":%d}' % tokens
head = b"POST /v1/chat/completions HTTP/1.1\\r\\nhost: x\\r\\ncontent-type: application/json\\r\\n"
head += b"connection: close\\r\\n"
request = head + b"content-length: %d\\r\\n\\r\\n" % len(body) + body

def read():
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request)
        while connection.recv(65536):
            pass

readers = [threading.Thread(target=read) for _ in range(streams)]
for reader in readers:
    reader.start()
for reader in readers:
    reader.join()
"""


class Cost(NamedTuple):
    """Microseconds of the processor for each token: of the event loop, the process, and that without the engine."""

    loop: float
    process: float
    outside: float


class EngineTime:
    """Counts the processor time of the fake engine's steps, from its making on."""

    def __init__(self) -> None:
        self.seconds = 0.0
        step = FakeSession.step

        def timed(session: FakeSession, threads: int, held: Collection[int] = ()) -> Sequence[StepEvent]:
            began = time.thread_time()
            try:
                return step(session, threads, held)
            finally:
                self.seconds += time.thread_time() - began

        FakeSession.step = timed


async def read_streams(port: int, streams: int, tokens: int) -> None:
    """Ask for so many streams at once, in a process of its own, and read them to their ends."""
    await trio.run_process([sys.executable, "-c", READER, str(port), str(streams), str(tokens)])


async def measure(port: int, streams: int, tokens: int, engine: EngineTime) -> Cost:
    """Measure one round."""
    before = time.thread_time(), time.process_time(), engine.seconds
    await read_streams(port, streams, tokens)
    after = time.thread_time(), time.process_time(), engine.seconds
    loop, process, steps = (1e6 * (end - start) / (streams * tokens) for start, end in zip(before, after, strict=True))
    return Cost(loop, process, process - steps)


async def run(folder: Path, arguments: argparse.Namespace) -> list[Cost]:
    """Serve, and measure as many rounds as were asked for."""
    path = folder / "tiny.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(64))
    model = ModelConfig(path=path, slots=arguments.streams, execution=arguments.execution)
    config, engine, over = Config(port=0, models=(model,)), FakeEngine(), trio.Event()
    engine.step_seconds = arguments.step_ms / 1000
    async with open_service(config, engine=engine) as service, trio.open_nursery() as nursery:
        await service.wait_started()
        sock = bind(config)
        port = sock.getsockname()[1]
        nursery.start_soon(serve_http, create_app(service), config, sock, over.wait)
        await read_streams(port, arguments.streams, WARM_UP)
        steps = EngineTime()
        costs = [await measure(port, arguments.streams, arguments.tokens, steps) for _ in range(arguments.rounds)]
        if arguments.profile:
            with cProfile.Profile() as profile:
                await read_streams(port, arguments.streams, arguments.tokens)
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        over.set()
    return costs


def main() -> None:
    """Print the median of the rounds."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.streaming", description=__doc__)
    parser.add_argument("--streams", type=int, default=16, help="side by side")
    parser.add_argument("--tokens", type=int, default=1600, help="of each")
    parser.add_argument("--step-ms", type=float, default=10, help="of one step of all streams")
    parser.add_argument("--execution", choices=["fused", "isolated"], default="fused")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="also tell where the time goes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        costs = trio.run(run, Path(folder), arguments)
    print("| streams | us of the event loop, each token | us of the process | without the engine |")
    print("|---|---|---|---|")
    medians = [f"{statistics.median(one):.0f}" for one in zip(*costs, strict=True)]
    print(f"| {arguments.streams} | {' | '.join(medians)} |")


if __name__ == "__main__":
    main()
