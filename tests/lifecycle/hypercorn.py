"""The same application under Hypercorn's own command."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Self

import httpx

from .client import http
from .daemon import START_SECONDS, Process, eventually, free_port

WORKERS = {"trio": ("-k", "trio"), "asyncio": ()}


class Hypercorn(Process):
    """``python -m hypercorn trioserve:app`` on a free port, ready to answer.

    Arguments:
        args: of the command.
        env: added to the environment; it alone sets the application up.
    """

    def __init__(self, *args: str, env: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "hypercorn", "--bind", f"127.0.0.1:{self.port}", *args, "trioserve:app"]
        super().__init__(command, env)

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            with http(self.url) as client:
                eventually(lambda: self._ready(client), START_SECONDS, "a ready server")
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _ready(self, client: httpx.Client) -> bool:
        assert self.running, "the server has ended"
        with contextlib.suppress(httpx.TransportError):
            return client.get("/health/ready").status_code == 200
        return False
