"""Every example runs as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .daemon import environment

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.sh")])
WITHOUT_SERVER = {"embed_service.py"}
RUN_SECONDS = 180


def test_there_are_examples():
    assert WITHOUT_SERVER | {"curl.sh"} <= {script.name for script in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_example_runs(request, tmp_path, script):
    url = [] if script.name in WITHOUT_SERVER else [request.getfixturevalue("shared").url]
    interpreter = "bash" if script.suffix == ".sh" else sys.executable
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [interpreter, str(script), *url],
        cwd=tmp_path,
        env=environment({"PATH": path}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=RUN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "Traceback" not in done.stderr
