"""``python -m faults``: a table of faults, one column for each way to run the application."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from .cases import CASES
from .probe import probe
from .ways import WAYS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m faults", description="Try slow and dead clients on real servers.")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="to run the application")
    parser.add_argument("--faults", nargs="+", choices=CASES, default=list(CASES), metavar="FAULT", help="by name")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or a server would be left behind
    _say("| fault | " + " | ".join(f"`{WAYS[way].name}`" for way in arguments.ways) + " |")
    _say("|---" * (1 + len(arguments.ways)) + "|")
    for name in arguments.faults:
        cells = [_cell(way, name) for way in arguments.ways]
        _say(f"| {CASES[name].name} | " + " | ".join(cells) + " |")
    return 0


def _cell(way: str, fault: str) -> str:
    try:
        return str(probe(WAYS[way], CASES[fault]))
    except Exception as error:  # one fault that can't be played must not hide the others
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
