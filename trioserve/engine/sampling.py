"""How the next token is chosen: the parameters, not the arithmetic."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

_SEED_BITS = 32
_RESERVED_SEED = 0xFFFFFFFF  # llama.cpp reads this one as "take a random seed"


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampler chain of one sequence.

    Attributes:
        temperature: 0 is greedy: always the most likely token, the other fields but the penalties are without effect.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probabilities sum to at least p (nucleus sampling).
        min_p: drop tokens less likely than this fraction of the most likely one.
        repeat_penalty: divide the logits of tokens among the last ``repeat_last_n``, prompt included; 1 is off.
        repeat_last_n: how many tokens ``repeat_penalty`` looks back.
        frequency_penalty: subtract this times the count of a token in the answer so far.
        presence_penalty: subtract this once for a token that is in the answer already.
        seed: of the random number generator, 0 to 2**32 - 2.
    """

    temperature: float = 1.0
    top_k: int = 40
    top_p: float = 1.0
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the answer is a function of the prompt alone."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether any penalty changes the logits."""
        return self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


def fold_seed(seed: int | None) -> int:
    """Map a client's seed to the engine's range.

    Arguments:
        seed: any integer; None draws a fresh one.

    Returns:
        An integer from 0 to 2**32 - 2. Equal seeds stay equal.
    """
    if seed is None:
        return secrets.randbelow(_RESERVED_SEED)
    folded = seed % (1 << _SEED_BITS)
    return _RESERVED_SEED - 1 if folded == _RESERVED_SEED else folded
