"""``trioserve serve``: service, application and connections in nested scopes, undone in reverse."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from typing import TextIO

import trio

from trioserve.checks import check_models
from trioserve.config import Config
from trioserve.engine.base import Engine
from trioserve.errors import TrioserveError
from trioserve.http.app import create_app
from trioserve.http.auth import exposure
from trioserve.http.listener import bind, serve_http, url
from trioserve.last_resort import LastResort
from trioserve.logs import BackgroundStream, configure_logging
from trioserve.service import Service, open_service

logger = logging.getLogger("trioserve")

CLEAN, FAILED, CUT_OFF = 0, 1, 3
"""Exit codes: all work was done; the server could not start or crashed; work was cut off at the end of the drain, or
threads did not come back in time."""

EXIT_SECONDS = 1.0
"""How much later than the end of the drain the process is gone, whatever hangs."""

LOG_SECONDS = 1.0
"""How long the last lines of the log may take to be written."""

FORCED_LOG_SECONDS = 0.1
"""The same where the end is forced; part of ``EXIT_SECONDS``."""

_FORCE_BEFORE = 0.2
"""How much earlier than it has to be gone a process that hangs is ended: for the log, and for the system."""

_SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


def _heeded() -> list[signal.Signals]:
    """The signals that end the server; what was ignored at its start (nohup ignores SIGHUP) stays ignored."""
    return [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def serve(config: Config, *, engine: Engine | None = None) -> int:
    """Serve until a signal, drain, and return the exit code.

    The process ends within ``drain_timeout_ms`` and ``EXIT_SECONDS`` of the signal: if need be it is left from here,
    with threads still at work.

    Arguments:
        config: of the server and its models.
        engine: llama.cpp where it is left out.

    Raises:
        ConfigError: the address, a certificate or a chat template can't be used.
        InvalidModelError: a model file can't be used.
    """
    check_models(config)
    sock = bind(config)
    log = configure_logging(config.log_format, config.log_level, background=True)
    if (warning := exposure(config, None if sock.family == socket.AF_UNIX else sock.getsockname()[0])) is not None:
        logger.warning("%s", warning)
    ending = _Ending(config.drain_timeout_ms / 1000, log)
    with sock:
        try:
            trio.run(_main, config, sock, engine, ending)
            return ending.code
        finally:
            # Too late for another signal to mean anything: it must not change the exit code.
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            ending.last_resort.call_off()
            if log is not None:
                log.close(min(LOG_SECONDS, ending.last_resort.seconds_left + FORCED_LOG_SECONDS))


async def _main(config: Config, sock: socket.socket, engine: Engine | None, ending: _Ending) -> None:
    # Signals are caught before anything is loaded and until everything is freed: an early one and a late one find the
    # same orderly way out.
    with trio.open_signal_receiver(*_heeded()) as signals:
        async with trio.open_nursery() as nursery:
            progress = _Progress(sys.stderr) if sys.stderr is not None and sys.stderr.isatty() else None
            async with open_service(config, engine=engine, progress=progress) as service:
                ending.service = service
                nursery.start_soon(ending.watch_signals, signals)
                logger.info("listening on %s", url(config, sock))
                with ending.bounded():
                    await serve_http(create_app(service), config, sock, ending.wait)
            nursery.cancel_scope.cancel()


class _Ending:
    """What ends the server: a signal, or a model that can't be loaded at the start.

    Arguments:
        drain_timeout: seconds that a drain may take.
        log: written to the end where the exit is forced.

    Attributes:
        code: of the exit.
        service: drained here, while connections are still accepted.
        last_resort: for what does not end by itself.
    """

    service: Service

    def __init__(self, drain_timeout: float, log: BackgroundStream | None) -> None:
        self._drain_timeout = drain_timeout
        self._log = log
        self._begun = trio.Event()
        self.code = CLEAN
        self.last_resort = LastResort(lambda: self.code or CUT_OFF, lambda: self.service.unfinished(), self._flush)

    @contextlib.contextmanager
    def bounded(self) -> Iterator[None]:
        """Bound what follows the block, however it ends."""
        try:
            yield
        except BaseException:
            self.code = FAILED
            self._leave_within(EXIT_SECONDS)
            raise

    def _begin(self) -> None:
        self._begun.set()
        self._leave_within(self._drain_timeout + EXIT_SECONDS)

    def _leave_within(self, seconds: float) -> None:
        self.last_resort.within(seconds - _FORCE_BEFORE)

    def _flush(self) -> None:
        if self._log is not None:
            self._log.close(FORCED_LOG_SECONDS)

    async def wait(self) -> None:
        """Return when the drain is over."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_start)
            await self._begun.wait()
            report = await self.service.drain()
            nursery.cancel_scope.cancel()
        logger.info("%s", report)
        if not report.complete and self.code == CLEAN:
            self.code = CUT_OFF

    async def watch_signals(self, signals: AsyncIterator[int]) -> None:
        """Drain at the first signal, cut off what is left at the second, leave at once at the third."""
        received = 0
        async for number in signals:
            received += 1
            name = signal.Signals(number).name
            if received == 1:
                logger.info("%s: draining; a second signal cuts it short", name)
                self._begin()
            elif received == 2:
                logger.warning("%s again: cutting off what is left", name)
                self.service.hurry()
                self._leave_within(EXIT_SECONDS)
            else:
                logger.error("%s for the third time: leaving at once", name)
                self.last_resort.leave()

    async def _watch_start(self) -> None:
        try:
            await self.service.wait_started()
        except TrioserveError:  # logged where it happened
            self.code = FAILED
            self._begin()
        else:
            logger.info("ready")


class _Progress:
    """Draws loads on a terminal, from the loading threads.

    Arguments:
        terminal: where to draw.
    """

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._drawn: dict[str, int] = {}

    def __call__(self, model_id: str, fraction: float) -> None:
        percent = int(100 * fraction)
        if percent != self._drawn.get(model_id):
            self._drawn[model_id] = percent
            self._terminal.write(f"\rloading {model_id}: {percent:3d} %" + ("\n" if percent == 100 else ""))
            self._terminal.flush()
