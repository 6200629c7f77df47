"""``python -m trioserve.bench``: the same as ``trioserve bench``, without the rest of the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from trioserve.bench.command import EXIT_USAGE, run
from trioserve.bench.plan import UsageError, add_arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; see ``command.run`` for the exit codes, and 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m trioserve.bench", description=__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except UsageError as error:
        sys.stderr.write(f"bench: {error}\n")
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
