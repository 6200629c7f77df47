"""Sessions for batches: made when one comes, as large as it needs, and freed after it. And one in place of another.

A context with room for many sequences takes that many KV caches. Kept for good in every slot they would cost several
times the memory of all other requests together, mostly unused; made for one batch they cost it a moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from trioserve.engine.base import LoadFailure, SequenceRequest, Session, SessionOptions, Weights, Work

logger = logging.getLogger("trioserve.slot")

HasRoom = Callable[[SessionOptions], bool]
"""Tells whether a session so made fits into the memory that is free. Called in worker threads."""


class BatchSessions:
    """Opens the sessions that a pool's slots decode batches in.

    Arguments:
        weights: of the pool.
        options: of its sessions.
        private: of a session that one slot has to itself; a batch's differs in its size.
        capacity: sequences that a batch decodes together at most.
        has_room: asked before one is made.
    """

    def __init__(
        self,
        weights: Weights,
        options: SessionOptions,
        private: SessionOptions,
        capacity: int,
        has_room: HasRoom,
    ) -> None:
        self._weights = weights
        self._options = options
        self._private = private
        self._capacity = capacity
        self._has_room = has_room

    def replacement(self) -> Session:
        """Make a session like the pool's own, in a worker thread.

        Raises:
            LoadFailure: it could not be made.
        """
        return self._weights.open_session(self._options)

    def open(self, works: Sequence[Work]) -> Session | None:
        """Make a session for a batch, in a worker thread. Whoever gets it closes it.

        Where the memory doesn't suffice it is made for half as many sequences, and so on.

        Returns:
            The session; None where the slot's own one has to do.
        """
        n_ctx = min(self._private.n_ctx, max(map(_tokens, works)))
        sequences = min(self._capacity, len(works))
        while sequences > self._private.max_sequences:
            options = replace(self._private, n_ctx=n_ctx, max_sequences=sequences)
            reason: object = "too little memory is free"
            if self._has_room(options):
                try:
                    return self._weights.open_session(options)
                except LoadFailure as error:
                    reason = error
            logger.warning("no session for %d sequences of %d tokens: %s", sequences, n_ctx, reason)
            sequences //= 2
        return None


def _tokens(work: Work) -> int:
    """How much context a sequence may fill."""
    return len(work.prompt) + (work.max_tokens if isinstance(work, SequenceRequest) else 0)
