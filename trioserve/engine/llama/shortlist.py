"""The likeliest tokens of a vocabulary, for choices that can't fall on any others."""

from __future__ import annotations

import ctypes
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
        So many at most; None where it is not known: something looks at all tokens, or takes some of them up.
    """
    most = 1 if sampling.greedy else sampling.top_k
    looks_at_all = sampling.mirostat.version or sampling.top_n_sigma or sampling.dry.multiplier
    takes_up = sampling.repeat_penalty < 1 or sampling.frequency_penalty < 0 or sampling.presence_penalty < 0
    if not most or looks_at_all or takes_up or any(bias != -np.inf for _, bias in sampling.logit_bias):
        return None
    if sampling.repeat_penalty > 1:
        most += min(sampling.repeat_last_n, prompt + answer)
    if sampling.frequency_penalty or sampling.presence_penalty:
        most += answer
    return most


def is_short(count: int, n_vocab: int) -> bool:
    """Whether a list of so many tokens is worth being made, out of a vocabulary of that size."""
    return n_vocab // _BLOCK >= _SPARE * count


def shortlist(logits: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp] | None:
    """The likeliest tokens, and few others.

    At least k logits are no less than the k-th largest of the blocks' maxima: the k likeliest are among those. So are
    all that are as likely as the last one of the k.

    Arguments:
        logits: ``[n_vocab]``.
        count: how many of the likeliest tokens there have to be.

    Returns:
        Token ids in rising order; None where it isn't worth the while, or where too many logits are no numbers.
    """
    if not is_short(count, len(logits)):
        return None
    blocks = len(logits) // _BLOCK
    maxima = logits[: blocks * _BLOCK].reshape(_BLOCK, blocks).max(axis=0)  # so that neighbours are compared at once
    maxima.partition(blocks - count)
    (tokens,) = (logits >= maxima[blocks - count]).nonzero()
    return tokens if len(tokens) >= count else None


def draw(chain: Any, logits: npt.NDArray[np.float32], tokens: npt.NDArray[np.intp]) -> int:
    """Have a sampler chain choose one of some tokens, and take note of it.

    Arguments:
        chain: a ``llama_sampler`` pointer.
        logits: ``[n_vocab]``.
        tokens: ids of those that it may choose; one at least.
    """
    candidates = np.empty(len(tokens), _CANDIDATE)
    candidates["id"] = tokens
    candidates["logit"] = logits[tokens]
    # From a number: a pointer that is cast from another one is garbage in a circle, which waits for the collector.
    data = ctypes.cast(candidates.ctypes.data, llama_cpp.llama_token_data_p)
    array = llama_cpp.llama_token_data_array(data=data, size=len(tokens), selected=-1, sorted=False)
    llama_cpp.llama_sampler_apply(chain, array)
    token = int(array.data[array.selected].id)  # a sampler may have moved ``data``, within the candidates
    llama_cpp.llama_sampler_accept(chain, token)
    return token
