"""What can be said of a configuration before anything is started. Needs nothing of the server."""

from __future__ import annotations

from pathlib import Path

from trioserve.config import Config, ModelConfig, check_model_file
from trioserve.engine.gguf import HeaderError
from trioserve.engine.model_file import inspect_model
from trioserve.errors import ChatTemplateError, ConfigError, InvalidModelError


def check_models(config: Config) -> None:
    """Look at every model's file and template.

    Raises:
        InvalidModelError: a file can't be used.
        ConfigError: a chat template is no template.
    """
    for model in config.models:
        check_model(model)


def check_model(model: ModelConfig) -> None:
    """Look at one model's file and template; see ``check_models`` for the errors."""
    check_model_file(model.path)
    if model.chat_template is None:
        return
    from trioserve.chat import ChatTemplate  # and with it Jinja, which most configurations have no use for

    try:
        ChatTemplate(model.chat_template, bos_token="", eos_token="")
    except ChatTemplateError as error:
        raise ConfigError(f"chat_template of model {model.id!r}: {error.message}") from None


def check_header(path: Path) -> None:
    """Look at the whole header of a model's file, as every load does first.

    Raises:
        InvalidModelError: it can't be loaded.
    """
    try:
        inspect_model(path)
    except (OSError, HeaderError) as error:
        raise InvalidModelError(f"model file {str(path)!r} can't be used: {error}", param="path") from None
