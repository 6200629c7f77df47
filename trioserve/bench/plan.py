"""What is to be measured: the command line's arguments, and the plan that follows from them. Pure."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

OURS, THEIRS = "server", "against"
"""Names of the two servers in every report."""

KEY_VARIABLES = {OURS: "BENCH_API_KEY", THEIRS: "BENCH_AGAINST_API_KEY"}
STDOUT = "-"
MAX_CLIENTS = 1000
_PICTURES = (".svg", ".png")


class UsageError(Exception):
    """An argument can't be used; one sentence that names it."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server to measure.

    Attributes:
        url: with or without ``/v1`` at its end.
        model: id of the model to ask; None for the first one that the server lists.
        key: API key, or None.
    """

    url: str
    model: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """What each request asks for.

    Attributes:
        tokens: of the answer.
        prompt_words: of the prompt, beside a short instruction; the fewest, where prompts differ in length.
        most_prompt_words: of the longest prompt, where that has more.
        extended: also send the fields beyond OpenAI's that llama.cpp's server and this one know: answers keep their
            full length, and no server answers from a cache.
        timeout: seconds that one read may wait.
    """

    tokens: int = 64
    prompt_words: int = 40
    most_prompt_words: int = 0
    extended: bool = True
    timeout: float = 600


@dataclass(frozen=True, slots=True)
class Plan:
    """All of one benchmark.

    Attributes:
        servers: by their names in the report; ``server`` alone, or that and ``against``.
        workload: of each request.
        clients: the counts of clients, one load for each.
        requests: of each client in a round.
        rounds: of each load.
        max_seconds: how long all of it may take.
        json: file for the report as JSON, ``-`` for standard output instead of the table, or None.
        plot: file for the plot, or None.
    """

    servers: Mapping[str, Server]
    workload: Workload = Workload()
    clients: tuple[int, ...] = (1, 2, 4, 8)
    requests: int = 4
    rounds: int = 3
    max_seconds: float = 3600
    json: str | None = None
    plot: Path | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of the command. They are texts; ``plan_from`` says what is wrong with them."""
    add = parser.add_argument
    keys = KEY_VARIABLES
    add("url", metavar="URL", help="base URL of the server, such as http://127.0.0.1:8080")
    add("model", metavar="MODEL", nargs="?", help="id of the model to ask (default: the first that the server lists)")
    add("--against", metavar="URL", help="a second server; rounds alternate between the two")
    add("--against-model", metavar="MODEL", help="its model (default: MODEL, or the first that it lists)")
    add("--clients", default="1,2,4,8", metavar="N,N", help="streams at a time (default: 1,2,4,8)")
    add("--requests", default="4", metavar="N", help="requests of each client in a round (default: 4)")
    add("--rounds", default="3", metavar="N", help="rounds; their median is reported (default: 3)")
    add("--tokens", default="64", metavar="N", help="tokens of each answer (default: 64)")
    add("--prompt-words", default="40", metavar="N", help="words of each prompt, or from N-N of them (default: 40)")
    add("--plain", action="store_true", help="send OpenAI's own fields only: no ignore_eos, no cache_prompt")
    add("--max-seconds", default="3600", metavar="N", help="end then, with what was measured (default: 3600)")
    add("--api-key", metavar="KEY", help=f"key for URL (default: the environment's {keys[OURS]})")
    add("--against-api-key", metavar="KEY", help=f"key for the second server (default: {keys[THEIRS]})")
    add("--json", nargs="?", const=STDOUT, metavar="FILE", help="write JSON there; without FILE print it, and no table")
    add("--plot", metavar="FILE.svg", help="draw throughput and latency; .png works where matplotlib is installed")


def plan_from(arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Plan:
    """Return what the arguments ask for.

    Arguments:
        arguments: of a parser that ``add_arguments`` has made.
        environ: may hold the keys.

    Raises:
        UsageError: one of them can't be used.
    """
    servers = {
        OURS: _server("URL", arguments.url, arguments.model, arguments.api_key or environ.get(KEY_VARIABLES[OURS]))
    }
    if arguments.against is not None:
        key = arguments.against_api_key or environ.get(KEY_VARIABLES[THEIRS])
        servers[THEIRS] = _server("--against", arguments.against, arguments.against_model or arguments.model, key)
    elif arguments.against_model or arguments.against_api_key:
        raise UsageError("--against-model and --against-api-key need --against")
    least, most = _range(arguments.prompt_words)
    workload = Workload(
        tokens=_number(arguments, "tokens"),
        prompt_words=least,
        most_prompt_words=most,
        extended=not arguments.plain,
    )
    return Plan(
        servers,
        workload,
        clients=_clients(arguments.clients),
        requests=_number(arguments, "requests"),
        rounds=_number(arguments, "rounds"),
        max_seconds=_number(arguments, "max_seconds"),
        json=_json_file(arguments.json),
        plot=_picture(arguments.plot),
    )


def _server(argument: str, url: str, model: str | None, key: str | None) -> Server:
    try:
        parts = urlsplit(url)
        usable = (
            parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
        )
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(f"{argument}: {url!r} is no address such as http://127.0.0.1:8080")
    if model == "":
        raise UsageError("the id of the model is empty")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise UsageError(f"the key for {argument} holds characters that no header can carry")
    return Server(url, model, key or None)


def _positive(text: str) -> int:
    """Raises ValueError where it is no integer from 1 on."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise ValueError
    return int(text)


def _number(arguments: Any, name: str) -> int:
    text = getattr(arguments, name)
    try:
        return _positive(text)
    except ValueError:
        raise UsageError(f"--{name.replace('_', '-')}: {text!r} is not an integer from 1 on") from None


def _range(text: str) -> tuple[int, int]:
    least, dash, most = text.partition("-")
    try:
        found = _positive(least), _positive(most) if dash else 0
    except ValueError:
        raise UsageError(f"--prompt-words: {text!r} is neither an integer from 1 on nor two, such as 70-130") from None
    if dash and found[0] > found[1]:
        raise UsageError(f"--prompt-words: {text!r} ends before it begins")
    return found


def _clients(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(_positive(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--clients: {text!r} is no list of integers from 1 on, such as 1,2,4") from None
    if max(counts) > MAX_CLIENTS:
        raise UsageError(f"--clients: {max(counts)} is more than {MAX_CLIENTS}")
    return tuple(dict.fromkeys(counts))


def _json_file(name: str | None) -> str | None:
    if name is not None and name != STDOUT:
        _check_writable("--json", Path(name))
    return name


def _picture(name: str | None) -> Path | None:
    if name is None:
        return None
    path = Path(name)
    if path.suffix.lower() not in _PICTURES:
        raise UsageError(f"--plot: {name!r} must end in .svg or .png")
    _check_writable("--plot", path)
    return path


def _check_writable(argument: str, path: Path) -> None:
    """Say it before minutes are spent on numbers that can't be kept."""
    place = path if path.exists() else path.parent
    if path.is_dir() or not place.exists() or not os.access(place, os.W_OK):
        raise UsageError(f"{argument}: {str(path)!r} can't be written")
