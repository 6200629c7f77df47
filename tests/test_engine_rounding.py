"""Which weights round alike, however many tokens are evaluated together."""

from types import SimpleNamespace

import pytest
from tiny_models import loaded, smollm2, tiny_model

from trioserve.engine.gguf import Tensor
from trioserve.engine.llama import LlamaEngine, library
from trioserve.engine.rounding import GRAIN, grain, rows_alike

F32, F16, Q4_0, Q8_0, Q4_K, Q6_K = 0, 1, 2, 8, 12, 14
NORM = Tensor("blk.0.attn_norm.weight", (256,), F32, 0)


def matrix(kind, name="blk.0.attn_q.weight", rows=256):
    return Tensor(name, (256, rows), kind, 0)


@pytest.fixture
def on(monkeypatch):
    """Say which machine this is."""
    return lambda machine: monkeypatch.setattr("platform.machine", lambda: machine)


@pytest.mark.parametrize(
    ("machine", "tensors", "expected"),
    [
        ("x86_64", [matrix(Q4_0), NORM], 1),
        ("AMD64", [matrix(F16)], 1),
        ("x86_64", [matrix(Q4_0), matrix(Q6_K, "output.weight"), matrix(Q6_K, "token_embd.weight")], 1),
        ("x86_64", [matrix(Q4_0), matrix(Q4_K)], GRAIN),
        ("aarch64", [matrix(Q4_0)], GRAIN),
        ("x86_64", [], GRAIN),
    ],
)
def test_prompts_are_cut_anywhere_only_where_that_is_known_to_change_nothing(on, machine, tensors, expected):
    on(machine)
    assert grain(tensors) == expected


@pytest.mark.parametrize(
    ("machine", "tensors", "without", "with_amx"),
    [
        ("x86_64", [matrix(Q4_0), matrix(Q8_0, "output.weight"), NORM], True, True),
        ("x86_64", [matrix(Q4_0), matrix(Q6_K, "output.weight")], False, True),
        ("x86_64", [matrix(Q4_K, rows=257)], False, False),
        ("x86_64", [matrix(Q8_0), matrix(F32, "blk.0.ffn_gate_inp.weight")], False, False),
        ("x86_64", [matrix(F16)], False, False),
        ("x86_64", [Tensor("blk.0.ffn_up_exps.weight", (256, 256, 8), Q8_0, 0)], False, False),
        ("arm64", [matrix(Q8_0)], False, False),
        ("x86_64", [], False, False),
    ],
)
def test_rows_are_alike_only_where_that_is_known(on, machine, tensors, without, with_amx):
    on(machine)
    assert rows_alike(tensors, amx=False) is without
    assert rows_alike(tensors, amx=True) is with_amx


@pytest.mark.parametrize("path", [smollm2, tiny_model, lambda: tiny_model(quantised=True)], ids=["Q4_1", "F32", "Q8_0"])
def test_a_file_and_its_weights_say_the_same(path):
    file = LlamaEngine().inspect(path())
    with loaded(path()) as weights:
        assert file.rows_alike is weights.rows_alike


@pytest.mark.parametrize(
    ("info", "system", "gpu", "refused", "expected"),
    [
        (b"AMX_INT8 = 1 | ", "linux", False, 0, True),
        (b"AVX512 = 1 | ", "linux", False, 0, False),
        (b"AMX_INT8 = 1 | ", "win32", False, 0, False),
        (b"AMX_INT8 = 1 | ", "linux", True, 0, False),
        (b"AMX_INT8 = 1 | ", "linux", False, -1, False),
    ],
)
def test_amx_is_counted_on_only_where_it_is_used(monkeypatch, info, system, gpu, refused, expected):
    monkeypatch.setattr(library.llama_cpp, "llama_print_system_info", lambda: info)
    monkeypatch.setattr(library.llama_cpp, "llama_supports_gpu_offload", lambda: gpu)
    monkeypatch.setattr(library.sys, "platform", system)
    monkeypatch.setattr(library.ctypes, "CDLL", lambda _: SimpleNamespace(syscall=lambda *_: refused))
    assert library.has_amx.__wrapped__() is expected
