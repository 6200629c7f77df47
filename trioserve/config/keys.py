"""Keys of clients: where they are written, and what may be one. No message here ever holds a key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, SecretStr, ValidationInfo

from trioserve.config.text_files import bounded_text

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["KEYS", "Keys"]

KEYS = "list of keys"
MAX_FILE_BYTES = 2**20
_KEY = re.compile(r"[!-~]+", re.ASCII)


def _expanded(value: object, info: ValidationInfo) -> object:
    """Put the keys of files in the place of ``@file``, and hide them all. What is no list of texts is left as it is."""
    if not isinstance(value, list | tuple):
        return value
    read_files = bool((info.context or {}).get("read_files"))
    found: list[object] = []
    for number, item in enumerate(value, 1):
        text = item.get_secret_value() if isinstance(item, SecretStr) else item
        if isinstance(text, str) and text.startswith("@"):
            if not read_files:
                raise ValueError("'@file' is read for the operator's configuration only")
            found += _keys_of_file(Path(text[1:]))
        elif isinstance(text, str):
            found.append(_checked(text, f"key {number}"))
        else:
            found.append(item)
    return tuple(found)


def _keys_of_file(path: Path) -> Iterator[SecretStr]:
    """Give the keys of a file: one on each line, among empty lines and comments.

    Raises:
        ValueError: the file cannot be read, or has no key: a server that was to be closed must not come up open.
    """
    found = False
    for number, line in enumerate(bounded_text(path, MAX_FILE_BYTES).removeprefix("\ufeff").split("\n"), 1):
        text = line.strip()
        if text and not text.startswith("#"):
            found = True
            yield _checked(text, f"line {number} of {str(path)!r}")
    if not found:
        raise ValueError(f"{str(path)!r} holds no key")


def _checked(text: str, place: str) -> SecretStr:
    if not text:
        raise ValueError(f"{place} is empty")
    if text.startswith("@"):
        raise ValueError(f"{place} begins with '@', which means a file")
    if not _KEY.fullmatch(text):
        raise ValueError(f"{place} is not of printable ASCII characters without spaces")
    return SecretStr(text)


Keys = Annotated[tuple[SecretStr, ...], BeforeValidator(_expanded)]
"""Texts that are hidden wherever they are printed."""
