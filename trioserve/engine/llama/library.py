"""The shared library: brought up once, and its log kept off the terminal.

``llama_cpp`` is imported before numpy everywhere in this room. Where its libraries carry a C++ runtime of their own (a
static libstdc++, as some images for CUDA build them) and numpy comes first, the process crashes when a tokenizer
compiles its first ``std::regex``: the shared libstdc++ that numpy brings along takes the place of a part of the
symbols, so that the ids of locale facets come from one runtime and the facets from the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp

_logger = logging.getLogger("trioserve.llama")
_capture = threading.local()
_GPUS = (1, 2)  # GGML_BACKEND_DEVICE_TYPE_GPU and _IGPU of ggml-backend.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGE_BUFFER = 1 << 20  # bytes
_SMALL_END = 1 << 17  # bytes; glibc's own default
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18  # of Linux on x86-64
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


def _libc_function(name: str) -> Any:
    """A function of glibc's allocator, or one that does nothing where there is no such allocator."""
    return getattr(ctypes.CDLL(None) if sys.platform == "linux" else None, name, lambda *_: None)


@functools.cache
def has_amx() -> bool:
    """Whether llama.cpp computes with AMX: it was built with it, and the system lets the process use it.

    Where there is a GPU it does not, even if no layers are on it: weights lie in that one's memory of the host then.
    """
    if b"AMX_INT8 = 1" not in llama_cpp.llama_print_system_info() or sys.platform != "linux":
        return False
    if llama_cpp.llama_supports_gpu_offload():
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def _return_large_buffers() -> None:
    """Make glibc give large buffers back to the system the moment they are freed.

    Left alone, it raises its bound for that to the size of any such buffer that is freed, and the bound for what may
    stay free at the end of a heap to twice as much. Once a cache was freed, others come from the heaps of the threads
    that ask for them, and each of those keeps tens of megabytes. Setting the first bound leaves the second one where it
    is by then, at megabytes: so both are set.
    """
    set_bound = _libc_function("mallopt")
    set_bound(_M_MMAP_THRESHOLD, _LARGE_BUFFER)
    set_bound(_M_TRIM_THRESHOLD, _LARGE_BUFFER)


@contextlib.contextmanager
def returned_pages() -> Iterator[None]:
    """Free within the block, and what is free on the heaps of all threads is the system's. Takes some milliseconds.

    A vocabulary is many small blocks; what stays between them keeps the heap of the thread that loaded it from
    shrinking, so ``malloc_trim`` gives back the free pages inside of heaps. It leaves the free end of each heap but the
    main one: that shrinks only in a ``free`` that makes it larger than a bound. This bound is low for the length of the
    block, and no longer: arrays of the size of a vocabulary, which logprobs make for each token, would lose their pages
    each time and get them anew.
    """
    set_bound = _libc_function("mallopt")
    set_bound(_M_TRIM_THRESHOLD, _SMALL_END)
    try:
        yield
    finally:
        set_bound(_M_TRIM_THRESHOLD, _LARGE_BUFFER)
        _libc_function("malloc_trim")(ctypes.c_size_t(0))


@functools.cache
def start_backend() -> None:
    """Bring the library up, once in the life of the process."""
    _return_large_buffers()
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


def free_device_memory() -> int | None:
    """Bytes that are free on all GPUs together; None where the library knows none.

    The first call makes CUDA's context of this process, so that what is left is told without it.

    The binding does not wrap this part of ggml: ``ggml_backend_dev_memory`` of ggml-backend.h.
    """
    if not llama_cpp.llama_supports_gpu_offload():
        return None
    ggml = _ggml()
    if ggml is None:
        return None
    free, total, sums = ctypes.c_size_t(), ctypes.c_size_t(), []
    for index in range(ggml.ggml_backend_dev_count()):
        device = ctypes.c_void_p(ggml.ggml_backend_dev_get(index))
        if ggml.ggml_backend_dev_type(device) in _GPUS:
            ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
            sums.append(free.value)
    return sum(sums) if sums else None


@functools.cache
def _ggml() -> Any:
    """The functions of ggml's backends, wherever the library was built to have them; None where they are hidden."""
    folder = Path(llama_cpp.__file__).parent / "lib"
    found = sorted(folder.glob("*ggml.*")) or sorted(folder.glob("*llama.*"))
    try:
        # libggml depends on libggml-base, so that both parts of the interface are found through it.
        library = ctypes.CDLL(str(found[0]))
        library.ggml_backend_dev_count.restype = ctypes.c_size_t
        library.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
        library.ggml_backend_dev_get.restype = ctypes.c_void_p
        library.ggml_backend_dev_type.restype = ctypes.c_int
        library.ggml_backend_dev_memory.restype = None
    except (IndexError, OSError, AttributeError):
        return None
    return library


def flag_reader() -> Any:
    """Return a C function that tells whether the first byte of a two-byte buffer is set, as an abort callback.

    ggml asks its abort callback between graph nodes. A Python function would take the GIL each time; libc's ``strlen``
    doesn't: the length of the buffer's string is 0 while the flag is down and 1 once its first byte is 1, and only the
    low byte of the answer is read as a bool.
    """
    libc = ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)
    return ctypes.cast(libc.strlen, llama_cpp.llama_set_abort_callback.argtypes[1])
