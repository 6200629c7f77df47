"""How long the threads of a step wait for each other before they let go of their cores."""

from __future__ import annotations

from collections.abc import MutableMapping

SPIN_COUNT = 1000
"""Turns of libgomp's waiting loop.

The threads meet after every operation, a thousand times for each token. Left alone, libgomp lets those that wait turn
300,000 times: where another program has taken the core of one thread, the others burn theirs all that while. One such
program made two threads on two cores 260 times slower (a model of 135M weights, 78 tokens/s without it, 0.3 with it).
1000 is what libgomp itself takes where there are more threads than cores. It leaves 27 tokens/s beside that program,
and without it took nothing that could be told from noise. With 100, or ``OMP_WAIT_POLICY=passive``, it was 40; but
those lost a fifth where nothing else ran, half on four cores and two thirds on eight. 10,000 left 6.
"""

_OPERATORS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def bound_spinning(environment: MutableMapping[str, str]) -> None:
    """Bound the waiting, unless the operator has decided about it.

    libgomp reads the environment once, when it is loaded.

    Arguments:
        environment: of the process.
    """
    if not any(name in environment for name in _OPERATORS):
        environment["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
