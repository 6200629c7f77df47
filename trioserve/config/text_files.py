"""Small text files that settings name with ``@file``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["bounded_text"]


def bounded_text(path: Path, max_bytes: int) -> str:
    """Return the text of a file in UTF-8.

    Arguments:
        path: of the file.
        max_bytes: it may have; no more is read.

    Raises:
        ValueError: it cannot be read, is no UTF-8 text, or is larger than that.
    """
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{str(path)!r} is not UTF-8 text") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > max_bytes:
        raise ValueError(f"{str(path)!r} is larger than {max_bytes} bytes")
    return text
