"""The end of the server: what was taken is finished, newcomers are told, and nothing can hold it up for ever."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from openai import APIError

import trioserve

from .client import (
    COMPLETIONS,
    RawClient,
    ask,
    assert_error,
    completion,
    each_event,
    exactly,
    http,
    model,
    openai,
    wait_active,
    wait_idle,
    wait_queued,
)
from .daemon import Daemon, eventually

SIZE = ("--slots", "2", "--n-ctx", "1024")
ENDLESS = 900
CLEAN, CUT_OFF = 0, 3
# A name that makes each chunk of a stream longer than a kilobyte, so that buffers fill within a few dozen tokens.
LONG_ID = "🌊" * 250


@contextlib.contextmanager
def serving(*args):
    with Daemon(*SIZE, *args) as daemon, http(daemon.url) as client:
        yield daemon, client


def report(daemon):
    """The counts of the line that a drain ends with."""
    line = daemon.wait_for_log(r"(drained|stopped before all work was done) in [\d.]+ s: (.*)$", 1).group(2)
    return {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", line)}


def assert_gone(daemon, code, seconds):
    """See that the process has ended in time and in order, and has left nobody behind."""
    assert daemon.finish(seconds) == code
    assert daemon.survivors() == []
    assert "Traceback" not in daemon.log_text()


# -- nothing under way


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_idle_server_ends_at_once(number):
    with serving() as (daemon, client):
        assert client.get("/health/ready").status_code == 200  # and this connection stays open
        daemon.signal(number)
        assert_gone(daemon, CLEAN, 2)
        assert report(daemon) == {"finished": 0, "cancelled": 0, "failed": 0, "rejected": 0}


def test_connections_that_say_nothing_hold_nothing_up():
    with serving() as (daemon, _), RawClient(daemon.port), RawClient(daemon.port) as halfway:
        halfway.post(exactly(1), cut=5)
        daemon.signal(signal.SIGTERM)
        assert_gone(daemon, CLEAN, 3)


def test_end_while_the_model_loads():
    with Daemon("--slots", "16", "--n-ctx", "2048", ready=False) as daemon:
        daemon.signal(signal.SIGTERM)
        assert_gone(daemon, CLEAN, 10)


def test_request_that_waits_for_the_load_is_finished():
    with Daemon("--slots", "16", "--n-ctx", "2048", ready=False) as daemon, http(daemon.url) as client:
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(ask, client, exactly(2), **{"x-request-id": "early"})
            with http(daemon.url) as other:
                eventually(lambda: model(other)["active_slots"] or "early" in daemon.log_text())
            daemon.signal(signal.SIGTERM)
            assert answer.result(60).usage["completion_tokens"] == 2
        assert_gone(daemon, CLEAN, 10)


# -- work under way that can be finished


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "group"])
def test_work_under_way_is_finished(how):
    with serving() as (daemon, client), http(daemon.url) as status, ThreadPoolExecutor(3) as threads:
        streams = [threads.submit(ask, client, exactly(60, stream=True)) for _ in range(2)]
        wait_active(status, 2)
        queued = threads.submit(ask, client, exactly(5))
        wait_queued(status, 1)
        if how == "group":
            daemon.signal_group(signal.SIGTERM)
        else:
            daemon.signal(signal.Signals[how])
        daemon.wait_for_log("draining active=3")
        with http(daemon.url) as fresh:
            for newcomer in (status, fresh):
                assert_turned_away(newcomer)
        assert not any(future.done() for future in streams)
        assert [future.result(60).finish_reason for future in streams] == ["length"] * 2
        assert queued.result(60).usage["completion_tokens"] == 5
        assert_gone(daemon, CLEAN, 5)
        assert report(daemon) == {"finished": 3, "cancelled": 0, "failed": 0, "rejected": 2}


def assert_turned_away(client):
    """See what a client hears that comes during the drain, be its connection old or new."""
    assert client.get("/health/live").status_code == 200
    assert client.get("/health/ready").status_code == 503
    response = client.post(COMPLETIONS, json=exactly(1))
    assert_error(response, 503, "shutting_down")
    assert response.headers["connection"] == "close"
    assert int(response.headers["retry-after"]) > 0


# -- work under way that is cut off


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_second_signal_cuts_off_what_is_left(first):
    with serving() as (daemon, _), under_way(daemon) as clients:
        daemon.signal(first)
        daemon.wait_for_log("draining active=4")
        daemon.signal(signal.SIGINT if first is signal.SIGTERM else signal.SIGTERM)
        assert_cut_off(daemon, clients)


def test_drain_bound_cuts_off_what_is_left():
    with serving("--drain-timeout-ms", "300") as (daemon, _), under_way(daemon) as clients:
        daemon.signal(signal.SIGTERM)
        assert_cut_off(daemon, clients)


def test_official_client_raises_where_its_stream_is_cut_off():
    with serving() as (daemon, _), openai(daemon.url) as client:
        endless = {"max_tokens": ENDLESS, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(model="smollm2", prompt="Once upon a time", stream=True, **endless)
        next(stream)
        daemon.signal(signal.SIGTERM)
        daemon.wait_for_log("draining active=1")
        daemon.signal(signal.SIGTERM)
        with pytest.raises(APIError, match="shutting down"):
            list(stream)
        assert_gone(daemon, CUT_OFF, 3)


@contextlib.contextmanager
def under_way(daemon):
    """A stream and a whole answer at work, one more of each in the queue."""
    with http(daemon.url) as client, ThreadPoolExecutor(4) as threads:
        futures = []
        for count in range(1, 5):
            body = exactly(ENDLESS, stream=count % 2 == 1)
            futures.append(threads.submit(raw_answer, client, body))
            if count <= 2:
                wait_active(client, count)
            else:
                wait_queued(client, count - 2)
        yield futures


def raw_answer(client, body):
    """Status and whole body, whatever they are."""
    with client.stream("POST", COMPLETIONS, json=body) as response:
        response.read()
        return response


def assert_cut_off(daemon, futures):
    assert_gone(daemon, CUT_OFF, 2)
    stream, *others = [future.result(10) for future in futures]
    assert stream.status_code == 200
    *chunks, last = [json.loads(event) for event in map_events(stream.text)]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert last["error"]["type"] == "shutting_down"
    for response in others:
        assert_error(response, 503, "shutting_down")
    assert report(daemon) == {"finished": 0, "cancelled": 4, "failed": 0, "rejected": 0}


def map_events(text):
    """Data of a stream's events; there is no ``[DONE]`` among them, or it would be no JSON."""
    assert text.endswith("\n\n")
    return [block.removeprefix("data: ") for block in text[:-2].split("\n\n")]


# -- clients that don't read


@pytest.fixture
def stalled():
    """A stream whose client reads nothing, up to the moment when all buffers on the way are full."""

    @contextlib.contextmanager
    def start(daemon):
        with RawClient(daemon.port, receive_buffer=2048) as raw:
            raw.post(exactly(ENDLESS, stream=True))
            eventually(lambda: _is_stuck(daemon.port, raw.port), 90, "a full send buffer")
            yield raw

    return start


def _is_stuck(server_port, client_port):
    """Whether the server has bytes for the client that don't become more or less for a while."""
    before = _unsent(server_port, client_port)
    if before == 0:
        return False
    time.sleep(0.5)
    return _unsent(server_port, client_port) == before


def _unsent(server_port, client_port):
    """Bytes in the server's send buffer for one connection."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        ends = [int(end.rpartition(":")[2], 16) for end in fields[1:3]]
        if ends == [server_port, client_port]:
            return int(fields[4].partition(":")[0], 16)
    return 0


def test_client_that_does_not_read_loses_its_slot():
    bounded = serving("--id", LONG_ID, "--send-timeout-ms", "1000")
    with bounded as (daemon, client), RawClient(daemon.port, receive_buffer=2048) as raw:
        raw.post(exactly(ENDLESS, stream=True))
        wait_active(client, 1)
        assert ask(client, exactly(5)).finish_reason == "length"  # others are not held up
        fields = daemon.request_log(raw.request_id, 90)
        assert fields["end"] == "cancelled"
        assert int(fields["completion_tokens"]) < ENDLESS
        wait_idle(client, 2)
        daemon.signal(signal.SIGTERM)
        assert_gone(daemon, CLEAN, 3)


def test_client_that_does_not_read_does_not_hold_up_the_end(stalled):
    with serving("--id", LONG_ID, "--drain-timeout-ms", "500") as (daemon, _), stalled(daemon):
        daemon.signal(signal.SIGTERM)
        assert_gone(daemon, CUT_OFF, 0.5 + 1 + SLACK)
        assert report(daemon)["cancelled"] == 1


def test_second_signal_despite_a_client_that_does_not_read(stalled):
    with serving("--id", LONG_ID) as (daemon, client), stalled(daemon):
        reader = client.stream("POST", COMPLETIONS, json=completion(max_tokens=3, ignore_eos=True, stream=True))
        with reader as response:
            daemon.signal(signal.SIGTERM)
            assert list(each_event(response))[-1] == "[DONE]"
        daemon.wait_for_log("draining")
        daemon.signal(signal.SIGTERM)
        assert_gone(daemon, CUT_OFF, 1 + SLACK)
        assert report(daemon)["finished"] == 1


# -- threads that don't come back


class Wedged(Daemon):
    """The server on the fake engine, with a part of it that hangs.

    Arguments:
        part: see ``wedged_server.py``.
        settings: by the names of their environment variables, without the prefix.
    """

    def __init__(self, part, folder, **settings):
        path = folder / "fake.gguf"
        path.write_bytes(b"GGUF\x03\0\0\0" + bytes(40))
        values = {"PATH": path, "PORT": 0, "DRAIN_TIMEOUT_MS": DRAIN_MS, **settings}
        env = {f"TRIOSERVE_{name}": str(value) for name, value in values.items()}
        env["PYTHONPATH"] = str(Path(trioserve.__file__).parents[1])  # the package that is under test
        super().__init__(env=env, ready=part not in ("load", "session"))
        # -P: beside the script lies a module of the name of a package.
        self._argv = [sys.executable, "-P", str(Path(__file__).with_name("wedged_server.py")), part]


DRAIN_MS = 300
BOUND = DRAIN_MS / 1000 + 1
SLACK = 0.5  # for the machine: the signal's way to the process, and the test's own polling


@contextlib.contextmanager
def gone_within(daemon, seconds, code=CUT_OFF):
    """See that the process ends in time from the end of the block, and that the log is whole."""
    yield
    since = time.monotonic()
    assert daemon.finish(seconds + SLACK) == code
    assert time.monotonic() - since < seconds + SLACK
    assert daemon.survivors() == []
    assert "Traceback" not in daemon.log_text()


def held_up_by(daemon):
    """What the last lines of the log say."""
    return re.findall(r"the end is forced; not done yet: (.*)", daemon.log_text())


@pytest.mark.parametrize("part", ["load", "session"])
def test_a_load_that_hangs_does_not_hold_up_the_end(part, tmp_path):
    with Wedged(part, tmp_path) as daemon, http(daemon.url) as client, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(raw_answer, client, exactly(3))
        with http(daemon.url) as status:
            wait_queued(status, 1)  # behind the load at the start, which holds the only slot
            assert status.get("/health/ready").json() == {"status": "loading"}
        with gone_within(daemon, BOUND):
            daemon.signal(signal.SIGTERM)
        assert_error(waiting.result(10), 503, "shutting_down")
        assert held_up_by(daemon) == ["model fake: it is loading"]


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "group"])
def test_a_step_that_hangs_does_not_hold_up_the_end(how, tmp_path):
    with Wedged("step", tmp_path) as daemon, http(daemon.url) as client, ThreadPoolExecutor(2) as threads:
        stream = threads.submit(raw_answer, client, exactly(9, stream=True))
        wait_active(client, 1)
        queued = threads.submit(raw_answer, client, exactly(9))
        wait_queued(client, 1)
        with gone_within(daemon, BOUND):
            if how == "group":
                daemon.signal_group(signal.SIGTERM)
            else:
                daemon.signal(signal.Signals[how])
        *chunks, last = map_events(stream.result(10).text)
        assert (len(chunks), json.loads(last)["error"]["type"]) == (3, "shutting_down")
        assert_error(queued.result(10), 503, "shutting_down")
        assert report(daemon) == {"finished": 0, "cancelled": 2, "failed": 0, "rejected": 0}
        (what,) = held_up_by(daemon)
        assert what.startswith("model fake: slot 0 is evaluating a step for")


def test_a_slot_that_stalled_before_the_end_does_not_hold_it_up(tmp_path):
    with Wedged("step", tmp_path, STALL_TIMEOUT_MS=200) as daemon, http(daemon.url) as client:
        last = map_events(raw_answer(client, exactly(9, stream=True)).text)[-1]
        assert "doesn't answer" in json.loads(last)["error"]["message"]
        assert client.get("/health/ready").json() == {"status": "stalled", "models": ["fake"]}
        with gone_within(daemon, BOUND):
            daemon.signal(signal.SIGTERM)
        assert report(daemon) == {"finished": 0, "cancelled": 0, "failed": 0, "rejected": 0}
        assert len(held_up_by(daemon)) == 1


def test_a_second_signal_bounds_the_end_anew_and_a_third_one_needs_no_time(tmp_path):
    with Wedged("step", tmp_path, DRAIN_TIMEOUT_MS=60_000) as daemon, RawClient(daemon.port) as raw:
        raw.post(exactly(9, stream=True))
        raw.read_events(3)
        daemon.signal(signal.SIGTERM)
        daemon.wait_for_log("draining active=1")
        with gone_within(daemon, 1):
            daemon.signal(signal.SIGTERM)
        assert '"shutting_down"' in raw.read_to_end()
    with Wedged("step", tmp_path, DRAIN_TIMEOUT_MS=60_000) as daemon, RawClient(daemon.port) as raw:
        raw.post(exactly(9, stream=True))
        raw.read_events(3)
        for line in ("draining active=1", "cutting off what is left"):
            daemon.signal(signal.SIGTERM)
            daemon.wait_for_log(line)
        with gone_within(daemon, 0.5):
            daemon.signal(signal.SIGTERM)
        assert "for the third time" in daemon.log_text()


def test_an_idle_server_whose_sessions_cannot_be_freed_ends(tmp_path):
    with Wedged("close", tmp_path) as daemon:
        with gone_within(daemon, BOUND):
            daemon.signal(signal.SIGTERM)
        assert report(daemon) == {"finished": 0, "cancelled": 0, "failed": 0, "rejected": 0}
        assert held_up_by(daemon) == ["model fake: it is unloading"]


def under_way_in(client, route):
    """Whether the operation has come to where it hangs, or soon will: the trial of a reconfiguration shows nowhere."""
    return route.endswith("/load") or model(client)["state"] == "unloading"


@pytest.mark.parametrize(
    ("route", "body", "what"),
    [
        ("/v1/models/unload", {"id": "fake"}, "model fake: it is unloading"),
        ("/v1/models/load", {"id": "fake", "slots": 2}, "thread "),  # the trial's session; it belongs to no pool
    ],
    ids=["unload", "reconfigure"],
)
def test_an_operation_that_hangs_does_not_hold_up_the_end(route, body, what, tmp_path):
    with Wedged("close", tmp_path, MANAGEMENT="on") as daemon, http(daemon.url) as client:
        with ThreadPoolExecutor(1) as threads:
            operation = threads.submit(client.post, route, json=body)
            with http(daemon.url) as status:
                eventually(lambda: under_way_in(status, route))
            with gone_within(daemon, BOUND):
                daemon.signal(signal.SIGTERM)
            with contextlib.suppress(httpx.RemoteProtocolError):  # nobody can answer for what isn't known yet
                assert_error(operation.result(10), 503, "shutting_down")
        assert report(daemon) == {"finished": 0, "cancelled": 1, "failed": 0, "rejected": 0}
        assert held_up_by(daemon)[0].startswith(what)
