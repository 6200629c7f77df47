"""What sessions a configuration asks for."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from trioserve.config import ModelConfig
from trioserve.engine.base import Adapter
from trioserve.runtime.arrangement import DEFAULT_N_CTX, LARGE, arrange


def model(*, n_ctx_train=4096, offloads=False, size=1000, rows_alike=True):
    return SimpleNamespace(n_ctx_train=n_ctx_train, offloads=offloads, size=size, rows_alike=rows_alike)


def options(n_ctx_train=4096, **settings):
    return arrange(ModelConfig(path="m.gguf", **settings), model(n_ctx_train=n_ctx_train)).options


def test_the_default_context_stays_within_what_the_model_was_trained_for():
    assert options(2048).n_ctx == 2048
    assert options(131072).n_ctx == DEFAULT_N_CTX
    assert options(0).n_ctx == DEFAULT_N_CTX
    assert options(2048, n_ctx=8192).n_ctx == 8192


@pytest.mark.parametrize(("setting", "option"), [("auto", None), ("on", True), ("off", False)])
def test_flash_attention_is_handed_on(setting, option):
    assert options(flash_attention=setting).flash_attention is option


@pytest.mark.parametrize(
    ("settings", "offloads", "fused"),
    [
        ({}, False, False),
        ({"gpu_layers": -1}, False, False),  # there is no GPU that they could go to
        ({"gpu_layers": -1}, True, True),
        ({"gpu_layers": 3}, True, True),
        ({"gpu_layers": 0}, True, False),
        ({"execution": "fused"}, False, True),
        ({"execution": "isolated", "gpu_layers": -1}, True, False),
        ({"execution": "fused", "slots": 1}, True, False),
        ({"execution": "fused", "task": "embed"}, True, False),
    ],
    ids=str,
)
def test_slots_share_a_context_where_that_is_asked_for_or_layers_are_offloaded(settings, offloads, fused):
    config = ModelConfig(path="m.gguf", **{"slots": 4} | settings)
    found = arrange(config, model(offloads=offloads))
    assert found.fused is fused
    assert found.sessions == (1 if fused else config.slots)


@pytest.mark.parametrize(
    ("settings", "file", "fused"),
    [
        ({}, {"size": LARGE}, True),
        ({}, {"size": LARGE - 1}, False),
        ({}, {"size": LARGE, "rows_alike": False}, False),
        ({"execution": "isolated"}, {"size": LARGE}, False),
        ({"slots": 1}, {"size": LARGE}, False),
        ({"task": "embed"}, {"size": LARGE}, False),
        ({"flash_attention": "on"}, {"size": LARGE}, False),
        ({"flash_attention": "off", "kv_dtype": "f32"}, {"size": LARGE}, True),
        ({"kv_dtype": "q8_0"}, {"size": LARGE}, False),
        ({"lora": [{"path": "a.gguf"}]}, {"size": LARGE}, False),
    ],
    ids=str,
)
def test_slots_of_a_large_model_share_a_context_on_the_cpu_where_that_changes_no_answer(settings, file, fused):
    assert arrange(ModelConfig(path="m.gguf", **{"slots": 4} | settings), model(**file)).fused is fused


def test_a_shared_context_has_a_sequence_for_each_slot_and_a_private_one_has_one():
    found = arrange(ModelConfig(path="m.gguf", slots=4, n_ctx=512, execution="fused", prefill_chunk=16), model())
    assert (found.options.max_sequences, found.options.n_ctx, found.options.prefill_chunk) == (4, 512, 16)
    assert (found.private.max_sequences, found.private.n_ctx) == (1, 512)


@pytest.mark.parametrize("execution", ["isolated", "fused"])
def test_every_session_has_the_adapters_of_the_model(execution):
    config = ModelConfig(path="m.gguf", slots=4, execution=execution, lora=["a.gguf", "b.gguf:0.5"])
    found = arrange(config, model())
    assert found.options.adapters == found.private.adapters == (Adapter(Path("a.gguf")), Adapter(Path("b.gguf"), 0.5))


def test_sessions_know_how_many_threads_a_step_of_theirs_has_at_most(monkeypatch):
    monkeypatch.setattr("trioserve.runtime.cores.available_cores", lambda: 8)
    assert [options(threads=threads).threads for threads in (0, 3, 99)] == [8, 3, 8]


def test_inputs_of_a_request_for_vectors_share_a_context():
    assert options(task="embed", batch_capacity=5).max_sequences == 5
