"""The command line: ``trioserve serve``, ``trioserve validate`` and ``trioserve bench``.

Flags of the server are made from the table of settings. Each command imports what it needs when it is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trioserve.errors import ConfigError, InvalidModelError
from trioserve.logs import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trioserve.config import Config, SettingInfo

__all__ = ["main", "run"]

EXIT_OK = 0
EXIT_CONFIG = 2
_METAVARS = {
    "integer": "N",
    "path": "FILE",
    "text": "TEXT",
    "text or @file": "TEXT|@FILE",
    "list": "A,B",
    "list of paths": "FOLDER,FOLDER",
    "list of adapters": "FILE,FILE:SCALE",
    "list of keys": "KEY,KEY|@FILE",
}


class _ShowVersion(argparse.Action):
    """Prints the installed version; looked up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("trioserve")
        except PackageNotFoundError:
            found = "0+unknown"
        sys.stdout.write(f"trioserve {found}\n")
        parser.exit()


def _add_setting(parser: argparse._ActionsContainer, info: SettingInfo) -> None:
    default = f" (default: {info.default})" if info.default else ""
    text = (info.description + default).replace("%", "%%")
    options: dict[str, Any] = {"dest": info.name, "default": argparse.SUPPRESS, "help": text}
    if info.kind == "boolean":
        parser.add_argument(info.flag, action=argparse.BooleanOptionalAction, **options)
    else:
        metavar = "|".join(info.choices) or _METAVARS[info.kind]
        parser.add_argument(info.flag, metavar=metavar, **options)


class _Command(argparse.ArgumentParser):
    """The parser of a command, whose arguments are made when the command is given: what they need takes time to import.

    Arguments:
        fill: adds them.
        more: of every parser.
    """

    def __init__(self, *, fill: Callable[[argparse.ArgumentParser], None], **more: Any) -> None:
        super().__init__(**more)
        self._fill = fill

    @property
    def flags(self) -> list[str]:
        """Its flags, once it has them, without the negative ones. argparse has no public list of them."""
        return [flag for flag in self._option_string_actions if not flag.startswith("--no-")]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Make the arguments and parse; called once."""
        self._fill(self)
        return super().parse_known_args(args, namespace)


def _add_configuration(parser: argparse.ArgumentParser) -> None:
    from trioserve.config import settings_by_flag

    parser.add_argument(
        "model", nargs="?", metavar="MODEL.gguf", default=argparse.SUPPRESS, help="the model's file (as --path)"
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="a TOML or JSON file with settings")
    server = parser.add_argument_group("settings of the server")
    model = parser.add_argument_group("settings of every model")
    for info in settings_by_flag().values():
        _add_setting(server if info.scope == "server" else model, info)
    parser.set_defaults(run=_run_configured)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    from trioserve.bench.plan import add_arguments

    add_arguments(parser)
    parser.set_defaults(run=_bench)


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "serve": ("start the server", _add_configuration),
    "validate": ("check the configuration and every model's file", _add_configuration),
    "bench": ("measure a server that speaks OpenAI's protocol, or two of them side by side", _add_bench),
}


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trioserve", description="Serves GGUF language models.", allow_abbrev=False)
    parser.add_argument(
        "--version", action=_ShowVersion, nargs=0, default=argparse.SUPPRESS, help="print the version and leave"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Command)
    for name, (text, fill) in _COMMANDS.items():
        description = f"{text[0].upper()}{text[1:]}."
        command = commands.add_parser(name, help=text, description=description, allow_abbrev=False, fill=fill)
        command.set_defaults(parser=command)
    return parser


def _refuse_unknown(unknown: Sequence[str], parser: _Command) -> None:
    """Raise ConfigError for arguments that no flag took, naming the nearest flag."""
    if not unknown:
        return
    from trioserve.config.sources import did_you_mean

    flag = next((argument for argument in unknown if argument.startswith("-")), unknown[0]).partition("=")[0]
    raise ConfigError(f"unknown argument {flag!r}{did_you_mean(flag, parser.flags)}")


def _run_configured(arguments: dict[str, Any]) -> int:
    """Serve or validate what file, environment and flags say."""
    from trioserve.config import load_config

    command, file = arguments.pop("command"), arguments.pop("config")
    config = load_config(file, os.environ, arguments)
    return _serve(config) if command == "serve" else _validate(config)


def _bench(arguments: dict[str, Any]) -> int:
    from trioserve.bench.command import run
    from trioserve.bench.plan import UsageError

    try:
        return run(argparse.Namespace(**arguments))
    except UsageError as error:
        raise ConfigError(str(error)) from None


def _serve(config: Config) -> int:
    # Until there is anything to drain, a signal just ends the process.
    for name in ("SIGINT", "SIGTERM"):
        signal.signal(getattr(signal, name), lambda _number, _frame: os._exit(EXIT_OK))
    from trioserve.serve import serve

    return serve(config)


def _validate(config: Config) -> int:
    """Print one line for each model that is in order; every one is looked at, whatever the others are."""
    from trioserve.checks import check_headers, check_model

    failed = False
    for model in config.models:
        try:
            check_model(model)
            check_headers(model)
        except InvalidModelError as error:
            failed = True
            _complain(f"model {model.id!r}: {error.message}")
        except ConfigError as error:  # names the model itself
            failed = True
            _complain(error.message)
        else:
            _say(one_line(f"{model.id} {model.path} slots={model.slots}"))
    if failed:
        return EXIT_CONFIG
    _say("configuration is valid")
    return EXIT_OK


def _say(line: str) -> None:
    """Print a line, where there is anybody to read it: the exit code tells it as well."""
    with contextlib.suppress(OSError, AttributeError):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _complain(message: str) -> None:
    sys.stderr.write(f"trioserve: {one_line(message)}\n")


def run() -> NoReturn:
    """Be the program: ``main``, and then the end without the interpreter's own.

    To take all modules apart lasts a second on a busy machine, and longer than the server may take to end. What it had
    is freed by then, and its log is written.
    """
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: that of the command, or 2 where the arguments cannot be used.

    Arguments:
        argv: the arguments after the program's name; None takes those of the process.

    Raises:
        SystemExit: ``--help``, ``--version``, or no command.
    """
    namespace, unknown = _build_parser().parse_known_args(argv)
    arguments = dict(vars(namespace))
    parser: _Command = arguments.pop("parser")
    run_command: Callable[[dict[str, Any]], int] = arguments.pop("run")
    try:
        _refuse_unknown(unknown, parser)
        return run_command(arguments)
    except (ConfigError, InvalidModelError) as error:
        _complain(error.message)
        return EXIT_CONFIG
