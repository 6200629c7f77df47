"""trioserve: a server for GGUF language models on Trio structured concurrency.

``app`` is the ASGI callable, ``open_service`` the server without HTTP, ``create_app`` the HTTP application over it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trioserve.asgi import app

if TYPE_CHECKING:
    from trioserve.config import Config
    from trioserve.http.app import create_app
    from trioserve.service import open_service

__version__ = "0.1.0"
__all__ = ["Config", "app", "create_app", "open_service"]

_LAZY = {"Config": "trioserve.config", "create_app": "trioserve.http.app", "open_service": "trioserve.service"}


def __getattr__(name: str) -> Any:
    """Import the public names when they are asked for, so that ``--help`` stays quick."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
