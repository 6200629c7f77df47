"""The log: what one event looks like in both forms."""

import json
import logging
import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.logs import BackgroundStream, JsonFormatter, TextFormatter, configure_logging, one_line

NOON = 1796040000.1239
STAMP = "2026-11-30T12:00:00.123Z"


@pytest.fixture
def logger():
    """The package's logger, as it was before when the test is over."""
    found = logging.getLogger("trioserve")
    before = (list(found.handlers), found.level, found.propagate)
    yield found
    found.handlers[:], found.level, found.propagate = before
    found.manager._clear_cache()


def event(message, *args, level=logging.INFO, exc_info=None, **fields):
    record = logging.LogRecord("trioserve.x", level, __file__, 1, message, args, exc_info)
    record.created = NOON
    if fields:
        record.fields = fields
    return record


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return (type(caught), caught, caught.__traceback__)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (event("ready"), "info ready"),
        (event("slot %d of %s", 3, "m", level=logging.WARNING), "warning slot 3 of m"),
        (event("done", tokens=7, model="m", ok=True, none=None), "info done tokens=7 model=m ok=True none=None"),
        (event("done", path="a b", empty="", quote='a"b', back="a\\b", eq="a=b"),
         'info done path="a b" empty="" quote="a\\"b" back="a\\\\b" eq="a=b"'),
        (event("a\nb\r\x1b[31m\u2028", text="c\nd\x00"), 'info a\\nb\\r\\x1b[31m\\u2028 text="c\\nd\\x00"'),
        (event("lone", text="\udc80"), 'info lone text="\\udc80"'),
        (event("ünïcode 猫", text="猫"), "info ünïcode 猫 text=猫"),
    ],
)  # fmt: skip
def test_text(record, expected):
    assert TextFormatter().format(record) == f"{STAMP} {expected}"


def test_text_with_a_traceback():
    record = event("failed", slot=1, exc_info=raised(ValueError("bad\n2026-11-30T12:00:00.123Z info forged\x1b")))
    first, *rest = TextFormatter().format(record).split("\n")
    assert first == f"{STAMP} info failed slot=1"
    assert rest[0] == "  Traceback (most recent call last):"
    assert rest[-2:] == ["  ValueError: bad", "  2026-11-30T12:00:00.123Z info forged\\x1b"]
    assert all(line.startswith("  ") for line in rest)


@given(st.text(), st.text())
def test_text_is_one_line_whatever_it_says(message, value):
    record = event("%s", message, value=value)
    assert TextFormatter().format(record).isprintable()


def test_one_line_leaves_printable_text_alone():
    assert one_line("a b\\n") == "a b\\n"
    assert one_line("a\tb") == "a\\tb"


def test_json():
    record = event("done %s", "a\nb", level=logging.ERROR, tokens=7, rate=0.5, ids=[1, None], text="é\x1b")
    line = JsonFormatter().format(record)
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line) == {
        "time": STAMP,
        "level": "error",
        "message": "done a\nb",
        "tokens": 7,
        "rate": 0.5,
        "ids": [1, None],
        "text": "é\x1b",
    }


def test_json_with_an_exception():
    line = JsonFormatter().format(event("failed", exc_info=raised(ValueError("bad"))))
    assert "\n" not in line
    exception = json.loads(line)["exception"]
    assert exception.startswith("Traceback (most recent call last):\n")
    assert exception.endswith("ValueError: bad")


def test_json_fields_do_not_replace_what_is_fixed():
    found = json.loads(JsonFormatter().format(event("m", level=logging.INFO, time=1, exception="e")))
    assert found == {"time": STAMP, "level": "info", "message": "m", "field_time": 1, "field_exception": "e"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (ValueError("v"), "v"),
    ],
)
def test_json_writes_what_it_cannot_hold_as_text(value, expected):
    def no_constant(word):
        raise AssertionError(word)

    line = JsonFormatter().format(event("m", value=value))
    assert json.loads(line, parse_constant=no_constant)["value"] == expected


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_no_exception_in_flight_is_no_exception(formatter):
    text = formatter.format(event("m", exc_info=(None, None, None)))
    assert "NoneType" not in text
    assert "exception" not in text


def test_configured_text_goes_to_stderr(logger, capsys):
    configure_logging("text", "info")
    logging.getLogger("trioserve.serve").info("ready", extra={"fields": {"port": 8080}})
    logging.getLogger("trioserve.serve").debug("hidden")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info ready port=8080\n", err)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_configured_level(logger, capsys, level, expected):
    configure_logging("json", level)
    for name in ("debug", "info", "warning", "error"):
        getattr(logger, name)("m")
    assert [json.loads(line)["level"] for line in capsys.readouterr().err.splitlines()] == expected


def test_configuring_again_replaces(logger, capsys):
    configure_logging("json", "error")
    configure_logging("text", "debug")
    logger.debug("once")
    assert capsys.readouterr().err.count("once") == 1
    assert len(logger.handlers) == 1


def test_handlers_at_the_root_do_not_repeat_events(logger, capsys, caplog):
    configure_logging("text", "info")
    logger.info("once")
    assert capsys.readouterr().err.count("once") == 1
    assert caplog.records == []


class Clogged:
    """A stream whose reader has stopped reading."""

    def __init__(self):
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.text = ""

    def write(self, text):
        self.entered.set()
        assert self.gate.wait(30)
        self.text += text

    def flush(self):
        pass


def test_a_reader_who_stops_reading_holds_nobody_up():
    clogged = Clogged()
    stream = BackgroundStream(clogged, lines=2)
    stream.write("first\n")
    assert clogged.entered.wait(30)
    for number in range(5):
        stream.write(f"{number}\n")
    clogged.gate.set()
    stream.close(30)
    assert not stream._thread.is_alive(), "it ends when all is written, not when the time is up"
    assert clogged.text.startswith("first\n0\n")
    assert "3 lines of the log were lost" in clogged.text


def test_the_end_does_not_wait_for_ever_for_the_log():
    clogged = Clogged()
    stream = BackgroundStream(clogged)
    stream.write("first\n")
    stream.close(0.01)
    assert clogged.text == ""
    clogged.gate.set()


def test_without_a_stderr_there_is_no_log(monkeypatch, logger):
    monkeypatch.setattr("sys.stderr", None)
    assert configure_logging("text", "info", background=True) is None
    logging.getLogger("trioserve").info("nobody hears this")
