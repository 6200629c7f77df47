"""Fixtures for tests that run models on the fake engine, and an end for tests that hang."""

from __future__ import annotations

import contextlib
import faulthandler
import os

import hypothesis
import pytest
import trio

from trioserve.config import Config, ModelConfig
from trioserve.http.bounded_stream import BoundedStream
from trioserve.runtime.cores import Cores
from trioserve.runtime.model import House, Model
from trioserve.runtime.residency import Residency
from trioserve.runtime.weights_cache import WeightsCache
from trioserve.service import open_service
from trioserve.testing import FakeEngine, FakeWeights

SAFETY_SECONDS = 40  # only a hang meets it; longer than the gates' own
HANG_SECONDS = 300  # for a whole test: then every thread's stack is printed and the run ends

# A machine that is busy with something else must not fail a property by its slowness.
hypothesis.settings.register_profile(
    "trioserve", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("trioserve")

_stderr = pytest.StashKey[int]()


def pytest_configure(config):
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        config.stash[_stderr] = os.dup(2)


def pytest_unconfigure(config):
    os.close(config.stash[_stderr])


@pytest.fixture(autouse=True)
def _ends_when_it_hangs(request):
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=request.config.stash[_stderr])
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def prompts(monkeypatch):
    """The texts that fakes tokenise, in order."""
    texts, tokenize = [], FakeWeights.tokenize
    monkeypatch.setattr(
        FakeWeights, "tokenize", lambda self, text, **how: texts.append(text) or tokenize(self, text, **how)
    )
    return texts


@pytest.fixture
def make_model_file(tmp_path):
    """Write the least that passes for a GGUF file."""

    def make(name="tiny.gguf"):
        path = tmp_path / name
        path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(64))
        return path

    return make


@pytest.fixture
def model_file(make_model_file):
    return make_model_file()


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def cores():
    return Cores(4)


@pytest.fixture
def cache(engine):
    return WeightsCache(engine)


@pytest.fixture
def house_for(engine, cache, cores):
    """What models share. Nobody limits how many of them are loaded, unless told otherwise."""

    def build(*, residency=None, max_queued=512, **more):
        return House(engine, cache, cores, residency or Residency(0, 0, list), max_queued=max_queued, **more)

    return build


@pytest.fixture
def model_for(model_file, house_for):
    """Open a model, unloaded, in a nursery of its own; leaving the block cancels it."""

    @contextlib.asynccontextmanager
    async def open_model(*, max_queued=512, stall_timeout=0, **settings):
        settings.setdefault("path", model_file)
        model = Model(ModelConfig(**settings), house_for(max_queued=max_queued, stall_timeout=stall_timeout))
        with trio.fail_after(SAFETY_SECONDS):
            async with trio.open_nursery() as nursery:
                await nursery.start(model.run)
                yield model
                nursery.cancel_scope.cancel()

    return open_model


@pytest.fixture
def service_for(engine, model_file):
    """Open a service; without models it has a lone lazy one named ``tiny``."""

    @contextlib.asynccontextmanager
    async def open_one(*models, **settings):
        config = Config(models=models or (ModelConfig(path=model_file, lazy=True),), **settings)
        with trio.fail_after(SAFETY_SECONDS):
            async with open_service(config, engine=engine) as service:
                yield service

    return open_one


@pytest.fixture
def eventually():
    """Let other tasks and threads go on until something is true."""

    async def wait(condition):
        with trio.fail_after(SAFETY_SECONDS):
            while not condition():
                await trio.lowlevel.checkpoint()

    return wait


@pytest.fixture
def closed_streams(monkeypatch):
    """The streams of the listener that were closed, each once."""
    closed = set()
    original = BoundedStream.aclose

    async def aclose(self):
        closed.add(self)
        await original(self)

    monkeypatch.setattr(BoundedStream, "aclose", aclose)
    return closed
