"""Vectors from the real daemon: a model that generates and embeds, and an encoder, over one socket."""

from __future__ import annotations

import json
import math
import socket

import openai as openai_package
import pytest
from tiny_models import smollm2, tiny_encoder

from .client import CHAT, ask, assert_error, chat, http, long_prompt, openai, wait_idle
from .daemon import Daemon, eventually

EMBEDDINGS = "/v1/embeddings"
TEXTS = ["The cat sleeps on the sofa.", "A cat is sleeping on a couch.", "Interest rates rose by half a percent."]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    models = [
        {"id": "embedder", "path": str(smollm2()), "task": "embed", "n_ctx": 512},
        {"id": "talker", "path": str(smollm2()), "n_ctx": 512, "lazy": True},
        {"id": "encoder", "path": str(tiny_encoder()), "task": "embed", "lazy": True},
        {"id": "mistaken", "path": str(tiny_encoder()), "lazy": True},
    ]
    path = tmp_path_factory.mktemp("embed") / "trioserve.json"
    path.write_text(json.dumps({"models": models}))
    with Daemon("--config", str(path)) as daemon:
        yield daemon
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log_text()


@pytest.fixture
def client(daemon):
    with http(daemon.url) as client:
        yield client


@pytest.fixture
def official(daemon):
    with openai(daemon.url) as client:
        yield client


def cosine(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_official_client(official):
    """It asks for base64 where it isn't told otherwise."""
    together = official.embeddings.create(model="embedder", input=TEXTS)
    assert [item.index for item in together.data] == [0, 1, 2]
    assert together.usage.prompt_tokens == together.usage.total_tokens > 10
    cat, other_cat, rates = (item.embedding for item in together.data)
    assert len(cat) == 576
    assert math.hypot(*cat) == pytest.approx(1, abs=1e-5)
    assert cosine(cat, other_cat) > cosine(cat, rates)
    for text, vector in zip(TEXTS, (cat, other_cat, rates), strict=True):
        alone = official.embeddings.create(model="embedder", input=text, encoding_format="float")
        assert cosine(alone.data[0].embedding, vector) > 0.999
    short = official.embeddings.create(model="embedder", input=TEXTS[0], dimensions=64).data[0].embedding
    assert short == pytest.approx([number / math.hypot(*cat[:64]) for number in cat[:64]], abs=1e-3)


def test_official_client_raises_on_what_does_not_fit(official):
    with pytest.raises(openai_package.BadRequestError) as caught:
        official.embeddings.create(model="embedder", input=["short", "word " * 600])
    assert caught.value.code == "context_length_exceeded"
    assert "input[1]" in caught.value.message


def test_one_file_embeds_and_generates_under_two_names(client):
    assert ask(client, chat(model="talker")).text
    for path, body in ((CHAT, chat(model="embedder")), (EMBEDDINGS, {"input": "a", "model": "talker"})):
        assert assert_error(client.post(path, json=body), 400, "invalid_request_error")["code"] == "wrong_task"
    assert client.post(EMBEDDINGS, json={"input": "a", "model": "embedder"}).status_code == 200


def test_an_encoder_embeds_and_says_so_where_it_shall_generate(client):
    answer = client.post(EMBEDDINGS, json={"input": ["the", "no"], "model": "encoder"}).json()
    assert [len(item["embedding"]) for item in answer["data"]] == [64, 64]
    error = assert_error(client.post(CHAT, json=chat(model="mistaken")), 400, "invalid_request_error")
    assert error["code"] == "invalid_model"
    assert 'task = "embed"' in error["message"]


def test_a_client_that_leaves_frees_its_slot(daemon, client):
    body = json.dumps({"input": [long_prompt(512)] * 50, "model": "embedder"}).encode()
    head = (
        f"POST {EMBEDDINGS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"x-request-id: leaver\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", daemon.port)) as sock:
        sock.sendall(head.encode() + body)
        eventually(lambda: "leaver" in [slot["request_id"] for slot in client.get("/v1/slots").json()["data"]])
    assert daemon.request_log("leaver")["end"] == "cancelled"
    wait_idle(client)
