"""What llama.cpp freed is the system's again, whatever threads it was made and freed in."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trioserve.config.model_files import embedded_model_path
from trioserve.engine.base import LoadOptions, SessionOptions
from trioserve.engine.llama import LlamaEngine

MIB = 1 << 20
CYCLES = 6
OPTIONS = LoadOptions(gpu_layers=0, mmap=True, mlock=False)


def anonymous_memory():
    """Bytes of this process that are in memory and of no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
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


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells")
def test_memory_comes_back_from_every_thread():
    def cycle(number):
        # Sizes change from time to time, as they do when models are reconfigured.
        with ThreadPoolExecutor(2) as threads:  # fresh ones, and with them other heaps
            list(threads.map(load_and_free, [[512 + 256 * (number % 3)] * 3, [768] * (1 + number % 3)]))
        return anonymous_memory()

    first, *_, last = [cycle(number) for number in range(CYCLES)]
    assert last < first + 24 * MIB
