"""The log: one line per event on stderr, as text or as JSON.

Structured fields travel as ``logger.info("message", extra={"fields": {"slot": 3}})``. Whatever a client managed to get
into a message or a value, it cannot begin a line of its own: characters that are not printable are escaped, and the
lines of a traceback are indented.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal, TextIO

from trioserve.origin import current_origin

__all__ = ["BackgroundStream", "JsonFormatter", "TextFormatter", "TraceFilter", "configure_logging", "one_line"]

LOGGER_NAME = "trioserve"
_RESERVED = frozenset({"time", "level", "message", "exception"})
_NEEDS_QUOTES = frozenset(' "=\\')


def one_line(text: str) -> str:
    """Return ``text`` with every character that is not printable written as a backslash escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _quoted(value: object) -> str:
    """Return a value for ``key=value``: bare where that is unambiguous, else in double quotes with escapes."""
    text = str(value)
    if text and text.isprintable() and _NEEDS_QUOTES.isdisjoint(text):
        return text
    return '"' + one_line(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, Mapping) else {}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """``2026-11-29T12:00:00.123Z info message key=value``, and below it an indented traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of one event, without the last newline."""
        words = [_time(record), record.levelname.lower(), one_line(record.getMessage())]
        words += [f"{one_line(str(key))}={_quoted(value)}" for key, value in _fields(record).items()]
        line = " ".join(words)
        if record.exc_info and record.exc_info[0] is not None:
            traceback = self.formatException(record.exc_info)
            line += "".join(f"\n  {one_line(part)}" for part in traceback.split("\n"))
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per event: time, level, message, the event's fields, and ``exception`` if there is one.

    A field whose name is one of those four is written as ``field_<name>``; a value that JSON cannot hold, as its text.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, without the newline."""
        event: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        for key, value in _fields(record).items():
            event[f"field_{key}" if key in _RESERVED else str(key)] = value
        if record.exc_info and record.exc_info[0] is not None:
            event["exception"] = self.formatException(record.exc_info)
        try:
            return json.dumps(event, allow_nan=False, default=str)
        except (TypeError, ValueError):
            # NaN, a key that is no string, or a value that contains itself: the event matters more than its types.
            return json.dumps({key: str(value) for key, value in event.items()})


class TraceFilter(logging.Filter):
    """Adds to each event the trace of the call that it came about in, where its caller is part of one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every event pass."""
        origin = current_origin()
        if origin is not None and origin.trace:
            record.fields = {**_fields(record), **origin.trace}
        return True


class BackgroundStream:
    """Writes to a stream from a thread of its own, so that a reader who has stopped reading holds nobody up.

    What finds the queue full is dropped, and a line says how much that was once there is room again.

    Arguments:
        stream: written to by that thread alone.
        lines: how many may wait.
    """

    def __init__(self, stream: TextIO, lines: int = 10_000) -> None:
        self._stream = stream
        self._queue: queue.Queue[str | None] = queue.Queue(lines)
        self._dropped = 0
        self._closing = False
        # A daemon: one that is stuck in a write must not keep the process.
        self._thread = threading.Thread(target=self._write_all, name="trioserve-log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Hand text over. Never waits."""
        try:
            self._queue.put_nowait(text)
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None:
        """Nothing to do here: the thread flushes what it writes."""

    def close(self, seconds: float) -> None:
        """Let the thread write what waits, for so long at most."""
        self._closing = True
        with contextlib.suppress(queue.Full):  # then there is something to write, and the thread looks after that
            self._queue.put_nowait(None)
        self._thread.join(seconds)

    def _write_all(self) -> None:
        while not (self._closing and self._queue.empty()) and (text := self._queue.get()) is not None:
            dropped, self._dropped = self._dropped, 0
            if dropped:
                text += f"{dropped} lines of the log were lost: nobody read it\n"
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):  # the reader has gone, or the stream was closed: serve on without a log
                continue


def configure_logging(
    log_format: Literal["text", "json"], log_level: str, *, background: bool = False
) -> BackgroundStream | None:
    """Send the events of the ``trioserve`` logger to stderr. Calling it again replaces what was set before.

    Arguments:
        log_format: ``text`` or ``json``.
        log_level: debug, info, warning or error; what is below it is dropped.
        background: write from a thread, so that logging never waits.

    Returns:
        What writes in the background, to be closed at the end; None where nothing does.
    """
    stream = BackgroundStream(sys.stderr) if background and sys.stderr is not None else None
    handler = _handler(stream)
    handler.addFilter(TraceFilter())
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logger = logging.getLogger(LOGGER_NAME)
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(log_level.upper())
    # A program that embeds the server may have handlers of its own at the root; each event is to appear once.
    logger.propagate = False
    return stream


def _handler(stream: BackgroundStream | None) -> logging.Handler:
    if stream is not None:
        return logging.StreamHandler(stream)
    # Without a stderr (the descriptor was closed) there is nowhere to log to.
    return logging.NullHandler() if sys.stderr is None else logging.StreamHandler(sys.stderr)
