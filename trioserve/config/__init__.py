"""The configuration: one table of settings, and how file, environment and flags fill it.

The table is ``ModelConfig`` and ``Config``. A new setting is a new field there; file keys, environment variables,
flags, ``--help`` and the checks of docs/settings.md follow from it.
"""

from trioserve.config.adapters import LoraAdapter
from trioserve.config.description import SettingInfo, settings, settings_by_flag
from trioserve.config.explanation import explain
from trioserve.config.loading import load_config
from trioserve.config.model_files import check_adapter_file, check_model_file
from trioserve.config.table import MAX_MODEL_ID_CHARS, Config, ModelConfig

__all__ = [
    "MAX_MODEL_ID_CHARS",
    "Config",
    "LoraAdapter",
    "ModelConfig",
    "SettingInfo",
    "check_adapter_file",
    "check_model_file",
    "explain",
    "load_config",
    "settings",
    "settings_by_flag",
]
