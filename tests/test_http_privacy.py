"""What people write stays out of the log, however it goes wrong, unless the operator asks for it."""

from __future__ import annotations

import logging

import pytest
from http_harness import CHAT, COMPLETIONS, chat, completion, running

from trioserve.testing import FakeEngine

WORD = "xylophonist"
# Lazy: their templates are met by requests that are in the book already, and so in the log.
REFUSING = {
    "chat_template": "{{ raise_exception('not with me: ' + messages[0].content) }}",
    "id": "refusing",
    "lazy": True,
}
BROKEN = {"chat_template": "{{ messages[0].content.nothing.there }}", "id": "broken", "lazy": True}
ENDLESS = {
    "chat_template": "{% for x in range(10**7) %}{{ messages[0].content }}{% endfor %}",
    "id": "endless",
    "lazy": True,
}


@pytest.fixture
def logged(caplog):
    """Everything that was logged, fields and tracebacks included."""
    caplog.set_level(logging.DEBUG, "trioserve")

    def text():
        return "\n".join(f"{record.getMessage()} {record.__dict__} {record.exc_text}" for record in caplog.records)

    return text


REQUESTS = {
    "chat": (CHAT, chat(WORD, model="fake"), 200),
    "stream": (CHAT, chat(WORD, model="fake", stream=True), 200),
    "system": (CHAT, {"model": "fake", "max_tokens": 2, "messages": [{"role": "system", "content": WORD}]}, 200),
    "completion": (COMPLETIONS, completion(WORD, model="fake"), 200),
    "stop and user": (COMPLETIONS, completion("x", model="fake", stop=[WORD], user=WORD, metadata={"a": WORD}), 200),
    "no JSON": (CHAT, f'{{"messages": "{WORD}'.encode(), 400),
    "no text": (CHAT, WORD.encode() + b"\xff", 400),
    "wrong type": (CHAT, {"model": "fake", "messages": WORD}, 400),
    "wrong field": (COMPLETIONS, completion("x", model="fake", temperature=WORD), 400),
    "wrong role": (CHAT, {"model": "fake", "messages": [{"role": 7, "content": WORD}]}, 400),
    "too long": (COMPLETIONS, completion(WORD * 10_000, model="fake"), 400),
    "refused by the template": (CHAT, chat(WORD, model="refusing"), 400),
    "broken template": (CHAT, chat(WORD, model="broken"), 400),
    "endless template": (CHAT, chat(WORD, model="endless"), 400),
    "path": (f"/v1/{WORD}?q={WORD}", None, 404),
    "another method": (f"/v1/models?{WORD}", {"x": WORD}, 405),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_words_of_a_request_are_not_logged(logged, name):
    path, body, status = REQUESTS[name]
    async with running(models=[{}, REFUSING, BROKEN, ENDLESS]) as server:
        reply = await server.call(path, body)
        assert reply.status == status, reply
    assert "ready" in logged()
    assert WORD not in logged()


@pytest.mark.parametrize("stream", [False, True])
async def test_words_of_a_request_that_fails_are_not_logged(logged, stream):
    engine = FakeEngine()
    async with running(engine) as server:
        engine.failing_step = 1
        await server.call(COMPLETIONS, completion(WORD, stream=stream))
    assert "failed" in logged()
    assert WORD not in logged()


async def test_words_of_strangers_are_not_logged(logged):
    async with running(api_keys=("sk",)) as server:
        assert (
            await server.call(f"/{WORD}", chat(WORD), headers=[("user-agent", WORD), ("x-api-key", WORD)])
        ).status == 401
    assert "denied" in logged()
    assert WORD not in logged()


async def test_prompts_are_logged_where_the_operator_asks_for_them(logged):
    async with running(log_prompts=True) as server:
        await server.call(CHAT, chat(WORD))
    assert WORD in logged()
