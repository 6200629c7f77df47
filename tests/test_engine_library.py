"""What llama.cpp freed is the system's again, whatever threads it was made and freed in."""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trioserve.config.model_files import embedded_model_path
from trioserve.engine.base import LoadOptions, SessionOptions
from trioserve.engine.llama import LlamaEngine
from trioserve.engine.llama.library import returned_pages, start_backend

KIB, MIB = 1 << 10, 1 << 20
CYCLES = 6
OPTIONS = LoadOptions(gpu_layers=0, mmap=True, mlock=False)


def anonymous_memory():
    """Bytes of this process that are in memory and of no file; those of ``status`` lag behind by some for each core."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * KIB
    raise AssertionError("the system does not tell")


def load_and_free(contexts):
    """Load the model, give it sessions of such contexts, and free all of it."""
    weights = LlamaEngine().load(embedded_model_path(), OPTIONS)
    sessions = [
        weights.open_session(
            SessionOptions(n_ctx=n_ctx, n_batch=512, n_ubatch=512, kv_dtype="f16", flash_attention=None)
        )
        for n_ctx in contexts
    ]
    for session in reversed(sessions):
        session.close()
    weights.close()


def has_glibc():
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


@pytest.mark.skipif(not has_glibc(), reason="it is about glibc's heaps")
def test_the_end_of_a_heap_comes_back():
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    blocks = (ctypes.c_void_p * 150)()  # together not as large as a large buffer

    def fill():
        for index in range(len(blocks)):
            blocks[index] = libc.malloc(4 * KIB)
            ctypes.memset(blocks[index], 1, 4 * KIB)

    def free():
        for block in blocks:
            libc.free(block)

    start_backend()
    with returned_pages():
        pass  # what was free before is not counted
    with ThreadPoolExecutor(1) as thread:  # a fresh one, and with it another heap than the main one
        thread.submit(fill).result()
        before = anonymous_memory()
        with returned_pages():
            thread.submit(free).result()
        assert anonymous_memory() < before - 300 * KIB


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells")
def test_memory_comes_back_from_every_thread():
    def cycle(number):
        # Sizes change from time to time, as they do when models are reconfigured.
        with ThreadPoolExecutor(2) as threads:  # fresh ones, and with them other heaps
            list(threads.map(load_and_free, [[512 + 256 * (number % 3)] * 3, [768] * (1 + number % 3)]))
        return anonymous_memory()

    first, *_, last = [cycle(number) for number in range(CYCLES)]
    assert last < first + 24 * MIB
