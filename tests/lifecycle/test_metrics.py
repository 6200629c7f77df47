"""What the real server counts while real clients come, stream and leave."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from prometheus_client.parser import text_string_to_metric_families

from .client import RawClient, ask, exactly, http, wait_idle
from .daemon import eventually

CLIENTS = 16
TOKENS = 30
FREED_SECONDS = 2.0


def scrape(client):
    """All samples of one answer, in which the sums must hold."""
    response = client.get("/metrics")
    assert response.status_code == 200
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert total(found, "requests_accepted_total") == total(found, "requests_active") + total(found, "requests_total")
    assert total(found, "rejects_total") == total(found, "requests_total", outcome="rejected")
    assert total(found, "cancels_total") == total(found, "requests_total", outcome="cancelled")
    return found


def total(found, name, **labels):
    """The sum of what has that name and these labels."""
    name = f"trioserve_{name}"
    return sum(value for (other, pairs), value in found.items() if other == name and labels.items() <= set(pairs))


def test_before_during_and_after(shared):
    seen = []

    def stream(number):
        body = exactly(TOKENS, f"Number {number}", stream=True, stream_options={"include_usage": True})
        with http(shared.url) as own:
            return ask(own, body).usage

    with http(shared.url) as client:
        before = scrape(client)
        with ThreadPoolExecutor(CLIENTS) as threads:
            answers = [threads.submit(stream, number) for number in range(CLIENTS)]
            while not all(answer.done() for answer in answers):
                seen.append(scrape(client))
                time.sleep(0.05)
        usages = [answer.result() for answer in answers]
        wait_idle(client)
        after = scrape(client)

    def grown(name, **labels):
        return total(after, name, **labels) - total(before, name, **labels)

    assert grown("requests_total") == grown("requests_total", outcome="finished") == CLIENTS
    assert grown("http_responses_total", route="/v1/completions", status="200") == CLIENTS
    assert grown("completion_tokens_total") == sum(usage["completion_tokens"] for usage in usages) == CLIENTS * TOKENS
    assert grown("prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    for name in ("queue_wait", "time_to_first_token", "request_duration"):
        assert grown(f"{name}_seconds_count") == CLIENTS
    assert grown("token_gap_seconds_count") == CLIENTS * (TOKENS - 1)
    assert 0 < grown("token_gap_seconds_sum") < grown("request_duration_seconds_sum")
    assert total(after, "requests_active") == total(after, "slots_busy") == 0
    # Among what was seen meanwhile: full slots with a queue behind them, and tokens that grow.
    assert max(total(found, "slots_busy") for found in seen) == 4
    assert max(total(found, "requests_queued") for found in seen) > 0
    assert max(total(found, "oldest_lease_age_seconds") for found in seen) > 0
    tokens = [total(found, "completion_tokens_total") for found in (before, *seen, after)]
    assert tokens == sorted(tokens)
    assert len(set(tokens)) > 5


def test_nothing_is_made_for_a_client_that_has_gone(shared):
    with http(shared.url) as client:
        before = scrape(client)
        with RawClient(shared.port) as raw:
            raw.post(exactly(1500, stream=True))
            raw.read_events(8)
            assert total(scrape(client), "slots_busy") == 1
        eventually(lambda: total(scrape(client), "slots_busy") == 0, FREED_SECONDS, "a free slot")
        gone = scrape(client)
        time.sleep(1.0)  # the window in which nothing may happen
        later = scrape(client)
    assert total(gone, "cancels_total", phase="decode") - total(before, "cancels_total", phase="decode") == 1
    assert total(gone, "completion_tokens_total") - total(before, "completion_tokens_total") >= 7
    assert total(later, "completion_tokens_total") == total(gone, "completion_tokens_total")
    cpu = ("process_cpu_seconds_total", ())
    assert later[cpu] - gone[cpu] < 0.2


def test_a_trace_is_in_the_log(shared):
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with http(shared.url) as client:
        for name, header in (("traced", f"00-{trace}-{parent}-01"), ("untraced", f"00-{trace}-{'0' * 16}-01")):
            ask(client, exactly(2), **{"x-request-id": name, "traceparent": header})
    fields = shared.request_log("traced")
    assert (fields["trace_id"], fields["parent_id"]) == (trace, parent)
    assert (fields["route"], fields["status"], fields["finish_reason"]) == ("/v1/completions", "200", "length")
    assert "trace_id" not in shared.request_log("untraced")
