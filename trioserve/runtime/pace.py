"""How many threads are worth having, found out by trying. Pure: the caller tells how long its steps took."""

from __future__ import annotations

import threading
from collections import deque
from statistics import median
from typing import NamedTuple

_RECENT = 8  # steps that tell how long one takes at present
_ENOUGH = 3  # steps without which a trial has nothing to be compared with: one alone may have met with anything
_MARGIN = 0.9  # a trial must be faster by a tenth to change anything
_SHORT = 0.001  # seconds; on shorter steps there is nothing to win
_SLUMP = 2.5  # a step that takes so many times longer than usual asks for a trial
_FIRST = {"fewer": 3, "more": 8}  # steps until the first trial
_GROWTH = 4  # after each trial in vain the next one is so many times further away
_LONGEST = {"fewer": 256, "more": 4096}


class Pace:
    """Chooses a number of threads for one kind of step of sessions that are alike, which may be in any threads.

    The threads of a step meet after every operation. As long as each has a core of its own, more of them are faster;
    but where another program takes a core away from one of them, all the others wait for it, many times in each step,
    and one thread alone can be twice as fast, or a hundred times where waiting threads don't let go of their cores
    (``engine.llama.waiting``). That changes while a request runs, so it is tried again and again:
    half as many threads first, after a few steps and whenever steps get much slower; then twice as many again. Each
    trial in vain makes the next one rarer. The answer doesn't depend on the number of threads, only its speed does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limit = 0
        self._chosen: dict[int, int] = {}  # for each limit that was met
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._trial: int | None = None
        self._steps = 0
        self._due = dict(_FIRST)
        self._interval = dict(_FIRST)

    def threads(self, limit: int) -> int:
        """Threads for the next step.

        Arguments:
            limit: the most it may take.
        """
        with self._lock:
            if limit != self._limit:
                self._start_over(limit)
            if self._trial is None:
                self._trial = self._next_trial()
            return self._trial or self._current

    def note(self, threads: int, seconds: float) -> None:
        """Tell how long a step took.

        Arguments:
            threads: that it was taken with, as they were chosen here.
            seconds: from its beginning to its end.
        """
        with self._lock:
            if threads == self._trial:
                self._steps += 1
                self._judge(seconds)
            elif threads == self._current:  # or it was begun before something changed, and tells nothing
                self._steps += 1
                self._compare(seconds)

    def _compare(self, seconds: float) -> None:
        if seconds < _SHORT:
            return
        usual = median(self._recent) if self._recent else seconds
        if seconds > _SLUMP * usual:
            # Once may be chance: fewer are tried when there have been enough of these, unless one is as quick as ever.
            self._recent.clear()
            self._due["fewer"] = self._steps + 1
        elif seconds * _SLUMP < usual:
            self._recent.clear()
            self._due["fewer"] = self._steps + self._interval["fewer"]
        self._recent.append(seconds)

    @property
    def _current(self) -> int:
        return self._chosen.get(self._limit, self._limit)

    def _start_over(self, limit: int) -> None:
        """Other neighbours, other times: only the choice for this limit is remembered."""
        self._limit = limit
        self._recent.clear()
        self._trial = None
        self._steps = 0
        self._due, self._interval = dict(_FIRST), dict(_FIRST)

    def _next_trial(self) -> int | None:
        if len(self._recent) < _ENOUGH:
            return None
        current = self._current
        if current > 1 and self._steps >= self._due["fewer"]:
            return current // 2
        if current < self._limit and self._steps >= self._due["more"]:
            return min(2 * current, self._limit)
        return None

    def _judge(self, seconds: float) -> None:
        trial, self._trial = self._trial, None
        assert trial is not None, "only a trial is judged"
        direction = "fewer" if trial < self._current else "more"
        if seconds < _MARGIN * median(self._recent):
            self._chosen[self._limit] = trial
            self._recent.clear()
            self._recent.append(seconds)
            self._interval = dict(_FIRST)
            # What was left behind is not tried again soon, or a lucky step would be paid for twice.
            back = "more" if direction == "fewer" else "fewer"
            self._due = {direction: self._steps + _FIRST[direction], back: self._steps + _FIRST["more"]}
        else:
            self._interval[direction] = min(self._interval[direction] * _GROWTH, _LONGEST[direction])
            self._due[direction] = self._steps + self._interval[direction]


class Paces(NamedTuple):
    """Those of the private sessions of one model, which are alike: what one has found out holds for all."""

    prefill: Pace
    decode: Pace
