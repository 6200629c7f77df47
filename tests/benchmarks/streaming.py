"""What one streamed token costs, from the engine's thread to the socket: processor time of a server without inference.

The real server in this process with the fake engine: at each step all streams get a token, and a step sleeps for as
long as inference would take. A program of its own reads them. Measured is the processor time of the event loop's
thread, and of all threads together.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import trio

from trioserve.config import Config, ModelConfig
from trioserve.http.app import create_app
from trioserve.http.listener import bind, serve_http
from trioserve.service import open_service
from trioserve.testing import FakeEngine

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
    """Processor time for each token, in microseconds: of the event loop's thread, and of the process."""

    loop: float
    process: float


async def read_streams(port: int, streams: int, tokens: int) -> None:
    """Ask for so many streams at once, in a process of its own, and read them to their ends."""
    await trio.run_process([sys.executable, "-c", READER, str(port), str(streams), str(tokens)])


async def measure(port: int, streams: int, tokens: int) -> Cost:
    """Measure one round."""
    loop, process = time.thread_time(), time.process_time()
    await read_streams(port, streams, tokens)
    per_token = 1e6 / (streams * tokens)
    return Cost(per_token * (time.thread_time() - loop), per_token * (time.process_time() - process))


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
        costs = [await measure(port, arguments.streams, arguments.tokens) for _ in range(arguments.rounds)]
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
    parser.add_argument("--tokens", type=int, default=400, help="of each")
    parser.add_argument("--step-ms", type=float, default=10, help="of one step of all streams")
    parser.add_argument("--execution", choices=["fused", "isolated"], default="fused")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="also tell where the time goes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        costs = trio.run(run, Path(folder), arguments)
    print("| streams | us of the event loop, each token | us of the process, each token |")
    print("|---|---|---|")
    loop, process = (statistics.median(one) for one in zip(*costs, strict=True))
    print(f"| {arguments.streams} | {loop:.0f} | {process:.0f} |")


if __name__ == "__main__":
    main()
