"""``python -m soak``: arguments in, lines out."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from .plan import Shape
from .run import soak

EXIT_CLEAN, EXIT_VIOLATIONS = 0, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 1 is at least one violation."""
    parser = argparse.ArgumentParser(prog="python -m soak", description="Soak the real daemon, and watch it closely.")
    parser.add_argument("--minutes", type=float, default=1, help="of load (default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="of everything random (default: 1)")
    parser.add_argument("--clients", type=int, default=16, help="beside the manager (default: 16)")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the daemon would be left behind
    tally = soak(60 * arguments.minutes, arguments.seed, Shape(clients=arguments.clients), _say)
    return EXIT_CLEAN if tally.clean else EXIT_VIOLATIONS


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
