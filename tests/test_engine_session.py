"""How many tokens of prompts a step of a session evaluates."""

import pytest

from trioserve.engine.base import SessionOptions
from trioserve.engine.llama.session import CPU_BESIDE, CPU_CHUNK, CPU_SHARE, pieces


def on_a_cpu(**options):
    return pieces(SessionOptions(**{"n_ubatch": 512} | options), offloaded=False)


def test_a_prompt_that_is_alone_goes_in_larger_pieces_than_one_that_others_wait_for():
    assert on_a_cpu(threads=2) == (CPU_CHUNK, CPU_BESIDE)
    assert CPU_BESIDE < CPU_CHUNK


def test_many_threads_get_larger_pieces():
    assert on_a_cpu(threads=16) == (16 * CPU_SHARE, 16 * CPU_SHARE)
    assert on_a_cpu(threads=6) == (CPU_CHUNK, 6 * CPU_SHARE)


@pytest.mark.parametrize("threads", [1, 2, 16, 256])
@pytest.mark.parametrize("wanted", [0, 2, 40, 300, 4096])
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize(("n_ubatch", "n_batch"), [(512, 2048), (64, 2048), (512, 100), (32, 32)])
def test_no_piece_is_more_than_a_micro_batch_or_a_batch(threads, wanted, offloaded, n_ubatch, n_batch):
    options = SessionOptions(n_ubatch=n_ubatch, n_batch=n_batch, threads=threads, prefill_chunk=wanted)
    chunk, beside = pieces(options, offloaded=offloaded)
    assert 0 < beside <= chunk <= min(n_ubatch, n_batch)


@pytest.mark.parametrize(("wanted", "expected"), [(40, (CPU_CHUNK, 40)), (300, (300, 300)), (4096, (512, 512))])
def test_what_is_asked_for_goes_for_the_piece_that_others_wait_for(wanted, expected):
    assert on_a_cpu(threads=2, prefill_chunk=wanted) == expected


def test_a_device_gets_as_much_as_it_takes_at_once():
    assert pieces(SessionOptions(threads=2), offloaded=True) == (512, 512)
    assert pieces(SessionOptions(threads=2, prefill_chunk=100), offloaded=True) == (512, 100)
