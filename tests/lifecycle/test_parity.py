"""Answers under load, with clients that come and go, are the answers of a quiet server, byte for byte."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .client import RawClient, ask, chat, completion, exactly, http, idle, long_prompt, wait_idle
from .daemon import well_behaved

REQUESTS = int(os.environ.get("PARITY_REQUESTS", "48"))
CLIENTS = 8
LIMIT = 16  # tokens of the longest answer
SHORT = ["Say hello.", "Name a colour.", "What is two and two?", "안녕하세요"]
TEXTS = ["Once upon a time", "The sea is", "1 2 3 4", "def main():"]


@dataclass
class Order:
    """One request: its body, and after how many seconds its client leaves, if it does."""

    body: dict[str, Any]
    patience: float | None


def catalogue():
    """Bodies to choose from: short and longer prompts, chats and completions."""
    story = "It was a dark and stormy night, and nobody was on the road. " * 2
    chats = [chat(text) for text in SHORT] + [chat(f"Summarise: {story}")]
    completions = [completion(text) for text in TEXTS] + [completion(story), completion(long_prompt(50))]
    return chats + completions


def orders(chance):
    """A mixture of requests, a third of them with an impatient client."""
    bodies = catalogue()
    for number in range(REQUESTS):
        body = {**chance.choice(bodies), "max_tokens": chance.randint(2, LIMIT), "stream": chance.random() < 0.5}
        yield Order(body, chance.uniform(0, 2) if number % 3 == 2 else None)


def serve_one(daemon, order):
    """Be the client of one request; return its answer, or None where the client left before."""
    if order.patience is None:
        with http(daemon.url) as client:
            return ask(client, order.body)
    with RawClient(daemon.port) as client:
        client.post(order.body)
        time.sleep(order.patience)
        return None


def alone(client, orders):
    """The answers of a quiet server, each request asked once; streaming may make no difference."""
    known = {}
    for order in orders:
        key = repr({**order.body, "stream": False})
        if order.patience is None and key not in known:
            known[key] = ask(client, {**order.body, "stream": False})
    return known


def test_answers_do_not_depend_on_the_load():
    wanted = list(orders(random.Random(20)))
    # Threads as they come: a request that is alone has more of them than one that is not.
    server = well_behaved("--slots", "4", "--n-ctx", "2048", env={"TRIOSERVE_THREADS": "0"})
    with server as daemon, http(daemon.url) as client:
        known = alone(client, wanted)
        with ThreadPoolExecutor(CLIENTS) as threads:
            answers = list(threads.map(lambda order: serve_one(daemon, order), wanted))
        finished = 0
        for order, answer in zip(wanted, answers, strict=True):
            if answer is not None:
                expected = known[repr({**order.body, "stream": False})]
                assert (answer.text, answer.finish_reason) == (expected.text, expected.finish_reason)
                finished += 1
        assert finished == REQUESTS - REQUESTS // 3
        wait_idle(client)
        ask(client, exactly(1), **{"x-request-id": "after-the-storm"})
        assert float(daemon.request_log("after-the-storm")["queue_ms"]) < 50
        assert idle(client)
