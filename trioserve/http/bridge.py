"""One ASGI callable for both kinds of server: a Trio application that also works when the server runs asyncio.

Under Trio a `Bridge` only delegates. Under asyncio it hosts the application in one ``trio.run`` of its own:

    asyncio thread                                        thread "trioserve-trio"
    --------------                                        -----------------------
    server awaits bridge(lifespan)   --- starts --------> trio.run: the lifespan task, parent of all others
    server awaits bridge(http)       --- run_sync_soon -> one task for each scope
    one task for each receive, send  <- call_soon_ ------ await receive(), await send(message)
                                        threadsafe

Every object below belongs to both threads, and every method to one: its docstring begins with the side that runs it.
A field is only touched on the side that its comment names. What crosses is a callback, by one of two documented
doors: ``TrioToken.run_sync_soon`` (`_Run.to_trio`) and ``loop.call_soon_threadsafe`` (`_Run.to_asyncio`). Both keep
order and both wake the other side, so that nobody polls and nobody holds a lock.

Invariants:
    * The run lives exactly as long as the lifespan task. When that ends, so do the others, the run and the thread.
    * Whoever waits on one side waits until the other side has ended, cancelled or not: nothing is left running.
    * The server hears the last word of the lifespan only when the thread is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn, TypeAlias

import outcome
import sniffio
import trio

Message: TypeAlias = Any  # a TypedDict of the server's own making
Scope: TypeAlias = Mapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]
# How one application call went: True, it ran to its end; False, it was cancelled; or the error that it raised.
Outcome: TypeAlias = "outcome.Value[bool] | outcome.Error"

_LAST_WORDS = frozenset({"lifespan.startup.failed", "lifespan.shutdown.complete", "lifespan.shutdown.failed"})
_NO_RUN = (
    "this Trio application runs under asyncio only while its ASGI lifespan does: "
    "let the server send lifespan events (uvicorn: --lifespan on), or use a Trio worker (hypercorn: -k trio)"
)
_STOPPED = "the Trio run was stopped before the application had answered this request"


class Bridge:
    """An ASGI 3 callable for servers on Trio and on asyncio.

    State belongs to one lifespan on one event loop: lifespans may follow each other, and several loops do not meet.

    Arguments:
        app: the ASGI application; it is only ever called under Trio.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._runs: dict[asyncio.AbstractEventLoop, _Run] = {}  # asyncio side, each loop its own key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """[either side] Serve one ASGI scope on the side that calls.

        Arguments:
            scope: the ASGI scope; under asyncio the first one must be the lifespan.
            receive: the server's callable for the next message.
            send: the server's callable to send one message.

        Errors:
            RuntimeError: there is no lifespan running on this loop (or one more is asked for), or it ended first.
            Anything that the application raises; a group of exactly one exception comes as that exception.
        """
        if sniffio.current_async_library() == "trio":
            await self._app(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._serve_lifespan(scope, receive, send)
        else:
            await self._serve_request(scope, receive, send)

    async def _serve_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """[asyncio side] Hold a Trio run for as long as the application's lifespan call, then say its last words."""
        loop = asyncio.get_running_loop()
        if loop in self._runs:
            raise RuntimeError("a lifespan of this application is already running on this event loop")
        run = _Run(loop)
        lifespan = _Lifespan(run, run.ended, self._app, scope, receive, send)
        self._runs[loop] = run
        try:
            run.start(lifespan)
            ended = await lifespan.wait()
        finally:
            del self._runs[loop]
        for message in run.last_words:
            await send(message)
        ended.unwrap()

    async def _serve_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """[asyncio side] Run the application for one http or websocket scope in this loop's Trio run."""
        loop = asyncio.get_running_loop()
        run = self._runs.get(loop)
        if run is None:
            raise RuntimeError(_NO_RUN)
        call = _Call(run, loop.create_future(), self._app, scope, receive, send)
        if not run.to_trio(run.adopt, call):
            raise RuntimeError(_NO_RUN)
        if not (await call.wait()).unwrap():
            raise RuntimeError(_STOPPED)


class _Run:
    """One ``trio.run`` in a thread of its own, and the two doors between it and the event loop that it serves."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.up: asyncio.Future[None] = loop.create_future()  # asyncio side: the start is over, well or not
        self.ended: asyncio.Future[Outcome] = loop.create_future()  # asyncio side: the thread is joined
        self._token: trio.lowlevel.TrioToken | None = None  # asyncio side
        self._thread: threading.Thread | None = None  # asyncio side
        self._nursery: trio.Nursery | None = None  # trio side; None again when no more calls are taken
        self._calls: set[_Call] = set()  # trio side: the calls in the nursery
        self._lifespan_scope: trio.CancelScope | None = None  # trio side
        self.last_words: list[Message] = []  # trio side, and asyncio side after the end

    def start(self, lifespan: _Lifespan) -> None:
        """[asyncio side] Start the thread, which ends with `lifespan`; RuntimeError when there can be no thread."""
        self._thread = threading.Thread(target=self._thread_main, args=(lifespan,), name="trioserve-trio", daemon=False)
        self._thread.start()

    def to_trio(self, function: Callable[..., object], *args: object) -> bool:
        """[asyncio side] Have the run call `function`; False when it has ended, or is not up yet.

        What was accepted is always called, for a run empties its queue as the last thing it does.
        """
        if self._token is None:
            return False
        try:
            self._token.run_sync_soon(function, *args)
        except trio.RunFinishedError:
            return False
        return True

    def to_asyncio(self, function: Callable[..., object], *args: object) -> bool:
        """[trio side] Have the event loop call `function`; False when the loop is closed, which stops the run."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if self._lifespan_scope is not None:
                self._lifespan_scope.cancel()
            return False
        return True

    def adopt(self, call: _Call) -> None:
        """[trio side] Start the task of `call`, or settle it as cancelled when the run is ending."""
        if self._nursery is None:
            self.to_asyncio(call.settle, outcome.Value(False))
            return
        self._calls.add(call)
        self._nursery.start_soon(self._host, call)

    async def _host(self, call: _Call) -> None:
        """[trio side] The task of one call: what that raises goes to its own asyncio caller, never to the nursery."""
        ended = await call.execute()
        self._calls.remove(call)
        self.to_asyncio(call.settle, ended)

    async def _main(self, lifespan: _Lifespan) -> Outcome:
        """[trio side] The main task: the lifespan call, around it the nursery of all the others."""
        self._lifespan_scope = lifespan.cancel_scope
        async with trio.open_nursery() as self._nursery:
            self.to_asyncio(self._set_up, trio.lowlevel.current_trio_token())
            ended = await lifespan.execute()
            self._nursery = None
            # The scope of each call, not the nursery's: so no Cancelled leaves a call, and each tells how it ended.
            for call in self._calls:
                call.cancel_scope.cancel()
        return ended

    def _thread_main(self, lifespan: _Lifespan) -> None:
        """[trio side] The whole thread. Its last act is to ask the event loop to join it."""
        try:
            ended = trio.run(self._main, lifespan)
        except BaseException as error:  # a TrioInternalError, or no file descriptors left: never lose the caller
            ended = outcome.Error(error)
        self.to_asyncio(self._finish, ended)

    def _set_up(self, token: trio.lowlevel.TrioToken) -> None:
        """[asyncio side] From here on `to_trio` works."""
        self._token = token
        self.up.set_result(None)

    def _finish(self, ended: Outcome) -> None:
        """[asyncio side] Join the thread, which has nothing left to do, and wake whoever waits for the run."""
        assert self._thread is not None
        self._thread.join()
        if not self.up.done():
            self.up.set_result(None)
        self.ended.set_result(ended)


class _Call:
    """One ASGI call: an asyncio task of the server that waits, and a Trio task of the application that runs."""

    def __init__(
        self, run: _Run, ended: asyncio.Future[Outcome], app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._run = run
        self._ended = ended  # asyncio side: the Trio task has ended
        self._app = app
        self._scope = scope
        self._server_receive = receive
        self._server_send = send
        self.cancel_scope = trio.CancelScope()  # trio side

    def settle(self, ended: Outcome) -> None:
        """[asyncio side] Take the end of the Trio task."""
        self._ended.set_result(ended)

    async def wait(self) -> Outcome:
        """[asyncio side] Wait until the Trio task has ended, and say how.

        A cancellation is passed on to the Trio task, whose end is still waited for. Then it continues here, unless
        the application raised an error on its way out: that takes its place, as in any ``finally``.
        """
        ends = {self._ended, self._run.ended}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await _outlast({self._run.up})
            self._run.to_trio(self.cancel_scope.cancel)
            await _outlast(ends)
            self._result().unwrap()
            raise
        return self._result()

    def _result(self) -> Outcome:
        """[asyncio side] How the call ended. The run only ends before it, and stands in, when Trio itself broke."""
        return self._ended.result() if self._ended.done() else outcome.Value(False)

    async def execute(self) -> Outcome:
        """[trio side] Call the application. Raises only the Cancelled of a run that breaks (TrioInternalError)."""
        try:
            with self.cancel_scope:
                await self._app(self._scope, self.receive, self.send)
        except trio.Cancelled:
            raise
        except BaseException as error:
            return outcome.Error(_sole(error))
        return outcome.Value(not self.cancel_scope.cancelled_caught)

    async def receive(self) -> Message:
        """[trio side] The application's ``receive``: raises what the server's raises."""
        return await _Crossing(self._run, self.cancel_scope, self._server_receive).wait()

    async def send(self, message: Message) -> None:
        """[trio side] The application's ``send``: raises what the server's raises."""
        await _Crossing(self._run, self.cancel_scope, self._server_send, message).wait()


class _Lifespan(_Call):
    """The call that the run lives for; its `ended` is the run's."""

    async def send(self, message: Message) -> None:
        """[trio side] Send, but keep a last word until the run has ended: it makes the server go on without us.

        Nothing comes after it, so what is left of the lifespan (background tasks, mostly) is cancelled.
        """
        if message["type"] not in _LAST_WORDS:
            await super().send(message)
            return
        self._run.last_words.append(message)
        self.cancel_scope.cancel()


class _Crossing:
    """One await of a server's callable by a Trio task: an asyncio task does it meanwhile."""

    def __init__(self, run: _Run, cancel_scope: trio.CancelScope, function: Callable[..., Any], *args: Any) -> None:
        self._run = run
        self._cancel_scope = cancel_scope  # trio side: that of the call
        self._function = function
        self._args = args
        self._waiter: trio.lowlevel.Task | None = None  # trio side; None when nobody is to be woken
        self._raise_cancel: Callable[[], NoReturn] | None = None  # trio side; set when Trio wanted to cancel
        self._task: asyncio.Task[Any] | None = None  # asyncio side

    async def wait(self) -> Any:
        """[trio side] Await the server's callable; a cancellation cancels that, and waits until it has ended.

        Errors:
            Anything that the callable raises.
            OSError: the event loop is closed, or the server cancelled our task while the caller is shielded.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._run.to_asyncio(self._start):
            raise OSError("the server's event loop is closed")
        self._waiter = trio.lowlevel.current_task()
        result: outcome.Value[Any] | outcome.Error | None = await trio.lowlevel.wait_task_rescheduled(self._abort)
        if result is not None:
            return result.unwrap()
        if self._raise_cancel is not None:
            self._raise_cancel()
        self._cancel_scope.cancel()  # a loop being wound up cancels all its tasks, the caller of this call included
        await trio.lowlevel.checkpoint()
        raise OSError("the server cancelled the operation")

    def _abort(self, raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        """[trio side] Ask for the asyncio task's end and let that wake us; Trio asks this once at most."""
        if not self._run.to_asyncio(self._cancel):
            self._waiter = None
            return trio.lowlevel.Abort.SUCCEEDED
        self._raise_cancel = raise_cancel
        return trio.lowlevel.Abort.FAILED

    def _resume(self, result: outcome.Value[Any] | outcome.Error | None) -> None:
        """[trio side] Wake the waiting task."""
        if self._waiter is not None:
            trio.lowlevel.reschedule(self._waiter, outcome.Value(result))
            self._waiter = None

    def _start(self) -> None:
        """[asyncio side] Start the task; its end, and nothing else, wakes the Trio task."""
        self._task = asyncio.get_running_loop().create_task(self._await())
        self._task.add_done_callback(self._report)

    async def _await(self) -> Any:
        """[asyncio side] The task: a coroutine of ours, because ASGI promises only an awaitable."""
        return await self._function(*self._args)

    def _cancel(self) -> None:
        """[asyncio side] Cancel the task. `_start` came first, for the door keeps order."""
        assert self._task is not None
        self._task.cancel()

    def _report(self, task: asyncio.Task[Any]) -> None:
        """[asyncio side] Carry the end of the task over: its outcome, or None if it was cancelled."""
        result: outcome.Value[Any] | outcome.Error | None = None
        if not task.cancelled():
            error = task.exception()
            result = outcome.Value(task.result()) if error is None else outcome.Error(error)
        self._run.to_trio(self._resume, result)


async def _outlast(futures: set[asyncio.Future[Any]]) -> None:
    """[asyncio side] Wait until one of `futures` is done, however often this task is cancelled meanwhile."""
    while not any(future.done() for future in futures):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _sole(error: BaseException) -> BaseException:
    """[either side] The only exception in `error` if that is a group of one, at any depth; else `error` itself."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
