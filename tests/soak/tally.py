"""Counts, and how they are told. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .checks import MIB, Kind, Reply, Violation
from .plan import Order

TOLD_VIOLATIONS = 20


@dataclass
class Tally:
    """What happened so far.

    Attributes:
        outcomes: of requests, by their ids; see ``Reply.outcome``.
        operations: outcomes of management calls, by route.
        answered: kinds of the questions of finished requests.
        cuts: how clients meant to leave, of those that did.
        violations: the first ones; ``kinds`` has all.
        kinds: how many violations of each kind there were.
        memory: resident bytes of the server, unloaded, one sample after the other.
        slowest: seconds of the slowest answer.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    operations: Counter[tuple[str, str]] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    cuts: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    kinds: Counter[Kind] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    slowest: float = 0

    def note(self, request_id: str, order: Order, reply: Reply, found: Iterable[Violation]) -> None:
        """Count a request."""
        self.outcomes[request_id] = reply.outcome
        if reply.outcome == "left" and order.cut is not None:
            self.cuts[order.cut.where] += 1
        if reply.outcome == "finished":
            self.answered[order.question.kind] += 1
            self.slowest = max(self.slowest, reply.seconds)
        self.violate(*found)

    def note_operation(self, route: str, reply: Reply, found: Iterable[Violation]) -> None:
        """Count a management call."""
        self.operations[route, reply.outcome] += 1
        self.violate(*found)

    def violate(self, *found: Violation) -> None:
        """Count violations."""
        for violation in found:
            self.kinds[violation.kind] += 1
            if len(self.violations) < TOLD_VIOLATIONS:
                self.violations.append(violation)

    @property
    def clean(self) -> bool:
        """Whether there was no violation."""
        return not self.kinds

    def line(self, seconds: float, resident: int) -> str:
        """One line on the state of things.

        Arguments:
            seconds: since the beginning.
            resident: bytes of the server in memory.
        """
        counts = Counter(self.outcomes.values())
        return (
            f"{seconds:6.0f} s: {counts['finished']} finished, {counts['busy']} busy, {counts['left']} left, "
            f"{self.operations.total()} operations, {self.kinds.total()} violations, {resident / MIB:.0f} MiB"
        )

    def report(self, phases: Sequence[str], reused: tuple[int, int]) -> Iterator[str]:
        """The lines of the last report.

        Arguments:
            phases: in which the server saw clients leave, one item for each.
            reused: tokens of prompts that slots had kept already, and all of them.
        """
        yield f"requests      {_listed(Counter(self.outcomes.values()))}; the slowest answer took {self.slowest:.1f} s"
        yield f"answered      {_listed(self.answered)}"
        yield f"left          as planned: {_listed(self.cuts)}"
        yield f"              as the server saw it: {_listed(Counter(phases))}"
        yield f"reused        {reused[0]} of {reused[1]} prompt tokens"
        outcomes: Counter[str] = Counter()
        routes: Counter[str] = Counter()
        for (route, outcome), count in self.operations.items():
            outcomes[outcome] += count
            routes[route.rpartition("/")[2]] += count
        yield f"operations    {_listed(routes)}; {_listed(outcomes)}"
        yield f"wrong bytes   {self.kinds[Kind.WRONG_BYTES]}"
        yield f"broken forms  {self.kinds[Kind.BROKEN_FORM]}"
        yield f"foreign words {self.kinds[Kind.FOREIGN_WORD]}"
        yield f"contract      {self.kinds[Kind.CONTRACT]}"
        yield f"stuck         {self.kinds[Kind.STUCK]}"
        yield f"memory        {', '.join(f'{sample / MIB:.1f}' for sample in self.memory)} MiB with nothing loaded"
        yield from (f"VIOLATION     {violation.kind}: {violation.what}" for violation in self.violations)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
