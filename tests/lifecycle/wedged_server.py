"""``trioserve serve`` on the fake engine, with a part of it that never comes back: ``python wedged_server.py PART``.

Settings come from the environment. The parts: ``load``, ``session``, ``step`` (after the first few), ``close``.
"""

from __future__ import annotations

import os
import sys

from trioserve.config import load_config
from trioserve.serve import serve
from trioserve.testing import FakeEngine

STEPS = 3


def main(part: str) -> int:
    """Serve until a signal."""
    engine = FakeEngine()
    engine.deaf = True
    getattr(engine, f"{part}_gate").shut()
    engine.step_gate.let(STEPS if part == "step" else 0)
    return serve(load_config(None, os.environ, {}), engine=engine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
