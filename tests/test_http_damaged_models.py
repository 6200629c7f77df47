"""Damaged and unsupported model files over HTTP, with the real engine: a 400, and what worked before goes on."""

from __future__ import annotations

import pytest
from gguf_parts import STRING, U32, Parts
from http_harness import COMPLETIONS, assert_error, completion, running
from tiny_models import tiny_encoder, tiny_encoder_decoder, tiny_model

from trioserve.engine.llama import LlamaEngine
from trioserve.testing import ThreadGate

LOAD = "/v1/models/load"
PROMPT = {"prompt": "the", "max_tokens": 4, "temperature": 0}


class RealEngine(LlamaEngine):
    """The real engine, with the gates that the harness opens in the end."""

    def __init__(self):
        self.load_gate, self.session_gate, self.step_gate = ThreadGate(), ThreadGate(), ThreadGate()


@pytest.fixture
def damaged(tmp_path):
    def write(**values):
        parts = Parts(tiny_model().read_bytes())
        for key, value in values.items():
            parts.set(key.replace("__", "."), STRING if isinstance(value, str) else U32, value)
        path = tmp_path / "damaged.gguf"
        path.write_bytes(parts.content())
        return path

    return write


@pytest.fixture
def truncated(tmp_path):
    path = tmp_path / "truncated.gguf"
    path.write_bytes(tiny_model().read_bytes()[:-1000])
    return path


@pytest.fixture
def serving(tmp_path):
    """A server with the model ``tiny``, which may load from anywhere that the tests write to."""

    def start():
        roots = (tmp_path, tiny_model().parent)
        model = {"id": "tiny", "path": tiny_model(), "n_ctx": 256}
        return running(RealEngine(), models=[model], management=True, model_roots=roots)

    return start


@pytest.mark.parametrize("new", [True, False], ids=["a new model", "the model that serves"])
async def test_a_file_that_would_end_the_process_is_refused_and_the_model_serves_on(serving, damaged, new):
    async with serving() as server:
        before = await server.call(COMPLETIONS, completion(**PROMPT))
        assert before.status == 200
        path = damaged(llama__block_count=0)
        reply = await server.call(LOAD, {"id": "new" if new else "tiny", "path": str(path)})
        assert_error(reply, 400, "invalid_request_error", code="invalid_model", param="path")
        assert "llama.block_count is 0; allowed is 1 to 512" in reply.json["error"]["message"]
        assert [model["id"] for model in (await server.call("/v1/models")).json["data"]] == ["tiny"]
        assert (await server.call(COMPLETIONS, completion(**PROMPT))).text == before.text


async def test_a_truncated_file_is_refused_and_the_model_serves_on(serving, truncated):
    async with serving() as server:
        reply = await server.call(LOAD, {"id": "tiny", "path": str(truncated)})
        assert_error(reply, 400, "invalid_request_error", code="invalid_model", param="path")
        assert (await server.call(COMPLETIONS, completion(**PROMPT))).status == 200


@pytest.mark.parametrize(
    ("make", "said", "param"),
    [
        (lambda damaged: damaged(general__architecture="lama"), "unknown model architecture: 'lama'", "path"),
        (lambda damaged: damaged(tokenizer__ggml__model="own"), "unknown tokenizer", "path"),
        (lambda damaged: tiny_encoder(), 'task = "embed"', "task"),
        (lambda damaged: tiny_encoder_decoder(), "encoder", "path"),
        (lambda damaged: tiny_model(vocabulary=False), "no vocabulary", "path"),
    ],
    ids=["architecture", "tokenizer", "embeddings", "encoder", "vocabulary"],
)
async def test_what_only_the_load_can_tell_is_the_files_fault_as_well(serving, damaged, make, said, param):
    path = str(make(damaged))
    async with serving() as server:
        for name in ("tiny", "new"):  # one is tried out beside the live model, the other loaded for good
            reply = await server.call(LOAD, {"id": name, "path": path})
            assert_error(reply, 400, "invalid_request_error", code="invalid_model", param=param)
            assert said in reply.json["error"]["message"]
        assert (await server.call(COMPLETIONS, completion(model="tiny", **PROMPT))).status == 200
