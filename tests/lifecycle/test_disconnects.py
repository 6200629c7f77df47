"""Clients that leave: in every phase, in every way, and what it means for the others. One slot shows it best."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime

import pytest

from .client import (
    COMPLETIONS,
    RawClient,
    ask,
    assert_error,
    each_event,
    exactly,
    http,
    idle,
    long_prompt,
    wait_active,
    wait_idle,
    wait_queued,
)
from .daemon import eventually

ENDLESS = 1500  # tokens: minutes of work
FREED_SECONDS = 2.0  # one graph of a micro-batch takes longer than that on a slow machine; a node of it does not
PREFILL = long_prompt(1800)


@pytest.fixture
def client(lone):
    with http(lone.url) as client:
        yield client


def leave(client, *, reset):
    if reset:
        client.reset()
    else:
        client.close()


def phase_of_end(daemon, raw):
    """In which phase a request was cancelled."""
    fields = daemon.request_log(raw.request_id)
    assert fields["end"] == "cancelled"
    return fields["cancelled_in"]


# -- one client that leaves


@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_leaving_in_prefill_frees_the_slot(lone, client, stream, reset):
    with RawClient(lone.port) as raw:
        raw.post(exactly(ENDLESS, PREFILL, stream=stream))
        wait_active(client, 1)
        leave(raw, reset=reset)
        wait_idle(client, FREED_SECONDS)
    assert phase_of_end(lone, raw) == "prefill"
    assert ask(client, exactly(2)).usage["completion_tokens"] == 2


@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
def test_leaving_a_stream_in_decode_frees_the_slot(lone, client, reset):
    with RawClient(lone.port) as raw:
        raw.post(exactly(ENDLESS, stream=True))
        raw.read_events(3)
        leave(raw, reset=reset)
        wait_idle(client, FREED_SECONDS)
    assert phase_of_end(lone, raw) == "decode"
    assert ask(client, exactly(2)).usage["completion_tokens"] == 2


@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
def test_leaving_a_whole_answer_in_decode_frees_the_slot(lone, client, reset):
    # Such an answer shows nothing while it grows: the client leaves later and later until it has met the decode.
    for patience in (0.5, 1, 2, 4, 8):
        with RawClient(lone.port) as raw:
            raw.post(exactly(ENDLESS))
            wait_active(client, 1)
            time.sleep(patience)
            leave(raw, reset=reset)
            wait_idle(client, FREED_SECONDS)
        if phase_of_end(lone, raw) == "decode":
            break
    assert phase_of_end(lone, raw) == "decode"
    assert ask(client, exactly(2)).usage["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_leaving_after_a_moment(lone, client, stream):
    with RawClient(lone.port) as raw:
        raw.post(exactly(ENDLESS, stream=stream))
        time.sleep(0.05)
    eventually(lambda: idle(client), FREED_SECONDS)


def test_leaving_in_the_middle_of_the_body(lone, client):
    with RawClient(lone.port) as raw:
        raw.post(exactly(ENDLESS), cut=5)
    assert ask(client, exactly(1)).finish_reason == "length"
    assert raw.request_id not in lone.log_text()


def test_no_tokens_are_made_for_nobody(lone, client):
    with RawClient(lone.port) as raw:
        raw.post(exactly(ENDLESS, stream=True))
        raw.read_events(8)
        seen = raw.received.count(b"\n\n")
    wait_idle(client, FREED_SECONDS)
    assert int(lone.request_log(raw.request_id)["completion_tokens"]) <= seen + 10


def test_processor_rests_after_the_client_has_gone(lone, client):
    for stream in (True, False):
        with RawClient(lone.port) as raw:
            raw.post(exactly(ENDLESS, PREFILL, stream=stream))
            wait_active(client, 1)
        wait_idle(client, FREED_SECONDS)
        window = 1.0
        before = lone.cpu_seconds()
        time.sleep(window)
        assert lone.cpu_seconds() - before < 0.1 * window


# -- and the others


def test_leaving_the_queue_disturbs_nobody(lone, client):
    with client.stream("POST", COMPLETIONS, json=exactly(150, stream=True)) as response:
        chunks = each_event(response)
        first = next(chunks)
        with http(lone.url) as other, RawClient(lone.port) as queued:
            queued.post(exactly(5))
            wait_queued(other, 1)
            queued.close()
            eventually(lambda: other.get("/v1/models").json()["data"][0]["queued_requests"] == 0, 1)
        rest = [first, *chunks]
    assert rest[-1] == "[DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    assert len(rest) >= 150
    fields = lone.request_log(queued.request_id)
    assert fields["cancelled_in"] == "queued"
    assert "slot" not in fields


@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
def test_those_who_left_the_queue_are_never_served(lone, client, reset):
    with ExitStack() as stack:
        busy = stack.enter_context(RawClient(lone.port))
        busy.post(exactly(30, stream=True))
        busy.read_events(1)
        waiting = [stack.enter_context(RawClient(lone.port)) for _ in range(5)]
        for number, queued in enumerate(waiting):
            queued.post(exactly(20, stream=number % 2 == 0))
        wait_queued(client, 5)
        for queued in waiting:
            leave(queued, reset=reset)
        busy.read_events(31)
        wait_idle(client, 1)
        for queued in waiting:
            fields = lone.request_log(queued.request_id)
            assert (fields["end"], fields["cancelled_in"]) == ("cancelled", "queued")
            assert "completion_tokens" not in fields
        assert lone.request_log(busy.request_id)["end"] == "finished"


def test_many_streams_in_a_row(lone, client):
    for number in range(50):
        if number % 2:
            assert ask(client, exactly(2, stream=True)).finish_reason == "length"
            continue
        with RawClient(lone.port) as raw:
            raw.post(exactly(50, stream=True))
            if number % 4:
                raw.read_events(1)
    wait_idle(client, FREED_SECONDS)
    assert ask(client, exactly(1)).finish_reason == "length"


# -- who waits, and how long


def test_bounded_wait_ends_no_sooner_and_not_much_later(lone, client):
    bound = 1000
    with RawClient(lone.port) as busy:
        busy.post(exactly(ENDLESS, stream=True))
        wait_active(client, 1)
        started = time.monotonic()
        response = client.post(COMPLETIONS, json=exactly(1, busy_timeout_ms=bound))
        waited = time.monotonic() - started
        error = assert_error(response, 503, "server_busy")
        assert error["code"] == "server_busy"
        assert int(response.headers["retry-after"]) > 0
        assert bound / 1000 <= waited < bound / 1000 + 0.5
        assert client.get("/v1/models").json()["data"][0]["queued_requests"] == 0
    wait_idle(client, FREED_SECONDS)


@pytest.mark.parametrize("bound", [0, 200])
def test_hopeless_wait_ends_at_once(lone, client, bound):
    """Without a wait, or with one that is shorter than the only slot has been taken already."""
    with RawClient(lone.port) as busy:
        busy.post(exactly(ENDLESS, stream=True))
        busy.read_events(6)
        eventually(lambda: _refused_quickly(client, bound), 5)
        assert client.get("/v1/models").json()["data"][0]["queued_requests"] == 0
    wait_idle(client, FREED_SECONDS)
    assert ask(client, exactly(1, busy_timeout_ms=bound)).finish_reason == "length"


def _refused_quickly(client, bound):
    started = time.monotonic()
    assert_error(client.post(COMPLETIONS, json=exactly(1, busy_timeout_ms=bound)), 503, "server_busy")
    return time.monotonic() - started < 0.15


def test_first_come_first_served(lone, client):
    """Four clients that come back at once with their next request: none is passed over."""
    rounds, clients = 6, 4
    names = [[f"fifo-{number}-{turn}" for turn in range(rounds)] for number in range(clients)]

    def loop(mine):
        with http(lone.url) as own:
            for name in mine:
                ask(own, exactly(3), **{"x-request-id": name})

    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(loop, names))
    history = [_times(lone, name) for mine in names for name in mine]
    entered = sorted(history, key=lambda times: times[0])
    started = sorted(history, key=lambda times: times[1])
    assert [name for *_, name in entered] == [name for *_, name in started]
    longest_job = max(ended - began for _, began, ended, _ in history)
    assert max(began - came for came, began, *_ in history) <= clients * longest_job


def _times(daemon, request_id):
    """When a request came, when it got its slot and when it ended, from the log: seconds."""
    fields = daemon.request_log(request_id)
    line = daemon.wait_for_log(rf"^(\S+) .*request_id={request_id}\b")
    ended = datetime.fromisoformat(line.group(1)).timestamp()
    came = ended - float(fields["total_ms"]) / 1000
    return came, came + float(fields["queue_ms"]) / 1000, ended, request_id
