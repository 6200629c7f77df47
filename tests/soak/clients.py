"""Clients that ask and leave, a manager that gives them no peace, and somebody who looks on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import h11
import trio

from .answers import Told
from .checks import Fate, Kind, Reply, Violation, error_type, judge, judge_operation
from .plan import Cut, Operation, Order
from .tally import Tally
from .wire import Exchange, Wire

STUCK_SECONDS = 240.0
"""Longer than any wait for a slot that a request may have here, and the answer; only a hang meets it."""

_LOOK_SECONDS = 0.1
_LOST = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError)


class Pauses:
    """Lets everybody work, or none of them."""

    def __init__(self) -> None:
        self._open = trio.Event()
        self._open.set()
        self._still = trio.Event()
        self._working = 0

    async def begin(self) -> None:
        """Wait for the end of a pause, and be at work."""
        await self._open.wait()
        self._working += 1

    def end(self) -> None:
        """Be at work no more."""
        self._working -= 1
        if not self._working:
            self._still.set()

    async def pause(self) -> None:
        """Let nobody begin, and return when nobody is at work."""
        self._open = trio.Event()
        while self._working:
            self._still = trio.Event()
            await self._still.wait()

    def go_on(self) -> None:
        """End a pause."""
        self._open.set()


@dataclass(eq=False)
class Watch:
    """What ``GET /v1/slots`` said last: request ids and their phases."""

    phases: dict[str, str] = field(default_factory=dict)
    slowest: float = 0
    _news: trio.Event = field(default_factory=trio.Event)

    async def run(self, port: int) -> None:
        """Look on until cancelled."""
        wire = Wire(port)
        try:
            while True:
                began = trio.current_time()
                slots = await wire.status("/v1/slots")
                self.slowest = max(self.slowest, trio.current_time() - began)
                self.phases = {slot["request_id"]: slot["phase"] for slot in slots if slot["request_id"]}
                self._news.set()
                self._news = trio.Event()
                await trio.sleep(_LOOK_SECONDS)
        finally:
            wire.leave()

    async def wait_phase(self, request_id: str, phase: str) -> None:
        """Return once a request was seen in a phase."""
        while self.phases.get(request_id) != phase:
            await self._news.wait()


@dataclass(frozen=True, eq=False)
class World:
    """What everybody here shares.

    Attributes:
        port: of the server.
        words: everybody's secret.
        expected: answers that questions got alone, by their keys.
        tally: of what happened.
        pauses: heeded between requests.
        watch: asked for phases.
    """

    port: int
    words: list[str]
    expected: dict[str, Told]
    tally: Tally
    pauses: Pauses = field(default_factory=Pauses)
    watch: Watch = field(default_factory=Watch)


async def be_client(world: World, number: int, orders: Iterator[Order]) -> None:
    """Send one order after the other until cancelled, which takes effect between two of them."""
    wire = Wire(world.port)
    try:
        for count, order in enumerate(orders):
            await world.pauses.begin()
            try:
                with trio.CancelScope(shield=True):
                    reply = await place(world, wire, order, f"soak-{number}-{count}")
            finally:
                world.pauses.end()
            await trio.sleep(order.pause if reply.outcome == "busy" else 0)
    finally:
        wire.leave()


async def place(world: World, wire: Wire, order: Order, request_id: str) -> Reply:
    """Send one order, leave as it says, and note what came of it."""
    exchange = Exchange(wire)
    cut = order.cut or Cut("never")

    async def follow() -> bool:
        return await exchange.run(
            "POST",
            order.question.route,
            order.body,
            request_id,
            missing=20 if cut.where == "upload" else 0,
            enough=lambda body: cut.where == "events" and body.count(b"\n\n") >= cut.events,
        )

    reply = await _until(exchange, follow, lambda: _patience(world, cut, request_id))
    if reply.fate is not Fate.WHOLE:
        wire.leave(reset=cut.reset)
    found = judge(order, request_id, reply, world.expected[order.question.key], world.words)
    world.tally.note(request_id, order, reply, found)
    return reply


async def be_manager(world: World, operations: Iterator[Operation]) -> None:
    """Carry out one operation after the other until cancelled, which takes effect between two of them."""
    wire = Wire(world.port)
    try:
        for operation in operations:
            await world.pauses.begin()
            try:
                with trio.CancelScope(shield=True):
                    await manage(world, wire, operation)
            finally:
                world.pauses.end()
            await trio.sleep(operation.pause)
    finally:
        wire.leave()


async def manage(world: World, wire: Wire, operation: Operation) -> None:
    """Carry one operation out and note what came of it."""
    exchange = Exchange(wire)

    async def follow() -> bool:
        return await exchange.run("POST", operation.route, operation.body, "soak-manager")

    async def patience() -> None:
        await (trio.sleep_forever() if operation.patience is None else trio.sleep(operation.patience))

    reply = await _until(exchange, follow, patience)
    if reply.fate is not Fate.WHOLE:
        wire.leave()
    world.tally.note_operation(operation.route, reply, judge_operation(operation.route, operation.statuses, reply))


async def be_newcomer(world: World, number: int) -> bool:
    """Come while the server drains; say whether it was told so. Not to be let in any more is also fine."""
    wire = Wire(world.port)
    exchange = Exchange(wire)
    try:
        await exchange.run("POST", "/v1/completions", {"prompt": "late", "max_tokens": 1}, f"soak-late-{number}")
    except _LOST:
        return False
    finally:
        wire.leave()
    if exchange.status == 503 and error_type(exchange.body) == "shutting_down":
        return True
    world.tally.violate(Violation(Kind.CONTRACT, f"a newcomer in the drain got {exchange.status}: {exchange.body!r}"))
    return False


async def _until(
    exchange: Exchange, follow: Callable[[], Awaitable[bool]], patience: Callable[[], Awaitable[None]]
) -> Reply:
    """Follow an exchange to its end, to that of somebody's patience, or of all patience."""
    fate, why = Fate.STUCK, ""

    async def leave() -> None:
        nonlocal fate
        await patience()
        fate = Fate.LEFT
        nursery.cancel_scope.cancel()

    with trio.move_on_after(STUCK_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            try:
                fate = Fate.WHOLE if await follow() else Fate.LEFT
            except _LOST as error:
                fate, why = Fate.LOST, repr(error)
            nursery.cancel_scope.cancel()
    return exchange.reply(fate, why)


async def _patience(world: World, cut: Cut, request_id: str) -> None:
    """Return when a client has had enough."""
    if cut.where in ("prefill", "decode"):
        await world.watch.wait_phase(request_id, cut.where)
    elif cut.where != "waiting":
        await trio.sleep_forever()
    await trio.sleep(cut.seconds)
