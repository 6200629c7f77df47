"""The same application under Hypercorn's own command, on Trio and on asyncio, set up by the environment alone."""

from __future__ import annotations

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults.http2 import H2RawClient

from .client import (
    COMPLETIONS,
    RawClient,
    ask,
    assert_error,
    chat,
    completion,
    each_event,
    exactly,
    http,
    wait_active,
    wait_idle,
)
from .daemon import ONE_THREAD, START_SECONDS, eventually
from .hypercorn import WORKERS, Hypercorn

SETTINGS = {"TRIOSERVE_SLOTS": "4", "TRIOSERVE_N_CTX": "1024", **ONE_THREAD}
PATIENT = ("--graceful-timeout", "60")  # how long Hypercorn lets requests go on; no time for them means a cut
END_SECONDS = 8  # from the end of the last request to the end of the last process


@pytest.fixture(scope="module", params=WORKERS)
def hypercorn(request):
    with Hypercorn(*WORKERS[request.param], env=SETTINGS) as process:
        yield process
        assert "Traceback" not in process.log_text()


@pytest.fixture
def client(hypercorn):
    with http(hypercorn.url) as client:
        wait_idle(client)
        yield client


def test_chat_and_stream(client):
    body = chat("Name three colours.")
    alone = ask(client, body)
    assert alone.text
    assert ask(client, {**body, "stream": True}).text == alone.text


def test_errors_have_the_same_shape(client):
    assert_error(client.post(COMPLETIONS, json={"prompt": 1}), 400, "invalid_request_error")
    assert_error(client.post(COMPLETIONS, json=completion([5] * 2000, stream=True)), 400, "invalid_request_error")
    assert_error(client.get("/nowhere"), 404, "invalid_request_error")
    assert_error(client.get(COMPLETIONS), 405, "invalid_request_error")


def test_four_streams_run_side_by_side(client):
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: ask(client, exactly(8, stream=True)), range(4)))
    assert {(answer.text, answer.finish_reason) for answer in answers} == {(answers[0].text, "length")}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_leaving_frees_the_slot(hypercorn, client, stream):
    with RawClient(hypercorn.port) as raw:
        raw.post(exactly(900, stream=stream))
        wait_active(client, 1)
        if stream:
            raw.read_events(3)
    wait_idle(client, 3)
    assert ask(client, exactly(2)).usage["completion_tokens"] == 2


@pytest.mark.parametrize("worker", WORKERS)
def test_a_connection_on_which_hypercorn_fails_ends_nothing_else(worker):
    with Hypercorn(*WORKERS[worker], env=SETTINGS) as process, http(process.url) as client:
        with client.stream("POST", COMPLETIONS, json=exactly(200, stream=True)) as response:
            events = each_event(response)
            next(events)
            with H2RawClient(process.port) as attacker:
                attacker.get(b"/\xff")
                process.wait_for_log("UnicodeDecodeError")
            assert list(events)[-1] == "[DONE]"
        assert ask(client, exactly(2)).usage["completion_tokens"] == 2


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
def test_sigterm_ends_it_when_requests_are_done(worker, group):
    with Hypercorn(*WORKERS[worker], *PATIENT, env=SETTINGS) as process, http(process.url) as client:
        with client.stream("POST", COMPLETIONS, json=exactly(8, stream=True)) as response:
            events = each_event(response)
            next(events)
            (process.signal_group if group else process.signal)(signal.SIGTERM)
            assert list(events)[-1] == "[DONE]"
        process.finish(END_SECONDS)
        assert eventually(lambda: not process.survivors(), 2)
        assert "Traceback" not in process.log_text()
        process.wait_for_log("drained in", 1)


def test_nothing_has_to_be_set_up():
    with Hypercorn() as process, http(process.url) as client:
        assert ask(client, chat("Say hello.")).text
        assert client.get("/v1/models").json()["data"][0]["slots"] == 4


# -- several workers

TWO = {**SETTINGS, "TRIOSERVE_SLOTS": "1"}


@contextlib.contextmanager
def two_workers():
    """Two workers, each with its own copy of the model; their process ids."""
    with Hypercorn("-k", "trio", "-w", "2", *PATIENT, env=TWO) as process:
        eventually(lambda: process.log_text().count(" is ready ") == 2, START_SECONDS, "two loaded workers")
        yield process, workers(process)


def workers(process):
    """The processes in which the application runs: those that have loaded llama.cpp."""
    return [pid for pid in process.survivors() if "libllama" in Path(f"/proc/{pid}/maps").read_text()]


def test_two_workers_serve_and_end_together():
    with two_workers() as (process, pids):
        assert len(pids) == 2
        with ThreadPoolExecutor(8) as threads:
            asked = [threads.submit(ask_afresh, process.url) for _ in range(8)]
            assert len({future.result().text for future in asked}) == 1
        process.signal_group(signal.SIGTERM)
        process.finish(END_SECONDS)
        assert eventually(lambda: not process.survivors(), 2)
        assert process.log_text().count("drained in") == 2
        assert "Traceback" not in process.log_text()


def ask_afresh(url):
    """Ask on a connection of its own: which worker takes it, the system decides."""
    with http(url) as client:
        return ask(client, exactly(4))


def test_a_killed_worker_takes_the_others_with_it_in_order():
    """Hypercorn's parent ends when a worker dies; whoever started it starts it again."""
    with two_workers() as (process, pids):
        os.kill(pids[0], signal.SIGKILL)
        process.finish(END_SECONDS)
        assert eventually(lambda: not process.survivors(), 2)
        assert process.log_text().count("drained in") == 1
