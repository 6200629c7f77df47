"""Threads of a step wait briefly for each other, unless the operator has decided otherwise."""

import os
import re
import subprocess
import sys

import pytest

from trioserve.engine.llama.waiting import SPIN_COUNT, bound_spinning

VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def test_the_count_is_set_where_nobody_has_decided():
    environment = {"OMP_NUM_THREADS": "3"}
    bound_spinning(environment)
    assert environment == {"OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": str(SPIN_COUNT)}


@pytest.mark.parametrize("decided", [{"GOMP_SPINCOUNT": "infinity"}, {"OMP_WAIT_POLICY": "passive"}], ids=str)
def test_what_the_operator_has_decided_stays(decided):
    environment = dict(decided)
    bound_spinning(environment)
    assert environment == decided


@pytest.mark.parametrize(
    ("decided", "count"), [({}, SPIN_COUNT), ({"GOMP_SPINCOUNT": "7"}, 7), ({"OMP_WAIT_POLICY": "passive"}, 0)], ids=str
)
def test_libgomp_goes_by_it(decided, count):
    inherited = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", "import trioserve.engine.llama"],
        env={**inherited, **decided, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    if found is None:
        pytest.skip("the library was built without libgomp")
    assert int(found[1]) == count
