"""Models that are loaded, changed and unloaded under a running server, with the real model."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_models import tiny_model

from trioserve.config.model_files import embedded_model_path

from .client import COMPLETIONS, ask, assert_error, each_event, exactly, http, model, wait_idle
from .daemon import Daemon, eventually, well_behaved

LOAD, UNLOAD, UNLOAD_ALL = "/v1/models/load", "/v1/models/unload", "/v1/tasks/unload_all_models"
MIB = 1 << 20
CYCLES = 20
RETRY_SECONDS = 0.05
SWITCHING_SECONDS = float(os.environ.get("SWITCHING_SECONDS", "10"))


@pytest.fixture
def managed():
    """A server with one slot that takes orders."""
    with well_behaved("--slots", "1", "--n-ctx", "512", "--management") as daemon:
        yield daemon


@pytest.fixture
def client(managed):
    with http(managed.url) as client:
        yield client


def post(client, route, /, **body):
    response = client.post(route, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def states(client):
    return {one["id"]: one["state"] for one in client.get("/v1/models").json()["data"]}


def memory(daemon):
    """Bytes of the process that are in memory, the mapped weights among them.

    The number in ``status`` lags behind by as much as some hundred kilobytes for each core.
    """
    for line in Path(f"/proc/{daemon.pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the system does not tell")


def stream(url, tokens, **fields):
    """A whole stream on a connection of its own."""
    with http(url) as client:
        return ask(client, exactly(tokens, stream=True, **fields))


class Reader:
    """A stream that is read in another thread; ``begun`` once its first event is there."""

    def __init__(self, url, tokens, **fields):
        self.begun = threading.Event()
        self.events = []
        self._args = url, exactly(tokens, stream=True, **fields)
        self._thread = threading.Thread(target=self._read, name="reader")

    def __enter__(self):
        self._thread.start()
        assert self.begun.wait(60)
        return self

    def __exit__(self, *_):
        self._thread.join(120)
        assert not self._thread.is_alive()

    @property
    def under_way(self):
        return self._thread.is_alive()

    @property
    def whole(self):
        return not self.under_way and self.events[-1] == "[DONE]"

    def _read(self):
        url, body = self._args
        with http(url) as client, client.stream("POST", COMPLETIONS, json=body) as response:
            assert response.status_code == 200
            for event in each_event(response):
                self.events.append(event)
                self.begun.set()


def test_a_second_registration_of_a_file_answers_alike(client):
    told = post(client, LOAD, id="twin", path=str(embedded_model_path()), n_ctx=256, slots=2)
    assert told == {"id": "twin", "state": "ready", "loaded": True, "slots": 2}
    first, second = (ask(client, exactly(12, model=name)) for name in ("smollm2", "twin"))
    assert first.text == second.text
    post(client, UNLOAD, id="smollm2")
    assert states(client) == {"smollm2": "unloaded", "twin": "ready"}
    assert ask(client, exactly(12, model="twin")).text == second.text


def test_more_slots_come_while_clients_stream_and_nobody_is_cut(managed, client):
    alone = stream(managed.url, 24).text
    with ThreadPoolExecutor(4) as threads:
        going = [threads.submit(lambda: [stream(managed.url, 24).text for _ in range(3)]) for _ in range(4)]
        eventually(lambda: model(client)["active_slots"] == 1, what="a stream")
        told = post(client, LOAD, id="smollm2", slots=3)
        texts = [text for future in going for text in future.result(120)]
    assert told["slots"] == 3
    assert texts == [alone] * 12
    assert len(client.get("/v1/slots").json()["data"]) == 3


def test_a_replacement_that_is_no_model_is_refused_and_streams_go_on(managed, client, tmp_path):
    truncated = Path(tmp_path, "cut.gguf")
    truncated.write_bytes(embedded_model_path().read_bytes()[: 8 * MIB])
    with Reader(managed.url, 100) as reader:
        response = client.post(LOAD, json={"id": "smollm2", "path": str(truncated)})
        assert_error(response, 400, "invalid_request_error")
        response = client.post(LOAD, json={"id": "smollm2", "slots": 17})
        assert assert_error(response, 400, "invalid_request_error")["param"] == "slots"
        assert states(client) == {"smollm2": "ready"}
    assert reader.whole


def test_an_unload_waits_for_a_stream_and_the_next_request_loads_again(managed, client):
    with Reader(managed.url, 150) as reader:
        assert reader.under_way
        told = post(client, UNLOAD, id="smollm2")
    assert reader.whole
    assert told["state"] == "unloaded"
    assert states(client) == {"smollm2": "unloaded"}
    assert ask(client, exactly(4)).finish_reason == "length"
    assert states(client) == {"smollm2": "ready"}


def test_everything_is_unloaded_again_and_again_under_load(managed, client):
    alone = ask(client, exactly(6)).text
    stop = threading.Event()

    texts = []

    def loop():
        with http(managed.url) as own:
            while not stop.is_set():
                texts.append(ask(own, exactly(6)).text)

    with ThreadPoolExecutor(8) as threads:
        loops = [threads.submit(loop) for _ in range(8)]
        try:
            for _ in range(6):
                seen = len(texts)
                assert post(client, UNLOAD_ALL) == {"unloaded": ["smollm2"]}
                eventually(lambda seen=seen: len(texts) > seen, what="an answer after an unload")
        finally:
            stop.set()
        for future in loops:
            future.result(120)
    assert set(texts) == {alone}
    wait_idle(client)


def test_memory_comes_back(managed, client):
    loaded = []

    def cycle():
        assert ask(client, exactly(4)).finish_reason == "length"
        loaded.append(memory(managed))
        post(client, UNLOAD, id="smollm2")
        return memory(managed)

    _, second, *later = [cycle() for _ in range(CYCLES)]
    assert max(later) <= second * 1.02
    assert loaded[-1] <= loaded[1] * 1.02
    assert loaded[1] > second + 50 * MIB, "a loaded model is larger: the measure measures something"


@pytest.fixture
def two_models(tmp_path):
    """A configuration with two models of which one may be loaded."""
    small = tmp_path / "small.gguf"
    small.symlink_to(tiny_model())
    file = tmp_path / "two.toml"
    file.write_text(
        f"""
        max_loaded_models = 1
        [[models]]
        id = "a"
        path = "{embedded_model_path()}"
        n_ctx = 512
        [[models]]
        id = "b"
        path = "{small}"
        lazy = true
        """
    )
    return file


def test_a_long_stream_is_never_cut_to_make_room(two_models):
    with Daemon("--config", str(two_models)) as daemon, http(daemon.url) as client:
        with Reader(daemon.url, 200, model="a") as reader:
            refusals = 0
            while reader.under_way:
                response = client.post(COMPLETIONS, json=exactly(4, model="b"))
                if response.status_code == 200:
                    break
                assert "max_loaded_models" in assert_error(response, 503, "server_busy")["message"]
                refusals += 1
        assert reader.whole
        assert refusals > 0
        wait_idle(client)
        assert ask(client, exactly(4, model="b")).finish_reason == "length"
        assert states(client) == {"a": "unloaded", "b": "ready"}
        assert daemon.stop() == 0


def test_clients_switch_between_models_without_a_server_error(two_models):
    with Daemon("--config", str(two_models)) as daemon:
        until = time.monotonic() + SWITCHING_SECONDS

        def switch(turn):
            codes = Counter()
            with http(daemon.url) as own:
                while time.monotonic() < until:
                    name = "ab"[turn % 2]
                    code = own.post(COMPLETIONS, json=exactly(3, model=name)).status_code
                    codes[name, code] += 1
                    if code == 200:
                        turn += 1
                    else:  # the other model is at work: come again
                        time.sleep(RETRY_SECONDS)
            return codes

        with ThreadPoolExecutor(8) as threads:
            codes = sum(threads.map(switch, range(8)), Counter())
        assert {code for _, code in codes} <= {200, 503}
        assert codes["a", 200] > 0
        assert codes["b", 200] > 0
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log_text()


def test_a_model_that_nobody_uses_is_unloaded():
    unused = ("--idle-unload-ms", "300")
    with well_behaved("--n-ctx", "512", "--slots", "1", *unused) as daemon, http(daemon.url) as client:
        daemon.wait_for_log(r"model smollm2 is unloaded", within=30)
        assert states(client) == {"smollm2": "unloaded"}
        assert client.get("/health/ready").status_code == 200
        assert ask(client, exactly(4)).finish_reason == "length"
        eventually(lambda: states(client) == {"smollm2": "unloaded"}, what="an unloaded model")


def test_a_failing_request_does_not_keep_a_model_from_being_unloaded(client):
    response = client.post(COMPLETIONS, json=exactly(4, prompt=list(range(300, 900))))
    assert assert_error(response, 400, "invalid_request_error")["code"] == "context_length_exceeded"
    assert post(client, UNLOAD, id="smollm2")["state"] == "unloaded"


def test_a_stop_during_a_load_ends_in_order(managed, client):
    post(client, UNLOAD, id="smollm2")
    with ThreadPoolExecutor(1) as threads, http(managed.url) as other:
        going = threads.submit(client.post, LOAD, json={"id": "smollm2", "slots": 8})
        eventually(lambda: going.done() or states(other)["smollm2"] != "unloaded", what="a load")
        assert managed.stop() == 0
        response = going.result(30)
    assert response.status_code in {200, 503}
