"""The likeliest tokens of a vocabulary, for choices that can't fall on any others."""

from __future__ import annotations

from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from trioserve.engine.sampling import Sampling

_BLOCK = 64  # logits; of 16 to 128 this was the fastest, for vocabularies of 49 and of 128 thousand tokens
_SPARE = 4  # blocks for each token that is looked for; with fewer the bound is too low to be worth having
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # a llama_token_data


def reach(sampling: Sampling, prompt: int, answer: int) -> int | None:
    """How many of the likeliest tokens the next choice can fall on, before penalties.

    Penalties take tokens of the past further down, and as many others come up in their places.

    Arguments:
        sampling: the parameters.
        prompt: tokens of it.
        answer: tokens that were chosen so far.

    Returns:
        None where it is not known: something looks at all tokens, or takes some of them up.
    """
    most = 1 if sampling.greedy else sampling.top_k
    looks_at_all = sampling.mirostat.version or sampling.top_n_sigma or sampling.dry.multiplier
    takes_up = sampling.repeat_penalty < 1 or sampling.frequency_penalty < 0 or sampling.presence_penalty < 0
    if not most or looks_at_all or takes_up or any(bias > -np.inf for _, bias in sampling.logit_bias):
        return None
    if sampling.repeat_penalty > 1:
        most += min(sampling.repeat_last_n, prompt + answer)
    if sampling.frequency_penalty or sampling.presence_penalty:
        most += answer
    return most


def shortlist(logits: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp] | None:
    """The likeliest tokens, and few others.

    As many of the maxima of blocks as are looked for are no less than the one that comes last among them, and so are as
    many logits.

    Arguments:
        logits: ``[n_vocab]``.
        count: how many of the likeliest tokens there have to be.

    Returns:
        Token ids in rising order; None where it isn't worth the while, or where logits are no numbers.
    """
    blocks = len(logits) // _BLOCK
    if blocks < _SPARE * count:
        return None
    maxima = logits[: blocks * _BLOCK].reshape(_BLOCK, blocks).max(axis=0)  # so that neighbours are compared at once
    maxima.partition(blocks - count)
    (tokens,) = (logits >= maxima[blocks - count]).nonzero()
    return tokens if len(tokens) >= count else None


def draw(chain: Any, logits: npt.NDArray[np.float32], tokens: npt.NDArray[np.intp]) -> int:
    """Have a sampler chain choose one of some tokens, and take note of it.

    Arguments:
        chain: a ``llama_sampler`` pointer.
        logits: ``[n_vocab]``.
        tokens: token ids.
    """
    candidates = np.empty(len(tokens), _CANDIDATE)
    candidates["id"] = tokens
    candidates["logit"] = logits[tokens]
    data = candidates.ctypes.data_as(llama_cpp.llama_token_data_p)
    array = llama_cpp.llama_token_data_array(data=data, size=len(tokens), selected=-1, sorted=False)
    llama_cpp.llama_sampler_apply(chain, array)
    token = int(array.data[array.selected].id)
    llama_cpp.llama_sampler_accept(chain, token)
    return token
