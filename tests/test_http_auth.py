"""Who gets in: the decision as a plain function, and over every kind of connection."""

from __future__ import annotations

import hmac
import logging
from base64 import b64encode

import pytest
import trio
from http_harness import (
    CHAT,
    COMPLETIONS,
    H2Client,
    assert_error,
    assert_error_object,
    chat,
    completion,
    expected,
    running,
    until,
)

from trioserve.config import Config
from trioserve.errors import AuthenticationError, PermissionDeniedError
from trioserve.http import auth
from trioserve.http.app import create_app
from trioserve.http.auth import MANAGEMENT_PATHS, PUBLIC_PATHS, Keyring, RouteKind, exposure, route_kind
from trioserve.service import open_service
from trioserve.testing import FakeEngine

PUBLIC, ORDINARY, MANAGEMENT = RouteKind
API, ADMIN, OTHER = "sk-api", "sk-admin", "sk-other"
LOAD, UNLOAD_ALL = "/v1/models/load", "/v1/tasks/unload_all_models"
OPEN, DENIED, FORBIDDEN = None, AuthenticationError, PermissionDeniedError


def bearer(key):
    return [(b"authorization", f"Bearer {key}".encode())]


def verdict(keyring, headers, kind=ORDINARY):
    error = keyring.judge(headers, kind)
    return None if error is None else type(error)


# Which keys open what


@pytest.mark.parametrize(
    ("keyring", "key", "ordinary", "management"),
    [
        (Keyring(), None, OPEN, OPEN),
        (Keyring(), OTHER, OPEN, OPEN),
        (Keyring([API]), None, DENIED, DENIED),
        (Keyring([API]), OTHER, DENIED, DENIED),
        (Keyring([API]), API, OPEN, OPEN),
        (Keyring([API], [ADMIN]), None, DENIED, DENIED),
        (Keyring([API], [ADMIN]), OTHER, DENIED, DENIED),
        (Keyring([API], [ADMIN]), API, OPEN, FORBIDDEN),
        (Keyring([API], [ADMIN]), ADMIN, OPEN, OPEN),
        (Keyring([], [ADMIN]), None, OPEN, DENIED),
        (Keyring([], [ADMIN]), OTHER, OPEN, DENIED),
        (Keyring([], [ADMIN]), ADMIN, OPEN, OPEN),
        (Keyring([API, ADMIN], [ADMIN]), ADMIN, OPEN, OPEN),
    ],
)
def test_what_a_key_opens(keyring, key, ordinary, management):
    headers = bearer(key) if key else []
    assert verdict(keyring, headers, ORDINARY) is ordinary
    assert verdict(keyring, headers, MANAGEMENT) is management
    assert verdict(keyring, headers, PUBLIC) is OPEN


@pytest.mark.parametrize("key", ["one", "two", "three"])
def test_each_of_several_keys_opens(key):
    assert verdict(Keyring(["one", "two", "three"]), bearer(key)) is OPEN
    assert verdict(Keyring([], ["one", "two", "three"]), bearer(key), MANAGEMENT) is OPEN


@pytest.mark.parametrize(
    "key", ["on", "onee", "One", "one,two", "one two", "twoone", "*", "o" * 20_000, "a,b,c", "'one'", "**********"]
)
def test_nothing_that_is_only_like_a_key_opens(key):
    assert verdict(Keyring(["one", "two"]), bearer(key)) is DENIED
    assert verdict(Keyring(["one", "two"]), [(b"x-api-key", key.encode())]) is DENIED


def test_the_configured_keys_count():
    keyring = Keyring.of(Config(api_keys=(API,), admin_keys=(ADMIN,)))
    assert verdict(keyring, bearer(API)) is OPEN
    assert verdict(keyring, bearer(API), MANAGEMENT) is FORBIDDEN
    assert verdict(keyring, bearer(ADMIN), MANAGEMENT) is OPEN


# How a key is sent

AUTHORIZATION = b"authorization"


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer sk-api")],
        [(b"authorization", b"bearer sk-api")],
        [(b"authorization", b"BEARER   sk-api  ")],
        [(b"authorization", b" Bearer\tsk-api")],
        [(b"Authorization", b"Bearer sk-api")],
        [(b"x-api-key", b"sk-api")],
        [(b"X-Api-Key", b"  sk-api\t")],
        [(b"authorization", b"Basic dXNlcjpwYXNz"), (b"x-api-key", b"sk-api")],
        [(b"authorization", b"Bearer wrong"), (b"x-api-key", b"sk-api")],
        [(b"x-api-key", b"wrong"), (b"authorization", b"Bearer sk-api")],
        [(b"authorization", b"Bearer sk-api"), (b"x-api-key", b"")],
        [(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b"), (b"x-api-key", b"sk-api")],
    ],
)
def test_ways_to_send_a_key(headers):
    assert verdict(Keyring([API]), headers) is OPEN


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"sk-api")],
        [(b"authorization", b"Bearersk-api")],
        [(b"authorization", b"Bearer: sk-api")],
        [(b"authorization", b"Token sk-api")],
        [(b"authorization", b"Basic " + b64encode(b"sk-api:"))],
        [(b"authorization", b"Bearer sk-api sk-api")],
        [(b"authorization", b"Bearer sk-api, Bearer sk-api")],
        [(b"authorization", b"Bearer sk-api\xff")],
        [(b"authorization", b"Bearer\xa0sk-api")],
        [(b"authorization", b"\xff\xfe")],
        [(b"authorization", b"Bearer sk-api"), (b"authorization", b"Bearer sk-api")],
        [(b"authorization", b"Bearer wrong"), (b"authorization", b"Bearer sk-api")],
        [(b"x-api-key", b"sk-api"), (b"X-API-Key", b"sk-api")],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"Bearer sk-api")],
        [(b"x-api-key", b"sk-api\xe9")],
        [(b"x-api-key", "sk-\N{CYRILLIC SMALL LETTER A}pi".encode())],
        [(b"api-key", b"sk-api")],
        [(b"proxy-authorization", b"Bearer sk-api")],
        [(b"cookie", b"authorization=Bearer sk-api")],
    ],
)
def test_what_is_no_key(headers):
    assert verdict(Keyring([API]), headers) is DENIED


@pytest.mark.parametrize("key", [API, "k2", ADMIN, OTHER])
@pytest.mark.parametrize("kind", [ORDINARY, MANAGEMENT])
def test_every_key_is_compared_in_constant_time_whatever_the_outcome(monkeypatch, key, kind):
    compared = []
    monkeypatch.setattr(
        auth.hmac, "compare_digest", lambda a, b, real=hmac.compare_digest: compared.append((a, b)) or real(a, b)
    )
    Keyring([API, "k2", "k3"], [ADMIN]).judge([*bearer(key), (b"x-api-key", b"x")], kind)
    assert len(compared) == 8
    assert {(len(a), len(b)) for a, b in compared} == {(32, 32)}, "lengths don't tell either"


def test_no_message_holds_a_key():
    for headers in ([], bearer(OTHER), bearer(API)):
        error = Keyring([API], [ADMIN]).judge(headers, MANAGEMENT)
        assert not [key for key in (API, ADMIN, OTHER) if key in error.message]


# Kinds of routes


async def test_the_kinds_are_those_of_the_routes():
    """Of every route and method that there is."""
    async with open_service(Config(), engine=FakeEngine()) as service:
        app = create_app(service)._app
    found = {kind: set() for kind in RouteKind}
    for rule in app.url_map.iter_rules():
        module = app.view_functions[rule.endpoint].__module__.rpartition(".")[2]
        kind = {"management": MANAGEMENT, "health": PUBLIC}.get(module, ORDINARY)
        for method in rule.methods - {"OPTIONS"}:
            assert route_kind(method, rule.rule) is kind, rule
        found[kind].add(rule.rule)
    assert found[MANAGEMENT] == MANAGEMENT_PATHS
    assert found[PUBLIC] == PUBLIC_PATHS


@pytest.mark.parametrize("path", ["/v1/models/load/", "//v1/models/load", "///v1/models/load//"])
def test_slashes_around_a_path_change_nothing(path):
    assert route_kind("POST", path) is MANAGEMENT


@pytest.mark.parametrize("path", ["/", "", "/healthz", "/health/other", "/health/live/..", "/HEALTH", "/v1/health"])
def test_nothing_else_is_public(path):
    assert route_kind("GET", path) is ORDINARY


# Over a connection


def closed(**settings):
    return running(api_keys=(API,), admin_keys=(ADMIN,), management=True, **settings)


def with_key(key):
    return {"headers": [("authorization", f"Bearer {key}")]}


def assert_denied(reply):
    error = assert_error(reply, 401, "authentication_error", code="invalid_api_key", param=None)
    assert reply.headers["www-authenticate"] == "Bearer"
    assert not [key for key in (API, ADMIN, OTHER) if key in error["message"]]


ROUTES = [
    (CHAT, chat()),
    (COMPLETIONS, completion(stream=True)),
    ("/v1/models", None),
    ("/v1/models/fake", None),
    ("/v1/slots", None),
    (LOAD, {"id": "fake"}),
    (UNLOAD_ALL, {}),
    ("/v1/unknown", None),
    ("/", None),
    ("/health/../v1/models", None),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("request_", [{}, with_key(OTHER)], ids=["missing", "wrong"])
async def test_strangers_learn_nothing_and_nothing_is_done_for_them(path, body, request_):
    async with closed() as server:
        assert_denied(await server.call(path, body, **request_))
        assert server.service.tally().finished == 0
        assert server.engine.closed == []


@pytest.mark.parametrize("path", sorted(PUBLIC_PATHS))
async def test_health_is_for_everybody(path):
    async with closed() as server:
        assert (await server.call(path)).status == 200


@pytest.mark.parametrize("key", [API, ADMIN])
async def test_clients_are_served(key):
    async with closed() as server:
        assert (await server.call(COMPLETIONS, completion(), **with_key(key))).text == expected()
        reply = await server.call(CHAT, chat(stream=True), headers=[("X-API-Key", key)])
        assert reply.events[-1] == "[DONE]"
        assert (await server.call("/v1/models", **with_key(key))).status == 200
        assert_error(await server.call("/v1/no", **with_key(key)), 404, "invalid_request_error", code="route_not_found")


@pytest.mark.parametrize("path", sorted(MANAGEMENT_PATHS))
async def test_management_is_for_administrators(path):
    async with closed() as server:
        body = {"id": "fake", "model_ids": ["fake"]} if path != LOAD else {"id": "fake"}
        reply = await server.call(path, body, **with_key(API))
        error = assert_error(reply, 403, "permission_denied", code="permission_denied")
        assert "admin key" in error["message"]
        assert server.engine.closed == []
        assert (await server.call(path, body, **with_key(ADMIN))).status == 200


async def test_without_admin_keys_clients_manage():
    async with running(api_keys=(API,), management=True) as server:
        assert_denied(await server.call(UNLOAD_ALL, {}))
        assert (await server.call(UNLOAD_ALL, {}, **with_key(API))).status == 200


async def test_with_admin_keys_alone_only_management_is_closed():
    async with running(admin_keys=(ADMIN,), management=True) as server:
        assert (await server.call(COMPLETIONS, completion(), **with_key(OTHER))).status == 200
        assert_denied(await server.call(UNLOAD_ALL, {}))
        assert_denied(await server.call(UNLOAD_ALL, {}, **with_key(OTHER)))
        assert (await server.call(UNLOAD_ALL, {}, **with_key(ADMIN))).status == 200


async def test_where_management_is_off_only_those_are_told_who_might_use_it():
    async with running(api_keys=(API,), admin_keys=(ADMIN,)) as server:
        assert_denied(await server.call(UNLOAD_ALL, {}))
        assert_error(await server.call(UNLOAD_ALL, {}, **with_key(API)), 403, "permission_denied")
        assert_error(await server.call(UNLOAD_ALL, {}, **with_key(ADMIN)), 403, "management_disabled")


DISGUISES = [
    "/v1/models/load/",
    "//v1/models/load",
    "///v1//models/load",
    "/v1/models//load",
    "/v1/models/./load",
    "/v1/models/x/../load",
    "/v1/models/load/.",
    "/v1%2Fmodels%2Fload",
    "/v1/models/%6Coad",
    "/v1/models/lo%61d%2F",
    "/%2F/v1/models/load",
    "/v1/models/load?x=1",
    "/v1/models/load;x",
    "/v1/models/load%00",
    "/v1/models/load%20",
    "/V1/models/load",
    "http://127.0.0.1/v1/models/load",
    "http://127.0.0.1//v1/models/load/",
    "health://x/v1/models/load",
    "/health/live/../../v1/models/load",
]


@pytest.mark.parametrize("path", DISGUISES)
@pytest.mark.parametrize("method", ["POST", "PUT", "post"])
async def test_no_spelling_of_a_path_gets_around_the_keys(path, method):
    async with running(admin_keys=(ADMIN,), management=True) as server:
        reply = await server.call(path, {"id": "fake", "slots": 3}, method=method, **with_key(OTHER))
        assert reply.status in (401, 404, 405)
        assert server.status().slots == 1


@pytest.mark.parametrize("path", [LOAD, f"/mounted{LOAD}", f"/mounted/{LOAD}", "/health/mounted" + LOAD])
async def test_a_prefix_under_which_the_server_is_mounted_is_no_way_around(path):
    sent = []

    async def receive():
        await trio.sleep_forever()

    async def send(message):
        sent.append(message)

    async with running(admin_keys=(ADMIN,), management=True) as server:
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "/mounted",
            "headers": [],
        }
        with trio.move_on_after(2):
            await server.app(scope, receive, send)
        assert sent[0]["status"] == (404 if path.startswith("/health") else 401)


async def test_a_path_is_routed_without_the_prefix_under_which_the_server_is_mounted():
    sent = []

    async def send(message):
        sent.append(message)

    async with running() as server:
        scope = {"type": "http", "http_version": "1.1", "method": "GET", "scheme": "http", "query_string": b""}
        scope |= {"path": "/mounted/v1/models", "root_path": "/mounted", "headers": []}
        await server.app(scope, lambda: trio.sleep_forever(), send)
        assert sent[0]["status"] == 200


async def test_a_key_is_asked_for_before_the_body_is_read():
    async with closed(max_request_body_bytes=10) as server:
        async with await server.connect() as client:
            await client.stream.send_all(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: text/plain\r\n"
                b"content-length: 1000000\r\n\r\n"
            )
            reply = await client.head()
            assert reply.status == 401
        assert_denied(await server.call(COMPLETIONS, b"{no json", headers=[("content-type", "text/plain")]))


async def test_a_denied_request_leaves_its_connection_in_order():
    async with closed() as server, await server.connect() as client:
        for _ in range(3):
            assert_denied(await client.call(COMPLETIONS, completion("x" * 10_000)))
            assert (await client.call(COMPLETIONS, completion(), **with_key(API))).text == expected()


async def test_headers_that_are_given_twice_offer_nothing():
    async with closed() as server:
        twice = [("authorization", f"Bearer {API}"), ("authorization", f"Bearer {API}")]
        assert_denied(await server.call("/v1/models", headers=twice))
        assert (await server.call("/v1/models", headers=[*twice, ("x-api-key", API)])).status == 200


async def test_bytes_that_are_no_text_are_only_a_wrong_key():
    async with closed() as server:
        for headers in ([("authorization", b"Bearer \xff\xfe")], [("x-api-key", b"\xc3\x28")]):
            assert_denied(await server.call("/v1/models", headers=headers))


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "TRACE", "PUT", "BREW"])
async def test_other_methods_need_a_key_too(method):
    async with closed() as server, await server.connect() as client:
        await client.send("/v1/models", method=method)
        assert (await client.head()).status == 401


async def test_http_2():
    async with closed() as server, await H2Client.open(server.port) as client:
        assert_denied(await client.reply(await client.send(COMPLETIONS, completion())))
        number = await client.send(COMPLETIONS, completion(), headers=[("authorization", f"Bearer {OTHER}")])
        assert_denied(await client.reply(number))
        number = await client.send(COMPLETIONS, completion(), headers=[("authorization", f"Bearer {API}")])
        assert (await client.reply(number)).text == expected()
        assert (await client.reply(await client.send("/health"))).status == 200


HANDSHAKE = [
    ("connection", "upgrade"),
    ("upgrade", "websocket"),
    ("sec-websocket-version", "13"),
    ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", LOAD])
async def test_websockets(path):
    async with closed() as server:
        reply = await server.call(path, headers=HANDSHAKE)
        assert reply.status == 401
        assert_error_object(reply.json["error"], "authentication_error")
        reply = await server.call(path, headers=[*HANDSHAKE, ("x-api-key", API)])
        assert_error(reply, 404, "invalid_request_error", code="route_not_found")


async def test_during_a_drain_strangers_are_still_strangers():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with closed(engine=engine) as server, await server.connect() as client:
        await client.send(COMPLETIONS, completion(), **with_key(API))
        await engine.step_gate.arrived()
        server.stop.set()
        await until(lambda: server.service.phase == "draining")
        assert_denied(await server.call(COMPLETIONS, completion()))
        assert_denied(await server.call("/v1/models"))
        assert_error(await server.call(COMPLETIONS, completion(), **with_key(API)), 503, "shutting_down")
        assert (await server.call("/health/live")).status == 200
        engine.step_gate.open()
        assert (await client.reply()).text == expected()


async def test_denials_are_logged_without_keys(caplog):
    caplog.set_level(logging.DEBUG, "trioserve")
    async with closed() as server:
        request = {"headers": [("authorization", f"Bearer {OTHER}"), ("x-request-id", "told")]}
        assert_denied(await server.call("/v1/models", **request))
        await server.call(UNLOAD_ALL, {}, **with_key(API))
        async with await H2Client.open(server.port) as client:  # which h2 refuses, quoting the value
            await client.send("/v1/models", headers=[("authorization", f" Bearer {API} ")])
            await client.eof()
    denied = [record.fields for record in caplog.records if record.getMessage() == "request denied"]
    assert [fields["code"] for fields in denied] == ["invalid_api_key", "permission_denied"]
    assert denied[0] == {"request_id": "told", "code": "invalid_api_key", "client": "127.0.0.1"}
    logged = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    assert not [key for key in (API, ADMIN, OTHER) if key in logged]


# Exposure


@pytest.mark.parametrize("address", [None, "127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
def test_nothing_is_said_of_a_server_that_only_this_machine_reaches(address):
    assert exposure(Config(management=True), address) is None


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.1.4", "2001:db8::1", "fe80::1%eth0", "::ffff:10.0.0.1"])
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "whoever reaches it may use it"),
        ({"management": True}, "DANGER"),
        ({"management": True, "admin_keys": (ADMIN,)}, "there are no api_keys"),
        ({"api_keys": (API,)}, None),
        ({"api_keys": (API,), "management": True}, None),
    ],
)
def test_the_operator_is_told_of_an_open_server_that_others_reach(address, settings, said):
    warning = exposure(Config(**settings), address)
    assert (warning is None) if said is None else (said in warning and address in warning)
