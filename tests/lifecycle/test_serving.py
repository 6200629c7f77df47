"""Requests that are served: whole and streamed, alone and side by side, through the clients that people use."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile

import openai as openai_package
import pytest

from .client import (
    CHAT,
    COMPLETIONS,
    RawClient,
    ask,
    assert_error,
    chat,
    completion,
    exactly,
    http,
    long_prompt,
    openai,
    route,
    streamed,
    wait_active,
    wait_idle,
)
from .daemon import Daemon

HAIKU = [{"role": "user", "content": "Write a haiku about the sea."}]
HANGUL = "안녕하세요. 저는 한국어를 배우고 있습니다. 안녕하세요. 저는 한국어를"
FAMILIES = "👩‍👩‍👧 👨‍👩‍👦 👩‍👩‍👧 👨‍👩‍👦 👩‍👩‍👧 👨‍👩‍👦 👩‍👩‍👧"
SMALL_CONTEXT = 64
SEEDS = 16
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
POLLS, POLLS_PER_SECOND = 60, 10
TASK = "/v1/tasks/run"


@pytest.fixture
def client(shared):
    with http(shared.url) as client:
        yield client


@pytest.fixture
def official(shared):
    with openai(shared.url) as client:
        yield client


@pytest.fixture(scope="module")
def small():
    """A server whose context is filled quickly."""
    with Daemon("--slots", "2", "--n-ctx", str(SMALL_CONTEXT)) as daemon, http(daemon.url) as client:
        yield client


# -- the official client


def test_streams_run_side_by_side(official):
    together = threading.Barrier(4)
    alone = {
        "ignore_eos": True,
        "cache_prompt": False,
    }  # one that goes on from what its slot has kept may well be done first

    def stream(_):
        together.wait(30)
        chunks = official.chat.completions.create(
            model="smollm2", messages=HAIKU, max_tokens=24, stream=True, extra_body=alone
        )
        arrivals, reason = [], None
        for chunk in chunks:
            if chunk.choices[0].delta.content:
                arrivals.append(time.monotonic())
            reason = reason or chunk.choices[0].finish_reason
        return arrivals, reason

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(stream, range(4)))
    assert [reason for _, reason in results] == ["length"] * 4
    firsts, lasts = zip(*((arrivals[0], arrivals[-1]) for arrivals, _ in results), strict=True)
    assert max(firsts) < min(lasts), "a stream had to wait for the end of another"


def test_equal_prompts_side_by_side_have_a_slot_each_and_one_answer(shared, client):
    together = threading.Barrier(4)

    def run(number):
        together.wait(30)
        # One that goes on from what its slot has kept may well be done before the others have begun.
        body = exactly(24, cache_prompt=False)
        response = client.post(TASK, json=body, headers={"x-request-id": f"side-{number}"})
        assert response.headers["x-request-id"] == f"side-{number}"
        return response.json()

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(run, range(4)))
    assert len({answer["text"] for answer in answers}) == 1
    slots = [answer["metadata"]["slot"] for answer in answers]
    assert sorted(slots) == [0, 1, 2, 3]
    assert [int(shared.request_log(f"side-{number}")["slot"]) for number in range(4)] == slots


def test_official_client_without_stream(official):
    answer = official.chat.completions.create(model="smollm2", messages=HAIKU, max_tokens=8, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_official_client_completes_text(official):
    answer = official.completions.create(model="smollm2", prompt="One, two, three,", max_tokens=4, temperature=0)
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == 4


def test_official_client_lists_models(official):
    (model,) = official.models.list()
    assert model.id == "smollm2"
    assert model.slots == 4
    assert model.loaded is True
    assert official.models.retrieve("smollm2") == model


def test_official_client_raises_on_a_prompt_that_is_too_long(official):
    for stream in (False, True):
        with pytest.raises(openai_package.BadRequestError) as caught:
            official.completions.create(model="smollm2", prompt=long_prompt(3000), stream=stream)
        assert caught.value.code == "context_length_exceeded"


def test_official_client_raises_on_an_unknown_model(official):
    with pytest.raises(openai_package.NotFoundError) as caught:
        official.chat.completions.create(model="gpt-17", messages=HAIKU)
    assert caught.value.type == "model_not_found"


# -- streamed equals whole


@pytest.mark.parametrize(
    "body",
    [
        chat("Name three colours."),
        completion("The capital of France is"),
        completion(HANGUL, max_tokens=24),
        completion(FAMILIES, max_tokens=24),
        chat(f"Repeat after me: {HANGUL} {FAMILIES}", max_tokens=24),
        completion("1 2 3 4 5", stop=["8"]),
        completion("a b c d e f", stop=[" i j", "zz"], max_tokens=16),
    ],
    ids=["chat", "completion", "hangul", "emoji", "both", "stop", "long stop"],
)
def test_stream_equals_whole(client, body):
    alone = ask(client, body)
    told = ask(client, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert (told.text, told.finish_reason) == (alone.text, alone.finish_reason)
    assert [told.usage[name] for name in COUNTS] == [alone.usage[name] for name in COUNTS]
    assert "\ufffd" not in alone.text
    assert told.chunks > 2
    assert not any(stop in alone.text for stop in body.get("stop", ()))


def test_streams_that_a_stop_string_ends_equal_whole_answers_whatever_the_seed(client):
    def both(seed):
        body = completion("Apples\nPears\nPlums\n", temperature=1, seed=seed, stop="\n", max_tokens=8)
        return ask(client, body), ask(client, {**body, "stream": True})

    with ThreadPoolExecutor(4) as threads:
        pairs = list(threads.map(both, range(SEEDS)))
    assert all((told.text, told.finish_reason) == (alone.text, alone.finish_reason) for alone, told in pairs)
    assert not any("\n" in alone.text for alone, _ in pairs)
    assert "stop" in {alone.finish_reason for alone, _ in pairs}


@pytest.mark.parametrize("prompt", [HANGUL, FAMILIES])
def test_characters_of_many_tokens_arrive_whole(client, prompt):
    with client.stream("POST", COMPLETIONS, json=completion(prompt, max_tokens=24, stream=True)) as response:
        lines = [line.decode("utf-8", "strict") for line in b"".join(response.iter_raw()).split(b"\n")]
    assert not any("\ufffd" in line for line in lines)
    assert any(not line.isascii() for line in lines), "the model did not go on in the script of the prompt"


def test_stop_strings_are_never_seen(client):
    answer = ask(client, completion("1 2 3 4 5 6", stop="9", max_tokens=24))
    assert answer.finish_reason == "stop"
    assert "8" in answer.text
    assert "9" not in answer.text


def test_usage_comes_last_and_only_when_asked(client):
    body = chat(stream=True)
    plain = client.post(CHAT, json=body).text
    assert '"usage"' not in plain
    text = client.post(CHAT, json={**body, "stream_options": {"include_usage": True}}).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert streamed(plain).text == streamed(text).text


# -- chance


def test_seed_decides_whatever_the_load(client):
    """Two seeds, each asked twice alone and three times among others, whole and streamed."""
    body = chat("Tell me a story.", temperature=1, max_tokens=12)

    def told(seed, stream=False):
        return ask(client, {**body, "seed": seed, "stream": stream}).text

    alone = {seed: told(seed) for seed in (42, 43)}
    assert {seed: told(seed, stream=True) for seed in alone} == alone
    assert alone[42] != alone[43]
    seeds = [42, 43, 7, 42, 43, 8, 42, 43]
    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(told, seeds, [index % 2 == 0 for index in range(len(seeds))]))
    assert all(text == alone[seed] for seed, text in zip(seeds, texts, strict=True) if seed in alone)


# -- what slots keep


def test_what_slots_keep_changes_no_answer(lone):
    """Equal calls are, with what was kept and without, and after somebody else has taken the slot."""
    question = chat("Name three colours.", max_tokens=12)
    stranger = completion(long_prompt(400), max_tokens=2)
    with http(lone.url) as client:
        cold = ask(client, {**question, "cache_prompt": False})
        again = ask(client, question)
        ask(client, stranger)
        after = ask(client, question)
        once_more = ask(client, question)
    answers = [cold, again, after, once_more]
    assert {answer.text for answer in answers} == {cold.text}
    assert {answer.usage["prompt_tokens"] for answer in answers} == {cold.usage["prompt_tokens"]}
    kept = [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert kept[0] == kept[2] == 0
    assert 0 < kept[1] == kept[3] < cold.usage["prompt_tokens"]


def test_equal_prompts_at_once_have_slots_of_their_own_and_one_answer(client):
    body = exactly(32, prompt="The sea is")
    together = threading.Barrier(4)

    def run(_):
        together.wait()
        return client.post("/v1/tasks/run", json=body).json()

    with ThreadPoolExecutor(4) as threads:
        tasks = list(threads.map(run, range(4)))
    assert sorted(task["metadata"]["slot"] for task in tasks) == [0, 1, 2, 3]
    assert len({task["text"] for task in tasks}) == 1
    assert len({task["id"] for task in tasks}) == 4


def test_hot_temperature_gives_valid_json(client):
    def hot(seed):
        body = chat(temperature=2, top_k=0, min_p=0, top_p=1, seed=seed, max_tokens=3)
        response = client.post(CHAT, json={**body, "stream": seed % 2 == 0})
        assert response.status_code == 200
        response.content.decode("utf-8", "strict")
        return streamed(response.text) if seed % 2 == 0 else response.json()

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(hot, range(50)))


def test_what_a_slot_has_kept_changes_no_answer(lone):
    with http(lone.url) as client:
        body = chat("Name three colours.", max_tokens=16)
        cold = ask(client, {**body, "cache_prompt": False})
        ask(client, chat("Tell me of the sea. " * 30, max_tokens=8))
        after_another, again = ask(client, body), ask(client, body)
    for answer in (after_another, again):
        assert (answer.text, answer.finish_reason) == (cold.text, cold.finish_reason)
        assert [answer.usage[name] for name in COUNTS] == [cold.usage[name] for name in COUNTS]
    kept = [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in (cold, after_another, again)]
    assert kept[0] == 0
    assert kept[1] < kept[2] < cold.usage["prompt_tokens"]


# -- the ends of the context


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_prompt_that_just_fits(small, stream):
    body = completion(long_prompt(SMALL_CONTEXT - 1), ignore_eos=True, stream=stream)
    answer = ask(small, {**body, "stream_options": {"include_usage": True}} if stream else body)
    assert answer.finish_reason == "length"
    assert [answer.usage[name] for name in COUNTS] == [SMALL_CONTEXT - 1, 1, SMALL_CONTEXT]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("tokens", [SMALL_CONTEXT, SMALL_CONTEXT + 1, 10 * SMALL_CONTEXT])
def test_prompt_that_does_not_fit(small, tokens, stream):
    response = small.post(COMPLETIONS, json=completion(long_prompt(tokens), stream=stream))
    error = assert_error(response, 400, "invalid_request_error")
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert str(tokens) in error["message"]
    assert str(SMALL_CONTEXT) in error["message"]
    assert ask(small, completion(max_tokens=1)).usage["completion_tokens"] == 1


def test_chat_that_does_not_fit(small):
    error = assert_error(small.post(CHAT, json=chat("word " * 1000)), 400, "invalid_request_error")
    assert error["param"] == "messages"


def test_answer_ends_at_the_end_of_the_context(small):
    prompt = long_prompt(SMALL_CONTEXT - 4)
    answer = ask(small, completion(prompt, max_tokens=100, ignore_eos=True))
    assert answer.finish_reason == "length"
    assert answer.usage["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": ""}, 200),
        ({"prompt": []}, 400),
        ({"prompt": [""]}, 200),
        ({"prompt": [[]]}, 400),
        ({"messages": []}, 400),
        ({"messages": [{"role": "user", "content": ""}]}, 200),
    ],
)
def test_empty_prompts(client, body, status):
    response = client.post(route(body), json={**body, "max_tokens": 2, "temperature": 0})
    assert response.status_code == status, response.text
    if status == 400:
        assert_error(response, 400, "invalid_request_error")
    assert ask(client, exactly(1)).finish_reason == "length"


# -- connections


def test_http2_with_prior_knowledge(shared):
    with http(shared.url, http1=False, http2=True) as client:
        response = client.get("/v1/models")
        assert response.http_version == "HTTP/2"
        bodies = [exactly(6, stream=index % 2 == 0) for index in range(4)]
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda body: ask(client, body), bodies))
        assert len({answer.text for answer in answers}) == 1
        assert_error(client.post(CHAT, json={"messages": 1}), 400, "invalid_request_error")


def test_thousands_of_calls_on_one_connection(client):
    ends = set()
    for _ in range(2500):
        with client.stream("GET", "/health/live") as response:
            assert response.status_code == 200
            ends.add(response.extensions["network_stream"].get_extra_info("client_addr"))
            response.read()
    assert len(ends) == 1


def poll(client, times):
    """Seconds that the answers of status routes took, ten times a second, and whether the last was of a prefill."""
    began = time.monotonic()
    for number in range(times):
        time.sleep(max(0, began + number / POLLS_PER_SECOND - time.monotonic()))
        waits = []
        for path in ("/health/live", "/health/ready", "/v1/models", "/v1/slots"):
            asked = time.monotonic()
            response = client.get(path)
            waits.append(time.monotonic() - asked)
            assert response.status_code == 200
        yield waits, "prefill" in {slot["phase"] for slot in response.json()["data"]}


def test_health_and_status_answer_during_a_prefill(shared, client):
    usual = max(wait for waits, _ in poll(client, POLLS // 3) for wait in waits)
    with RawClient(shared.port) as raw:
        raw.post(exactly(1, long_prompt(2000), cache_prompt=False))
        wait_active(client, 1)
        polls = takewhile(lambda found: found[1], poll(client, POLLS))
        waits = sorted(wait for waits, _ in polls for wait in waits)
    wait_idle(client)
    assert len(waits) >= 100, "the prompt was through too soon to say anything"
    # On a machine that is busy with something else, processes wait for their turn as well.
    assert waits[len(waits) * 99 // 100] < 0.1 + usual
