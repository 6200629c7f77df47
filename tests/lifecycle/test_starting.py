"""The start of the server: what stops it is told in one line, and what it may be told to serve."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trioserve.config.model_files import embedded_model_path

from .client import COMPLETIONS, ask, assert_error, exactly, http, model
from .daemon import Daemon, run_to_end, trioserve

BAD_CONFIGURATION, FAILED = 2, 1


def refused(*args, env=None):
    """Start a server that can't start; return the one line that it says."""
    code, said = run_to_end(trioserve("serve", *args), env)
    assert code == BAD_CONFIGURATION
    (line,) = said.splitlines()
    assert line.startswith("trioserve: ")
    return line


# -- starts that fail


def test_missing_file(tmp_path):
    assert str(tmp_path / "none.gguf") in refused(str(tmp_path / "none.gguf"))


def test_directory(tmp_path):
    assert "is a directory" in refused(str(tmp_path))


def test_file_that_is_no_model(tmp_path):
    path = tmp_path / "notes.gguf"
    path.write_text("not a model")
    assert "is not a GGUF file" in refused(str(path))


def test_unreadable_configuration_file(tmp_path):
    assert "cannot read configuration file" in refused("--config", str(tmp_path / "none.toml"))


def test_unknown_key_in_a_file(tmp_path):
    path = tmp_path / "server.toml"
    path.write_text("prot = 8080\n")
    line = refused("--config", str(path))
    assert "'prot'" in line
    assert "port" in line.replace("'prot'", "")


def test_unknown_flag():
    assert "--slot" in refused("--slot", "4")


def test_unknown_variable():
    assert "TRIOSERVE_SLOT" in refused(env={"TRIOSERVE_SLOT": "4"})


@pytest.mark.parametrize("slots", ["0", "17", "many"])
def test_impossible_slots(slots):
    line = refused("--slots", slots)
    assert "slots" in line
    assert slots in line


def test_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refused("--port", port)
    assert f"127.0.0.1:{port}" in line
    assert "in use" in line


@pytest.mark.parametrize("kept", [100, 1_000_000], ids=["within the metadata", "within the tensors"])
def test_truncated_model(tmp_path, kept):
    """Its first bytes look right; only the load shows."""
    path = tmp_path / "truncated.gguf"
    with embedded_model_path().open("rb") as whole:
        path.write_bytes(whole.read(kept))
    code, said = run_to_end(trioserve("serve", str(path)))
    assert code == FAILED
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if " error " in line]
    assert str(path) in line


def test_validate_starts_nothing(tmp_path):
    code, said = run_to_end([sys.executable, "-m", "trioserve", "validate"])
    assert (code, said) == (0, "")
    code, said = run_to_end([sys.executable, "-m", "trioserve", "validate", str(tmp_path / "none.gguf")])
    assert code == BAD_CONFIGURATION
    assert len(said.splitlines()) == 1


# -- two models


@pytest.fixture
def two_models(tmp_path):
    """A server with a model that is loaded at the start and one that is not."""
    path = tmp_path / "server.toml"
    path.write_text(
        f"""
        [[models]]
        id = "eager"
        path = "{embedded_model_path()}"
        n_ctx = 256

        [[models]]
        id = "lazy"
        path = "{embedded_model_path()}"
        n_ctx = 256
        slots = 2
        lazy = true
        """
    )
    with Daemon("--config", str(path)) as daemon:
        yield daemon


def test_lazy_model_is_loaded_once_at_its_first_use(two_models):
    with http(two_models.url) as client, ThreadPoolExecutor(4) as threads:
        assert client.get("/health/ready").status_code == 200
        assert [model(client, index)["state"] for index in (0, 1)] == ["ready", "unloaded"]
        assert ask(client, exactly(2, model="eager")).finish_reason == "length"
        assert model(client, 1)["loaded"] is False
        answers = list(threads.map(lambda _: ask(client, exactly(4, model="lazy")), range(4)))
        assert len({answer.text for answer in answers}) == 1
        assert len(re.findall("model lazy is ready", two_models.log_text())) == 1
        assert model(client, 1)["state"] == "ready"


def test_model_has_to_be_named_where_there_are_two(two_models):
    with http(two_models.url) as client:
        error = assert_error(client.post(COMPLETIONS, json=exactly(1)), 400, "invalid_request_error")
        assert error["param"] == "model"
        response = client.post(COMPLETIONS, json=exactly(1, model="smollm2"))
        assert assert_error(response, 404, "model_not_found")["param"] == "model"
        assert model(client, 1)["state"] == "unloaded"
        assert client.get("/v1/models/lazy").json()["id"] == "lazy"
        assert_error(client.get("/v1/models/smollm2"), 404, "model_not_found")


# -- other ways to say it


def test_json_file(tmp_path):
    path = tmp_path / "server.json"
    entry = {"id": "tiny", "path": str(embedded_model_path()), "slots": 2, "n_ctx": 256}
    path.write_text(json.dumps({"busy_timeout_ms": None, "port": 0, "models": [entry]}))
    with Daemon(env={"TRIOSERVE_CONFIG": str(path)}) as daemon, http(daemon.url) as client:
        assert (model(client)["id"], model(client)["slots"], model(client)["n_ctx"]) == ("tiny", 2, 256)
        assert ask(client, exactly(1, model="tiny")).finish_reason == "length"


def test_flags_over_environment_over_file(tmp_path):
    path = tmp_path / "server.toml"
    path.write_text(f'[[models]]\npath = "{embedded_model_path()}"\nn_ctx = 64\nslots = 1\nn_batch = 32\n')
    env = {"TRIOSERVE_CONFIG": str(path), "TRIOSERVE_SLOTS": "2", "TRIOSERVE_N_CTX": "128"}
    with Daemon("--n-ctx", "256", env=env) as daemon, http(daemon.url) as client:
        assert (model(client)["slots"], model(client)["n_ctx"]) == (2, 256)


def test_json_log():
    with Daemon("--log-format", "json", "--slots", "1", "--n-ctx", "256") as daemon, http(daemon.url) as client:
        ask(client, exactly(2), **{"x-request-id": "told"})
        assert_error(client.post(COMPLETIONS, json={"prompt": 1}), 400, "invalid_request_error")
        assert daemon.stop() == 0
    lines = [json.loads(line) for line in daemon.log_text().splitlines()]
    assert all({"time", "level", "message"} <= line.keys() for line in lines)
    (told,) = [line for line in lines if line.get("request_id") == "told"]
    assert told["message"] == "request finished"
    assert told["completion_tokens"] == 2


@pytest.fixture
def socket_path():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # such paths may have a hundred characters at most
        yield Path(folder, "server.sock")


def test_unix_socket(socket_path):
    args = ("--host", f"unix:{socket_path}", "--slots", "1", "--n-ctx", "256")
    with Daemon(*args, "--lazy") as killed:
        killed.signal(signal.SIGKILL)
        killed.wait(30)
    assert stat.S_ISSOCK(os.stat(socket_path).st_mode), "what a killed server leaves behind is no obstacle to the next"
    with Daemon(*args) as daemon, http(daemon.url) as client:
        assert daemon.url == f"unix:{socket_path}"
        assert "another server does" in refused(*args)
        assert ask(client, exactly(2, stream=True)).finish_reason == "length"
        client.close()
        assert daemon.stop() == 0
    assert not socket_path.exists()
