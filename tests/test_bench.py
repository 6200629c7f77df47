"""The bench: its arithmetic, its reading of streams, and one run against the real application on a fake engine."""

from __future__ import annotations

import contextlib
import json
import math
import sys

import httpx
import pytest
import trio

from trioserve.bench import __main__ as command
from trioserve.bench.load import Target, Workload, ask, ask_once, run_load
from trioserve.bench.measures import (
    Answer,
    Chunk,
    Sample,
    StreamError,
    ends_stream,
    medians,
    percentile,
    ratios,
    read_chunk,
    summarise,
)
from trioserve.config import Config, ModelConfig
from trioserve.http.app import create_app
from trioserve.http.listener import bind, serve_http, url
from trioserve.service import open_service
from trioserve.testing import FakeEngine

TOKENS = 5


def chunk(**fields):
    return f"data: {json.dumps(fields)}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", None),
        (": keep-alive", None),
        ("event: message", None),
        ("data:", None),
        ("data: [DONE]", None),
        (chunk(choices=[{"delta": {"role": "assistant", "content": ""}}]), Chunk("")),
        (chunk(choices=[{"delta": {"content": "hé"}}], usage=None), Chunk("hé")),
        (chunk(choices=[{"delta": {}, "finish_reason": "stop"}]), Chunk("")),
        (chunk(choices=[{"delta": {"content": None}}]), Chunk("")),
        (chunk(choices=[], usage={"completion_tokens": 7}), Chunk("", 7)),
        ('data:{"choices":[{"delta":{"content":"x"}}]}', Chunk("x")),
    ],
)
def test_lines_of_a_stream(line, expected):
    assert read_chunk(line) == expected


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("data: {", "no JSON"),
        ("data: [1]", "no object"),
        (chunk(choices="oops"), "no chunk"),
        (chunk(error={"message": "cut off"}), "cut off"),
        (chunk(error="plain"), "plain"),
    ],
)
def test_bad_lines_of_a_stream(line, complaint):
    with pytest.raises(StreamError, match=complaint):
        read_chunk(line)


def test_the_end_of_a_stream():
    assert ends_stream("data: [DONE]")
    assert ends_stream("data:[DONE]")
    assert not ends_stream(chunk(choices=[{"delta": {"content": "[DONE]"}}]))


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([3.0], 95, 3), ([1, 2, 3, 4], 50, 2.5), ([4, 1, 3, 2], 0, 1), ([1, 2, 3, 4], 100, 4), (range(101), 95, 95)],
)
def test_percentile(values, percent, expected):
    assert percentile(values, percent) == pytest.approx(expected)


def test_percentile_of_nothing_is_no_number():
    assert math.isnan(percentile([], 50))


def test_summary_of_answers():
    answers = [
        Answer(sent=0.0, texts=(0.1, 0.2, 0.4), tokens=3),
        Answer(sent=1.0, texts=(1.3,), tokens=1),
        Answer(sent=1.0, texts=(1.1, 9.0), tokens=2, error="cut"),
    ]
    sample = summarise(answers, seconds=2.0)
    assert sample.tokens_per_s == pytest.approx(2.0)
    assert sample.ttft_p50_ms == pytest.approx(200)
    assert sample.ttft_p95_ms == pytest.approx(290)
    assert sample.gap_p50_ms == pytest.approx(150)
    assert sample.gap_p95_ms == pytest.approx(195)
    assert sample.errors == 1


def test_summary_of_failures_only():
    sample = summarise([Answer(sent=0.0, error="no")], seconds=1.0)
    assert sample.errors == 1
    assert sample.tokens_per_s == 0
    assert math.isnan(sample.ttft_p50_ms)


def sample(speed, gap=1.0, errors=0):
    return Sample(speed, 10.0, 20.0, gap, 2.0, errors)


def test_medians_leave_out_what_has_no_value():
    middle = medians([sample(3.0, errors=1), sample(1.0, gap=math.nan), sample(2.0, gap=5.0, errors=2)])
    assert middle == sample(2.0, gap=3.0, errors=3)
    assert math.isnan(medians([sample(1.0, gap=math.nan)]).gap_p50_ms)


def test_ratios():
    shares = ratios(sample(3.0), sample(2.0, gap=0.0))
    assert shares["tokens_per_s"] == 1.5
    assert shares["ttft_p50_ms"] == 1
    assert math.isnan(shares["gap_p50_ms"])
    assert "errors" not in shares


def test_reports():
    report = {1: {"server": sample(3.0), "against": sample(2.0, gap=math.nan)}}
    head, rule, *rows = command.as_table(report).split("\n")
    assert [cell.strip() for cell in head.split("|")[1:4]] == ["clients", "", "tokens/s"]
    assert len({len(line) for line in (head, rule, *rows)}) == 1
    assert [row.split("|")[2].strip() for row in rows] == ["server", "against", "ratio"]
    assert "1.50" in rows[2]
    load = json.loads(command.as_json(report))["loads"][0]
    assert load["clients"] == 1
    assert load["against"]["gap_p50_ms"] is None
    assert load["ratio"]["tokens_per_s"] == 1.5


def test_prompts_follow_from_their_seed():
    workload = Workload(tokens=7, prompt_words=12)
    assert workload.body("m", 1) == workload.body("m", 1)
    assert workload.body("m", 1)["messages"] != workload.body("m", 2)["messages"]
    assert workload.body("m", 1)["ignore_eos"] is True
    assert "ignore_eos" not in Workload(extended=False).body("m", 1)


@pytest.mark.parametrize("base", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_endpoint_of_a_base_url(base):
    assert Target(base, "m").endpoint == "http://h:1/v1/chat/completions"


@contextlib.asynccontextmanager
async def serving(tmp_path, engine=None):
    """Yield the base URL of the application on a fake engine, with two slots."""
    path = tmp_path / "fake.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0")
    config = Config(port=0, models=(ModelConfig(path=path, slots=2),))
    done = trio.Event()
    with bind(config) as sock:
        async with open_service(config, engine=engine or FakeEngine()) as service, trio.open_nursery() as nursery:
            nursery.start_soon(serve_http, create_app(service), config, sock, done.wait)
            yield url(config, sock)
            done.set()


async def test_load_on_the_application(tmp_path):
    async with serving(tmp_path) as base:
        answers, seconds = await run_load(
            Target(base, "fake"), Workload(tokens=TOKENS), clients=3, requests=2, first_seed=1
        )
    assert [answer.error for answer in answers] == [None] * 6
    assert {answer.tokens for answer in answers} == {TOKENS}
    assert {len(answer.texts) for answer in answers} == {TOKENS}
    assert seconds > 0


@pytest.mark.parametrize(
    ("prepare", "model", "complaint"),
    [
        (lambda engine: None, "other", "status 404"),
        (lambda engine: setattr(engine, "failing_step", 3), "fake", "error in the stream"),
    ],
)
async def test_failures_are_part_of_the_answer(tmp_path, prepare, model, complaint):
    engine = FakeEngine()
    prepare(engine)
    async with serving(tmp_path, engine) as base:
        answer = await ask_once(Target(base, model), Workload(tokens=TOKENS))
    assert complaint in answer.error


@pytest.mark.parametrize("cut", range(1, 60, 7))
async def test_text_may_hold_what_others_take_for_the_end_of_a_line(cut):
    whole = 'data: {"choices":[{"delta":{"content":"a\u2028b\x85c"}}]}\r\n\r\ndata: [DONE]'.encode()

    async def answer(request):
        return httpx.Response(200, content=pieces())

    async def pieces():
        yield whole[:cut]
        yield whole[cut:]

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        told = await ask(client, Target("http://nowhere", "any"), Workload(), 1)
    assert (told.error, len(told.texts)) == (None, 1)


async def test_nobody_listens():
    with bind(Config(port=0)) as sock:
        base = url(Config(), sock)
    answer = await ask_once(Target(base, "m"), Workload())
    assert answer.error.startswith("ConnectError")


async def test_two_servers_side_by_side(tmp_path, capsys):
    async with serving(tmp_path) as base:
        words = [base, "fake", "--against", base, "--clients", "1,2", "--requests", "1", "--tokens", "3"]
        arguments = command.build_parser().parse_args([*words, "--rounds", "2"])
        report = await command.measure(arguments)
    assert list(report) == [1, 2]
    assert all(samples["server"].errors == samples["against"].errors == 0 for samples in report.values())
    assert capsys.readouterr().err == ""


def test_command_reports_failures_and_its_exit_code(capsys):
    with bind(Config(port=0)) as sock:
        base = url(Config(), sock)
    assert command.main([base, "m", "--clients", "1", "--requests", "1", "--rounds", "1", "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["loads"][0]["server"]["errors"] == 1
    assert printed.err.count("ConnectError") == 1


def test_without_httpx_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert command.main(["http://h", "m"]) == 2
    assert "trioserve[bench]" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--clients", "0"], ["--clients", "1,,2"], ["--rounds", "x"]])
def test_bad_arguments_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        command.main(["http://h", "m", *words])
    assert words[0] in capsys.readouterr().err
