"""llama.cpp's sampler chain for one sequence."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from trioserve.engine.base import ConstraintError, Likelihood, TokenLogprob
from trioserve.engine.llama.constraint import Matcher
from trioserve.engine.llama.context import Context
from trioserve.engine.llama.shortlist import draw, is_short, reach, shortlist
from trioserve.engine.llama.triggered import Triggered
from trioserve.engine.llama.vocabulary import Vocabulary
from trioserve.engine.sampling import Dry, Sampling

_MIROSTAT_CANDIDATES = 100  # tokens that Mirostat 1 estimates the distribution from, as in its paper
_KEEP = 1  # truncating samplers always leave at least one candidate
# Logits divided by less would leave the range of a float32, even twice: infinities, whose difference is no number.
_LEAST_PROBABILITY = 1e-12
_LEAST_DIVISOR = 1e-15


class Sampler:
    """Choose tokens for one sequence. Holds the state of its random number generator and penalties.

    Arguments:
        vocabulary: of the model.
        sampling: the parameters.
        prompt: token ids of the prompt, which ``repeat_penalty`` looks back on.
        n_ctx: tokens of context, the reach of the frequency and presence penalties.
        banned: token ids that may never be chosen.
        logprobs: how many of the most likely tokens to report with each choice; None reports nothing.
        matcher: of the grammar that the answer follows, if any.

    Attributes:
        banned: token ids that may never be chosen; None for none.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        sampling: Sampling,
        prompt: Sequence[int],
        n_ctx: int,
        banned: Sequence[int] = (),
        logprobs: int | None = None,
        matcher: Matcher | Triggered | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        # Some of llama.cpp's samplers would choose a token of no probability before they choose none.
        never = [*banned, *(token for token, bias in sampling.logit_bias if bias == -np.inf)]
        self.banned = np.asarray(never, np.intp) if never else None
        # Looking for what is left takes longer than most of the chain.
        self._may_leave_none = matcher is not None or len(never) >= vocabulary.size
        self._logprobs = logprobs
        # Without what is in ``never``, which may be thousands, to be looked through for each token.
        finite = tuple((token, bias) for token, bias in sampling.logit_bias if bias != -np.inf)
        self._sampling = dataclasses.replace(sampling, logit_bias=finite)
        self._prompt, self._answer = len(prompt), 0  # tokens
        # Without penalties the greedy choice is an argmax, which numpy does in a tenth of the chain's time.
        self._chain = (
            None if sampling.greedy and not sampling.penalised else _chain(vocabulary, sampling, prompt, n_ctx)
        )

    @property
    def complete(self) -> bool:
        """Whether the grammar lets nothing but the end follow."""
        return self._matcher is not None and self._matcher.complete

    @property
    def plain(self) -> bool:
        """Whether it chooses the likeliest token that isn't banned, and nothing is told about it."""
        return self._chain is None and self._matcher is None and self._logprobs is None

    @property
    def quick(self) -> bool:
        """Whether the next choice looks at few tokens and tells nothing of them: it isn't worth waking a thread."""
        if self._logprobs is not None:
            return False
        most = self._reach
        return self._chain is None or (most is not None and is_short(most, self._vocabulary.size))

    @property
    def _reach(self) -> int | None:
        """How many of the likeliest tokens the next choice can fall on; None where that may be all."""
        return reach(self._sampling, self._prompt, self._answer)

    def choose(self, context: Context, row: int) -> tuple[int, Likelihood | None]:
        """Choose the token that follows a row of the last batch, and take note of it.

        Returns:
            The token, and how likely the model held it and others, where that was asked for.

        Raises:
            ConstraintError: the grammar has become too complex, or no token is left to choose.
        """
        if self._logprobs is None:
            return self._choose(context, row), None
        # Before a ban changes the logits: what is told is what the model said.
        before = context.logits(row).copy()
        token = self._choose(context, row)
        return token, self._likelihood(before, token, self._logprobs)

    def _choose(self, context: Context, row: int) -> int:
        logits = context.logits(row)
        if self.banned is not None:
            logits[self.banned] = -np.inf
        if self._matcher is not None:
            self._matcher.restrict(logits)
        if self._may_leave_none and logits.max() == -np.inf:
            raise ConstraintError("no token is left that its form and logit_bias allow")
        token = int(logits.argmax()) if self._chain is None else self._draw(context, row, logits)
        if self._matcher is not None:
            self._matcher.accept(token)
        self._answer += 1
        return token

    def _draw(self, context: Context, row: int, logits: npt.NDArray[np.float32]) -> int:
        """Have the chain choose, among few tokens where that is the same: it takes long to go through them all.

        The same but for tokens with equal logits: which of them stands where in the chain's order depends on all that
        it gets. Either way that follows from the request and the logits alone.
        """
        most = self._reach
        tokens = None if most is None else shortlist(logits, most)
        if tokens is None:
            return int(llama_cpp.llama_sampler_sample(self._chain, context.pointer, row))
        return draw(self._chain, logits, tokens)

    def _likelihood(self, logits: npt.NDArray[np.float32], token: int, top: int) -> Likelihood:
        most = logits.max()
        norm = float(np.log(np.exp(logits - most).sum(dtype=np.float64)))

        def said(one: int) -> TokenLogprob:
            return TokenLogprob(one, self._vocabulary.text_piece(one), float(logits[one]) - float(most) - norm)

        tokens = shortlist(logits, top) if top else np.empty(0, np.intp)
        if tokens is None:
            tokens = np.arange(len(logits))
        best = tokens[np.argsort(-logits[tokens], kind="stable")[:top]]
        return Likelihood(said(token), tuple(said(int(other)) for other in best))

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
    for part in _choice(vocabulary, sampling):
        llama_cpp.llama_sampler_chain_add(chain, part)
    return chain


def _penalties(vocabulary: Vocabulary, sampling: Sampling, prompt: Sequence[int], n_ctx: int) -> list[Any]:
    parts = []
    if finite := [(token, bias) for token, bias in sampling.logit_bias if bias != -math.inf]:
        biases = (llama_cpp.llama_logit_bias * len(finite))(*finite)
        parts.append(llama_cpp.llama_sampler_init_logit_bias(vocabulary.size, len(biases), biases))
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
    if sampling.dry.multiplier > 0:
        parts.append(_dry(vocabulary, sampling.dry, prompt, n_ctx))
    return parts


def _dry(vocabulary: Vocabulary, dry: Dry, prompt: Sequence[int], n_ctx: int) -> Any:
    last = n_ctx if dry.last_n < 0 else min(dry.last_n, n_ctx)
    breakers = (ctypes.c_char_p * len(dry.breakers))(*(breaker.encode() for breaker in dry.breakers))
    part = llama_cpp.llama_sampler_init_dry(
        vocabulary.pointer, dry.multiplier, dry.base, dry.allowed_length, last, breakers, len(breakers)
    )
    for token in prompt[-last:] if last else ():
        llama_cpp.llama_sampler_accept(part, token)
    return part


def _choice(vocabulary: Vocabulary, sampling: Sampling) -> list[Any]:
    if sampling.greedy:
        return [llama_cpp.llama_sampler_init_greedy()]
    if sampling.mirostat.version:
        return [_temperature(sampling), _mirostat(vocabulary, sampling)]
    return [*_truncation(sampling), _temperature(sampling), llama_cpp.llama_sampler_init_dist(sampling.seed)]


def _truncation(sampling: Sampling) -> list[Any]:
    """What leaves only some of the tokens, in llama.cpp's usual order."""
    parts = []
    if sampling.top_n_sigma > 0:
        parts.append(llama_cpp.llama_sampler_init_top_n_sigma(sampling.top_n_sigma))
    if sampling.top_k:
        parts.append(llama_cpp.llama_sampler_init_top_k(sampling.top_k))
    if sampling.typical_p < 1:
        parts.append(llama_cpp.llama_sampler_init_typical(sampling.typical_p, _KEEP))
    if sampling.top_p < 1:
        parts.append(llama_cpp.llama_sampler_init_top_p(sampling.top_p, _KEEP))
    if sampling.min_p > 0:
        parts.append(llama_cpp.llama_sampler_init_min_p(sampling.min_p, _KEEP))
    if sampling.xtc_probability > 0:
        parts.append(
            llama_cpp.llama_sampler_init_xtc(
                # Above nothing at all: tokens that may not come have a probability of zero, and would be left over.
                sampling.xtc_probability,
                max(sampling.xtc_threshold, _LEAST_PROBABILITY),
                _KEEP,
                sampling.seed,
            )
        )
    return parts


def _temperature(sampling: Sampling) -> Any:
    temperature = max(sampling.temperature, _LEAST_DIVISOR)
    if sampling.dynatemp_range > 0:
        return llama_cpp.llama_sampler_init_temp_ext(temperature, sampling.dynatemp_range, sampling.dynatemp_exponent)
    return llama_cpp.llama_sampler_init_temp(temperature)


def _mirostat(vocabulary: Vocabulary, sampling: Sampling) -> Any:
    mirostat = sampling.mirostat
    if mirostat.version == 1:
        return llama_cpp.llama_sampler_init_mirostat(
            vocabulary.size, sampling.seed, mirostat.tau, mirostat.eta, _MIROSTAT_CANDIDATES
        )
    return llama_cpp.llama_sampler_init_mirostat_v2(sampling.seed, mirostat.tau, mirostat.eta)
