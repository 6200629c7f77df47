"""llama.cpp's sampler chain for one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

from trioserve.engine.llama.context import Context
from trioserve.engine.llama.vocabulary import Vocabulary
from trioserve.engine.sampling import Sampling

_KEEP = 1  # truncating samplers always leave at least one candidate
# Logits divided by less would leave the range of a float32, even twice: infinities, whose difference is no number.
_LEAST_DIVISOR = 1e-15


class Sampler:
    """Choose tokens for one sequence. Holds the state of its random number generator and penalties.

    Arguments:
        vocabulary: of the model.
        sampling: the parameters.
        prompt: token ids of the prompt, which ``repeat_penalty`` looks back on.
        n_ctx: tokens of context, the reach of the frequency and presence penalties.
        banned: token ids that may never be chosen.
    """

    def __init__(
        self, vocabulary: Vocabulary, sampling: Sampling, prompt: Sequence[int], n_ctx: int, banned: Sequence[int] = ()
    ) -> None:
        self._banned = np.asarray(banned, np.intp) if banned else None
        # Without penalties the greedy choice is an argmax, which numpy does in a tenth of the chain's time.
        self._chain = (
            None if sampling.greedy and not sampling.penalised else _chain(vocabulary, sampling, prompt, n_ctx)
        )

    def choose(self, context: Context, row: int) -> int:
        """Choose the token that follows a row of the last batch, and take note of it."""
        if self._chain is not None and self._banned is None:
            return int(llama_cpp.llama_sampler_sample(self._chain, context.pointer, row))
        logits = context.logits(row)
        if self._banned is not None:
            logits[self._banned] = -np.inf
        if self._chain is None:
            return int(logits.argmax())
        return int(llama_cpp.llama_sampler_sample(self._chain, context.pointer, row))

    def close(self) -> None:
        """Free the chain. Idempotent."""
        if self._chain is not None:
            chain, self._chain = self._chain, None
            llama_cpp.llama_sampler_free(chain)


def _chain(vocabulary: Vocabulary, sampling: Sampling, prompt: Sequence[int], n_ctx: int) -> Any:
    """Build the chain: penalties, truncation, temperature, choice. The chain owns its parts."""
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for part in _penalties(vocabulary, sampling, prompt, n_ctx):
        llama_cpp.llama_sampler_chain_add(chain, part)
    for part in _choice(sampling):
        llama_cpp.llama_sampler_chain_add(chain, part)
    return chain


def _penalties(vocabulary: Vocabulary, sampling: Sampling, prompt: Sequence[int], n_ctx: int) -> list[Any]:
    parts = []
    if sampling.repeat_penalty != 1 and sampling.repeat_last_n:
        last = min(sampling.repeat_last_n, n_ctx)
        divisor = max(sampling.repeat_penalty, _LEAST_DIVISOR)
        repeat = llama_cpp.llama_sampler_init_penalties(vocabulary.size, last, divisor, 0.0, 0.0)
        for token in prompt[-last:]:
            llama_cpp.llama_sampler_accept(repeat, token)
        parts.append(repeat)
    if sampling.frequency_penalty or sampling.presence_penalty:
        # A part of its own: OpenAI counts these two over the answer alone.
        parts.append(
            llama_cpp.llama_sampler_init_penalties(
                vocabulary.size, n_ctx, 1.0, sampling.frequency_penalty, sampling.presence_penalty
            )
        )
    return parts


def _choice(sampling: Sampling) -> list[Any]:
    if sampling.greedy:
        return [llama_cpp.llama_sampler_init_greedy()]
    parts = []
    if sampling.top_k:
        parts.append(llama_cpp.llama_sampler_init_top_k(sampling.top_k))
    if sampling.top_p < 1:
        parts.append(llama_cpp.llama_sampler_init_top_p(sampling.top_p, _KEEP))
    if sampling.min_p > 0:
        parts.append(llama_cpp.llama_sampler_init_min_p(sampling.min_p, _KEEP))
    parts.append(llama_cpp.llama_sampler_init_temp(max(sampling.temperature, _LEAST_DIVISOR)))
    parts.append(llama_cpp.llama_sampler_init_dist(sampling.seed))
    return parts
