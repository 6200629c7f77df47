"""Where settings come from: a TOML or JSON file, the environment, flags. Each value remembers its origin.

Nothing is validated here beyond names and syntax; the table does the rest.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trioserve.config.adapters import ADAPTERS
from trioserve.config.description import SettingInfo, settings, settings_by_flag
from trioserve.config.keys import KEYS
from trioserve.config.paths import PATHS
from trioserve.config.table import TEXT_OR_FILE
from trioserve.errors import ConfigError
from trioserve.logs import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = [
    "Entry",
    "FileSettings",
    "Given",
    "config_error",
    "did_you_mean",
    "parse_text",
    "read_environment",
    "read_file",
    "read_flags",
]

ENV_PREFIX = "TRIOSERVE_"
ENV_CONFIG = "TRIOSERVE_CONFIG"
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_NULLS = frozenset({"", "null", "none"})


@dataclass(frozen=True, slots=True)
class Given:
    """A value and where it was given, such as ``flag --slots``."""

    value: object
    origin: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One model's settings by name, and the place of the entry as a whole."""

    values: Mapping[str, Given]
    origin: str


@dataclass(frozen=True, slots=True)
class FileSettings:
    """What a configuration file says: the server's settings, and its ``[[models]]`` entries in order."""

    server: Mapping[str, Given]
    models: tuple[Entry, ...]


def config_error(problem: str, origin: str) -> ConfigError:
    """Return the error for a problem and where it came from, on one line."""
    return ConfigError(one_line(f"{problem} ({origin})"))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" with the known name nearest to ``name``, or nothing where none is near."""
    # Without the prefix that all variables share: it would make any two of them look alike.
    bare = {candidate.removeprefix(ENV_PREFIX).lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.removeprefix(ENV_PREFIX).lower(), bare, n=1)
    return f"; did you mean {bare[near[0]]}?" if near else ""


def _unknown(name: str, origin: str, known: Iterable[str]) -> ConfigError:
    return config_error(f"unknown setting {name!r}{did_you_mean(name, known)}", origin)


def parse_text(info: SettingInfo, text: str) -> object:
    """Return the value that a text from the environment or a flag stands for.

    A text that stands for nothing of the setting's kind comes back as it is, for validation to refuse.
    """
    word = text.strip().lower()
    if info.nullable and word in _NULLS:
        return None
    if info.kind == "boolean":
        return _BOOLEANS.get(word, text)
    if info.kind == "integer":
        return int(word) if _INTEGER.fullmatch(word) else text
    if info.kind == "choice":
        return word if word in info.choices else text
    if info.kind == KEYS:
        # An empty one stays, to be refused: a variable that was left empty must not open the server.
        return tuple(part.strip() for part in text.split(","))
    if info.kind in {"list", PATHS, ADAPTERS}:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text


def _overrides(given: Mapping[str, Given], source: str) -> dict[str, Given]:
    """Return what one source gives: texts parsed, and ``model`` under the name it has in the table, ``path``."""
    if "model" in given and "path" in given:
        raise config_error("model and path are two names for the same setting: give one of them", source)
    found: dict[str, Given] = {}
    for alias, item in given.items():
        name = "path" if alias == "model" else alias
        info = settings_by_flag()[name]
        value = parse_text(info, item.value) if isinstance(item.value, str) else item.value
        found[name] = Given(value, item.origin)
    return found


def read_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """Return the settings among environment variables, by name. An empty ``TRIOSERVE_MODEL`` names none.

    Raises:
        ConfigError: a variable begins with ``TRIOSERVE_`` and is no setting.
    """
    names = {ENV_PREFIX + name.upper(): name for name in (*settings_by_flag(), "model")}
    given: dict[str, Given] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable == ENV_CONFIG:
            continue
        if variable not in names:
            raise _unknown(variable, "environment variable", (*names, ENV_CONFIG))
        if text or names[variable] != "model":
            given[names[variable]] = Given(text, f"environment variable {variable}")
    return _overrides(given, "environment")


def read_flags(flags: Mapping[str, object]) -> dict[str, Given]:
    """Return the settings given as flags, by name. Texts are parsed, other values are taken as they are.

    Raises:
        ConfigError: a name is no setting.
    """
    known = (*settings_by_flag(), "model")
    given: dict[str, Given] = {}
    for name, value in flags.items():
        if name not in known:
            raise _unknown(name, "flag", known)
        given[name] = Given(value, "model argument" if name == "model" else f"flag --{name.replace('_', '-')}")
    return _overrides(given, "flags")


def read_file(path: Path, origin: str) -> FileSettings:
    """Return what a configuration file says.

    Arguments:
        path: a ``.toml`` or ``.json`` file.
        origin: who named the file, for errors about the file itself.

    Raises:
        ConfigError: the file cannot be read or parsed, or holds an unknown key.
    """
    document = _parse_document(path, origin)
    place = f"file {str(path)!r}"
    entries = document.pop("models", [])
    if not isinstance(entries, list):
        raise config_error("models: must be a list of tables, [[models]]", place)
    models = []
    for number, entry in enumerate(entries):
        where = f"models[{number}] in {place}"
        if not isinstance(entry, dict):
            raise config_error("models: each entry must be a table", where)
        models.append(Entry(_from_table(entry, "model", where, path), where))
    return FileSettings(_from_table(document, "server", place, path), tuple(models))


def _parse_document(path: Path, origin: str) -> dict[str, Any]:
    suffix = path.suffix.lower()
    if suffix not in {".toml", ".json"}:
        raise config_error(f"configuration file {str(path)!r} must end in .toml or .json", origin)
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise config_error(f"configuration file {str(path)!r} is no regular file", origin)
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise config_error(f"file {str(path)!r} is not UTF-8 text: bad byte at offset {error.start}", origin) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise config_error(f"cannot read configuration file {str(path)!r}: {reason}", origin) from None
    try:
        document = tomllib.loads(text) if suffix == ".toml" else _parse_json(text)
    except (ValueError, RecursionError) as error:
        raise config_error(f"not valid {suffix[1:].upper()}: {error}", f"file {str(path)!r}") from None
    if not isinstance(document, dict):
        raise config_error("the top level must be an object with settings", f"file {str(path)!r}")
    return document


def _parse_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} is given twice")
        return found

    def no_constant(word: str) -> Any:
        raise ValueError(f"{word} is no JSON value")

    return json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)


def _from_table(table: Mapping[str, Any], scope: str, origin: str, file: Path) -> dict[str, Given]:
    known = {info.name: info for info in settings() if info.scope == scope}
    elsewhere = {info.name for info in settings() if info.scope != scope}
    found: dict[str, Given] = {}
    for name, value in table.items():
        if name not in known:
            if name in elsewhere:
                home = "at the top level of the file" if scope == "model" else "in a [[models]] entry"
                raise config_error(f"setting {name!r} belongs {home}", origin)
            raise _unknown(name, origin, known)
        found[name] = Given(_beside_file(known[name], value, file.absolute().parent), origin)
    return found


def _beside_file(info: SettingInfo, value: object, folder: Path) -> object:
    """Return a file's value with relative paths made absolute from the file's folder, and a list as a tuple."""
    if info.kind == "path" and isinstance(value, str) and value:
        return str(folder / value)
    if info.kind == TEXT_OR_FILE:
        return _file_beside(value, folder)
    if info.kind == KEYS and isinstance(value, list):
        return tuple(_file_beside(item, folder) for item in value)
    if info.kind in {PATHS, ADAPTERS} and isinstance(value, list):
        return tuple(_item_beside(item, folder) for item in value)
    return tuple(value) if info.kind == "list" and isinstance(value, list) else value


def _item_beside(item: object, folder: Path) -> object:
    """Return an item of a list, with its path made absolute: the item itself, or one of a table's values."""
    if isinstance(item, dict) and "path" in item:
        return item | {"path": _item_beside(item["path"], folder)}
    return str(folder / item) if isinstance(item, str) and item else item


def _file_beside(value: object, folder: Path) -> object:
    """Return a value, with the name made absolute where it is ``@file``."""
    return f"@{folder / value[1:]}" if isinstance(value, str) and value.startswith("@") and len(value) > 1 else value
