"""``GET /metrics``: valid, documented, of one moment, and there whatever else goes on."""

from __future__ import annotations

import re
from pathlib import Path

import prometheus_client
import pytest
import trio
from http_harness import CHAT, COMPLETIONS, assert_error, chat, completion, running, until
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from trioserve.errors import TrioserveError
from trioserve.http.exposition import reject_reasons
from trioserve.http.routing import RouteNames
from trioserve.testing import FakeEngine

METRICS, BATCH = "/metrics", "/v1/tasks/batch"
DOCS = Path(__file__).parents[1] / "docs"
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Scrape:
    """One answer, by names and labels."""

    def __init__(self, text):
        self.families = {family.name: family for family in parse_plain(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def __call__(self, name, **labels):
        """The sum of all samples of that name that have these labels."""
        found = [one.value for one in self.of(name, **labels)]
        assert found, (name, labels)
        return sum(found)

    def of(self, name, **labels):
        name = f"trioserve_{name}"
        return [one for one in self.samples if one.name == name and labels.items() <= one.labels.items()]

    def assert_balanced(self):
        """Nothing that has come is unaccounted for, on any route, for any model."""
        for accepted in self.of("requests_accepted_total"):
            labels = accepted.labels
            assert accepted.value == self("requests_active", **labels) + self("requests_total", **labels)
            assert len(self.of("requests_total", **labels)) == 4
        if self.of("requests_total"):
            assert self("rejects_total") == self("requests_total", outcome="rejected")
            assert self("cancels_total") == self("requests_total", outcome="cancelled")


async def scrape(server):
    reply = await server.call(METRICS)
    assert (reply.status, reply.headers["content-type"]) == (200, PLAIN)
    found = Scrape(reply.body.decode())
    found.assert_balanced()
    return found


# The formats


def documented():
    rows = re.findall(
        r"^\| `(trioserve_\w+)` \| (\w+) \| (.*?) \| (.+) \|$", (DOCS / "metrics.md").read_text(), re.MULTILINE
    )
    return {name: (kind, set(re.findall(r"`(\w+)`", labels)), meaning) for name, kind, labels, meaning in rows}


async def test_every_metric_is_what_the_documentation_says():
    async with running() as server:
        await server.call(CHAT, chat())
        families = (await scrape(server)).families.values()
    found = {}
    for family in families:
        if family.name.startswith("trioserve_"):
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            found[name] = (family.type, labels, family.documentation)
    assert found == documented()
    assert len(found) > 20


async def test_the_process_is_told_of():
    async with running() as server:
        families = (await scrape(server)).families
    assert {"process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds"} <= families.keys()
    assert not [name for name in families if not name.startswith(("trioserve_", "process_"))]


def test_alert_rules_name_metrics_that_there_are():
    names = re.findall(r"trioserve_\w+", (DOCS / "operations.md").read_text())
    histograms = {name for name, (kind, *_) in documented().items() if kind == "histogram"}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in names} <= documented().keys()
    assert {name for name in names if name.endswith("_bucket")} <= {f"{name}_bucket" for name in histograms}
    assert len(set(names)) > 5


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text",
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;q=0.5",
        "text/html, Application/OpenMetrics-Text ; version=x",
    ],
)
async def test_openmetrics_for_those_who_take_it(accept):
    async with running() as server:
        await server.call(CHAT, chat())
        reply = await server.call(METRICS, headers=[("accept", accept)])
    assert (reply.status, reply.headers["content-type"]) == (200, OPENMETRICS)
    assert {family.name for family in parse_openmetrics(reply.body.decode())} >= {
        "trioserve_requests",
        "trioserve_build",
    }


@pytest.mark.parametrize(
    "accept", ["", "*/*", "text/plain;version=0.0.4", "text/plain;version=x", "application/json", ",;,"]
)
async def test_plain_text_for_all_others(accept):
    async with running() as server:
        reply = await server.call(METRICS, headers=[("accept", accept)])
    assert (reply.status, reply.headers["content-type"]) == (200, PLAIN)


async def test_odd_names_of_models_are_escaped():
    name = 'a"b\\c{}d \u732b'
    async with running(models=[{"id": name}]) as server:
        assert (await scrape(server))("slots", model=name) == 1
        reply = await server.call(METRICS, headers=[("accept", "application/openmetrics-text")])
        found = [s for family in parse_openmetrics(reply.body.decode()) for s in family.samples]
    assert [
        sample.value for sample in found if sample.name == "trioserve_slots" and sample.labels["model"] == name
    ] == [1]


async def test_services_share_no_numbers():
    async with running() as one, running() as other:
        await one.call(CHAT, chat())
        assert (await scrape(one))("requests_total") == 1
        assert not (await scrape(other)).of("requests_total")
    assert b"trioserve" not in prometheus_client.generate_latest()


# Routes


async def test_every_route_has_its_rule_for_a_name():
    async with running() as server:
        rules = server.app._app.url_map
        name_of = RouteNames(rules)
        for rule in rules.iter_rules():
            path = re.sub(r"<.+?>", "some/thing", rule.rule)
            for method in rule.methods:
                assert name_of(method, path) == re.sub(r"<\w+:(\w+)>", r"{\1}", rule.rule)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/no"),
        ("GET", CHAT),
        ("PUT", CHAT),
        ("BREW", CHAT),
        ("POST", "/v1"),
        ("GET", "//x/metrics"),
    ],
)
async def test_what_no_route_takes_has_no_name(method, path):
    async with running() as server:
        assert server.app._name_route(method, path) == "unmatched"
        await server.call(path, method=method)
        found = await scrape(server)
        (response,) = found.of("http_responses_total")
        assert response.labels["route"] == "unmatched"
        assert not found.of("requests_total")


async def test_responses_are_counted_by_route_and_status():
    async with running() as server:
        await server.call(CHAT, chat(stream=True))
        await server.call(CHAT, chat())
        await server.call(CHAT, {})
        await server.call("/v1/models/no/body")
        await server.call("/v1/models/fake")
        await server.call("/health/")
        found = await scrape(server)
    counts = {(s.labels["route"], s.labels["status"]): s.value for s in found.of("http_responses_total")}
    assert counts == {
        (CHAT, "200"): 2,
        (CHAT, "400"): 1,
        ("/v1/models/{model_id}", "404"): 1,
        ("/v1/models/{model_id}", "200"): 1,
        ("/health", "200"): 1,
    }
    assert not found.of("requests_total", route="/v1/models/{model_id}")


# Requests


REFUSED = {
    "invalid_value": (b"{", {}),
    "model_not_found": (completion(model="no"), {}),
    "unsupported_media_type": (b"x", {"headers": [("content-type", "text/html")]}),
    "request_too_large": (b"x" * 3000, {}),
}


@pytest.mark.parametrize("reason", REFUSED)
async def test_what_is_refused_at_the_door_is_a_reject(reason):
    body, more = REFUSED[reason]
    async with running(max_request_body_bytes=2000) as server:
        reply = await server.call(COMPLETIONS, body, **more)
        assert reply.json["error"]["code"] == reason
        found = await scrape(server)
        assert found("rejects_total", reason=reason) == found("rejects_total") == 1
        assert found("requests_total", route=COMPLETIONS, model="", outcome="rejected") == 1
        assert server.service.tally().rejected == 1


async def test_a_prompt_that_is_too_long_counts_for_its_model():
    async with running() as server:
        assert_error(await server.call(COMPLETIONS, completion("x" * 5000)), 400, "invalid_request_error")
        found = await scrape(server)
    assert found("requests_total", model="fake", outcome="rejected") == 1
    assert found("rejects_total", reason="context_length_exceeded") == 1


async def test_operations_are_counted_on_their_routes():
    async with running(management=True) as server:
        await server.call("/v1/models/unload", {"id": "fake"})
        await server.call("/v1/models/unload", {"id": "no"})
        await server.call("/v1/tasks/unload_all_models", {})
        await server.call("/v1/models/load", {"id": "fake"})
        found = await scrape(server)
    assert found("requests_total", route="/v1/models/unload", model="fake", outcome="finished") == 1
    assert found("requests_total", route="/v1/models/unload", model="", outcome="rejected") == 1
    assert found("requests_total", route="/v1/tasks/unload_all_models", model="", outcome="finished") == 1
    assert found("model_unloads_total", model="fake", reason="request") == 1
    assert found("model_loads_total", model="fake", outcome="loaded") == 2


async def test_management_that_is_off_rejects():
    async with running() as server:
        await server.call("/v1/models/unload", {"id": "fake"})
        assert (await scrape(server))("rejects_total", reason="management_disabled") == 1


async def test_a_wrong_key_is_a_reject():
    key = {"headers": [("x-api-key", "sk")]}
    async with running(api_keys=("sk",)) as server:
        await server.call(CHAT, chat(), headers=[("x-api-key", "no")])
        await server.call("/nowhere", chat())
        assert (await server.call(METRICS)).status == 401
        found = Scrape((await server.call(METRICS, **key)).body.decode())
    found.assert_balanced()
    assert found("rejects_total", reason="invalid_api_key") == found("requests_total", route=CHAT, model="") == 1
    assert found("http_responses_total", status="401") == 3
    assert found("http_responses_total", status="401", route="unmatched") == 1


async def test_a_fault_of_ours_is_a_failure_wherever_it_happens(monkeypatch):
    async def faulty(*_):
        raise LookupError("secret")

    async with running() as server:
        monkeypatch.setattr("trioserve.service.Generation.next_parts", faulty)
        for stream in (False, True):
            await server.call(CHAT, chat(stream=stream))
        monkeypatch.setattr("trioserve.http.routes.chat.read_as", faulty)
        assert_error(await server.call(CHAT, chat()), 500, "internal_error")
        await server.free()
        found = await scrape(server)
    assert found("requests_total", outcome="failed") == found("requests_accepted_total") == 3


def test_every_code_that_rejects_is_there_from_the_beginning():
    assert {"busy_timeout", "queue_full", "overdue", "no_wait", "shutting_down", "context_length_exceeded"} <= set(
        reject_reasons()
    )
    assert TrioserveError.code not in reject_reasons()


async def test_an_answer_in_numbers():
    async with running() as server:
        await server.call(COMPLETIONS, completion("hello", max_tokens=7, stream=True))
        await server.free()
        found = await scrape(server)
    assert found("prompt_tokens_total", model="fake") == 5
    assert found("completion_tokens_total", model="fake") == 7
    for name, count in (("queue_wait", 1), ("time_to_first_token", 1), ("token_gap", 6), ("request_duration", 1)):
        assert found(f"{name}_seconds_count", model="fake") == count
        assert found(f"{name}_seconds_bucket", model="fake", le="+Inf") == count
        assert found(f"{name}_seconds_sum", model="fake") > 0


# At any time


async def test_it_is_answered_while_everything_waits():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server, await server.connect() as busy, await server.connect() as queued:
        await busy.send(CHAT, chat(stream=True))
        await engine.step_gate.arrived()
        await queued.send(CHAT, chat())
        await until(lambda: server.status().queued_requests == 1)
        found = await scrape(server)
        assert (found("slots"), found("slots_busy"), found("requests_queued")) == (1, 1, 1)
        assert found("requests_active", route=CHAT, model="fake") == 2
        assert found("queue_wait_seconds_count") == 1
        age = found("oldest_lease_age_seconds")
        assert age > 0
        await trio.sleep(0.01)
        assert (await scrape(server))("oldest_lease_age_seconds") > age
        engine.step_gate.open()
        await queued.reply()
        await server.free()
        found = await scrape(server)
    assert (found("slots_busy"), found("requests_queued"), found("requests_active")) == (0, 0, 0)
    assert found("oldest_lease_age_seconds") == 0


async def test_it_is_answered_while_a_model_loads():
    engine = FakeEngine()
    engine.load_gate.shut()
    async with running(engine, started=False) as server:
        await engine.load_gate.arrived()
        states = {s.labels["state"]: s.value for s in (await scrape(server)).of("model_state", model="fake")}
        assert states == {"unloaded": 0, "loading": 1, "ready": 0, "reconfiguring": 0, "unloading": 0}
        engine.load_gate.open()


async def test_it_is_answered_during_a_drain_and_counts_newcomers_once():
    engine = FakeEngine()
    engine.step_gate.shut()
    async with running(engine) as server, await server.connect() as busy:
        await busy.send(CHAT, chat())
        await engine.step_gate.arrived()
        server.stop.set()
        await until(lambda: server.service.phase == "draining")
        assert_error(await server.call(BATCH, {"requests": [chat()]}), 503, "shutting_down")
        found = await scrape(server)
        assert [s.labels["phase"] for s in found.of("phase") if s.value] == ["draining"]
        assert found("requests_total", route=BATCH, model="", outcome="rejected") == 1
        assert found("rejects_total", reason="shutting_down") == found("rejects_total") == 1
        assert found("requests_active", route=CHAT, model="fake") == 1
        engine.step_gate.open()
        await busy.reply()


async def test_a_head_is_enough_for_some():
    async with running() as server:
        assert (await server.call(METRICS, method="HEAD")).status == 200
