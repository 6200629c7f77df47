"""Keys, exposure and silence of the real server."""

from __future__ import annotations

import socket
from contextlib import closing

import openai as openai_package
import pytest

from .client import CHAT, assert_error, chat, http, openai
from .daemon import Daemon, run_to_end, trioserve, well_behaved

API, FROM_FILE, ADMIN, WRONG = "sk-one", "sk-from-a-file", "sk-admin", "sk-wrong"
WORD = "xylophonist"
SMALL = ("--slots", "1", "--n-ctx", "256")


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    """A server with keys from everywhere; nothing of what its clients sent may be in its log at the end."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys").write_text(f"# of the team\n\n{FROM_FILE}\n")
    (folder / "c.toml").write_text(f'admin_keys = ["{ADMIN}"]\nmanagement = true\n')
    env = {"TRIOSERVE_API_KEYS": f"{API},@{folder}/keys"}
    with well_behaved("--config", str(folder / "c.toml"), "--log-level", "debug", *SMALL, env=env) as daemon:
        yield daemon
        log = daemon.log_text()
        assert "request finished" in log
        assert "request denied" in log
        assert not [secret for secret in (API, FROM_FILE, ADMIN, WRONG, WORD) if secret in log]


def official(daemon, key):
    """The official client with a key of its own."""
    return closing(openai(daemon.url).with_options(api_key=key))


@pytest.mark.parametrize("key", [API, FROM_FILE, ADMIN])
def test_official_client_with_a_right_key(closed, key):
    with official(closed, key) as client:
        answer = client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": WORD}], max_tokens=4
        )
        assert answer.usage.completion_tokens <= 4
        chunks = client.completions.create(model="smollm2", prompt=WORD, max_tokens=4, stream=True)
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1]
        assert [model.id for model in client.models.list()] == ["smollm2"]


@pytest.mark.parametrize("stream", [False, True])
def test_official_client_with_a_wrong_key(closed, stream):
    with official(closed, WRONG) as client, pytest.raises(openai_package.AuthenticationError) as caught:
        client.completions.create(model="smollm2", prompt=WORD, stream=stream)
    assert (caught.value.status_code, caught.value.type) == (401, "authentication_error")
    assert caught.value.code == "invalid_api_key"
    assert caught.value.response.headers["www-authenticate"] == "Bearer"


def test_official_client_that_is_no_administrator(closed):
    with official(closed, API) as client, pytest.raises(openai_package.PermissionDeniedError) as caught:
        client.post("/models/unload", body={"id": "smollm2"}, cast_to=object)
    assert caught.value.code == "permission_denied"
    with official(closed, ADMIN) as client:
        assert client.post("/models/unload", body={"id": "smollm2"}, cast_to=object)["state"] == "unloaded"


def raw(daemon, request):
    """Say every byte of a request and hear the answer to its end."""
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=30) as sock:
        sock.sendall(request)
        heard = b""
        while data := sock.recv(65536):
            heard += data
    head, _, body = heard.partition(b"\r\n\r\n")
    status, *headers = head.split(b"\r\n")
    return int(status.split()[1]), [header.lower() for header in headers], body


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        (b"GET /v1/models", [], 401),
        (b"GET /v1/models", [b"Authorization: Bearer sk-wrong"], 401),
        (b"GET /v1/models", [b"Authorization: Bearer sk-one"], 200),
        (b"GET /v1/models", [b"authorization:bEaReR   sk-one  "], 200),
        (b"GET /v1/models", [b"X-API-KEY:sk-from-a-file"], 200),
        (b"GET /v1/models", [b"x-api-key: sk-wrong", b"authorization: Bearer sk-one"], 200),
        (b"GET /v1/models", [b"authorization: Bearer sk-one", b"authorization: Bearer sk-one"], 401),
        (b"GET /v1/models", [b"authorization: Bearer sk-\xff\xfe"], 401),
        (b"GET /v1/unknown", [], 401),
        (b"OPTIONS *", [], 401),
        (b"POST /v1/models/load", [b"x-api-key: sk-one", b"content-length: 0"], 403),
        (b"POST //v1/models/unload/", [b"x-api-key: sk-one", b"content-length: 0"], 403),
        (b"GET http://127.0.0.1/health/live", [], 200),
        (b"GET /health/ready", [b"authorization: Bearer sk-wrong"], 200),
    ],
)
def test_raw_requests(closed, request_line, headers, status):
    lines = [request_line + b" HTTP/1.1", b"host: 127.0.0.1", b"connection: close", *headers, b"", b""]
    found, heard, body = raw(closed, b"\r\n".join(lines))
    assert found == status
    assert (b"www-authenticate: bearer" in heard) == (status == 401)
    assert b"sk-" not in body
    assert not [header for header in heard if header.startswith(b"access-control")]


def test_a_stranger_with_a_large_body_is_told_before_it_is_sent(closed):
    with socket.create_connection(("127.0.0.1", closed.port), timeout=30) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 30000000\r\n\r\n" + WORD.encode())
        assert sock.recv(65536).startswith(b"HTTP/1.1 401 ")


def test_what_goes_wrong_with_a_prompt_is_not_logged(closed):
    """The fixture looks at the log."""
    with http(closed.url, headers={"x-api-key": API}) as client:
        for body in ({"messages": WORD}, chat(WORD * 2000), chat(WORD, temperature=WORD), {"messages": [{WORD: WORD}]}):
            assert_error(client.post(CHAT, json=body), 400, "invalid_request_error")
        assert_error(client.post(CHAT, content=f'{{"{WORD}'), 400, "invalid_request_error")
        assert_error(client.get(f"/{WORD}"), 404, "invalid_request_error")


# Exposure


@pytest.mark.parametrize(
    ("args", "env", "warned"),
    [
        (("--host", "0.0.0.0"), {}, " warning 0.0.0.0 can be reached from other machines and there are no api_keys"),
        (("--host", "0.0.0.0", "--management"), {}, " warning DANGER: 0.0.0.0 can be reached"),
        (("--host", "0.0.0.0", "--management"), {"TRIOSERVE_API_KEYS": API}, ""),
        (("--host", "localhost", "--management"), {}, ""),
    ],
    ids=["open", "managed", "closed", "local"],
)
def test_an_open_server_that_others_reach_is_warned_of_once(args, env, warned):
    with Daemon(*args, "--lazy", *SMALL, env=env) as daemon:
        assert daemon.stop() == 0
        warnings = [line for line in daemon.log_text().splitlines() if " warning " in line]
    assert [warned in line for line in warnings] == ([True] if warned else [])


def test_keys_from_a_file_that_is_missing_keep_the_server_from_starting(tmp_path):
    env = {"TRIOSERVE_API_KEYS": f"{WORD},@{tmp_path}/none"}
    code, said = run_to_end(trioserve("serve", *SMALL), env)
    assert code == 2
    assert said.startswith("trioserve: api_keys: cannot read ")
    assert WORD not in said
