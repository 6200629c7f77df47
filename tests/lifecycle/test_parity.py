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
    """Bodies to choose from: short and longer prompts and answers, chats and completions."""
    story = "It was a dark and stormy night, and nobody was on the road. " * 2
    chats = [chat(text) for text in SHORT] + [chat(f"Summarise: {story}")]
    completions = [completion(text) for text in TEXTS] + [completion(story), completion(long_prompt(50))]
    return [{**body, "max_tokens": 4 + index % (LIMIT - 3)} for index, body in enumerate(chats + completions)]


def orders(chance):
    """A mixture of requests, a third of them with an impatient client."""
    bodies = catalogue()
    for number in range(REQUESTS):
        body = {**chance.choice(bodies), "stream": chance.random() < 0.5}
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


# In log probability. A quiet session that evaluates the same tokens in one piece instead of one by one moves the lead
# of this model's likeliest token by up to 0.4 (median 0.04): its activations are rounded to 8 bits.
NEAR = 0.5


def said(client, body):
    """The bytes of each token of a whole answer, and by how much it was likelier than the next one."""
    response = client.post("/v1/chat/completions", json={**body, "logprobs": True, "top_logprobs": 2})
    assert response.status_code == 200, response.text
    tokens = response.json()["choices"][0]["logprobs"]["content"]
    return [
        (bytes(token["bytes"]), token["top_logprobs"][0]["logprob"] - token["top_logprobs"][1]["logprob"])
        for token in tokens
    ]


def parts_without_cause(alone, text):
    """Whether a text leaves the answer that was given alone at a token to which there was no near second."""
    left = text.encode()
    for piece, lead in alone:
        if not left.startswith(piece):
            return lead >= NEAR
        left = left.removeprefix(piece)
    return bool(left)


def test_answers_from_a_shared_context_part_from_those_of_a_quiet_server_at_ties_only():
    chance = random.Random(21)
    bodies = [{**body, "max_tokens": 8 + index, "ignore_eos": True} for index, body in enumerate(map(chat, SHORT[:3]))]
    bodies += [chat(f"{text} " * 12, max_tokens=16, ignore_eos=True) for text in TEXTS]
    wanted = [
        Order({**chance.choice(bodies), "stream": number % 2 == 0}, chance.uniform(0, 2) if number % 3 == 2 else None)
        for number in range(REQUESTS)
    ]
    server = well_behaved("--slots", "4", "--n-ctx", "2048", "--execution", "fused")
    with server as daemon, http(daemon.url) as client:
        alone = {str(body["messages"]): said(client, body) for body in bodies}
        with ThreadPoolExecutor(CLIENTS) as threads:
            answers = list(threads.map(lambda order: serve_one(daemon, order), wanted))
        finished = [
            (alone[str(order.body["messages"])], answer)
            for order, answer in zip(wanted, answers, strict=True)
            if answer is not None
        ]
        assert len(finished) == REQUESTS - REQUESTS // 3
        for expected, answer in finished:
            assert answer.finish_reason == "length"
            assert not parts_without_cause(expected, answer.text)
        wait_idle(client)
        ask(client, exactly(1), **{"x-request-id": "after-the-storm"})
        assert float(daemon.request_log("after-the-storm")["queue_ms"]) < 50
        assert idle(client)
