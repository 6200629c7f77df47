"""The bench: its arithmetic, its reading of streams, and one run against the real application on a fake engine."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import shlex
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from functools import partial

import httpx
import pytest
import trio

from trioserve import cli
from trioserve.bench import __main__ as alone
from trioserve.bench import command
from trioserve.bench.load import NoTargetError, Target, ask, ask_once, body, find_target, run_load
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
from trioserve.bench.picture import write_picture
from trioserve.bench.plan import Plan, Server, UsageError, Workload, add_arguments, plan_from
from trioserve.bench.plot import Chart, Series, as_svg
from trioserve.bench.report import Report, as_charts, as_json, as_table
from trioserve.config import Config, ModelConfig
from trioserve.http.app import create_app
from trioserve.http.listener import bind, serve_http, url
from trioserve.service import open_service
from trioserve.testing import FakeEngine

TOKENS = 5
SAFETY_SECONDS = 40


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


@pytest.fixture
def report():
    """Two servers, two rounds with one client, and one round with two that only the first server got to."""
    plan = Plan({"server": Server("http://a"), "against": Server("http://b", key="secret")})
    made = Report(plan, {"server": "m<1>", "against": "n"})
    made.note(1, "against", sample(2.0, gap=math.nan))
    made.note(1, "server", sample(2.0))
    made.note(1, "server", sample(4.0, errors=1))
    made.note(2, "server", sample(5.0))
    made.failures["no"] += 1
    return made


def test_table(report):
    head, rule, *rows = as_table(report).split("\n")
    assert [cell.strip() for cell in head.split("|")[1:4]] == ["clients", "", "tokens/s"]
    assert len({len(line) for line in (head, rule, *rows)}) == 1
    assert [row.split("|")[2].strip() for row in rows] == ["server", "against", "ratio", "server"]
    assert "1.50" in rows[2]
    assert rows[0].split("|")[-2].strip() == "1"


def test_json(report):
    told = json.loads(as_json(report))
    one, two = told["loads"]
    assert (one["clients"], one["server"]["tokens_per_s"], one["server"]["rounds"]) == (1, 3.0, 2)
    assert one["against"]["gap_p50_ms"] is None
    assert one["ratio"]["tokens_per_s"] == 1.5
    assert (two["clients"], "against" in two, "ratio" in two) == (2, False, False)
    assert told["servers"]["server"] == {"url": "http://a", "model": "m<1>"}
    assert told["failures"] == {"no": 1}
    assert "secret" not in as_json(report)


def test_charts(report):
    throughput, latency = as_charts(report)
    assert [series.points for series in throughput.series] == [[(1, 3.0), (2, 5.0)], [(1, 2.0)]]
    assert [series.points for series in latency.series] == [[(1, 10.0), (2, 10.0)], [(1, 10.0)]]


# -- pictures


def texts_of(svg):
    return [element.text for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_a_picture_names_everything(report):
    svg = as_svg(as_charts(report))
    texts = texts_of(svg)
    assert texts.count("tokens per second") == 1
    assert texts.count("m<1> at http://a") == texts.count("n at http://b") == 2
    assert texts.count("clients") == 2
    assert "prefers-color-scheme: dark" in svg
    assert "secret" not in svg


def points_of(svg):
    """Corners of the first line of a picture."""
    return [tuple(map(float, pair.split(","))) for pair in re.search(r'points="(.*?)"', svg)[1].split()]


def test_higher_values_are_drawn_higher():
    svg = as_svg([Chart("y", "x", [Series("a", [(1, 10), (2, 30), (4, 20)])])])
    (x1, y1), (x2, y2), (x4, y4) = points_of(svg)
    assert x1 < x2 < x4
    assert y2 < y4 < y1
    assert y4 == pytest.approx((y1 + y2) / 2, abs=0.2)
    assert {"0", "10", "20", "30", "1", "2", "4"} <= set(texts_of(svg))


def test_wide_values_are_drawn_by_their_logarithm():
    svg = as_svg([Chart("y", "x", [Series("a", [(1, 0.1), (100, 10), (10_000, 1000)])], log_y=True)])
    (x1, y1), (x2, y2), (x3, y3) = points_of(svg)
    assert x2 == pytest.approx((x1 + x3) / 2, abs=0.2)
    assert y2 == pytest.approx((y1 + y3) / 2, abs=0.2)
    assert {"0.1", "1,000", "10,000"} <= set(texts_of(svg))


@pytest.mark.parametrize("points", [[], [(1, math.nan)], [(1, 0)], [(3, 5)]])
@pytest.mark.parametrize("log_y", [False, True])
def test_little_can_be_drawn_too(points, log_y):
    svg = as_svg([Chart("y", "x", [Series("a", points)], log_y=log_y)])
    assert "nan" not in svg
    ET.fromstring(svg)


def test_names_from_servers_fit_into_a_picture():
    texts = texts_of(as_svg([Chart("y", "x", [Series("a\x00<b>\n" + "é" * 100, [(1, 1)])])]))
    (label,) = [text for text in texts if text.startswith("a")]
    assert label.startswith("a?<b>?é")
    assert label.endswith("é…")
    assert len(label) < 60


def test_labels_do_not_touch():
    svg = as_svg([Chart("y", "x", [Series("a", [(float(x), 1) for x in range(1000, 1100)])])])
    assert 2 < sum(text.startswith("1,0") for text in texts_of(svg)) < 20


def test_a_picture_as_png(tmp_path, report):
    pytest.importorskip("matplotlib")
    write_picture(tmp_path / "p.png", as_charts(report))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


# -- the plan


def planned(*words, environ=None):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return plan_from(parser.parse_args(words), environ or {})


def test_plan_of_a_bare_address():
    assert planned("http://h:1") == Plan({"server": Server("http://h:1")})


def test_plan_with_everything(tmp_path):
    plan = planned(
        *["http://h", "m", "--against", "https://g/v1", "--against-model", "n", "--clients", "4,1,4", "--plain"],
        *["--requests", "2", "--rounds", "5", "--tokens", "6", "--prompt-words", "7-9", "--max-seconds", "8"],
        *["--json", str(tmp_path / "j"), "--plot", str(tmp_path / "p.SVG"), "--api-key", "k"],
        environ={"BENCH_API_KEY": "other", "BENCH_AGAINST_API_KEY": "l"},
    )
    assert plan == Plan(
        {"server": Server("http://h", "m", "k"), "against": Server("https://g/v1", "n", "l")},
        Workload(6, 7, 9, extended=False),
        clients=(4, 1),
        requests=2,
        rounds=5,
        max_seconds=8,
        json=str(tmp_path / "j"),
        plot=tmp_path / "p.SVG",
    )


def test_a_key_goes_to_its_server_only():
    plan = planned("http://h", "m", "--against", "http://g", environ={"BENCH_API_KEY": "k"})
    assert plan.servers == {"server": Server("http://h", "m", "k"), "against": Server("http://g", "m", None)}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["h:80"], "URL: 'h:80' is no address"),
        (["http://"], "URL: 'http://' is no address"),
        (["http://h:99999"], "URL: 'http://h:99999' is no address"),
        (["ftp://h"], "URL: 'ftp://h' is no address"),
        (["http://me:secret@h"], "URL: 'http://me:secret@h' is no address"),
        (["http://h", ""], "the id of the model is empty"),
        (["http://h", "--against", "g"], "--against: 'g' is no address"),
        (["http://h", "--against-model", "g"], "need --against"),
        (["http://h", "--clients", "0"], "--clients: '0' is no list"),
        (["http://h", "--clients", "1,,2"], "--clients: '1,,2' is no list"),
        (["http://h", "--clients", "5000"], "--clients: 5000 is more than 1000"),
        (["http://h", "--rounds", "x"], "--rounds: 'x' is not an integer from 1 on"),
        (["http://h", "--tokens", "-1"], "--tokens: '-1' is not an integer from 1 on"),
        (["http://h", "--prompt-words", "7-"], "--prompt-words: '7-' is neither an integer from 1 on nor two"),
        (["http://h", "--prompt-words", "0-7"], "--prompt-words: '0-7' is neither an integer from 1 on nor two"),
        (["http://h", "--prompt-words", "9-7"], "--prompt-words: '9-7' ends before it begins"),
        (["http://h", "--max-seconds", "0"], "--max-seconds: '0' is not an integer from 1 on"),
        (["http://h", "--api-key", "a\nb"], "the key for URL holds characters"),
        (["http://h", "--plot", "p.gif"], "'p.gif' must end in .svg or .png"),
        (["http://h", "--plot", "/none/p.svg"], "--plot: '/none/p.svg' can't be written"),
        (["http://h", "--json", "/"], "--json: '/' can't be written"),
    ],
)
def test_wrong_arguments_are_one_line(words, complaint, capsys):
    assert cli.main(["bench", *words]) == 2
    told = capsys.readouterr().err
    assert complaint in told
    assert told.startswith("trioserve: ")
    assert told.count("\n") == 1
    with pytest.raises(UsageError):
        planned(*words)


def test_an_unknown_flag_has_a_neighbour(capsys):
    assert cli.main(["bench", "http://h", "--cleints", "1"]) == 2
    assert capsys.readouterr().err == "trioserve: unknown argument '--cleints'; did you mean --clients?\n"


@pytest.mark.parametrize(
    ("package", "words", "complaint"),
    [("httpx", [], "trioserve[bench]"), ("matplotlib", ["--plot", "p.png"], "--plot: PNG needs matplotlib")],
)
def test_a_missing_package_is_one_line(package, words, complaint, monkeypatch, capsys):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == package else object())
    for main, arguments in ((alone.main, []), (cli.main, ["bench"])):
        assert main([*arguments, "http://h", "m", *words]) == 2
        told = capsys.readouterr().err
        assert complaint in told
        assert told.count("\n") == 1


def test_prompts_follow_from_their_seed():
    workload = Workload(tokens=7, prompt_words=12, most_prompt_words=12)
    assert body(workload, "m", 1) == body(workload, "m", 1)
    assert body(workload, "m", 1)["messages"] != body(workload, "m", 2)["messages"]
    assert body(workload, "m", 1)["ignore_eos"] is True
    assert "ignore_eos" not in body(Workload(extended=False), "m", 1)


def test_prompts_are_as_long_as_they_may_be():
    def words(least, most, seed):
        workload = Workload(prompt_words=least, most_prompt_words=most)
        return len(body(workload, "m", seed)["messages"][0]["content"].split())

    instruction = words(5, 5, 1) - 5
    assert {words(5, 8, seed) - instruction for seed in range(40)} == {5, 6, 7, 8}
    assert {words(5, 5, seed) - instruction for seed in range(40)} == {5}


# -- loads


@pytest.mark.parametrize("base", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_endpoint_of_a_base_url(base):
    assert Target(base, "m").endpoint == "http://h:1/v1/chat/completions"


@contextlib.asynccontextmanager
async def serving(tmp_path, engine=None, **settings):
    """Yield the base URL of the application on a fake engine: a model for embeddings, and one with two slots."""
    path = tmp_path / "fake.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0")
    models = (ModelConfig(path=path, id="vectors", task="embed", lazy=True), ModelConfig(path=path, slots=2))
    config = Config(port=0, models=models, **settings)
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


SMALL = {"clients": (1, 2), "requests": 1, "rounds": 2}


def plan_for(base, *others, **fields):
    servers = dict(zip(("server", "against"), (Server(url) for url in (base, *others)), strict=False))
    return Plan(servers, Workload(tokens=3), **{**SMALL, **fields})


async def test_two_servers_side_by_side(tmp_path):
    told = []
    async with serving(tmp_path) as base:
        report = Report(plan_for(base, base))
        await command.measure(report, told.append)
    assert report.models == {"server": "fake", "against": "fake"}
    assert {
        clients: {name: len(rounds) for name, rounds in loads.items()} for clients, loads in report.rounds.items()
    } == {
        1: {"server": 2, "against": 2},
        2: {"server": 2, "against": 2},
    }
    assert not report.failures
    assert not report.cut_short
    order = [line.split(", ")[2].partition(":")[0] for line in told]
    assert order == ["server", "against", "against", "server"] * 2


async def test_a_key_is_sent_and_a_wrong_one_is_told(tmp_path):
    async with serving(tmp_path, api_keys=("right",)) as base:
        for key, heard in (("right", ""), ("wrong", "status 401"), (None, "status 401")):
            report = Report(Plan({"server": Server(base, "fake", key)}, Workload(tokens=3), **SMALL))
            await command.measure(report, lambda line: None)
            assert heard in "".join(report.failures)
            assert bool(report.rounds) == (not heard)


async def answering(body, stream):
    await stream.receive_some()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    await stream.send_all(head.encode() + body)


@contextlib.asynccontextmanager
async def foreign_server(body):
    """Yield the base URL of a server that answers everything with the same bytes."""
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, partial(answering, body), 0, host="127.0.0.1"))
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def test_the_first_model_is_asked():
    async with foreign_server(b'{"data": [{"id": "first"}, {"id": "second"}]}') as base:
        assert await find_target(Server(base, key="k")) == Target(base, "first", "k")
        assert await find_target(Server(base, "second")) == Target(base, "second")


@pytest.mark.parametrize(
    "listed", [b'{"data": []}', b"[]", b"{", b'{"data": [{}]}', b'{"data": [7]}', b'{"data": null}']
)
async def test_servers_without_a_model(listed):
    async with foreign_server(listed) as base:
        with pytest.raises(NoTargetError, match="lists no model to ask"):
            await find_target(Server(base))


async def test_time_puts_an_end_to_it(tmp_path, autojump_clock):
    """Virtual time goes on only where everything waits: at a server that has taken the request and says nothing."""
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(
            partial(trio.serve_tcp, lambda stream: trio.sleep_forever(), 0, host="127.0.0.1")
        )
        base = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        report = Report(Plan({"server": Server(base, "m")}, max_seconds=5))
        began = trio.current_time()
        await command.measure(report, lambda line: None)
        assert trio.current_time() - began == pytest.approx(5)
        nursery.cancel_scope.cancel()
    assert report.cut_short == "stopped after 5 s (--max-seconds)"
    assert not report.rounds


def as_program(*words):
    return [sys.executable, "-m", "trioserve", "bench", *words]


async def test_the_program_measures_prints_and_draws(tmp_path):
    words = ["--clients", "1,2", "--requests", "1", "--rounds", "1", "--tokens", "3"]
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.svg")]
    async with serving(tmp_path) as base:
        done = await trio.run_process(as_program(base, *words, *files), capture_stdout=True, capture_stderr=True)
    assert done.stdout.decode().splitlines()[0].startswith("| clients |")
    assert [load["server"]["errors"] for load in json.loads((tmp_path / "r.json").read_text())["loads"]] == [0, 0]
    assert "fake at http://" in (tmp_path / "r.svg").read_text()


async def test_failed_requests_are_counted_and_the_exit_code_is_1(tmp_path):
    engine = FakeEngine()
    engine.failing_step = 8  # of each slot: after the first request of all, which has five
    words = ["--clients", "2", "--requests", "2", "--rounds", "1", "--tokens", "5", "--json"]
    async with serving(tmp_path, engine) as base:
        done = await trio.run_process(as_program(base, *words), capture_stdout=True, capture_stderr=True, check=False)
    assert done.returncode == 1
    told = json.loads(done.stdout)
    ((failure, count),) = told["failures"].items()
    assert failure.startswith("error in the stream")
    assert told["loads"][0]["server"]["errors"] == count
    assert 0 < count < 4
    assert done.stderr.decode().count("error in the stream") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_prints_what_was_measured(tmp_path, number):
    engine = FakeEngine()
    engine.step_gate.shut()
    engine.step_gate.let(6)  # the first request of all, and the load with one client; the one with two waits
    words = ["--clients", "1,2", "--requests", "1", "--rounds", "1", "--tokens", "3"]
    with trio.fail_after(SAFETY_SECONDS):
        async with serving(tmp_path, engine) as base, trio.open_nursery() as nursery:
            program = partial(trio.run_process, as_program(base, *words), check=False)
            process = await nursery.start(partial(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
            await engine.step_gate.arrived(8)
            process.send_signal(number)
            told = b"".join([piece async for piece in process.stdout]).decode()
            heard = b"".join([piece async for piece in process.stderr]).decode()
            assert await process.wait() == 128 + number
    assert [row.split("|")[1].strip() for row in told.splitlines()[2:]] == ["1"]
    assert f"stopped by {number.name}" in heard
    assert "Traceback" not in heard


async def test_what_a_server_says_stays_on_one_line():
    told = []
    report = Report(Plan({"server": Server("http://127.0.0.1", "m")}))
    command._note_failures(report, ["status 500: <html>\r\n\t<b>\x1b[2J", "no", "no"], told.append)
    assert told == ["failed: status 500: <html> <b> [2J", "failed: no"]
    assert report.failures.total() == 3


@pytest.mark.parametrize("output", [">&-", ">/dev/full"])
async def test_a_table_that_nobody_gets_is_an_error_and_no_crash(tmp_path, output):
    words = ["--clients", "1", "--requests", "1", "--rounds", "1", "--tokens", "3"]
    async with serving(tmp_path) as base:
        shell = f"{shlex.join(as_program(base, *words))} {output}"
        done = await trio.run_process(["bash", "-c", shell], capture_stderr=True, check=False)
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr


def test_nobody_answers(capsys):
    with bind(Config(port=0)) as sock:
        base = url(Config(), sock)
    assert alone.main([base, "m", "--json"]) == 1
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert told["loads"] == []
    assert list(told["failures"].values()) == [1]
    assert printed.err.count("ConnectError") == 1
