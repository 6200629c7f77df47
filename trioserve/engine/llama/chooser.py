"""Choosing the next tokens of all rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from trioserve.engine.base import Likelihood
from trioserve.engine.llama.context import Context
from trioserve.engine.llama.sampler import Sampler

_MOST_THREADS = 8  # 16 rows of a vocabulary of 128 thousand took as long with more


class Row(NamedTuple):
    """A row of the last batch.

    Attributes:
        sampler: of the sequence that it belongs to.
        number: of the row in the batch.
        output: which of the rows that have logits it is.
    """

    sampler: Sampler
    number: int
    output: int


Choice = tuple[int, Likelihood | None] | Exception
"""A token, and how likely it was where that was asked for; or why there is none."""


class Chooser:
    """Chooses tokens for rows side by side: the plain ones at one stroke, of the others the slow ones in threads.

    What is chosen for a row depends on its own sampler alone, and not on the way that it went.

    Arguments:
        context: whose rows they are.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pool: ThreadPoolExecutor | None = None

    def choose(self, rows: Sequence[Row], outputs: int, threads: int) -> list[Choice]:
        """Choose a token for each row.

        Arguments:
            rows: of the last batch, in rising order.
            outputs: how many rows of it have logits, with those that nobody asks for any more.
            threads: CPU threads to use.
        """
        if len(rows) == 1:
            return [self._choose(rows[0])]
        choices: dict[Row, Choice] = {}
        if plain := [row for row in rows if row.sampler.plain]:
            choices.update(self._choose_together(plain, outputs))
        choices.update(self._choose_apart([row for row in rows if row not in choices], threads))
        return [choices[row] for row in rows]

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.shutdown()

    def _choose_together(self, rows: Sequence[Row], outputs: int) -> dict[Row, Choice]:
        """Choose the likeliest tokens. A row that has none left is told why by its own sampler."""
        bans = [row.sampler.banned for row in rows]
        tokens = self._context.likeliest(outputs, [row.output for row in rows], bans)
        return {
            row: self._choose(row) if token is None else (token, None) for row, token in zip(rows, tokens, strict=True)
        }

    def _choose_apart(self, rows: Sequence[Row], threads: int) -> dict[Row, Choice]:
        """Choose row by row, the slow ones in threads: their calls into llama.cpp let go of the GIL.

        The quick ones are all this thread's, which has its share of the slow ones, too.
        """
        if not rows:
            return {}
        # The first look at the logits waits for the device and puts the rows in order; those that follow only read.
        self._context.logits(rows[0].number)
        quick = [row for row in rows if row.sampler.quick]
        slow = [row for row in rows if not row.sampler.quick]
        count = min(threads, len(slow) + bool(quick), _MOST_THREADS)
        if count <= 1:
            return self._choose_all(rows)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_MOST_THREADS, "sampling")
        few = len(slow) // count
        own, rest = [*quick, *slow[:few]], slow[few:]
        shares = [self._pool.submit(self._choose_all, rest[start :: count - 1]) for start in range(count - 1)]
        choices = self._choose_all(own)
        for share in shares:
            choices.update(share.result())
        return choices

    def _choose_all(self, rows: Sequence[Row]) -> dict[Row, Choice]:
        return {row: self._choose(row) for row in rows}

    def _choose(self, row: Row) -> Choice:
        try:
            return row.sampler.choose(self._context, row.number)
        except Exception as error:  # it is told to the one sequence that it ends
            return error
