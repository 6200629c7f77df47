"""What scheduling costs: operations per second with ever more waiters.

Prints a table in Markdown. Entering, leaving and granting are measured on the decider alone; waits that run out or are
cancelled go through the gate, the tasks that wait there included.
"""

from __future__ import annotations

import argparse
import statistics
import time

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trioserve.errors import ServerBusyError
from trioserve.runtime.gate import Gate
from trioserve.scheduling.admission import Admission, Ticket

WAITERS = (10, 1_000, 10_000)
SLOTS = 4
LEAST_OPERATIONS = 10_000  # of each measurement
PATIENCE = 60.0  # seconds on a clock that jumps


class Line:
    """An admission whose slots are taken, with so many tickets in the queue."""

    def __init__(self, waiters: int) -> None:
        self.admission = Admission(SLOTS, waiters * 2)
        self.holders = [self.arrive() for _ in range(SLOTS)]
        self.waiting = [self.arrive() for _ in range(waiters)]

    def arrive(self, wait: float | None = None) -> Ticket:
        ticket = Ticket(wait=wait)
        self.admission.enter(ticket, 0.0)
        self.admission.assign(0.0)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        self.admission.withdraw(ticket)
        self.admission.assign(0.0)


def enter(waiters: int) -> float:
    """Newcomers at the end of the queue."""
    line, some = Line(waiters), waiters // 2
    return timed(lambda: [line.arrive() for _ in range(some)]) / some


def turn_away(waiters: int) -> float:
    """Newcomers that may not wait."""
    line, some = Line(waiters), waiters // 2

    def arrive() -> None:
        for _ in range(some):
            try:
                line.arrive(wait=0)
            except ServerBusyError:
                continue

    return timed(arrive) / some


def withdraw(waiters: int) -> float:
    """Waiters that leave, from the middle of the queue outwards to its end."""
    line = Line(waiters)
    leaving = line.waiting[waiters // 2 :]
    return timed(lambda: [line.leave(ticket) for ticket in leaving]) / len(leaving)


def release(waiters: int) -> float:
    """Leases that come back, each granted to the head of the queue in the same step."""
    line, some = Line(waiters), waiters // 2
    order = [*line.holders, *line.waiting][:some]

    def hand_on() -> None:
        for ticket in order:
            line.admission.release(ticket)
            line.admission.assign(0.0)

    return timed(hand_on) / some


def time_out(waiters: int) -> float:
    """Waits that run out, all at one moment."""
    return trio.run(_all_leave, waiters, False, clock=MockClock())


def cancel(waiters: int) -> float:
    """Waits that are cancelled, all at one moment."""
    return trio.run(_all_leave, waiters, True, clock=MockClock())


async def _all_leave(waiters: int, by_cancel: bool) -> float:
    gate = Gate(Admission(1, waiters))
    await gate.pass_through(Ticket())

    async def wait() -> None:
        try:
            await gate.pass_through(Ticket(wait=PATIENCE))
        except ServerBusyError:
            return

    async with trio.open_nursery() as nursery:
        for _ in range(waiters):
            nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        began = time.perf_counter()
        if by_cancel:
            nursery.cancel_scope.cancel()
        else:
            trio.lowlevel.current_clock().jump(PATIENCE)
    return (time.perf_counter() - began) / waiters


def timed(action) -> float:
    """Seconds that an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(operation, waiters: int) -> float:
    """Operations per second: the median of enough rounds."""
    rounds = max(5, LEAST_OPERATIONS // waiters)
    return 1 / statistics.median(operation(waiters) for _ in range(rounds))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="bench_scheduling", description=__doc__)
    parser.add_argument("--waiters", type=int, nargs="+", default=WAITERS, help="lengths of the queue, 2 or more each")
    lengths = parser.parse_args().waiters
    print("| operations/s at so many waiters |", *(f"{waiters:,} |" for waiters in lengths))
    print("|---" * (len(lengths) + 1) + "|")
    for operation in (enter, turn_away, withdraw, release, time_out, cancel):
        rates = [measure(operation, waiters) for waiters in lengths]
        print(f"| {operation.__name__.replace('_', ' ')} |", *(f"{rate:,.0f} |" for rate in rates))


if __name__ == "__main__":
    main()
