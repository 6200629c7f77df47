"""What the service counts: histograms, each end of a request once, loads and unloads, sums that hold at any time."""

import contextlib
import itertools
import random
from collections import Counter
from math import inf

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from trioserve.config import ModelConfig
from trioserve.engine.base import Finished, FinishReason, Token
from trioserve.errors import (
    BusyReason,
    ContextLengthError,
    EngineError,
    InvalidModelError,
    ModelLoadError,
    ServerBusyError,
    ShuttingDownError,
)
from trioserve.origin import Origin, as_origin
from trioserve.runtime.job import Times
from trioserve.runtime.observer import LoadOutcome, UnloadReason
from trioserve.scheduling.lifecycle import RequestPhase
from trioserve.service import BatchRequest, GenerationRequest, TextPrompt
from trioserve.service.answer import Answer
from trioserve.service.metrics import Histogram, Metrics

FINISHED, FAILED, CANCELLED, REJECTED = (
    RequestPhase.FINISHED,
    RequestPhase.FAILED,
    RequestPhase.CANCELLED,
    RequestPhase.REJECTED,
)


def assert_balanced(service):
    """Whatever has come is under way or has ended, for each route and model; and ends are told apart further."""
    metrics, active = service.metrics, service.active()
    gone = Counter()
    for (route, model, _), count in metrics.ended.items():
        gone[route, model] += count
    assert metrics.accepted == active + gone
    tally = service.tally()
    assert tally.accepted == metrics.accepted.total()
    assert tally.active == active.total()
    assert metrics.rejects.total() == tally.rejected
    assert metrics.cancels.total() == tally.cancelled


def request(text="prompt", max_tokens=5, **fields):
    return GenerationRequest(TextPrompt(text), max_tokens=max_tokens, **fields)


async def use(service, wanted=None):
    async with service.generate(wanted or request()) as generation:
        return [part async for part in generation]


@contextlib.asynccontextmanager
async def using(service, wanted=None):
    """Have a request under way for the length of the block, then have its client leave."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(use, service, wanted)
        await wait_all_tasks_blocked()
        yield
        nursery.cancel_scope.cancel()


# -- histograms


def test_a_bound_belongs_to_its_range():
    histogram = Histogram((1, 2.5))
    for value in (0, 1, 1.0001, 2.5, 2.6, 1e9):
        histogram.observe(value)
    histogram.observe(2, 10)
    assert list(histogram.cumulative()) == [(1, 2), (2.5, 14), (inf, 16)]
    assert histogram.count == 16
    assert histogram.total == pytest.approx(0 + 1 + 1.0001 + 2.5 + 2.6 + 1e9 + 20)


@given(st.lists(st.floats(0, 1000)), st.lists(st.floats(0, 1000), min_size=1, unique=True).map(sorted))
def test_ranges_count_what_is_not_above_them(values, bounds):
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    assert dict(histogram.cumulative()) == {bound: sum(value <= bound for value in values) for bound in (*bounds, inf)}


# -- gaps


def answer_at(first):
    times = Times(begun=0.0, first=first)
    return Answer(0, 1, times, 0, 0.0), times


def give(answer, times, gaps, tokens, latest):
    times.latest = latest
    for _ in range(tokens):
        answer.take(Token(0, 65, "A"))
    answer.measure_gaps(gaps)


def test_a_gap_is_from_token_to_token():
    answer, times = answer_at(1.0)
    gaps = Histogram((0.5, 1, 2))
    give(answer, times, gaps, 1, 1.0)  # the first token has none before it
    assert gaps.count == 0
    give(answer, times, gaps, 1, 1.5)
    give(answer, times, gaps, 1, 3.0)
    assert list(gaps.cumulative()) == [(0.5, 1), (1, 1), (2, 2), (inf, 2)]
    assert gaps.total == pytest.approx(2.0)


def test_tokens_that_piled_up_share_their_time():
    answer, times = answer_at(1.0)
    gaps = Histogram((0.5, 1, 2))
    give(answer, times, gaps, 3, 2.0)
    give(answer, times, gaps, 4, 8.0)
    assert list(gaps.cumulative()) == [(0.5, 2), (1, 2), (2, 6), (inf, 6)]
    assert gaps.total == pytest.approx(7.0)


def test_the_end_of_an_answer_is_no_token():
    answer, times = answer_at(1.0)
    gaps = Histogram((1,))
    give(answer, times, gaps, 2, 1.5)
    times.latest = times.ended = 99.0
    answer.take(Finished(0, FinishReason.STOP))
    answer.measure_gaps(gaps)
    assert (gaps.count, gaps.total) == (1, pytest.approx(0.5))


# -- tokens and times


async def test_an_answer_is_measured(service_for):
    async with service_for() as service:
        await use(service, request("hello", 7))
        found = service.metrics.of("tiny")
    assert (found.prompt_tokens, found.completion_tokens) == (5, 7)
    counts = (found.queue_wait, found.first_token, found.token_gap, found.duration)
    assert [histogram.count for histogram in counts] == [1, 1, 6, 1]
    assert found.first_token.total + found.token_gap.total <= found.duration.total


async def test_a_batch_is_measured_as_one_request(service_for):
    wanted = BatchRequest([request("a", 3), request("bc", 5)])
    async with service_for() as service:
        await use(service, wanted)
        found = service.metrics.of("tiny")
    assert (found.prompt_tokens, found.completion_tokens) == (3, 8)
    counts = (found.queue_wait, found.first_token, found.token_gap, found.duration)
    assert [histogram.count for histogram in counts] == [1, 1, 2 + 4, 1]


async def test_tokens_are_counted_while_an_answer_grows_and_not_after_its_client_left(service_for, engine, eventually):
    engine.step_gate.shut()
    async with service_for() as service:
        found = service.metrics.of("tiny")
        async with using(service, request(max_tokens=100)):
            engine.step_gate.let(3)
            await eventually(lambda: found.completion_tokens == 3)
        assert service.metrics.cancels == {RequestPhase.DECODE: 1}
        engine.step_gate.open()
        await eventually(lambda: service.models()[0].active_slots == 0)
        assert found.completion_tokens == 3
        assert (found.first_token.count, found.token_gap.count, found.duration.count) == (1, 2, 0)


# -- ends


async def test_each_end_has_its_route_and_its_model(service_for, engine):
    async with service_for() as service:
        with as_origin(Origin(route="/a")):
            await use(service)
        engine.raising_step = 6
        with pytest.raises(EngineError), as_origin(Origin(route="/b")):
            await use(service)
        await use(service)
    assert service.metrics.ended == {("/a", "tiny", FINISHED): 1, ("/b", "tiny", FAILED): 1, ("", "tiny", FINISHED): 1}


@pytest.mark.parametrize("phase", ["queued", "loading", "prefill", "decode"])
async def test_cancels_are_counted_by_phase(service_for, engine, eventually, phase):
    gate = engine.load_gate if phase == "loading" else engine.step_gate
    gate.shut()
    async with service_for() as service, contextlib.AsyncExitStack() as stack:
        if phase == "queued":
            (model,) = service.registry
            stack.callback((await model.admit(None)).release)
        async with using(service):
            if phase == "decode":
                gate.let(1)
                await eventually(lambda: service.metrics.of("tiny").completion_tokens == 1)
            elif phase != "queued":
                await gate.arrived()
            assert_balanced(service)
        assert service.metrics.cancels == {phase: 1}
        assert_balanced(service)
        gate.open()


async def test_a_cut_at_the_end_of_a_drain_is_a_cancel_in_its_phase(service_for, engine):
    engine.step_gate.shut()
    async with service_for() as service, trio.open_nursery() as nursery:

        async def client():
            with pytest.raises(ShuttingDownError):
                await use(service)

        nursery.start_soon(client)
        await engine.step_gate.arrived()
        service.hurry()
        await service.drain()
        engine.step_gate.open()
    assert service.metrics.cancels == {RequestPhase.PREFILL: 1}


@contextlib.contextmanager
def rejected(service, reason, error=ServerBusyError):
    before = service.metrics.rejects[reason]
    with pytest.raises(error):
        yield
    assert service.metrics.rejects[reason] == before + 1
    assert_balanced(service)


async def test_rejects_are_counted_by_what_stood_in_the_way(service_for, model_file, engine, mock_clock):
    engine.step_gate.shut()

    async def wait_in_vain():
        with rejected(service, "busy_timeout"):
            await use(service, request(busy_timeout_ms=10_000))

    async with service_for(ModelConfig(path=model_file, max_queued_requests=1)) as service:
        await service.wait_started()
        async with using(service):
            with rejected(service, "no_wait"):
                await use(service, request(busy_timeout_ms=0))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_in_vain)
                await wait_all_tasks_blocked()
                mock_clock.jump(10)
            with rejected(service, "overdue"):
                await use(service, request(busy_timeout_ms=10_000))
            async with using(service):
                with rejected(service, "queue_full"):
                    await use(service)
        engine.step_gate.open()
        await service.drain()
        with rejected(service, "shutting_down", ShuttingDownError):
            await use(service)
    assert service.metrics.rejects.total() == 5
    assert service.tally().rejected == 5


async def test_too_many_loaded_models_stand_in_the_way(service_for, model_file, make_model_file, engine):
    models = [ModelConfig(path=path, lazy=True) for path in (model_file, make_model_file("other.gguf"))]
    engine.step_gate.shut()
    async with service_for(*models, max_loaded_models=1) as service:
        async with using(service, request(model="tiny")):
            await engine.step_gate.arrived()
            with rejected(service, "loaded_models"):
                await use(service, request(model="other"))
        assert service.metrics.loads == {("tiny", LoadOutcome.LOADED): 1, ("other", LoadOutcome.NO_ROOM): 1}
        engine.step_gate.open()


async def test_a_prompt_that_turns_out_too_long_after_its_admission_is_a_reject(service_for):
    async with service_for() as service:  # nothing is loaded, so nobody can tell before
        with rejected(service, "context_length_exceeded", ContextLengthError):
            await use(service, request("x" * 5000))


async def test_every_waiter_for_a_load_is_rejected_for_the_same_reason(
    service_for, model_file, make_model_file, engine
):
    """The error of a load is copied for each of them."""
    models = [ModelConfig(path=path, lazy=True, slots=2) for path in (model_file, make_model_file("other.gguf"))]
    engine.step_gate.shut()
    async with service_for(*models, max_loaded_models=1) as service:
        errors = []

        async def client():
            try:
                await use(service, request(model="other"))
            except ServerBusyError as error:
                errors.append(error)

        async with using(service, request(model="tiny")):
            await engine.step_gate.arrived()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client)
                nursery.start_soon(client)
        engine.step_gate.open()
    one, other = errors
    assert one is not other
    assert one.busy == other.busy == BusyReason.LOADED_MODELS
    assert one.message == other.message


async def test_a_call_is_counted_once_whoever_notices_its_error(service_for):
    error = ContextLengthError("too long")
    async with service_for() as service:
        with as_origin(Origin(route="/a", model="tiny")):
            service.note_error(error)
            service.note_error(error)
        assert service.metrics.ended == {("/a", "tiny", REJECTED): 1}
        with as_origin(Origin(route="/a")):
            await use(service)
            service.note_error(error)
        assert service.metrics.ended == {("/a", "tiny", REJECTED): 1, ("/a", "tiny", FINISHED): 1}
        with as_origin(Origin(route="/b")):
            service.note_error(EngineError("unforeseen"))
        assert service.metrics.ended["/b", "", FAILED] == 1
        assert_balanced(service)


async def test_an_unforeseen_error_under_way_is_a_failure_and_no_cancel(service_for):
    async with service_for() as service:
        with as_origin(Origin(route="/a")):
            async with service.generate(request()):
                service.note_error(EngineError("unforeseen"))
        assert service.metrics.ended == {("/a", "tiny", FAILED): 1}
        assert_balanced(service)


# -- operations, loads and unloads


async def test_operations_count_for_registered_models_only(service_for, model_file, make_model_file):
    new = {"id": "new", "path": str(make_model_file("new.gguf"))}
    async with service_for(ModelConfig(path=model_file), model_roots=(model_file.parent,)) as service:
        await service.wait_started()
        with pytest.raises(InvalidModelError):
            await service.management.load({"id": "wrong", "path": str(model_file.parent / "missing.gguf")})
        for _ in range(2):  # it isn't registered the first time
            await service.management.load(new)
        await service.management.unload("new")
        await service.management.unload_all()
        assert service.metrics.accepted == {("", ""): 3, ("", "new"): 2}
        assert service.metrics.models.keys() <= {"tiny", "new"}
        assert_balanced(service)


async def test_loads_are_counted_by_what_came_of_them(service_for, engine):
    async with service_for() as service:
        engine.failing_loads = 1
        with pytest.raises(ModelLoadError):
            await use(service)
        await use(service)
        await use(service)
        assert service.metrics.loads == {("tiny", LoadOutcome.FAILED): 1, ("tiny", LoadOutcome.LOADED): 1}


async def test_a_load_that_the_end_interrupts_was_given_up(service_for, engine):
    engine.load_gate.shut()
    async with service_for() as service, trio.open_nursery() as nursery:

        async def client():
            with pytest.raises(ShuttingDownError):
                await use(service)

        nursery.start_soon(client)
        await engine.load_gate.arrived()
        nursery.start_soon(service.close)
        await wait_all_tasks_blocked()
        engine.load_gate.open()
    assert service.metrics.loads == {("tiny", LoadOutcome.GIVEN_UP): 1}
    assert service.metrics.unloads == {}


async def test_unloads_are_counted_by_their_reasons(service_for, model_file, make_model_file, mock_clock, eventually):
    models = [ModelConfig(path=path, lazy=True) for path in (model_file, make_model_file("other.gguf"))]
    async with service_for(*models, max_loaded_models=1) as service:
        await use(service, request(model="tiny"))
        await use(service, request(model="other"))  # makes room
        await service.management.load({"id": "other", "n_ctx": 64})
        await service.management.unload("other")
        await service.management.unload("other")  # without effect
        await use(service, request(model="other"))
        await service.management.unload_all()
        await service.management.load({"id": "other", "keep_alive_ms": 1000})
        await wait_all_tasks_blocked()
        mock_clock.jump(2)
        await eventually(lambda: service.metrics.unloads["other", UnloadReason.IDLE])
        await use(service, request(model="tiny"))
    assert service.metrics.unloads == {
        ("tiny", UnloadReason.ROOM): 1,
        ("tiny", UnloadReason.SHUTDOWN): 1,
        ("other", UnloadReason.RECONFIGURATION): 1,
        ("other", UnloadReason.REQUEST): 2,
        ("other", UnloadReason.IDLE): 1,
    }
    assert service.metrics.loads["other", LoadOutcome.LOADED] == 4


# -- sums


async def test_the_sums_hold_at_every_moment(service_for, model_file, engine):
    """Looked at from a task that runs between any two steps of the others."""
    choice = random.Random(11)
    looks = itertools.count()

    async with service_for(ModelConfig(path=model_file, slots=2, max_queued_requests=4)) as service:
        await service.wait_started()

        async def one(number):
            for _ in range(choice.randrange(20)):
                await trio.lowlevel.checkpoint()
            text = "x" * 5000 if number % 9 == 0 else f"{number}"
            wait = choice.choice([None, 0, 1, 60_000])
            origin = Origin(route=choice.choice(["/a", "/b"]))
            async with trio.open_nursery() as nursery:
                with as_origin(origin):
                    nursery.start_soon(ask, request(text, choice.choice([1, 5, 50]), busy_timeout_ms=wait))
                for _ in range(choice.randrange(50)):
                    await trio.lowlevel.checkpoint()
                if number % 3 == 0:
                    nursery.cancel_scope.cancel()

        async def ask(wanted):
            try:
                await use(service, wanted)
            except (ServerBusyError, ContextLengthError) as error:
                service.note_error(error)

        async def manage():
            for _ in range(5):
                with contextlib.suppress(ServerBusyError):
                    await service.management.unload("tiny", busy_timeout_ms=choice.choice([0, 1, None]))

        async def look(scope):
            with scope:
                while True:
                    assert_balanced(service)
                    next(looks)
                    await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            nursery.start_soon(look, scope)
            async with trio.open_nursery() as clients:
                for number in range(60):
                    clients.start_soon(one, number)
                clients.start_soon(manage)
            scope.cancel()
        engine.step_gate.shut()
        async with using(service), using(service):
            await ask(request(busy_timeout_ms=0))
        engine.step_gate.open()
        assert_balanced(service)
        assert min(service.metrics.outcomes(outcome) for outcome in (FINISHED, CANCELLED, REJECTED)) > 0
    assert next(looks) > 50


def test_counts_of_a_model_are_made_once():
    metrics = Metrics()
    assert metrics.of("m") is metrics.of("m")
    assert list(metrics.models) == ["m"]
