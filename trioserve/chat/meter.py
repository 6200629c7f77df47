"""What one rendering may still spend: time, and characters.

Nothing here can interrupt a running operation (no signal, no thread), so the bounds hold by two rules that every hook
of the sandbox obeys: ask the clock before each operation, and refuse an operation whose result would be too large
before it starts. A single operation is then short, because its operands are bounded too.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from trioserve.errors import ChatTemplateError

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")

#: Weight of one place in a container, in characters. It bounds containers to ``max_chars / SLOT_WEIGHT`` items.
SLOT_WEIGHT = 16
#: Deeper values could overflow the C stack: hashing nested tuples and resuming nested generators do not check it.
MAX_DEPTH = 100
#: Largest integer, in bits. Beyond it single arithmetic operations become slow.
MAX_INT_BITS = 16_384
#: All texts together that one rendering may build, in units of its ``max_chars``: bounds memory held in variables.
CHURN_FACTOR = 64

_EMPTY: dict[object, object] = {}
_VIEWS = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
_CONTAINERS = (list, tuple, dict, set, frozenset, *_VIEWS)
_SCALARS = (float, complex, bytes, type(None))


class Shape(NamedTuple):
    """How large a value is.

    ``weight`` is about the length of its text, in characters, counting a part again wherever it occurs again: a list
    of twice the same list, thirty levels deep, is small in memory and endless when printed. ``depth`` counts levels.
    """

    weight: int
    depth: int


_LEAF = Shape(SLOT_WEIGHT, 0)


class Meter:
    """The budget of one rendering.

    Arguments:
        time_limit_s: seconds from now.
        max_chars: characters of the output and of every value on the way.
    """

    def __init__(self, *, time_limit_s: float, max_chars: int) -> None:
        self.max_chars = max_chars
        self._time_limit_s = time_limit_s
        self._deadline = time.monotonic() + time_limit_s
        self._churn = 0
        # The value is stored beside its shape: while it is alive, no other value gets its id.
        self._known: dict[int, tuple[object, Shape]] = {}

    def tick(self) -> None:
        """Raise ChatTemplateError once the time is spent."""
        if time.monotonic() > self._deadline:
            raise ChatTemplateError(f"The model's chat template exceeded its time bound of {self._time_limit_s:g} s.")

    def reserve(self, chars: float) -> None:
        """Raise ChatTemplateError where a value of that many characters is too large; call it before building one."""
        if chars > self.max_chars:
            raise ChatTemplateError(
                f"The model's chat template exceeded its size bound of {self.max_chars} characters."
            )

    def reserve_bits(self, bits: int) -> None:
        """As ``reserve``, for an integer of that many bits."""
        if bits > MAX_INT_BITS:
            raise ChatTemplateError(
                f"The model's chat template exceeded its size bound of {MAX_INT_BITS} bits a number."
            )

    def keep(self, value: T, sources: Iterable[object] = ()) -> T:
        """Admit a new value: every operation's result passes here, so every value that a template holds is bounded.

        Arguments:
            value: what the operation gave; returned as it is.
            sources: the operands, which a lazy result such as a generator still hangs on.

        Errors: ChatTemplateError when the value is too large, too deep, or the clock has run out.
        """
        self.tick()
        if isinstance(value, str):
            self._charge(len(value))
        elif isinstance(value, int):
            self.reserve_bits(value.bit_length())
        elif isinstance(value, _CONTAINERS):
            self._charge(len(value))
            self.shape(value)
        elif not isinstance(value, _SCALARS):
            self._keep_lazy(value, sources)
        return value

    def keep_sum(self, value: T, left: object, right: object) -> T:
        """``keep`` for two joined sequences, whose shape is known without walking them again."""
        if isinstance(value, (list, tuple)):
            self._charge(len(value))
            one, two = self.shape(left), self.shape(right)
            self._remember(value, Shape(one.weight + two.weight, max(one.depth, two.depth)))
        return self.keep(value)

    def shape(self, value: object) -> Shape:
        """Weight and depth of a value; walks each container once in a rendering."""
        if isinstance(value, str):
            return Shape(SLOT_WEIGHT + len(value), 0)
        if isinstance(value, int):
            return Shape(SLOT_WEIGHT + value.bit_length() // 3, 0)
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, _CONTAINERS):
            return self._remember(value, self._walk(value))
        return _LEAF

    def check_arguments(self, args: Iterable[object], kwargs: Iterable[object]) -> None:
        """Bound what a macro may see as its ``varargs`` and ``kwargs``: containers that no operation built."""
        self.tick()
        self._walk((*args, *kwargs))

    def _walk(self, container: Iterable[object]) -> Shape:
        self.tick()
        weight, depth = SLOT_WEIGHT, 0
        parts = chain.from_iterable(container.items()) if isinstance(container, dict) else container
        for part in parts:
            shape = self.shape(part)
            weight += shape.weight
            depth = max(depth, shape.depth)
            self.reserve(weight)
        return Shape(weight, depth + 1)

    def _remember(self, value: object, shape: Shape) -> Shape:
        self.reserve(shape.weight)
        if shape.depth > MAX_DEPTH:
            raise ChatTemplateError(f"The model's chat template exceeded its bound of {MAX_DEPTH} nested values.")
        self._known[id(value)] = (value, shape)
        return shape

    def _keep_lazy(self, value: object, sources: Iterable[object]) -> None:
        depth = max((self.shape(source).depth for source in sources), default=0)
        if depth:
            self._remember(value, Shape(SLOT_WEIGHT, depth + 1))

    def _charge(self, chars: int) -> None:
        self.reserve(chars)
        self._churn += chars
        if self._churn > CHURN_FACTOR * self.max_chars:
            raise ChatTemplateError(
                f"The model's chat template exceeded its size bound of {CHURN_FACTOR} x {self.max_chars} characters "
                "for all values together."
            )


#: The meter of the rendering that runs in this thread. Rendering never suspends, so set and reset always pair up.
METER: ContextVar[Meter] = ContextVar("trioserve_chat_meter")
