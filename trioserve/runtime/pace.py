"""How many threads are worth having, found out by trying. Pure: the caller tells how long its steps took."""

from __future__ import annotations

import threading
from collections import deque
from statistics import median
from typing import NamedTuple

_RECENT = 8  # steps that tell how long one takes at present
_ENOUGH = 3  # steps without which a trial has nothing to be compared with: one alone may have met with anything
_PROOF = 2  # steps of a trial that have to be faster: one may have met with anything, too
# So many steps that aren't faster end a trial in vain. One of more threads gets a second chance: they sooner meet with
# another program for a moment.
_PATIENCE = {"fewer": 1, "more": 2}
_MARGIN = 0.9  # a trial must be faster by a tenth to change anything
_SHORT = 0.001  # seconds; on shorter steps there is nothing to win
_SLUMP = 2.5  # a step that takes so many times longer than usual asks for a trial, or ends one
_HELD_UP = 1.5  # where twice the threads take so many times longer, others are in their way
_FIRST = {"fewer": 3, "more": 6}  # steps until the first trial
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
        self._searches: dict[int, _Search] = {}  # for each limit that was met: other neighbours, other times
        self._search: _Search | None = None

    def threads(self, limit: int) -> int:
        """Threads for the next step.

        Arguments:
            limit: the most it may take.
        """
        with self._lock:
            if self._search is None or self._search.limit != limit:
                self._search = self._searches.setdefault(limit, _Search(limit))
                self._search.resume()
            return self._search.threads()

    def bound(self, limit: int) -> int:
        """Threads that a step of another kind should take at most: fewer only where more would be held up by others.

        That holds for all kinds of steps; how many threads are best for one of them says nothing about the others.

        Arguments:
            limit: the most it may take.
        """
        with self._lock:
            search = self._searches.get(limit)
            return search.bound() if search is not None else limit

    def note(self, threads: int, seconds: float) -> None:
        """Tell how long a step took.

        Arguments:
            threads: that it was taken with, as they were chosen here.
            seconds: from its beginning to its end.
        """
        with self._lock:
            if self._search is not None:
                self._search.note(threads, seconds)


class _Search:
    """Of the best number of threads up to a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._current = limit
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._trial: int | None = None
        self._tried: list[float] = []
        self._steps = 0
        self._due = dict(_FIRST)
        self._interval = dict(_FIRST)
        self._put_off = False  # whether ``resume`` has done that with the next trial
        self._held_up: int | None = None  # so many threads were, by other programs, when they were tried last

    def resume(self) -> None:
        """Go on after a time with another limit.

        What was found remains, and a trial is put off until some steps have shown whether it still holds.
        Once only: limits that alternate would put a trial off for ever. For the same reason none is broken off.
        """
        if self._recent and self._trial is None and not self._put_off:
            self._put_off = True
            self._due = {direction: max(due, self._steps + _RECENT) for direction, due in self._due.items()}

    def threads(self) -> int:
        """Threads for the next step."""
        if self._trial is None:
            self._trial = self._next_trial()
        return self._trial or self._current

    def bound(self) -> int:
        """See ``Pace.bound``."""
        return self.limit if self._held_up is None else self._current

    def note(self, threads: int, seconds: float) -> None:
        """See ``Pace.note``."""
        if threads == self._trial:
            self._steps += 1
            self._judge(threads, seconds)
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

    def _next_trial(self) -> int | None:
        if len(self._recent) < _ENOUGH:
            return None
        if self._current > 1 and self._steps >= self._due["fewer"]:
            return self._current // 2
        if self._current < self.limit and self._steps >= self._due["more"]:
            return min(2 * self._current, self.limit)
        return None

    def _judge(self, threads: int, seconds: float) -> None:
        """Take one step of a trial into account, and end it when it has shown enough.

        Whether others are in the way of so many threads, it also shows where nothing comes of it.
        """
        usual, direction = median(self._recent), self._direction
        self._tried.append(seconds)
        faster = sum(tried < _MARGIN * usual for tried in self._tried)
        if direction == "more" and seconds > _HELD_UP * usual:
            self._held_up = threads
        elif self._held_up is not None and threads >= self._held_up:
            self._held_up = None
        if faster == _PROOF:
            self._adopt()
        elif seconds > _SLUMP * usual or len(self._tried) - faster == _PATIENCE[direction]:
            self._interval[direction] = min(self._interval[direction] * _GROWTH, _LONGEST[direction])
            self._due[direction] = self._steps + self._interval[direction]
            self._end_trial()

    def _adopt(self) -> None:
        direction = self._direction
        assert self._trial is not None, "only a trial is adopted"
        if direction == "fewer" and max(self._tried) * _HELD_UP < median(self._recent):
            self._held_up = self._current
        self._current = self._trial
        self._recent.clear()
        self._recent.extend(self._tried)
        self._interval = dict(_FIRST)
        # What was left behind is not tried again soon, or a lucky step would be paid for twice.
        back = "more" if direction == "fewer" else "fewer"
        self._due = {direction: self._steps + _FIRST[direction], back: self._steps + _FIRST["more"]}
        self._end_trial()

    @property
    def _direction(self) -> str:
        assert self._trial is not None, "asked of a trial"
        return "fewer" if self._trial < self._current else "more"

    def _end_trial(self) -> None:
        self._trial = None
        self._tried = []
        self._put_off = False


class Paces(NamedTuple):
    """Those of the private sessions of one model, which are alike: what one has found out holds for all."""

    prefill: Pace
    decode: Pace
