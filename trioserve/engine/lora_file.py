"""Whether llama.cpp can use LoRA adapters with a model, and survives them.

An adapter is a GGUF file with two small matrices for some of a model's: to what comes out of such a matrix it adds what
comes out of the two, times a scale. llama.cpp refuses most of what doesn't fit by itself, but not all: a key of another
type, matrices that don't go together, or experts that are too few end the process, at the load or at the first token.
So all of it is checked here first. Each message names the key or the tensor and what it would have to be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from trioserve.engine.gguf import Header, HeaderError, Tensor, read_header

_HALVES = ("lora_a", "lora_b")
_SKIPPED = "_norm.weight"  # llama.cpp leaves vectors for norms out
_TYPES = {0: "F32", 1: "F16", 30: "BF16", 8: "Q8_0"}  # what adapters are written in, and every backend multiplies with
_NVFP4 = 40  # llama.cpp asserts that no adapter changes a matrix of this type
_EMBEDDINGS = "token_embd.weight"
_OUTPUT = "output.weight"
_DIMENSIONS = 4
# Families for whose graphs llama.cpp sets aside no room for adapters: more pairs than the model has tensors might not
# fit, and what doesn't fit ends the process.
_BOUNDED = {
    "bailingmoe3", "deepseek4", "dflash", "glm5-next", "hrm_text", "hy_v4", "kimi-k3", "kimi-linear", "minimax-01",
    "minimax-m3", "nanbeige", "qwen35", "qwen35moe", "qwen3next", "qwen4exp",
}  # fmt: skip


def inspect_adapters(paths: Sequence[Path], base: Header) -> Mapping[Path, Header]:
    """Read the headers of adapter files and check that they fit a model, each by itself and all together.

    Arguments:
        paths: of the files.
        base: of the model, with the tensors of all its files.

    Raises:
        HeaderError: one of them can't be read, or can't be used with this model. ``str()`` names it.
    """
    headers, seen, pairs = {}, set(), 0
    for path in paths:
        try:
            if (real := path.resolve()) in seen:
                raise HeaderError("it is given twice")
            seen.add(real)
            headers[path] = header = read_header(path)
            _check_kind(header, base)
            pairs += _check_pairs(header, base)
            if base.architecture in _BOUNDED and pairs > len(base.tensors):
                raise HeaderError(
                    f"{len(base.tensors)} tensors of a {base.architecture} model can be changed, not {pairs}"
                )
        except (OSError, RuntimeError, HeaderError) as error:
            raise HeaderError(f"adapter file {str(path)[:300]!r} can't be used: {error}") from None
    return headers


def _check_kind(header: Header, base: Header) -> None:
    """See that it is an adapter, of the only kind there is, for models of this family."""
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (found := header.metadata.get(key)) != wanted:
            raise HeaderError(f"its {key} is {found!r}, and has to be {wanted!r}")
    if header.architecture != base.architecture:
        raise HeaderError(f"it is for {header.architecture} models, and this is a {base.architecture} model")
    if "adapter.alora.invocation_tokens" in header.metadata:
        raise HeaderError("it is to work after certain tokens only (adapter.alora.invocation_tokens): not supported")
    alpha = header.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float) or not math.isfinite(alpha):
        raise HeaderError(f"its adapter.lora.alpha is {alpha!r}, and has to be a finite number")


def _check_pairs(header: Header, base: Header) -> int:
    """See that every tensor is one of a pair, and each pair goes with its matrix. Returns how many pairs there are."""
    matrices = {tensor.name: tensor for tensor in base.tensors}
    pairs: dict[str, dict[str, Tensor]] = {}
    for tensor in header.tensors:
        name, _, half = tensor.name.rpartition(".")
        if half in _HALVES and not any(f".{half}" in name for half in _HALVES):
            pairs.setdefault(name, {})[half] = tensor
        elif half in _HALVES or not tensor.name.endswith(_SKIPPED):
            raise HeaderError(f"its tensor {tensor.name!r} is named neither NAME.lora_a nor NAME.lora_b")
    if not pairs:
        raise HeaderError("it changes no tensor")
    for name, halves in pairs.items():
        if len(halves) < len(_HALVES):
            lacking = next(half for half in _HALVES if half not in halves)
            raise HeaderError(f"it has no tensor '{name}.{lacking}' beside '{name}.{next(iter(halves))}'")
        if name not in matrices:
            raise HeaderError(f"it changes the tensor {name!r}, which the model doesn't have")
        _check_pair(matrices[name], halves["lora_a"], halves["lora_b"])
    if _EMBEDDINGS in pairs and _OUTPUT not in matrices:
        # Its matrices would be multiplied the wrong way round at the model's other end.
        raise HeaderError(f"it changes {_EMBEDDINGS!r}, which in this model is the output's too: not supported")
    return len(pairs)


def _check_pair(matrix: Tensor, a: Tensor, b: Tensor) -> None:
    for tensor in (a, b):
        if tensor.type not in _TYPES:
            raise HeaderError(f"its tensor {tensor.name!r} is of type {tensor.type}; usable are {_named(_TYPES)}")
    if matrix.type == _NVFP4:
        raise HeaderError(f"it changes the tensor {matrix.name!r}, whose type NVFP4 allows no adapters")
    columns, rows, *rest = _sizes(matrix)
    if matrix.name.endswith(_EMBEDDINGS):  # here A has a row for each token, and B is as ever
        rank = _sizes(a)[0]
        wanted = [rank, rows, *rest], [rank, columns, *rest]
    else:
        rank = _sizes(a)[1]
        wanted = [columns, rank, *rest], [rank, rows, *rest]
    for tensor, sizes in zip((a, b), wanted, strict=True):
        if _sizes(tensor) != sizes:
            raise HeaderError(
                f"its tensor {tensor.name!r} has the shape {_shape(tensor)}, and {sizes} would fit the model"
            )
    if not 0 < rank <= max(columns, rows):
        raise HeaderError(f"the rank of its tensor {a.name!r} is {rank}; 1 to {max(columns, rows)} make sense")


def _sizes(tensor: Tensor) -> list[int]:
    return [*tensor.shape, *[1] * (_DIMENSIONS - len(tensor.shape))]


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def _named(types: Mapping[int, str]) -> str:
    return ", ".join(f"{name} ({number})" for number, name in types.items())
