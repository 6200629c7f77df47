"""Random LoRA adapters for the models of ``tiny_models``, written on first use."""

from __future__ import annotations

import functools
import itertools

from tiny_models import _directory, _finish

from trioserve.engine.gguf import read_header

import gguf  # isort: skip - brings numpy in, which has to come after llama_cpp
import numpy as np  # isort: skip

ATTENTION = ("attn_q.weight",)

_serial = itertools.count()


@functools.cache
def tiny_adapter(base, targets=ATTENTION, rank=4, seed=1, strength=1.0, alpha=None, kind="f32", architecture=None):
    """Write an adapter once for its arguments and return its path.

    Arguments:
        base: path of the model that it is for.
        targets: the tensors of the model that it changes: those whose names end so.
        rank: of its matrices.
        seed: of their numbers.
        strength: by which the numbers of B are multiplied; with 0 the adapter changes nothing.
        alpha: as the header says it; None leaves it out.
        kind: element type.
        architecture: as the header names it; that of the model where it is left out.
    """
    header = read_header(base)
    path = _directory() / f"adapter-{next(_serial)}.gguf"
    writer = gguf.GGUFWriter(path, architecture or header.architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    rng = np.random.default_rng(seed)
    for tensor in header.tensors:
        if tensor.name.endswith(targets):
            for half, values in _halves(rng, tensor, rank, strength):
                _add(writer, f"{tensor.name}.{half}", values, kind)
    return _finish(writer, path)


def _halves(rng, tensor, rank, strength):
    """The two matrices for a tensor; those for input embeddings are the other way round."""
    columns, rows, *rest = tensor.shape  # of GGUF, the fastest first
    a = rng.normal(0, columns**-0.5, (*rest, rank, columns))
    b = rng.normal(0, strength * rank**-0.5, (*rest, rows, rank))
    if tensor.name.endswith("token_embd.weight"):
        a, b = rng.normal(0, 1, (rows, rank)), rng.normal(0, strength * rank**-0.5, (columns, rank))
    return ("lora_a", a), ("lora_b", b)


def _add(writer, name, values, kind):
    quantised = gguf.GGMLQuantizationType[kind.upper()]
    if quantised is gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values.astype(np.float32))
    else:
        writer.add_tensor(name, gguf.quantize(values.astype(np.float32), quantised), raw_dtype=quantised)
