"""A service's numbers in the text formats of Prometheus and OpenMetrics."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata

import trio
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from trioserve.errors import BusyReason, MethodNotAllowedError, RouteNotFoundError, ShuttingDownError, TrioserveError
from trioserve.runtime.model import ModelStatus
from trioserve.runtime.observer import LoadOutcome, UnloadReason
from trioserve.scheduling.lifecycle import ModelState, ProcessPhase
from trioserve.service import Service
from trioserve.service.metrics import OUTCOMES, PHASES, Histogram, ModelMetrics

_PREFIX = "trioserve_"
_MODEL = ("model",)
_OF_NO_ROUTE = {RouteNotFoundError.code, MethodNotAllowedError.code}
_OPENMETRICS = "application/openmetrics-text"
_OPENMETRICS_TYPE = f"{_OPENMETRICS}; version=1.0.0; charset=utf-8"
_PLAIN_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_generate_openmetrics: Callable[[CollectorRegistry], bytes] = generate_openmetrics


class Exposition:
    """Renders the numbers of one service.

    Arguments:
        service: read at each rendering, in one step: all numbers are of one moment.
    """

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_ServiceCollector(service))
        ProcessCollector(registry=self._registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the text, and its media type.

        Arguments:
            accept: the client's header of that name. Who names OpenMetrics there gets that.
        """
        if any(part.partition(";")[0].strip().lower() == _OPENMETRICS for part in accept.split(",")):
            return _generate_openmetrics(self._registry), _OPENMETRICS_TYPE
        return generate_latest(self._registry), _PLAIN_TYPE


def reject_reasons() -> list[str]:
    """All values of the label ``reason`` of rejects: they are there from the beginning, so that rates see the first."""
    foreseen = {kind.code for kind in _all_errors(TrioserveError) if kind.status < 500} - _OF_NO_ROUTE
    return sorted({*foreseen, *BusyReason, ShuttingDownError.code})


def _all_errors(kind: type[TrioserveError]) -> Iterator[type[TrioserveError]]:
    for below in kind.__subclasses__():
        yield below
        yield from _all_errors(below)


class _ServiceCollector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service
        self._reasons = reject_reasons()
        self._build = {"version": _version("trioserve"), "python": platform.python_version()}
        self._build["llama_cpp_python"] = _version("llama-cpp-python")

    def describe(self) -> list[Metric]:
        """Nothing: without this the registry would collect when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all families. Runs in one step of the event loop."""
        statuses = self._service.models()
        yield from self._process()
        yield from self._requests()
        yield from self._of_models([self._service.metrics.of(status.id) for status in statuses], statuses)
        yield from self._occupation(statuses)
        yield from self._loads(statuses)

    def _process(self) -> Iterator[Metric]:
        yield InfoMetricFamily(_PREFIX + "build", "Versions of the server and of what it runs on.", self._build)
        phase = _gauge("phase", "1 for the phase that the process is in, 0 for the others.", ("phase",))
        for each in ProcessPhase:
            phase.add_metric([each.value], each is self._service.phase)
        yield phase
        responses = _counter("http_responses", "Responses of HTTP that have begun.", ("route", "status"))
        for (route, status), count in self._service.metrics.responses.items():
            responses.add_metric([route, str(status)], count)
        yield responses

    def _requests(self) -> Iterator[Metric]:
        metrics, active = self._service.metrics, self._service.active()
        both = ("route", "model")
        accepted = _counter("requests_accepted", "Requests and operations that have come.", both)
        under_way = _gauge("requests_active", "Requests and operations that are under way.", both)
        ended = _counter("requests", "Requests and operations that have ended.", (*both, "outcome"))
        for key, count in metrics.accepted.items():
            accepted.add_metric(key, count)
            under_way.add_metric(key, active[key])
            for outcome in OUTCOMES:
                ended.add_metric([*key, outcome.value], metrics.ended[*key, outcome])
        yield from (accepted, under_way, ended)
        rejects = _counter("rejects", "Rejected requests and operations, by what stood in the way.", ("reason",))
        for reason in self._reasons:
            rejects.add_metric([reason], metrics.rejects[reason])
        yield rejects
        cancels = _counter("cancels", "Cancelled requests and operations, by how far they had come.", ("phase",))
        for phase in PHASES:
            cancels.add_metric([phase.value], metrics.cancels[phase])
        yield cancels

    def _of_models(self, counts: Sequence[ModelMetrics], statuses: Sequence[ModelStatus]) -> Iterator[Metric]:
        def tokens(name: str, text: str, value: Callable[[ModelMetrics], int]) -> Metric:
            family = _counter(name, text, _MODEL)
            for status, count in zip(statuses, counts, strict=True):
                family.add_metric([status.id], value(count))
            return family

        def seconds(name: str, text: str, value: Callable[[ModelMetrics], Histogram]) -> Metric:
            family = HistogramMetricFamily(f"{_PREFIX}{name}_seconds", text, labels=_MODEL)
            for status, count in zip(statuses, counts, strict=True):
                histogram = value(count)
                buckets = [(_bound(bound), below) for bound, below in histogram.cumulative()]
                family.add_metric([status.id], buckets, histogram.total)
            return family

        yield tokens("prompt_tokens", "Tokens of the prompts that a slot has begun.", lambda one: one.prompt_tokens)
        yield tokens(
            "prompt_tokens_cached",
            "Those of them that were there already, kept of an earlier prompt or shared with one at work, "
            "in answers that ended.",
            lambda one: one.cached_tokens,
        )
        yield tokens(
            "completion_tokens", "Tokens of answers, as they are handed on.", lambda one: one.completion_tokens
        )
        yield seconds("queue_wait", "From a request's entry to its slot.", lambda one: one.queue_wait)
        yield seconds("time_to_first_token", "From a request's entry to its first token.", lambda one: one.first_token)
        yield seconds(
            "token_gap", "From one token of an answer to the next, as they are made.", lambda one: one.token_gap
        )
        yield seconds("request_duration", "From entry to end of finished requests.", lambda one: one.duration)

    def _occupation(self, statuses: Sequence[ModelStatus]) -> Iterator[Metric]:
        now = trio.current_time()

        def gauge(name: str, text: str, value: Callable[[ModelStatus], float]) -> Metric:
            family = _gauge(name, text, _MODEL)
            for status in statuses:
                family.add_metric([status.id], value(status))
            return family

        yield gauge("slots", "Slots, as configured.", lambda status: status.slots)
        yield gauge("slots_busy", "Slots that are leased.", lambda status: status.active_slots)
        yield gauge("slots_stalled", "Slots that can't serve, stalled or broken.", lambda status: len(status.ailments))
        yield gauge("requests_queued", "Requests that wait for a slot.", lambda status: status.queued_requests)
        yield gauge(
            "oldest_lease_age_seconds",
            "For how long the slot has been leased that was leased first; 0 where none is.",
            lambda status: now - min(status.leased.values(), default=now),
        )

    def _loads(self, statuses: Iterable[ModelStatus]) -> Iterator[Metric]:
        metrics = self._service.metrics
        states = _gauge("model_state", "1 for the state that a model is in, 0 for the others.", ("model", "state"))
        loads = _counter("model_loads", "Loads that have ended.", ("model", "outcome"))
        unloads = _counter("model_unloads", "Loaded models that were taken from service.", ("model", "reason"))
        for status in statuses:
            for state in ModelState:
                states.add_metric([status.id, state.value], state is status.state)
            for outcome in LoadOutcome:
                loads.add_metric([status.id, outcome.value], metrics.loads[status.id, outcome])
            for reason in UnloadReason:
                unloads.add_metric([status.id, reason.value], metrics.unloads[status.id, reason])
        yield from (states, loads, unloads)


def _counter(name: str, text: str, labels: Sequence[str]) -> CounterMetricFamily:
    return CounterMetricFamily(_PREFIX + name, text, labels=labels)


def _gauge(name: str, text: str, labels: Sequence[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, text, labels=labels)


def _bound(value: float) -> str:
    return "+Inf" if value == math.inf else str(float(value))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # run from its source
        return "unknown"
