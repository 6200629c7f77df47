"""What can be said of a configuration before anything is started. Needs nothing of the server."""

from __future__ import annotations

from trioserve.config import Config, ModelConfig, check_adapter_file, check_model_file
from trioserve.engine.gguf import HeaderError
from trioserve.engine.lora_file import inspect_adapters
from trioserve.engine.model_file import inspect_model
from trioserve.errors import ChatTemplateError, ConfigError, InvalidModelError


def check_models(config: Config) -> None:
    """Look at every model's files and template.

    Raises:
        InvalidModelError: a file can't be used.
        ConfigError: a chat template is no template.
    """
    for model in config.models:
        check_model(model)


def check_model(model: ModelConfig) -> None:
    """Look at one model's files and template; see ``check_models`` for the errors."""
    check_model_file(model.path)
    for adapter in model.lora:
        check_adapter_file(adapter.path)
    if model.chat_template is None:
        return
    from trioserve.chat import ChatTemplate  # and with it Jinja, which most configurations have no use for

    try:
        ChatTemplate(model.chat_template, bos_token="", eos_token="")
    except ChatTemplateError as error:
        raise ConfigError(f"chat_template of model {model.id!r}: {error.message}") from None


def check_headers(model: ModelConfig) -> None:
    """Look at the whole headers of a model's file and its adapters, as every load does first.

    Raises:
        InvalidModelError: one can't be loaded.
    """
    try:
        header = inspect_model(model.path)
    except (OSError, HeaderError) as error:
        raise InvalidModelError(f"model file {str(model.path)!r} can't be used: {error}", param="path") from None
    try:
        inspect_adapters([adapter.path for adapter in model.lora], header)
    except HeaderError as error:
        raise InvalidModelError(f"lora: {error}", param="lora") from None
