"""The shared library: brought up once, and its log kept off the terminal.

``llama_cpp`` is imported before numpy everywhere in this room: with some CUDA builds the other order crashed at load.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import llama_cpp

_logger = logging.getLogger("trioserve.llama")
_capture = threading.local()
_LEVEL_ERROR = 4  # of ggml.h; the list in a comment of llama_cpp._logger is an older one


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _data: object) -> None:
    line = text.decode("utf-8", "replace").strip()
    if not line:
        return
    lines: list[str] | None = getattr(_capture, "lines", None)
    if lines is not None and level == _LEVEL_ERROR:
        lines.append(line)
    _logger.debug("%s", line)


@functools.cache
def start_backend() -> None:
    """Bring the library up, once in the life of the process."""
    llama_cpp.llama_log_set(_on_log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()


@contextlib.contextmanager
def captured_errors() -> Iterator[list[str]]:
    """Collect the error lines that the library logs in this thread."""
    lines: list[str] = []
    _capture.lines = lines
    try:
        yield lines
    finally:
        del _capture.lines


def flag_reader() -> Any:
    """Return a C function that tells whether the first byte of a two-byte buffer is set, as an abort callback.

    ggml asks its abort callback between graph nodes. A Python function would take the GIL each time; libc's ``strlen``
    doesn't: the length of the buffer's string is 0 while the flag is down and 1 once its first byte is 1, and only the
    low byte of the answer is read as a bool.
    """
    libc = ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)
    return ctypes.cast(libc.strlen, llama_cpp.llama_set_abort_callback.argtypes[1])
