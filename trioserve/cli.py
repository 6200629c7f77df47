"""The command line: ``trioserve serve`` and ``trioserve validate``.

Flags are made from the table of settings. Nothing of the server is imported before it is to be started.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trioserve.config import Config, SettingInfo, load_config, settings_by_flag
from trioserve.config.sources import did_you_mean
from trioserve.errors import ConfigError, InvalidModelError
from trioserve.logs import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def _configuration_arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        "model", nargs="?", metavar="MODEL.gguf", default=argparse.SUPPRESS, help="the model's file (as --path)"
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="a TOML or JSON file with settings")
    server = parser.add_argument_group("settings of the server")
    model = parser.add_argument_group("settings of every model")
    for info in settings_by_flag().values():
        _add_setting(server if info.scope == "server" else model, info)
    return parser


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trioserve", description="Serves GGUF language models.", allow_abbrev=False)
    parser.add_argument(
        "--version", action=_ShowVersion, nargs=0, default=argparse.SUPPRESS, help="print the version and leave"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shared = _configuration_arguments()
    for name, text in (("serve", "start the server"), ("validate", "check the configuration and every model's file")):
        commands.add_parser(name, parents=[shared], help=text, description=text.capitalize() + ".", allow_abbrev=False)
    return parser


def _refuse_unknown(unknown: Sequence[str]) -> None:
    """Raise ConfigError for arguments that no flag took, naming the nearest flag."""
    if not unknown:
        return
    flag = next((argument for argument in unknown if argument.startswith("-")), unknown[0]).partition("=")[0]
    known = ["--config", *(info.flag for info in settings_by_flag().values())]
    raise ConfigError(f"unknown argument {flag!r}{did_you_mean(flag, known)}")


def _serve(config: Config) -> int:
    # Until there is anything to drain, a signal just ends the process.
    for name in ("SIGINT", "SIGTERM"):
        signal.signal(getattr(signal, name), lambda _number, _frame: os._exit(EXIT_OK))
    from trioserve.serve import serve

    return serve(config)


def _validate(config: Config) -> int:
    """Print one line for each model that is in order; every one is looked at, whatever the others are."""
    from trioserve.service.checks import check_headers, check_model

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
    """Run the command line and return the exit code: 0, or 2 where the configuration cannot be used.

    Arguments:
        argv: the arguments after the program's name; None takes those of the process.

    Raises:
        SystemExit: ``--help``, ``--version``, or no command.
    """
    arguments, unknown = _build_parser().parse_known_args(argv)
    flags = dict(vars(arguments))
    command, file = flags.pop("command"), flags.pop("config")
    try:
        _refuse_unknown(unknown)
        config = load_config(file, os.environ, flags)
        return _serve(config) if command == "serve" else _validate(config)
    except (ConfigError, InvalidModelError) as error:
        _complain(error.message)
        return EXIT_CONFIG
