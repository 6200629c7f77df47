"""Requests for vectors on the fake engine: their way through the service, and how they end."""

from contextlib import ExitStack

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.config import ModelConfig
from trioserve.engine.base import UnfitOptions
from trioserve.errors import (
    ContextLengthError,
    EngineError,
    InvalidModelError,
    InvalidRequestError,
    ServerBusyError,
    ShuttingDownError,
    WrongTaskError,
)
from trioserve.scheduling.lifecycle import ModelState
from trioserve.service import BatchRequest, EmbeddingRequest, GenerationRequest, TextPrompt, TokenPrompt
from trioserve.service.ledger import Tally
from trioserve.testing import FakeWeights, fake_vector

TEXTS = [f"text {'x' * (number * 7 % 40)} {number}" for number in range(32)]


@pytest.fixture
def embedder_for(service_for, model_file):
    """Open a service with one model that embeds."""

    def build(*, lazy=False, server=None, **model):
        return service_for(ModelConfig(path=model_file, task="embed", lazy=lazy, **model), **(server or {}))

    return build


def wanted(*texts, **fields):
    return EmbeddingRequest([TextPrompt(text) for text in texts or ("text",)], **fields)


def expected(text, dimensions=None):
    return fake_vector(text.encode(), dimensions)


async def embed(service, request):
    with ExitStack() as resources:
        embedding = await service.embed(request, resources)
        return await embedding.vectors()


class Client:
    """A task that sends a request, in a cancel scope of its own."""

    def __init__(self, service, request):
        self.service, self.request = service, request
        self.scope = trio.CancelScope()
        self.vectors = self.error = None

    async def __call__(self):
        with self.scope:
            try:
                self.vectors = await embed(self.service, self.request)
            except Exception as error:
                self.error = error


def only(service):
    (model,) = service.models()
    return model


def tally(**counts):
    return Tally(**{"active": 0, "finished": 0, "failed": 0, "cancelled": 0, "rejected": 0, **counts})


# -- vectors


async def test_vectors_come_in_the_order_of_the_inputs(embedder_for):
    async with embedder_for(batch_capacity=8) as service:
        assert await embed(service, wanted(*TEXTS)) == [expected(text) for text in TEXTS]
        assert service.tally() == tally(finished=1)


async def test_a_slot_computes_as_many_inputs_together_as_its_capacity_in_its_own_session(
    embedder_for, engine, eventually
):
    engine.step_gate.shut()
    async with embedder_for(batch_capacity=8) as service, trio.open_nursery() as nursery:
        client = Client(service, wanted(*TEXTS))
        nursery.start_soon(client)
        await engine.step_gate.arrived()
        engine.step_gate.let(4)
        await engine.step_gate.arrived(4)
        await eventually(lambda: client.vectors is not None)
        (slot,) = service.registry.find(None).pool.slots
        assert slot.place.session.max_sequences == 8
        assert engine.closed == []


async def test_tokens_are_taken_as_they_are(embedder_for):
    request = EmbeddingRequest([TokenPrompt([1, 2, 256]), TextPrompt("a")])
    async with embedder_for() as service:
        assert await embed(service, request) == [fake_vector([1, 2, 256]), expected("a")]


async def test_tokens_are_counted(embedder_for):
    async with embedder_for() as service:
        with ExitStack() as resources:
            embedding = await service.embed(wanted("abc", "de"), resources)
            assert (embedding.prompt_tokens, embedding.model) == (5, "tiny")
            assert service.slots()[0].phase == "prefill"
            await embedding.vectors()
            assert service.slots()[0].phase == "finished"


async def test_vectors_are_cut_to_the_dimensions_that_were_asked_for(embedder_for):
    async with embedder_for() as service:
        assert await embed(service, wanted("a", "b", dimensions=5)) == [expected("a", 5), expected("b", 5)]


# -- what is refused, before a slot is taken


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (wanted("a", "x" * 101, "b"), ContextLengthError, r"input\[1\] has 101 tokens, .* holds 100 "),
        (wanted("x" * 101), ContextLengthError, r"^input has 101 tokens, .* holds 100 "),
        (wanted("a", "x" * 300_000), ContextLengthError, r"input\[1\] has at least 300000 tokens"),
        (EmbeddingRequest([TokenPrompt([1] * 101)]), ContextLengthError, r"^input has 101 tokens"),
        (EmbeddingRequest([TextPrompt("a"), TokenPrompt([1, 257])]), InvalidRequestError, r"input\[1\]\[1\] is 257"),
        (EmbeddingRequest([TokenPrompt([-1])]), InvalidRequestError, r"input\[0\] is -1"),
        (wanted("a", ""), InvalidRequestError, r"input\[1\] has no tokens"),
        (wanted("a", dimensions=33), InvalidRequestError, "dimensions is 33, .* have 32"),
    ],
)
async def test_what_can_not_be_honoured_is_refused_while_all_slots_are_busy(
    embedder_for, engine, request_, error, words
):
    engine.step_gate.shut()
    async with embedder_for(n_ctx=100) as service, trio.open_nursery() as nursery:
        await service.wait_started()
        nursery.start_soon(Client(service, wanted()))
        await engine.step_gate.arrived()
        with pytest.raises(error, match=words) as caught:
            await embed(service, request_)
        assert caught.value.param == ("dimensions" if request_.dimensions else "input")
        assert only(service).queued_requests == 0
        engine.step_gate.open()
    assert service.tally() == tally(finished=1)


async def test_an_input_fills_the_context(embedder_for):
    async with embedder_for(n_ctx=100) as service:
        assert await embed(service, wanted("x" * 100)) == [expected("x" * 100)]


@pytest.mark.parametrize("lazy", [False, True])
async def test_a_model_that_embeds_does_not_generate(embedder_for, engine, lazy):
    async with embedder_for(lazy=lazy) as service:
        await service.wait_started()
        generation = GenerationRequest(TextPrompt("a"))
        for request in (generation, BatchRequest([generation, generation])):
            with pytest.raises(WrongTaskError, match="task = 'embed', but this is a request to generate") as caught:
                async with service.generate(request):
                    pass
            assert caught.value.param == "model"
        assert service.tally() == tally()
        assert engine.loads == (not lazy)


@pytest.mark.parametrize("lazy", [False, True])
async def test_a_model_that_generates_does_not_embed(service_for, model_file, engine, lazy):
    async with service_for(ModelConfig(path=model_file, lazy=lazy)) as service:
        await service.wait_started()
        with pytest.raises(WrongTaskError, match="task = 'generate', but this is a request to embed"):
            await embed(service, wanted())
        assert service.tally() == tally()
        assert engine.loads == (not lazy)


async def test_a_request_that_was_queued_meets_the_task_of_its_admission(service_for, model_file, engine, eventually):
    settings = {"model_roots": (model_file.parent,), "management": True}
    engine.step_gate.shut()
    async with service_for(ModelConfig(path=model_file), **settings) as service, trio.open_nursery() as nursery:
        await service.wait_started()
        async with service.generate(GenerationRequest(TextPrompt("a"), max_tokens=1)) as generation:
            await engine.step_gate.arrived()
            nursery.start_soon(service.management.load, {"id": "tiny", "task": "embed"})
            (model,) = service.registry
            await eventually(lambda: model._gate.statistics().waiting_managers == 1)
            errors = []

            async def late():
                try:
                    async with service.generate(GenerationRequest(TextPrompt("b"))):
                        pass
                except WrongTaskError as error:
                    errors.append(error)

            nursery.start_soon(late)
            await wait_all_tasks_blocked()
            assert only(service).queued_requests == 1
            engine.step_gate.open()
            assert [part async for part in generation]
    assert len(errors) == 1
    assert service.tally().rejected == 1


# -- how it ends


async def test_a_failing_step_fails_the_request_and_not_the_next_one(embedder_for, engine):
    engine.failing_step = 2
    async with embedder_for(batch_capacity=2) as service:
        with pytest.raises(EngineError, match=r"^inference failed$"):
            await embed(service, wanted("a", "b", "c"))
        assert await embed(service, wanted("a")) == [expected("a")]
        assert service.tally() == tally(finished=1, failed=1)


async def test_a_step_that_raises_fails_the_request_and_not_the_next_one(embedder_for, engine):
    engine.raising_step = 1
    async with embedder_for() as service:
        with pytest.raises(EngineError):
            await embed(service, wanted())
        assert await embed(service, wanted("a")) == [expected("a")]


async def test_a_request_that_is_cancelled_in_the_middle_frees_its_slot(embedder_for, engine):
    engine.step_gate.shut()
    async with embedder_for(batch_capacity=2) as service, trio.open_nursery() as nursery:
        client = Client(service, wanted("a", "b", "c", "d"))
        nursery.start_soon(client)
        engine.step_gate.let(1)
        await engine.step_gate.arrived(2)
        client.scope.cancel()
        next_one = Client(service, wanted("e"))
        nursery.start_soon(next_one)
        engine.step_gate.open()
    assert client.vectors is client.error is None
    assert next_one.vectors == [expected("e")]
    assert service.tally() == tally(finished=1, cancelled=1)


async def test_a_request_that_may_not_wait_is_turned_away(embedder_for, engine):
    engine.step_gate.shut()
    async with embedder_for() as service, trio.open_nursery() as nursery:
        await service.wait_started()
        nursery.start_soon(Client(service, wanted()))
        await engine.step_gate.arrived()
        with pytest.raises(ServerBusyError):
            await embed(service, wanted(busy_timeout_ms=0))
        engine.step_gate.open()


async def test_a_drain_lets_it_finish_and_takes_no_other(embedder_for, engine):
    engine.step_gate.shut()
    async with embedder_for() as service, trio.open_nursery() as nursery:
        client = Client(service, wanted("a"))
        nursery.start_soon(client)
        await engine.step_gate.arrived()
        nursery.start_soon(service.drain)
        await wait_all_tasks_blocked()
        with pytest.raises(ShuttingDownError):
            await embed(service, wanted("b"))
        engine.step_gate.open()
    assert client.vectors == [expected("a")]


async def test_a_drain_cuts_it_off_at_its_end(embedder_for, engine):
    engine.step_gate.shut()
    async with embedder_for(server={"drain_timeout_ms": 0}) as service, trio.open_nursery() as nursery:
        client = Client(service, wanted("a"))
        nursery.start_soon(client)
        await engine.step_gate.arrived()
        report = await service.drain()
        engine.step_gate.open()
    assert isinstance(client.error, ShuttingDownError)
    assert (report.cancelled, report.complete) == (1, False)


async def test_a_first_load_that_fails_for_the_task_is_the_operators_error(embedder_for, monkeypatch):
    def refuse(self, options):
        raise UnfitOptions("it is made for something else", "task")

    monkeypatch.setattr(FakeWeights, "open_session", refuse)
    async with embedder_for(lazy=True) as service:
        with pytest.raises(InvalidModelError, match="made for something else"):
            await embed(service, wanted())
        assert only(service).state is ModelState.UNLOADED
