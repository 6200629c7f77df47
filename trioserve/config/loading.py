"""Putting the sources together: the table's defaults < file < environment < flags."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from trioserve.config.description import Scope, settings, settings_by_flag
from trioserve.config.explanation import explain, shown_value
from trioserve.config.model_files import embedded_model_path
from trioserve.config.sources import (
    ENV_CONFIG,
    Entry,
    FileSettings,
    Given,
    config_error,
    read_environment,
    read_file,
    read_flags,
)
from trioserve.config.table import Config, ModelConfig
from trioserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["load_config"]

EMBEDDED_ID = "smollm2"
EMBEDDED_SLOTS = 4
_ONE_MODEL_ONLY = ("id", "chat_template", "lora")


def load_config(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> Config:
    """Return the configuration that a file, the environment and flags give together; a later source wins.

    Arguments:
        file: a TOML or JSON file; where None, ``TRIOSERVE_CONFIG`` may name it.
        environ: environment variables; those that begin with ``TRIOSERVE_`` are settings.
        flags: settings by name, and ``model`` for the path of one model. Texts are parsed as in the environment.

    A model's setting from environment or flags applies to every model. Where no source names a model, the embedded
    default is served.

    Raises:
        ConfigError: one line that names the setting, what is wrong with its value, and where it was given.
    """
    overrides = read_environment(environ) | read_flags(flags)
    from_file = _file_settings(file, environ)
    scopes = {name: info.scope for name, info in settings_by_flag().items()}
    server = dict(from_file.server) | {name: item for name, item in overrides.items() if scopes[name] == "server"}
    for_models = {name: item for name, item in overrides.items() if scopes[name] == "model"}
    models = tuple(_build_model(entry) for entry in _model_entries(from_file.models, for_models))
    return _build_config(server, models)


def _file_settings(file: Path | None, environ: Mapping[str, str]) -> FileSettings:
    if file is not None:
        return read_file(file, "flag --config")
    if name := environ.get(ENV_CONFIG):
        return read_file(Path(name), f"environment variable {ENV_CONFIG}")
    return FileSettings({}, ())


def _model_entries(entries: tuple[Entry, ...], overrides: dict[str, Given]) -> list[Entry]:
    """Return the models to serve, each with the overrides applied; exactly one source may name models."""
    named = overrides.pop("path", None)
    if named is not None and entries:
        place = entries[0].origin.partition(" in ")[2]
        raise config_error(f"model: {shown_value(named.value)} is given, and {place} has [[models]] too", named.origin)
    if named is not None:
        entries = (Entry({"path": named}, named.origin),)
    elif not entries:
        entries = (_embedded_entry(),)
    for name in _ONE_MODEL_ONLY:
        if name in overrides and len(entries) > 1:
            problem = f"{name}: can be given for one model only, and {len(entries)} are configured"
            raise config_error(problem, overrides[name].origin)
    return [Entry(dict(entry.values) | overrides, entry.origin) for entry in entries]


def _embedded_entry() -> Entry:
    values = {"path": embedded_model_path(), "id": EMBEDDED_ID, "slots": EMBEDDED_SLOTS}
    origin = "embedded default"
    return Entry({name: Given(value, origin) for name, value in values.items()}, origin)


def _build_model(entry: Entry) -> ModelConfig:
    values = {name: item.value for name, item in entry.values.items()}
    try:
        return ModelConfig.model_validate(values, context={"read_files": True})
    except ValidationError as error:
        raise _explained(error, "model", entry.values, entry.origin) from None


def _build_config(given: Mapping[str, Given], models: tuple[ModelConfig, ...]) -> Config:
    values = {name: item.value for name, item in given.items()}
    try:
        config = Config.model_validate({**values, "models": models}, context={"read_files": True})
    except ValidationError as error:
        raise _explained(error, "server", given, "not given") from None
    for info in settings():
        path = getattr(config, info.name) if info.scope == "server" and info.kind == "path" else None
        if path is not None and not path.is_file():
            raise config_error(f"{info.name}: there is no file {str(path)!r}", given[info.name].origin)
    return config


def _explained(error: ValidationError, scope: Scope, given: Mapping[str, Given], fallback: str) -> ConfigError:
    """Return the first problem of a validation as one sentence: setting, value, limit, origin."""
    problem = explain(error, scope)
    if problem.name == "models":
        return ConfigError(problem.text)
    return config_error(problem.text, given[problem.name].origin if problem.name in given else fallback)
