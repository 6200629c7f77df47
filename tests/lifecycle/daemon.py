"""A server process under test: started, heard, signalled, and never left behind."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")

START_SECONDS = 90  # only a hang meets it
STOP_SECONDS = 30
# Several threads of one slot wait for each other by spinning: beside another busy process they are the slower ones.
ONE_THREAD = {"TRIOSERVE_THREADS": "1"}
_POLL_SECONDS = 0.02
_PROC = Path("/proc")


def eventually(predicate: Callable[[], T], within: float = 30, what: str = "the condition") -> T:
    """Return the first true value of ``predicate``; fail when there is none within so many seconds."""
    deadline = time.monotonic() + within
    while not (value := predicate()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what} did not come true within {within} s")
        time.sleep(_POLL_SECONDS)
    return value


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without settings of ours and without proxies, and what is given."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TRIOSERVE_") and not name.lower().endswith("_proxy")
    }
    return {**kept, "PYTHONUNBUFFERED": "1", **(extra or {})}


class Process:
    """A command in a process group of its own, for the length of a ``with`` block; at its end the group is killed.

    Arguments:
        argv: the command.
        env: added to the environment.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._argv = list(argv)
        self._env = environment(env)
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._closed = False

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._argv,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, name="log reader")
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._signal_group(signal.SIGKILL)
        self._process.wait(STOP_SECONDS)
        self._reader.join(STOP_SECONDS)
        self._process.stderr.close()
        if error is not None:
            error.add_note(f"$ {shlex.join(self._argv)}\n{self.log_text()}")

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

    def log_text(self) -> str:
        """Everything that came on stderr so far."""
        with self._news:
            return "".join(self._lines)

    def wait_for_log(self, pattern: str, within: float = START_SECONDS) -> re.Match[str]:
        """Return the first match in any line of the log, waiting for it."""
        regex = re.compile(pattern)
        deadline = time.monotonic() + within
        seen = 0
        with self._news:
            while True:
                for line in self._lines[seen:]:
                    if found := regex.search(line):
                        return found
                seen = len(self._lines)
                left = deadline - time.monotonic()
                if self._closed or left <= 0:
                    raise AssertionError(f"no line of the log matched {pattern!r}")
                self._news.wait(left)

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        self._process.send_signal(number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the whole process group, as a terminal or a service manager does."""
        self._signal_group(number)

    def wait(self, seconds: float) -> int:
        """Return the exit code; fail when the process is still there after so many seconds."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the process is still there after {seconds} s") from None

    def finish(self, seconds: float = STOP_SECONDS) -> int:
        """Wait for the end of the process and of its log; return the exit code."""
        code = self.wait(seconds)
        self._reader.join(STOP_SECONDS)
        return code

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def cpu_seconds(self) -> float:
        """Processor time that the process has used so far."""
        fields = (_PROC / str(self.pid) / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def survivors(self) -> list[int]:
        """Processes of the group that are still alive."""
        return [int(folder.name) for folder in _PROC.glob("[0-9]*") if _lives_in_group(folder, self.pid)]

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _read(self) -> None:
        for line in self._process.stderr:
            with self._news:
                self._lines.append(line)
                self._news.notify_all()
        with self._news:
            self._closed = True
            self._news.notify_all()


class Daemon(Process):
    """``trioserve serve`` on a free port; its slots have one thread each unless the environment says otherwise.

    Arguments:
        args: of the command, after its name.
        env: added to the environment.
        command: what ``trioserve`` is told to do.
        ready: wait until the models are loaded.
    """

    def __init__(
        self, *args: str, env: Mapping[str, str] | None = None, command: str = "serve", ready: bool = True
    ) -> None:
        super().__init__(trioserve(command, *args), {**ONE_THREAD, **(env or {})})
        self._wait_ready = ready
        self.url = ""

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.url = self.wait_for_log(r"listening on ([^\s\"]+)").group(1)
            if self._wait_ready:
                self.wait_for_log(r' info ready$|"message": "ready"')
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    @property
    def port(self) -> int:
        """That it listens on."""
        return int(self.url.rpartition(":")[2])

    def request_log(self, request_id: str, within: float = 10) -> dict[str, str]:
        """What the log says of a request that has ended: its fields, and how it ended as ``end``."""
        found = self.wait_for_log(rf" info request (\w+) (.*\brequest_id={re.escape(request_id)}\b.*)", within)
        fields = dict(pair.partition("=")[::2] for pair in shlex.split(found.group(2)))
        return {**fields, "end": found.group(1)}

    def stop(self) -> int:
        """Ask for an orderly end and return the exit code."""
        self.signal(signal.SIGTERM)
        return self.finish()


@contextlib.contextmanager
def well_behaved(*args: str, env: Mapping[str, str] | None = None) -> Iterator[Daemon]:
    """A server that must end in order, whatever its clients did, and must have had no error of its own."""
    with Daemon(*args, env=env) as daemon:
        yield daemon
        assert daemon.stop() == 0
        log = daemon.log_text()
        assert "Traceback" not in log
        assert " error " not in log
        assert daemon.survivors() == []


def trioserve(command: str, *args: str) -> list[str]:
    """The command line of ``trioserve``; a port is chosen by the system unless one is given."""
    port = [] if "--port" in args else ["--port", "0"]
    return [sys.executable, "-m", "trioserve", command, *port, *args]


def run_to_end(argv: Sequence[str], env: Mapping[str, str] | None = None, seconds: float = 60) -> tuple[int, str]:
    """Run a command that is expected to end by itself; return its exit code and its stderr."""
    with Process(argv, env) as process:
        code = process.finish(seconds)
        return code, process.log_text()


def _lives_in_group(folder: Path, group: int) -> bool:
    try:
        state, _, group_of, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # gone meanwhile
        return False
    return state != "Z" and int(group_of) == group
