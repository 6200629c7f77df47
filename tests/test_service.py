"""The service on the fake engine: a request's way, the book of requests, and the end."""

import contextlib
import json
import logging
import random
import threading
from collections import Counter

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.config import ModelConfig
from trioserve.engine.base import Constraint, ConstraintKind, Failed, FinishReason
from trioserve.errors import (
    ChatTemplateError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
    ServerBusyError,
    ShuttingDownError,
)
from trioserve.runtime.job import BUFFERED_EVENTS
from trioserve.scheduling.lifecycle import ModelState, ProcessPhase
from trioserve.service import (
    BatchRequest,
    ChatPrompt,
    Done,
    Failure,
    GenerationRequest,
    TextDelta,
    TextPrompt,
    TokenPrompt,
    Usage,
)
from trioserve.service.ledger import Tally
from trioserve.testing import FakeSession, FakeWeights, ThreadGate, fake_answer

NOTHING = Tally(active=0, finished=0, failed=0, cancelled=0, rejected=0)


def request(prompt="prompt", max_tokens=5, **fields):
    if isinstance(prompt, str):
        prompt = TextPrompt(prompt)
    return GenerationRequest(prompt, max_tokens=max_tokens, **fields)


def expected(prompt, tokens=5):
    return fake_answer(prompt.encode(), tokens)


async def collect(service, wanted):
    """All parts: the text, and the ``Done`` at the end."""
    async with service.generate(wanted) as generation:
        parts = [part async for part in generation]
    assert all(isinstance(part, TextDelta) and part.text for part in parts[:-1])
    assert isinstance(parts[-1], Done)
    return "".join(part.text for part in parts[:-1]), parts[-1]


class Client:
    """A task that sends a request, in a cancel scope of its own."""

    def __init__(self, service, wanted):
        self.service, self.wanted = service, wanted
        self.scope = trio.CancelScope()
        self.text = ""
        self.done = self.error = None

    async def __call__(self):
        with self.scope:
            try:
                async with self.service.generate(self.wanted) as generation:
                    async for part in generation:
                        if isinstance(part, Done):
                            self.done = part
                        else:
                            self.text += part.text
            except Exception as error:
                self.error = error


async def send(nursery, service, *wanted):
    """Start clients one after another, each settled before the next."""
    clients = [Client(service, each) for each in wanted]
    for client in clients:
        nursery.start_soon(client)
        await wait_all_tasks_blocked()
    return clients


def only(service):
    (model,) = service.models()
    return model


async def loaded(service):
    """Load the lone model without leaving a trace in the book."""
    (model,) = service.registry
    await model.ensure_loaded()


# -- from a request to an answer


async def test_a_text_is_continued(service_for):
    async with service_for() as service:
        text, done = await collect(service, request("hello", 7))
    assert text == expected("hello", 7)
    assert (done.finish_reason, done.usage) == (FinishReason.LENGTH, Usage(prompt_tokens=5, completion_tokens=7))
    assert done.usage.total_tokens == 12


async def test_tokens_are_continued(service_for):
    async with service_for() as service:
        text, _ = await collect(service, request(TokenPrompt(list(b"hello")), 7))
    assert text == expected("hello", 7)


async def test_a_conversation_goes_through_the_models_template(service_for, model_file):
    template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"
    async with service_for(ModelConfig(path=model_file, chat_template=template)) as service:
        text, done = await collect(service, request(ChatPrompt([{"role": "user", "content": "hello"}])))
    assert text == expected("[user] hello")
    assert done.usage.prompt_tokens == len("[user] hello")


async def test_an_answer_that_ends_by_itself_says_so(service_for, engine):
    engine.answer_tokens = 3
    async with service_for() as service:
        text, done = await collect(service, request("hello", 100))
    assert text == expected("hello", 100)[:3]
    assert (done.finish_reason, done.usage) == (FinishReason.STOP, Usage(5, 3))


async def test_a_stop_string_ends_the_answer_and_is_not_in_it(service_for):
    whole = expected("hello", 60)
    stop = whole[20:23]
    async with service_for() as service:
        text, done = await collect(service, request("hello", 60, stops=(stop,)))
    assert text == whole[: whole.index(stop)]
    assert done.finish_reason is FinishReason.STOP


async def test_without_a_limit_the_answer_fills_the_context(service_for, model_file):
    async with service_for(ModelConfig(path=model_file, n_ctx=32)) as service:
        text, done = await collect(service, request("x" * 20, None))
    assert len(text) == 12
    assert done.finish_reason is FinishReason.LENGTH


async def test_parts_end_and_stay_ended(service_for):
    async with service_for() as service, service.generate(request()) as generation:
        while await generation.next_parts():
            pass
        assert await generation.next_parts() == []


async def test_concurrent_answers_do_not_mix(service_for, model_file):
    prompts = [f"prompt {number}" for number in range(40)]
    async with service_for(ModelConfig(path=model_file, slots=3)) as service, trio.open_nursery() as nursery:
        clients = [Client(service, request(prompt, 30)) for prompt in prompts]
        for client in clients:
            nursery.start_soon(client)
    assert [client.text for client in clients] == [expected(prompt, 30) for prompt in prompts]
    assert [client.done.usage for client in clients] == [Usage(len(prompt), 30) for prompt in prompts]


async def test_a_stream_and_its_neighbours_all_progress(service_for, model_file, engine, eventually):
    engine.step_gate.shut()
    async with service_for(ModelConfig(path=model_file, slots=4)) as service, trio.open_nursery() as nursery:
        await service.wait_started()
        clients = await send(nursery, service, *[request(f"{number}", 9) for number in range(4)])
        await engine.step_gate.arrived(4)
        engine.step_gate.open()
    assert [client.done.finish_reason for client in clients] == [FinishReason.LENGTH] * 4


# -- models


async def test_a_lazy_model_is_loaded_by_its_first_request(service_for, engine):
    async with service_for() as service:
        await service.wait_started()
        assert (engine.loads, only(service).state, service.ready) == (0, ModelState.UNLOADED, True)
        assert (await collect(service, request()))[0] == expected("prompt")
        assert (engine.loads, only(service).state) == (1, ModelState.READY)


async def test_a_failed_first_load_fails_that_request_and_the_next_one_retries(service_for, engine):
    engine.failing_loads = 1
    async with service_for() as service:
        with pytest.raises(ModelLoadError):
            await collect(service, request())
        assert only(service).active_slots == 0
        assert (await collect(service, request()))[0] == expected("prompt")
        assert service.tally() == Tally(active=0, finished=1, failed=1, cancelled=0, rejected=0)


async def test_a_request_names_its_model(service_for, make_model_file):
    paths = [make_model_file(name) for name in ("a.gguf", "b.gguf")]
    async with service_for(*[ModelConfig(path=path, lazy=True) for path in paths]) as service:
        async with service.generate(request(model="b")) as generation:
            assert generation.model == "b"
        with pytest.raises(InvalidRequestError, match="a, b"):
            await collect(service, request())
        with pytest.raises(ModelNotFoundError, match="'c'"):
            await collect(service, request(model="c"))
        assert service.tally().accepted == 1
        assert [model.loaded for model in service.models()] == [False, True]


# -- before a slot is taken


@pytest.mark.parametrize("length", [32, 33, 1000])
async def test_a_prompt_that_does_not_fit_is_refused_before_a_slot_is_taken(service_for, model_file, engine, length):
    config = ModelConfig(path=model_file, n_ctx=32, max_queued_requests=0)
    engine.step_gate.shut()
    async with service_for(config) as service, trio.open_nursery() as nursery:
        await service.wait_started()
        (active,) = await send(nursery, service, request())
        before = only(service)
        # Slot and queue are full: whoever got as far as admission would hear of that instead.
        with pytest.raises(ContextLengthError, match=f"{length} tokens.*32") as caught:
            await collect(service, request("x" * length))
        assert caught.value.param == "prompt"
        assert only(service) == before
        assert service.tally() == Tally(active=1, finished=0, failed=0, cancelled=0, rejected=0)
        engine.step_gate.open()
    assert active.text == expected("prompt")


async def test_the_longest_prompt_that_fits_leaves_room_for_one_token(service_for, model_file):
    async with service_for(ModelConfig(path=model_file, n_ctx=32)) as service:
        await service.wait_started()
        text, done = await collect(service, request("x" * 31, 100))
    assert len(text) == 1
    assert done.finish_reason is FinishReason.LENGTH


async def test_a_prompt_that_does_not_fit_is_refused_after_the_load_where_one_was_needed(service_for, model_file):
    async with service_for(ModelConfig(path=model_file, n_ctx=32, lazy=True)) as service:
        with pytest.raises(ContextLengthError):
            await collect(service, request("x" * 32))
        assert (only(service).loaded, only(service).active_slots) == (True, 0)
        assert service.tally() == Tally(active=0, finished=0, failed=0, cancelled=0, rejected=1)


@pytest.mark.parametrize("prompt", [TextPrompt(""), TokenPrompt([])])
async def test_an_empty_prompt_starts_a_text_where_the_model_can(service_for, prompt):
    async with service_for() as service:
        await loaded(service)
        with pytest.raises(InvalidRequestError, match="empty"):
            await collect(service, request(prompt))
        (model,) = service.registry
        model.pool.weights.bos = 7
        text, done = await collect(service, request(prompt))
    assert text == fake_answer(bytes([7]), 5)
    assert done.usage.prompt_tokens == 1


@pytest.mark.parametrize("tokens", [[-1], [257], [1, 2, 10**12]])
async def test_tokens_the_model_does_not_have_are_refused(service_for, tokens):
    async with service_for() as service:
        await loaded(service)
        with pytest.raises(InvalidRequestError, match=rf"prompt\[{len(tokens) - 1}\] is {tokens[-1]}"):
            await collect(service, request(TokenPrompt(tokens)))
        assert service.tally() == NOTHING


async def test_messages_that_the_template_refuses_take_no_slot(service_for, model_file):
    config = ModelConfig(path=model_file, chat_template="{{ raise_exception('no system role') }}")
    async with service_for(config) as service:
        await service.wait_started()
        with pytest.raises(ChatTemplateError, match="no system role"):
            await collect(service, request(ChatPrompt([{"role": "user", "content": "hello"}])))
        assert (service.tally(), only(service).active_slots) == (NOTHING, 0)


# -- admission


async def test_a_request_that_may_not_wait_is_rejected_at_once(service_for, engine):
    engine.step_gate.shut()
    async with service_for() as service, trio.open_nursery() as nursery:
        await loaded(service)
        (active,) = await send(nursery, service, request())
        with pytest.raises(ServerBusyError):
            await collect(service, request(busy_timeout_ms=0))
        assert service.tally() == Tally(active=1, finished=0, failed=0, cancelled=0, rejected=1)
        engine.step_gate.open()
    assert active.done is not None


@pytest.mark.parametrize(
    ("server", "model"), [({"busy_timeout_ms": 0}, {}), ({}, {"busy_timeout_ms": 0}), ({"max_queued_requests": 0}, {})]
)
async def test_server_and_model_bound_the_wait_as_well(service_for, model_file, engine, server, model):
    engine.step_gate.shut()
    config = ModelConfig(path=model_file, lazy=True, **model)
    async with service_for(config, **server) as service, trio.open_nursery() as nursery:
        await send(nursery, service, request())
        with pytest.raises(ServerBusyError):
            await collect(service, request(busy_timeout_ms=60_000))
        engine.step_gate.open()


async def test_the_models_queue_bound_replaces_the_servers(service_for, model_file, engine):
    engine.step_gate.shut()
    config = ModelConfig(path=model_file, lazy=True, max_queued_requests=1)
    async with service_for(config, max_queued_requests=0) as service, trio.open_nursery() as nursery:
        await send(nursery, service, request(), request())
        assert only(service).queued_requests == 1
        engine.step_gate.open()


async def test_requests_are_admitted_in_the_order_of_their_arrival(service_for, engine, monkeypatch):
    order = []
    add = FakeSession.add
    monkeypatch.setattr(
        FakeSession, "add", lambda self, sequence: order.append(bytes(sequence.prompt)) or add(self, sequence)
    )
    engine.step_gate.shut()
    async with service_for() as service, trio.open_nursery() as nursery:
        await send(nursery, service, *[request(f"{number}") for number in range(8)])
        engine.step_gate.open()
    assert order == [b"%d" % number for number in range(8)]


# -- the book


async def test_each_outcome_is_counted_once(service_for, engine, eventually):
    async with service_for() as service:
        await loaded(service)
        await collect(service, request())
        assert service.tally() == Tally(active=0, finished=1, failed=0, cancelled=0, rejected=0)

        engine.raising_step = 6
        with pytest.raises(EngineError):
            await collect(service, request())
        assert service.tally() == Tally(active=0, finished=1, failed=1, cancelled=0, rejected=0)

        engine.step_gate.shut()
        async with trio.open_nursery() as nursery:
            active, queued = await send(nursery, service, request(), request())
            assert service.tally() == Tally(active=2, finished=1, failed=1, cancelled=0, rejected=0)
            queued.scope.cancel()
            await wait_all_tasks_blocked()
            assert service.tally() == Tally(active=1, finished=1, failed=1, cancelled=1, rejected=0)
            with pytest.raises(ServerBusyError):
                await collect(service, request(busy_timeout_ms=0))
            assert service.tally() == Tally(active=1, finished=1, failed=1, cancelled=1, rejected=1)
            active.scope.cancel()
        assert service.tally() == Tally(active=0, finished=1, failed=1, cancelled=2, rejected=1)
        assert service.tally().accepted == 5
        await eventually(lambda: only(service).active_slots == 0)


@pytest.mark.parametrize("moment", ["queued", "loading", "prefill", "decode", "paused", "finished"])
async def test_a_client_that_leaves_counts_by_what_it_saw(service_for, engine, eventually, moment):
    gate = engine.load_gate if moment == "loading" else engine.step_gate
    gate.shut()
    async with service_for() as service:
        async with contextlib.AsyncExitStack() as stack:
            nursery = await stack.enter_async_context(trio.open_nursery())
            if moment == "queued":
                (model,) = service.registry
                stack.callback((await model.admit(None)).release)
            if moment in {"paused", "finished"}:
                gate.open()
                generation = await stack.enter_async_context(service.generate(request(max_tokens=3 * BUFFERED_EVENTS)))
                await eventually(lambda: generation._job.full)
                if moment == "finished":
                    assert "".join([part.text async for part in generation if isinstance(part, TextDelta)])
            else:
                (client,) = await send(nursery, service, request())
                if moment == "decode":
                    gate.let(2)
                    await eventually(lambda: len(client.text) == 2)
                elif moment != "queued":
                    await gate.arrived()
                client.scope.cancel()
        ends = {"finished": 1, "cancelled": 0} if moment == "finished" else {"finished": 0, "cancelled": 1}
        assert service.tally() == Tally(active=0, failed=0, rejected=0, **ends)
        gate.open()
        await eventually(lambda: only(service).active_slots == 0)
        assert (await collect(service, request()))[0] == expected("prompt")


async def test_a_client_that_leaves_the_queue_leaves_the_active_one_alone(service_for, engine):
    engine.step_gate.shut()
    async with service_for() as service, trio.open_nursery() as nursery:
        active, queued = await send(nursery, service, request("active", 400), request("queued"))
        await engine.step_gate.arrived()
        queued.scope.cancel()
        engine.step_gate.open()
    assert active.text == expected("active", 400)
    assert active.done.usage.completion_tokens == 400
    assert queued.text == ""


async def test_the_book_adds_up_at_all_times_under_traffic(service_for, model_file, engine):
    choice = random.Random(7)
    started = 0
    seen = []

    async with service_for(ModelConfig(path=model_file, slots=2, max_queued_requests=5)) as service:
        await service.wait_started()

        async def one(number):
            nonlocal started
            await trio.lowlevel.checkpoint()
            for _ in range(choice.randrange(20)):
                await trio.lowlevel.checkpoint()
            tokens, wait = choice.choice([1, 5, 50]), choice.choice([None, 0, 1, 60_000])
            client = Client(service, request(f"{number}", tokens, busy_timeout_ms=wait))
            started += 1
            if number % 4 == 0:
                client.scope.cancel()
            await client()
            seen.append((service.tally(), started))

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(one, number)
        assert started == 100
        end = service.tally()
    assert (end.accepted, end.active, end.failed) == (100, 0, 0)
    for tally, so_far in seen:
        assert tally.accepted == so_far
        assert min(tally.active, tally.finished, tally.cancelled, tally.rejected) >= 0


# -- readiness


async def test_readiness_waits_for_the_models_that_load_at_the_start(service_for, model_file, engine):
    engine.load_gate.shut()
    async with service_for(ModelConfig(path=model_file)) as service:
        await engine.load_gate.arrived()
        assert not service.ready
        engine.load_gate.open()
        await service.wait_started()
        assert service.ready
        await service.drain()
        assert not service.ready


async def test_a_model_that_fails_at_the_start_keeps_the_service_unready_until_it_loads(
    service_for, model_file, engine
):
    engine.failing_loads = 1
    async with service_for(ModelConfig(path=model_file)) as service:
        with pytest.raises(ModelLoadError):
            await service.wait_started()
        assert not service.ready
        await collect(service, request())
        assert service.ready


async def test_an_unloaded_model_does_not_make_the_service_unready(service_for, model_file):
    async with service_for(ModelConfig(path=model_file)) as service:
        await service.wait_started()
        (model,) = service.registry
        await model.unload()
        assert service.ready


async def test_models_load_side_by_side_at_the_start(service_for, make_model_file, engine):
    engine.load_gate.shut()
    configs = [ModelConfig(path=make_model_file(f"{name}.gguf")) for name in "abc"]
    async with service_for(*configs) as service:
        await engine.load_gate.arrived(3)
        engine.load_gate.open()
        await service.wait_started()
        assert all(model.loaded for model in service.models())


# -- drain


async def test_a_drain_without_work_is_over_at_once(service_for):
    async with service_for() as service:
        report = await service.drain()
        assert (report.finished, report.failed, report.cancelled, report.rejected) == (0, 0, 0, 0)
        assert report.complete
        assert service.phase is ProcessPhase.STOPPED


async def test_a_drain_lets_active_and_queued_requests_finish_and_turns_newcomers_away(service_for, engine):
    reports = []
    engine.step_gate.shut()

    async def drain(service):
        reports.append(await service.drain())

    async with service_for() as service, trio.open_nursery() as nursery:
        clients = await send(nursery, service, request("active"), request("queued"), request("too"))
        await engine.step_gate.arrived()
        nursery.start_soon(drain, service)
        await wait_all_tasks_blocked()
        assert (service.phase, service.ready) == (ProcessPhase.DRAINING, False)
        for _ in range(2):
            with pytest.raises(ShuttingDownError):
                await collect(service, request("newcomer"))
        assert reports == []
        engine.step_gate.open()
    assert [client.text for client in clients] == [expected("active"), expected("queued"), expected("too")]
    (report,) = reports
    assert (report.finished, report.failed, report.cancelled, report.rejected) == (3, 0, 0, 2)
    assert report.complete
    assert service.tally() == Tally(active=0, finished=3, failed=0, cancelled=0, rejected=2)


async def test_a_report_counts_the_drain_only(service_for, engine):
    async with service_for() as service:
        await collect(service, request())
        report = await service.drain()
    assert (report.finished, service.tally().finished) == (0, 1)


async def test_a_drain_in_a_hurry_cuts_off_what_is_left_with_an_error(service_for, model_file, engine):
    reports = []
    engine.step_gate.shut()

    async def drain(service):
        reports.append(await service.drain())

    async with service_for(ModelConfig(path=model_file, slots=2)) as service, trio.open_nursery() as nursery:
        await service.wait_started()
        wanted = [request(f"{number}", 50) for number in range(4)]
        clients = await send(nursery, service, *wanted)
        engine.step_gate.let(6)
        await engine.step_gate.arrived(8)
        nursery.start_soon(drain, service)
        await wait_all_tasks_blocked()
        service.hurry()
    assert [type(client.error) for client in clients] == [ShuttingDownError] * 4
    assert sum(len(client.text) for client in clients) == 6, "what had been made reached the clients"
    assert [client.done for client in clients] == [None] * 4
    (report,) = reports
    assert (report.finished, report.failed, report.cancelled, report.rejected) == (0, 0, 4, 0)
    assert not report.complete


async def test_a_hurry_before_the_drain_leaves_no_time(service_for, engine):
    engine.step_gate.shut()
    async with service_for() as service, trio.open_nursery() as nursery:
        (client,) = await send(nursery, service, request())
        service.hurry()
        report = await service.drain()
    assert isinstance(client.error, ShuttingDownError)
    assert report.cancelled == 1


async def test_a_drain_cuts_off_at_its_timeout(service_for, engine):
    engine.step_gate.shut()
    async with service_for(drain_timeout_ms=5) as service, trio.open_nursery() as nursery:
        clients = await send(nursery, service, request("active"), request("queued"))
        await engine.step_gate.arrived()
        report = await service.drain()
    assert [type(client.error) for client in clients] == [ShuttingDownError] * 2
    assert (report.cancelled, report.complete) == (2, False)
    assert report.seconds >= 0.005


async def test_a_drain_without_time_still_finds_an_idle_service_drained(service_for):
    async with service_for(drain_timeout_ms=0) as service:
        await collect(service, request())
        assert (await service.drain()).complete


async def test_a_request_that_waits_for_a_load_is_cut_off_without_waiting_for_it(service_for, engine):
    engine.load_gate.shut()
    async with service_for() as service:
        async with trio.open_nursery() as nursery:
            (client,) = await send(nursery, service, request())
            await engine.load_gate.arrived()
            service.hurry()
            report = await service.drain()
        assert isinstance(client.error, ShuttingDownError)
        assert (report.cancelled, report.complete) == (1, False)
        assert only(service).state is ModelState.LOADING
        engine.load_gate.open()


async def test_a_client_that_does_not_read_is_abandoned_after_the_drain(service_for, eventually, monkeypatch):
    monkeypatch.setattr("trioserve.service.service.CUT_GRACE", 0.005)
    async with service_for() as service, service.generate(request(max_tokens=1000)) as generation:
        await eventually(lambda: generation._job.full)
        service.hurry()
        report = await service.drain()
        assert (report.cancelled, report.complete) == (1, False)
        await eventually(lambda: only(service).active_slots == 0)
        with pytest.raises(ShuttingDownError):
            await generation.next_parts()
    assert service.tally() == Tally(active=0, finished=0, failed=0, cancelled=1, rejected=0)


async def test_a_request_admitted_in_the_tick_of_the_cut_is_cut_off_as_well(service_for, engine):
    async with service_for() as service, trio.open_nursery() as nursery:
        await loaded(service)
        (model,) = service.registry
        lease = await model.admit(None)
        engine.step_gate.shut()
        (client,) = await send(nursery, service, request())
        nursery.start_soon(service.drain)
        await wait_all_tasks_blocked()
        lease.release()
        service._ledger.cut(ShuttingDownError("over"))
        await wait_all_tasks_blocked()
        assert isinstance(client.error, ShuttingDownError)
        assert service.tally() == Tally(active=0, finished=0, failed=0, cancelled=1, rejected=0)


async def test_a_request_abandoned_in_the_tick_of_its_admission_ends_in_order(service_for, engine, eventually):
    async with service_for() as service, trio.open_nursery() as nursery:
        await loaded(service)
        (model,) = service.registry
        lease = await model.admit(None)
        engine.step_gate.shut()
        (client,) = await send(nursery, service, request())
        lease.release()
        service._ledger.cut(ShuttingDownError("over"))
        service._ledger.abandon()
        await wait_all_tasks_blocked()
        assert isinstance(client.error, ShuttingDownError)
        await eventually(lambda: only(service).active_slots == 0)


# -- while a prompt is being prepared

LONG = "x" * 5000  # prepared in a thread


@pytest.fixture
def tokenize_gate(monkeypatch):
    """Passed by every tokenisation of a long prompt."""
    gate, freed = ThreadGate(), []
    tokenize, close = FakeWeights.tokenize, FakeWeights.close

    def held(self, text, **options):
        if len(text) >= len(LONG):
            gate.wait()
            assert self not in freed, "freed while it was in use"
        return tokenize(self, text, **options)

    monkeypatch.setattr(FakeWeights, "tokenize", held)
    monkeypatch.setattr(FakeWeights, "close", lambda self: freed.append(self) or close(self))
    return gate


@pytest.fixture
def roomy(model_file):
    return ModelConfig(path=model_file, n_ctx=8192)


async def test_weights_outlast_a_preparation_that_uses_them(service_for, roomy, engine, tokenize_gate):
    tokenize_gate.shut()
    async with service_for(roomy) as service, trio.open_nursery() as nursery:
        await service.wait_started()
        (client,) = await send(nursery, service, request(LONG))
        await tokenize_gate.arrived()
        (model,) = service.registry
        nursery.start_soon(model.unload)
        await wait_all_tasks_blocked()
        assert "tiny" not in engine.closed
        tokenize_gate.open()
    assert client.text == expected(LONG)
    assert engine.loads == 2, "the request was admitted after the unload, and loaded again"


async def test_weights_outlast_a_preparation_whose_client_left(service_for, roomy, engine, tokenize_gate):
    tokenize_gate.shut()
    async with service_for(roomy) as service, trio.open_nursery() as nursery:
        await service.wait_started()
        (client,) = await send(nursery, service, request(LONG))
        await tokenize_gate.arrived()
        client.scope.cancel()
        (model,) = service.registry
        nursery.start_soon(model.unload)
        await wait_all_tasks_blocked()
        assert "tiny" not in engine.closed
        tokenize_gate.open()
    assert engine.closed == ["tiny[0]", "tiny"]


async def test_a_request_that_is_prepared_while_the_drain_begins_is_turned_away(service_for, roomy, tokenize_gate):
    tokenize_gate.shut()
    async with service_for(roomy) as service, trio.open_nursery() as nursery:
        await service.wait_started()
        (client,) = await send(nursery, service, request(LONG))
        await tokenize_gate.arrived()
        assert (await service.drain()).complete
        tokenize_gate.open()
    assert isinstance(client.error, ShuttingDownError)


async def test_a_request_that_is_prepared_while_the_service_closes_is_turned_away(
    service_for, roomy, engine, tokenize_gate
):
    tokenize_gate.shut()
    async with trio.open_nursery() as outside, service_for(roomy) as service:
        await service.wait_started()
        (client,) = await send(outside, service, request(LONG))
        await tokenize_gate.arrived()
        outside.start_soon(_open_when_settled, tokenize_gate)
    assert isinstance(client.error, ShuttingDownError)
    assert engine.closed == ["tiny[0]", "tiny"]


async def _open_when_settled(gate):
    await wait_all_tasks_blocked()
    gate.open()


async def test_a_long_preparation_does_not_hold_up_others(service_for, roomy, tokenize_gate):
    tokenize_gate.shut()
    async with service_for(roomy) as service, trio.open_nursery() as nursery:
        await service.wait_started()
        (client,) = await send(nursery, service, request(LONG))
        await tokenize_gate.arrived()
        assert (await collect(service, request()))[0] == expected("prompt")
        tokenize_gate.open()
    assert client.text == expected(LONG)


def calling(arguments):
    """A conversation with a call in it."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "b"}]
    return GenerationRequest(ChatPrompt([{"role": "user", "content": "hi"}, *turns]), max_tokens=2)


async def test_a_long_call_of_an_earlier_turn_does_not_hold_up_others(service_for, roomy, tokenize_gate):
    async with service_for(roomy) as service, trio.open_nursery() as nursery:
        await collect(service, calling("{}"))  # from here on short conversations are prepared at once
        tokenize_gate.shut()
        (client,) = await send(nursery, service, calling(json.dumps({"a": LONG})))
        await tokenize_gate.arrived()
        assert (await collect(service, request()))[0] == expected("prompt")
        tokenize_gate.open()
    assert client.done


# -- the end


@pytest.fixture
def inside(monkeypatch):
    """Counts threads inside sessions; a session that closes with one inside is noted."""
    lock, threads, torn = threading.Lock(), Counter(), []
    step, close = FakeSession.step, FakeSession.close

    def counted(self, count):
        with lock:
            threads[self.name] += 1
        try:
            return step(self, count)
        finally:
            with lock:
                threads[self.name] -= 1

    def checked(self):
        with lock:
            torn.extend([self.name] * threads[self.name])
        close(self)

    monkeypatch.setattr(FakeSession, "step", counted)
    monkeypatch.setattr(FakeSession, "close", checked)
    return torn


async def test_leaving_the_service_gives_up_the_work_and_joins_its_threads_first(
    service_for, model_file, engine, inside
):
    engine.step_gate.shut()
    async with trio.open_nursery() as outside, service_for(ModelConfig(path=model_file, slots=2)) as service:
        await service.wait_started()
        clients = await send(outside, service, *[request(f"{number}", 50) for number in range(4)])
        await engine.step_gate.arrived(2)
    assert [type(client.error) for client in clients] == [ShuttingDownError] * 4
    assert inside == []
    assert engine.closed == ["tiny[1]", "tiny[0]", "tiny"]
    assert service.tally() == Tally(active=0, finished=0, failed=0, cancelled=4, rejected=0)


async def test_a_step_that_cannot_be_cut_short_is_waited_for(service_for, engine, inside, monkeypatch):
    monkeypatch.setattr(FakeSession, "interrupt", lambda self: None)
    engine.step_gate.shut()
    async with trio.open_nursery() as outside, service_for() as service:
        (client,) = await send(outside, service, request(max_tokens=50))
        await engine.step_gate.arrived()
        outside.start_soon(_open_when_settled, engine.step_gate)
    assert isinstance(client.error, ShuttingDownError)
    assert inside == []
    assert engine.closed == ["tiny[0]", "tiny"]


async def test_something_unforeseen_before_the_answer_counts_as_a_failure(service_for, monkeypatch):
    async with service_for() as service:
        await loaded(service)
        before = service.tally()

        def refuse(*_, **__):
            raise ValueError("unforeseen")

        monkeypatch.setattr("trioserve.runtime.lease.Lease.start", refuse)
        with pytest.raises(ValueError, match="unforeseen"):
            await collect(service, request())
        after = service.tally()
        assert (after.failed - before.failed, after.cancelled - before.cancelled, after.active) == (1, 0, 0)


@pytest.mark.parametrize("drained", [True, False])
async def test_a_service_that_has_ended_is_stopped(service_for, drained):
    async with service_for() as service:
        if drained:
            await service.drain()
    assert service.phase is ProcessPhase.STOPPED


async def test_a_service_whose_drain_was_given_up_is_stopped_all_the_same(service_for, engine):
    engine.step_gate.shut()
    async with service_for() as service, trio.open_nursery() as nursery:
        await send(nursery, service, request())
        await engine.step_gate.arrived()
        nursery.start_soon(service.drain)
        await wait_all_tasks_blocked()
        assert service.phase is ProcessPhase.DRAINING
        nursery.cancel_scope.cancel()
    assert service.phase is ProcessPhase.STOPPED


async def test_a_closed_service_takes_no_requests(service_for, engine):
    async with service_for() as service:
        await collect(service, request())
    with pytest.raises(ShuttingDownError):
        await collect(service, request())
    assert not service.ready
    assert engine.loads == 1


async def test_leaving_after_a_drain_frees_everything(service_for, engine):
    async with service_for() as service:
        await collect(service, request())
        await service.drain()
        assert engine.closed == []
    assert engine.closed == ["tiny[0]", "tiny"]


async def test_a_service_cancelled_from_outside_in_its_start_ends(service_for, model_file, engine):
    engine.load_gate.shut()
    with trio.CancelScope() as scope:
        async with service_for(ModelConfig(path=model_file)):
            await engine.load_gate.arrived()
            scope.cancel()
            engine.load_gate.open()
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_a_service_cancelled_from_outside_in_its_work_joins_and_frees(service_for, model_file, engine, inside):
    engine.step_gate.shut()
    with trio.CancelScope() as scope:
        async with service_for(ModelConfig(path=model_file, slots=2)) as service, trio.open_nursery() as nursery:
            await service.wait_started()
            await send(nursery, service, *[request(f"{number}", 50) for number in range(4)])
            await engine.step_gate.arrived(2)
            scope.cancel()
    assert scope.cancelled_caught
    assert inside == []
    assert engine.closed == ["tiny[1]", "tiny[0]", "tiny"]
    assert service.tally() == Tally(active=0, finished=0, failed=0, cancelled=4, rejected=0)


async def test_an_error_in_the_block_frees_everything_and_comes_out(service_for, engine):
    async def fail():
        async with service_for() as service:
            await collect(service, request())
            raise ValueError("from the block")

    with pytest.raises(ExceptionGroup) as caught:
        await fail()
    assert caught.group_contains(ValueError, match="from the block")
    assert engine.closed == ["tiny[0]", "tiny"]


@pytest.mark.parametrize("given", [GenerationRequest(TextPrompt("x" * 1_000_000)), calling("x" * 1_000_000)])
async def test_a_text_far_too_long_is_refused_without_its_tokens(service_for, engine, monkeypatch, given):
    async with service_for() as service:
        async with service.generate(GenerationRequest(TextPrompt("x"), max_tokens=1)) as generation:
            assert [part async for part in generation]
        weights = type(next(iter(service.registry)).pool.weights)
        monkeypatch.setattr(weights, "tokenize", lambda *_, **__: pytest.fail("it was tokenised"))
        with pytest.raises(ContextLengthError, match=r"at least 1000\d\d\d tokens.*4096"):
            await service.start(given, contextlib.ExitStack())


# -- the form of an answer


async def test_a_form_that_cannot_be_honoured_is_refused_before_a_slot_is_taken(service_for):
    async with service_for() as service:
        await loaded(service)
        constraint = Constraint(ConstraintKind.REGEX, "refused")
        with pytest.raises(
            InvalidRequestError, match="regex can't be honoured: the fake was told to refuse it"
        ) as caught:
            await collect(service, request(constraint=constraint, constraint_field="regex"))
        assert caught.value.param == "regex"
        assert service.tally() == NOTHING
        await collect(service, request(constraint=Constraint(ConstraintKind.REGEX, "fine")))


async def test_the_forms_of_a_batch_have_a_bound_together(service_for):
    items = [
        request(constraint=Constraint(ConstraintKind.REGEX, f"{n}" * 30_000), constraint_field="regex") for n in "ab"
    ]
    async with service_for() as service:
        await loaded(service)
        wanted = BatchRequest([*items, items[0], request(constraint=Constraint(ConstraintKind.REGEX, "c" * 9000))])
        async with service.generate(wanted) as generation:
            parts = [part async for part in generation]
    (failure,) = (part for part in parts if isinstance(part, Failure))
    assert failure.index == 3
    assert "65536 characters together" in failure.error.message


async def test_whoever_leaves_while_forms_are_compiled_holds_nothing_for_long(service_for, monkeypatch, eventually):
    gate, compiled = ThreadGate(is_open=False), []

    def compile_slowly(self, constraint):
        gate.wait()
        compiled.append(constraint.source)

    monkeypatch.setattr(FakeWeights, "check_constraint", compile_slowly)
    async with service_for() as service:
        await loaded(service)
        items = [request(constraint=Constraint(ConstraintKind.REGEX, letter)) for letter in "abcdef"]
        client = trio.CancelScope()
        async with trio.open_nursery() as nursery:

            async def ask():
                with client:
                    async with service.generate(BatchRequest(items)):
                        raise AssertionError("it had left")

            nursery.start_soon(ask)
            await gate.arrived()
            client.cancel()
            gate.let(1)
        (model,) = service.registry
        await model.unload()
        assert compiled == ["a"]


async def test_choices_of_one_prompt_are_prepared_once(service_for, monkeypatch):
    asked = []
    tokenize = FakeWeights.tokenize
    monkeypatch.setattr(FakeWeights, "tokenize", lambda *args, **more: asked.append(args) or tokenize(*args, **more))
    prompt = TextPrompt("hello")
    async with service_for() as service:
        await loaded(service)
        async with service.generate(BatchRequest([request(prompt)] * 5, all_or_nothing=True, choices=5)) as generation:
            ends = [part async for part in generation if isinstance(part, Done)]
    assert len(ends) == 5
    assert len(asked) == 1


async def test_one_choice_that_fails_alone_ends_the_others_at_once(service_for, engine, monkeypatch):
    """Also where these go on, and have given something by the time that the error is told."""
    step = FakeSession.step

    def poor(self, threads, held=()):
        events = step(self, threads, held)
        (number, live), *_ = self._live.items()
        if len(self._live) == 1 or live.ended:
            return events
        live.ended = True
        return [Failed(number, "its sampler broke", alone=True), *(one for one in events if one.sequence != number)]

    monkeypatch.setattr(FakeSession, "step", poor)
    engine.step_gate.shut()
    async with service_for() as service:
        await loaded(service)
        batch = BatchRequest([request(max_tokens=200)] * 3, all_or_nothing=True, choices=3)
        async with service.generate(batch) as generation:
            engine.step_gate.let(1)
            assert [part.index for part in await generation.next_parts()] == [1, 2]
            engine.step_gate.let(1)
            await engine.step_gate.arrived(3)
            with pytest.raises(EngineError, match="inference failed"):
                await generation.next_parts()


async def test_an_answer_that_the_request_leaves_no_token_for_is_its_own_fault(service_for, engine, monkeypatch):
    monkeypatch.setattr(FakeSession, "_fail", lambda self, number, live: Failed(number, "none left", unanswerable=True))
    engine.failing_step = 1
    async with service_for() as service:
        with pytest.raises(InvalidRequestError, match="the answer can't go on: none left"):
            await collect(service, request())
        assert service.tally() == Tally(active=0, finished=0, failed=1, cancelled=0, rejected=0)


async def test_grammars_that_take_long_to_compile_hold_no_long_prompt_up(service_for, engine, monkeypatch):
    async with service_for() as service:
        await loaded(service)
        go_on = threading.Event()
        weights = type(next(iter(service.registry)).pool.weights)
        monkeypatch.setattr(weights, "check_constraint", lambda *_: go_on.wait())
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                constraint = Constraint(ConstraintKind.REGEX, "slow")
                nursery.start_soon(collect, service, request(constraint=constraint))
            try:
                await wait_all_tasks_blocked()
                with trio.fail_after(30):
                    long = ChatPrompt([{"role": "user", "content": "x"}] * 130)
                    async with service.generate(GenerationRequest(long, max_tokens=1)) as generation:
                        assert [part async for part in generation]
            finally:
                go_on.set()


# -- threads that don't come back


async def test_a_service_that_closes_says_what_it_waits_for(service_for, engine, monkeypatch, caplog):
    monkeypatch.setattr("trioserve.service.service.HELD_UP_SECONDS", 0.01)
    monkeypatch.setattr(logging.getLogger("trioserve"), "propagate", True)
    engine.deaf = True
    engine.step_gate.shut()

    async def open_when_told():
        while "the end waits" not in caplog.text:
            await trio.sleep(0.001)
        engine.step_gate.open()

    async with trio.open_nursery() as nursery, service_for() as service:
        (client,) = await send(nursery, service, request())
        await engine.step_gate.arrived()
        nursery.start_soon(open_when_told)
    assert "the end waits for a thread: model tiny: slot 0 is evaluating a step for" in caplog.text
    assert isinstance(client.error, ShuttingDownError)


async def test_what_is_under_way_in_threads_can_be_told_at_any_time(service_for, engine, eventually):
    gates = {"load": engine.load_gate, "step": engine.step_gate, "close": engine.close_gate}
    for gate in gates.values():
        gate.shut()
    async with service_for() as service, trio.open_nursery() as nursery:
        assert service.unfinished() == []
        await send(nursery, service, request(max_tokens=1))
        assert service.unfinished() == ["model tiny: it is loading"]
        gates["load"].open()
        await gates["step"].arrived()
        (what,) = service.unfinished()
        assert what.startswith("model tiny: slot 0 is evaluating a step for")
        gates["step"].open()
        await eventually(lambda: service.tally().finished == 1)
        assert service.unfinished() == []
        nursery.start_soon(service.management.unload, "tiny")
        await gates["close"].arrived()
        assert service.unfinished() == ["model tiny: it is unloading"]
        gates["close"].open()


async def test_the_log_of_a_stall_names_the_request(service_for, engine, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("trioserve"), "propagate", True)
    engine.deaf = True
    engine.step_gate.shut()
    async with service_for(stall_timeout_ms=1) as service, trio.open_nursery() as nursery:
        (client,) = await send(nursery, service, request(request_id="req-7"))
        while client.error is None:
            await trio.sleep(0.001)
        engine.step_gate.open()
    (record,) = [record for record in caplog.records if "slot stalled" in record.getMessage()]
    assert record.fields["request_id"] == "req-7"
    assert isinstance(client.error, EngineError)
    assert service.tally().failed == 1


async def test_an_operation_that_was_given_up_before_its_thread_came_back_counts_once(service_for, engine, monkeypatch):
    monkeypatch.setattr("trioserve.service.service.CUT_GRACE", 0.005)
    failed = []

    async def unload(service):
        try:
            await service.management.unload("tiny")
        except ShuttingDownError as error:
            failed.append(error)

    async with service_for(drain_timeout_ms=0) as service, trio.open_nursery() as nursery:
        await loaded(service)
        engine.close_gate.shut()
        nursery.start_soon(unload, service)
        await engine.close_gate.arrived()
        report = await service.drain()
        assert (report.cancelled, report.complete) == (1, False)
        engine.close_gate.open()
    assert len(failed) == 1
    assert service.tally() == Tally(active=0, finished=0, failed=0, cancelled=1, rejected=0)
