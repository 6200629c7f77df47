"""How the next token is chosen: the parameters, not the arithmetic."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

_SEED_BITS = 32
_RESERVED_SEED = 0xFFFFFFFF  # llama.cpp reads this one as "take a random seed"


@dataclass(frozen=True, slots=True)
class Dry:
    """The DRY penalty ("don't repeat yourself"): tokens that would go on with a repetition become less likely.

    The penalty is ``multiplier * base ** (length - allowed_length)``, where length is that of the repetition.

    Attributes:
        multiplier: 0 is off.
        base: how fast the penalty grows.
        allowed_length: repetitions up to this many tokens are free.
        last_n: how many tokens it looks back, prompt included; -1 is all.
        breakers: strings at which a repetition ends.
    """

    multiplier: float = 0.0
    base: float = 1.75
    allowed_length: int = 2
    last_n: int = -1
    breakers: tuple[str, ...] = ("\n", ":", '"', "*")


@dataclass(frozen=True, slots=True)
class Mirostat:
    """Mirostat sampling: keeps the surprise of the answer at a level. It takes the place of all truncation.

    Attributes:
        version: 1 or 2; 0 is off.
        tau: the surprise, in bits.
        eta: how fast it is corrected.
    """

    version: int = 0
    tau: float = 5.0
    eta: float = 0.1


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampler chain of one sequence.

    Attributes:
        temperature: 0 is greedy: always the most likely token, only penalties and biases have an effect.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probabilities sum to at least p (nucleus sampling).
        min_p: drop tokens less likely than this fraction of the most likely one.
        typical_p: keep the tokens whose surprise is nearest to what is expected, up to this probability (locally
            typical sampling); 1 is off.
        top_n_sigma: keep the tokens within so many standard deviations of the largest logit; 0 is off.
        xtc_probability: how often all but the least likely of the tokens above ``xtc_threshold`` are dropped ("exclude
            top choices"); 0 is off.
        xtc_threshold: see above; more than 0.5 is off.
        dynatemp_range: the temperature varies by this with the entropy of the choice; 0 is off.
        dynatemp_exponent: how entropy becomes temperature.
        mirostat: see ``Mirostat``.
        dry: see ``Dry``.
        logit_bias: token ids, and what is added to their logits.
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
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: Mirostat = field(default_factory=Mirostat)
    dry: Dry = field(default_factory=Dry)
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether the answer is a function of the prompt alone."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether any penalty or bias changes the logits."""
        penalties = self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return penalties or self.dry.multiplier > 0 or bool(self.logit_bias)


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
