"""Pages of other origins: silence where they are not configured, and the protocol where they are."""

from __future__ import annotations

import pytest
from http_harness import CHAT, COMPLETIONS, assert_error, chat, completion, running

from trioserve.http.cors import Cors

PAGE, OTHER = "https://page.example", "https://other.example"
PREFLIGHT = [
    ("access-control-request-method", "POST"),
    ("access-control-request-headers", "authorization,content-type,x-stainless-os"),
]


def about_cors(reply):
    return {
        name: value for name, value in reply.headers.items() if name.startswith("access-control-") or name == "vary"
    }


@pytest.mark.parametrize("settings", [{}, {"api_keys": ("sk",)}], ids=["open", "closed"])
async def test_without_configured_origins_nothing_is_said_about_them(settings):
    async with running(**settings) as server:
        for origin in (PAGE, "null", "*"):
            headers = [("origin", origin)]
            replies = [
                await server.call(CHAT, chat(), headers=headers),
                await server.call(CHAT, chat(stream=True), headers=headers),
                await server.call("/v1/models", headers=headers),
                await server.call("/health", headers=headers),
                await server.call("/v1/unknown", headers=headers),
                await server.call(CHAT, method="OPTIONS", headers=[*headers, *PREFLIGHT]),
            ]
            assert [about_cors(reply) for reply in replies] == [{}] * len(replies)


async def test_a_configured_page_may_read_answers_and_errors():
    async with running(cors_origins=(PAGE,), api_keys=("sk",)) as server:
        for path, body, key, status in (
            (COMPLETIONS, completion(), "sk", 200),
            (COMPLETIONS, completion(stream=True), "sk", 200),
            (COMPLETIONS, {}, "sk", 400),
            (COMPLETIONS, completion(), "no", 401),
        ):
            reply = await server.call(path, body, headers=[("origin", PAGE), ("x-api-key", key)])
            assert reply.status == status
            assert reply.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in reply.headers["access-control-expose-headers"]
            assert reply.headers["vary"] == "origin"
            assert "access-control-allow-credentials" not in reply.headers


@pytest.mark.parametrize("origin", [OTHER, f"{PAGE}.evil", f"{PAGE}:8443", "http://page.example", PAGE.upper(), "null"])
async def test_other_pages_may_not(origin):
    async with running(cors_origins=(PAGE,)) as server:
        assert about_cors(await server.call("/v1/models", headers=[("origin", origin)])) == {"vary": "origin"}
        reply = await server.call(CHAT, method="OPTIONS", headers=[("origin", origin), *PREFLIGHT])
        assert about_cors(reply) == {"vary": "origin"}


async def test_a_preflight_needs_no_key_and_opens_nothing():
    async with running(cors_origins=(PAGE,), api_keys=("sk",)) as server, await server.connect() as client:
        reply = await client.call(CHAT, method="OPTIONS", headers=[("origin", PAGE), *PREFLIGHT])
        assert (reply.status, reply.body) == (204, b"")
        assert about_cors(reply) == {
            "access-control-allow-origin": PAGE,
            "access-control-allow-methods": "GET, HEAD, POST",
            "access-control-allow-headers": "authorization,content-type,x-stainless-os",
            "access-control-expose-headers": "x-request-id, retry-after, www-authenticate",
            "access-control-max-age": "600",
            "vary": "origin",
        }
        assert reply.headers["x-request-id"]
        reply = await client.call(CHAT, chat(), headers=[("origin", PAGE)])
        assert_error(reply, 401, "authentication_error")


async def test_what_only_looks_like_a_preflight_needs_a_key():
    async with running(cors_origins=(PAGE,), api_keys=("sk",)) as server:
        for method, headers in (
            ("OPTIONS", [("origin", PAGE)]),
            ("OPTIONS", PREFLIGHT),
            ("OPTIONS", [("origin", OTHER), *PREFLIGHT]),
            ("GET", [("origin", PAGE), *PREFLIGHT]),
        ):
            assert (await server.call("/v1/models", method=method, headers=headers)).status == 401


async def test_all_origins():
    async with running(cors_origins=(PAGE, "*")) as server:
        reply = await server.call("/v1/models", headers=[("origin", "null")])
        assert reply.headers["access-control-allow-origin"] == "*"
        assert "vary" not in reply.headers
        assert about_cors(await server.call("/v1/models")) == {}, "to who is no page nothing is said"


@pytest.mark.parametrize("names", [b"", b"a\x00b", b"a\r\nset-cookie: x", b"x" * 2001, b"\xff"])
def test_names_of_headers_that_are_none_are_not_sent_back(names):
    headers = [
        (b"origin", PAGE.encode()),
        (b"access-control-request-method", b"GET"),
        (b"access-control-request-headers", names),
    ]
    assert b"access-control-allow-headers" not in dict(Cors([PAGE]).preflight_headers("OPTIONS", headers))
