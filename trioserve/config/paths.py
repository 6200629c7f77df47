"""Names of files, as settings give them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

__all__ = ["PATHS", "FilePath", "checked_path"]

PATHS = "list of paths"


def checked_path(value: object) -> object:
    """Return a value that may name a file, or is of another type than names are.

    Raises:
        ValueError: no file has such a name.
    """
    if isinstance(value, str | os.PathLike) and os.fspath(value) in {"", b""}:
        raise ValueError("the path is empty")
    if isinstance(value, str) and "\0" in value:
        raise ValueError("the path holds a NUL character")
    return value


FilePath = Annotated[Path, Field(strict=False), BeforeValidator(checked_path)]
