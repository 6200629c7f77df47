"""An engine without a model, for tests of everything around it. Ships with the package; no other room imports it."""

from trioserve.testing.fake_engine import FakeEngine, FakeSession, FakeWeights, fake_answer, fake_vector
from trioserve.testing.gate import ThreadGate

__all__ = ["FakeEngine", "FakeSession", "FakeWeights", "ThreadGate", "fake_answer", "fake_vector"]
