"""For which weights a token comes out with the same bits whatever it is evaluated together with, on a CPU.

Which routines multiply depends on the processor, the kind of weights and how many tokens there are. What is listed here
was seen to make no difference: logits compared by their bits, with AVX2, AVX-512 and AMX, and Q8_0 also in a build for
CUDA that has no layer on the GPU.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence

from trioserve.engine.gguf import Tensor

GRAIN = 8
"""Tokens whose multiples prompts are cut at, where it is not known that any cut is as good; see ``prefix.cut``. By
routines of x86 for Q4_K, Q5_K, Q6_K and IQ4_NL, chunks of 2 to 7 tokens came out with other last bits than the same
tokens in larger ones, and cuts at other than multiples of 4 changed those of all that followed."""

_F32, _F16, _Q4_0, _Q4_1, _Q8_0, _Q4_K, _Q5_K, _Q6_K = 0, 1, 2, 3, 8, 12, 13, 14  # of ggml
_CUT_ANYWHERE = {_F32, _F16, _Q4_0, _Q4_1, _Q8_0}
_ROWS_ALIKE = {_Q4_0, _Q4_1, _Q8_0}
_WITH_AMX = {_Q4_K, _Q5_K, _Q6_K}
_TILES = 32  # that a matrix has to be a multiple of, or it is multiplied without AMX
_BESIDE_LAYERS = ("token_embd.", "output.")  # looked up, and computed for one token of a prompt


def grain(tensors: Sequence[Tensor]) -> int:
    """Tokens whose multiples prompts have to be cut at, so that no cut changes any bits.

    Arguments:
        tensors: of the model; none where they aren't known.
    """
    kinds = {tensor.type for tensor in tensors if not tensor.name.startswith(_BESIDE_LAYERS)}
    return 1 if _is_x86() and kinds and kinds <= _CUT_ANYWHERE else GRAIN


def rows_alike(tensors: Iterable[Tensor], *, amx: bool) -> bool:
    """Whether next tokens of several sequences come out of one step with the bits that they have alone.

    Arguments:
        tensors: of the model.
        amx: whether the engine computes with those instructions of the processor.
    """
    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]  # other tensors are used element by element
    return _is_x86() and bool(matrices) and all(_is_alike(matrix, amx=amx) for matrix in matrices)


def _is_alike(matrix: Tensor, *, amx: bool) -> bool:
    if len(matrix.shape) != 2:
        return False  # of experts, each of which sees some of the tokens
    return matrix.type in _ROWS_ALIKE or (amx and matrix.type in _WITH_AMX and matrix.shape[1] % _TILES == 0)


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")
