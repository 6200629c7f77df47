"""The table of settings: ``ModelConfig`` is one ``[[models]]`` entry, ``Config`` is everything.

Validation is strict: a string is no number and a bool is no number. Descriptions, ranges and defaults given here are
what ``--help`` prints and what docs/settings.md is tested against. Where the default is computed, ``default_text`` says
it in words.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from trioserve.config.adapters import ADAPTERS, Adapters
from trioserve.config.keys import KEYS, Keys
from trioserve.config.paths import PATHS, FilePath
from trioserve.config.text_files import bounded_text

__all__ = ["MAX_MODEL_ID_CHARS", "Config", "ModelConfig"]

MAX_INT = 2**31 - 1
MAX_CONTEXT_TOKENS = 2**24
MAX_MODEL_ID_CHARS = 256
MAX_TEMPLATE_BYTES = 2**20
DEFAULT_UBATCH = 512
QUANTISED_KV_DTYPES = frozenset({"q8_0", "q4_0"})
TEXT_OR_FILE = "text or @file"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._-]+(:[0-9]{1,5})?|[a-z]+://\[[0-9a-f:.]+\](:[0-9]{1,5})?", re.ASCII)


Milliseconds = Annotated[int, Field(ge=0, le=MAX_INT)]
Count = Annotated[int, Field(ge=0, le=MAX_INT)]
BatchTokens = Annotated[int, Field(ge=1, le=MAX_CONTEXT_TOKENS)]


def _file_stem(validated: dict[str, Any]) -> str:
    path: Path = validated["path"]
    return path.stem or str(path)  # "." and "/" have none, and are to be refused for what they are


def _ubatch_within(validated: dict[str, Any]) -> int:
    n_batch: int = validated["n_batch"]
    return min(DEFAULT_UBATCH, n_batch)


class ModelConfig(BaseModel):
    """One model: where its file lies and how it is run.

    A ``chat_template`` of the form ``@file`` is read only under the validation context ``{"read_files": True}``, which
    ``load_config`` gives: a request that carries a model's settings must not name files for the server to read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    path: FilePath = Field(
        description="The model's GGUF file. A relative path in a configuration file starts at that file's folder."
    )
    id: str = Field(
        default_factory=_file_stem,
        validate_default=True,
        max_length=MAX_MODEL_ID_CHARS,
        description="The name by which requests ask for the model; each model has its own.",
        json_schema_extra={"default_text": "the file's stem"},
    )
    task: Literal["generate", "embed"] = Field(
        default="generate", description="What the model is for: to continue texts, or to turn them into vectors."
    )
    pooling: Literal["auto", "mean", "cls", "last"] = Field(
        default="auto",
        description="With task embed, what makes one vector of those of all tokens: their mean, the first (cls) or the "
        "last one. auto takes the model's own way, and the mean where it has none.",
    )
    slots: int = Field(
        default=1,
        ge=1,
        le=16,
        description="How many requests the model serves at the same time, each in its own context.",
    )
    n_ctx: Annotated[int, Field(ge=16, le=MAX_CONTEXT_TOKENS)] | None = Field(
        default=None,
        description="Tokens of context per slot, prompt and answer together. Left out, it is 4096 or what the model "
        "was trained for, whichever is less.",
        json_schema_extra={"default_text": "4096"},
    )
    n_batch: BatchTokens = Field(
        default=2048, description="Most tokens of all sequences together that one step evaluates."
    )
    n_ubatch: BatchTokens = Field(
        default_factory=_ubatch_within,
        description="Most tokens computed together inside such a call; at most n_batch. Left out, it is 512 or "
        "n_batch, whichever is less.",
        json_schema_extra={"default_text": str(DEFAULT_UBATCH)},
    )
    batch_capacity: int = Field(
        default=8,
        ge=1,
        le=256,
        description="Most prompts or inputs of one request that a slot computes together; the others follow as these "
        "end.",
    )
    execution: Literal["auto", "isolated", "fused"] = Field(
        default="auto",
        description="How slots compute: isolated, each in a context of its own, so that no answer depends on the load; "
        "or fused, all in one context, which GPUs and large models want. auto takes fused where layers are on a GPU, "
        "and for half a gigabyte of weights and more where that changes no answer.",
    )
    prefill_chunk: Annotated[int, Field(ge=2, le=MAX_CONTEXT_TOKENS)] | None = Field(
        default=None,
        description="With execution fused, most tokens of prompts that a step evaluates while other requests wait for "
        "their next token; at most n_ubatch. Left out, it is 64 on the CPU, or 16 for each thread if that is more, and "
        "n_ubatch on a GPU.",
        json_schema_extra={"default_text": "64 or n_ubatch"},
    )
    threads: int = Field(default=0, ge=0, le=1024, description="Cores that the busy slots share; 0 means all of them.")
    gpu_layers: int = Field(
        default=0, ge=-1, le=MAX_INT, description="Layers of the model to keep on the GPU; -1 means all of them."
    )
    lazy: bool = Field(default=False, description="Load the model at its first use instead of at the start.")
    kv_dtype: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] = Field(
        default="f16", description="Element type of the KV cache; the quantised ones save memory and cost precision."
    )
    flash_attention: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Whether attention uses the flash kernels; a quantised kv_dtype needs them. auto leaves "
        "them off on the CPU, because only then an answer is the same, byte for byte, whatever the load.",
    )
    cache_prompt: bool = Field(
        default=True,
        description="Let a slot keep its last prompt and answer, so that a request that begins like them costs less.",
    )
    chat_template: str | None = Field(
        default=None,
        min_length=1,
        description="A Jinja template for chat messages in place of the model's own: its text, or @ and the name of a "
        "file that holds it.",
        json_schema_extra={"default_text": "from the GGUF", "kind": TEXT_OR_FILE},
    )
    lora: Adapters = Field(
        default=(),
        description="LoRA adapters that are added to the model: GGUF files, each with a colon and its scale behind it, "
        "or alone, which is a scale of 1.",
        json_schema_extra={"default_text": "none", "kind": ADAPTERS},
    )
    mmap: bool = Field(default=True, description="Map the model's file into memory instead of reading it whole.")
    mlock: bool = Field(default=False, description="Keep the weights from being swapped out.")
    keep_alive_ms: Milliseconds | None = Field(
        default=None,
        description="Unload the model when it was unused for so many milliseconds; 0 keeps it.",
        json_schema_extra={"default_text": "server's"},
    )
    busy_timeout_ms: Milliseconds | None = Field(
        default=None,
        description="Longest wait for a slot of this model, in milliseconds; the server's bound holds as well, and the "
        "smaller one counts.",
        json_schema_extra={"default_text": "server's"},
    )
    max_queued_requests: Count | None = Field(
        default=None,
        description="Most requests that wait for this model at once.",
        json_schema_extra={"default_text": "server's"},
    )

    @field_validator("id")
    @classmethod
    def _id_is_a_name(cls, value: str) -> str:
        if not value:
            raise ValueError("the id is empty")
        # Control characters break logs, and lone surrogates (from an undecodable file name) break JSON.
        if any(unicodedata.category(character) in {"Cc", "Cs"} for character in value):
            raise ValueError(f"the id {value!r} holds control characters")
        return value

    @field_validator("n_ubatch")
    @classmethod
    def _ubatch_fits_in_batch(cls, value: int, info: ValidationInfo) -> int:
        n_batch = info.data.get("n_batch", value)
        if value > n_batch:
            raise ValueError(f"{value} is more than n_batch, which is {n_batch}")
        return value

    @field_validator("flash_attention")
    @classmethod
    def _quantised_cache_has_flash_attention(cls, value: str, info: ValidationInfo) -> str:
        kv_dtype = info.data.get("kv_dtype")
        if value == "off" and kv_dtype in QUANTISED_KV_DTYPES:
            raise ValueError(f"'off' does not go with kv_dtype {kv_dtype}, which needs flash attention")
        return value

    @field_validator("chat_template")
    @classmethod
    def _template_from_file(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None or not value.startswith("@"):
            return value
        if not (info.context or {}).get("read_files"):
            raise ValueError("'@file' is read for the operator's configuration only")
        text = bounded_text(Path(value[1:]), MAX_TEMPLATE_BYTES)
        if not text:
            raise ValueError(f"{value[1:]!r} is empty")
        return text


class Config(BaseModel):
    """Everything the operator decides: the server's settings and its models, in the order in which they were named.

    Keys of the form ``@file`` are read under the validation context ``{"read_files": True}``, as a chat template is.
    """

    # Among the inputs are keys.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)

    host: str = Field(
        default="127.0.0.1",
        description="Address or name to listen on, or unix:/path for a Unix domain socket.",
    )
    port: int = Field(default=8080, ge=0, le=65535, description="TCP port to listen on; 0 takes any free one.")
    busy_timeout_ms: Milliseconds | None = Field(
        default=300_000,
        description="Longest wait for a slot, in milliseconds; 0 means never wait, null means no bound. A request can "
        "shorten its wait and not lengthen it.",
    )
    max_queued_requests: Count = Field(
        default=512, description="Most requests that wait for one model at once; one more is refused as busy."
    )
    drain_timeout_ms: Milliseconds = Field(
        default=30_000,
        description="How long a stopping server lets admitted and queued requests finish, in milliseconds.",
    )
    send_timeout_ms: Annotated[int, Field(ge=1, le=MAX_INT)] = Field(
        default=30_000,
        description="How long a client may stop reading, in milliseconds, before it counts as disconnected.",
    )
    stall_timeout_ms: Milliseconds = Field(
        default=120_000,
        description="How long one call into the engine may take, in milliseconds, before its slot counts as stalled; "
        "0 means for ever.",
    )
    max_request_body_bytes: Annotated[int, Field(ge=1, le=MAX_INT)] = Field(
        default=33_554_432, description="Largest body of a request, in bytes; a larger one is refused with status 413."
    )
    api_keys: Keys = Field(
        default=(),
        description="Keys of which a request needs one, or @ and the name of a file with one key per line. Without "
        "any, whoever reaches the server may use it.",
        json_schema_extra={"default_text": "none", "kind": KEYS},
    )
    admin_keys: Keys = Field(
        default=(),
        description="Keys of which a call of a management route needs one; they open the other routes as well. Without "
        "any, api_keys open everything.",
        json_schema_extra={"default_text": "none", "kind": KEYS},
    )
    cors_origins: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Origins whose pages in a browser may use the server, such as https://chat.example, or * for all.",
        json_schema_extra={"default_text": "none"},
    )
    management: bool = Field(
        default=False,
        description="Serve the routes that load, reconfigure and unload models; otherwise they answer 403.",
    )
    model_roots: tuple[FilePath, ...] = Field(
        default=(),
        strict=False,
        description="Folders from which a load request may name files. Without any, it may only name files that "
        "registered models have already.",
        json_schema_extra={"default_text": "none", "kind": PATHS},
    )
    max_loaded_models: Count = Field(
        default=0,
        description="Most models that are loaded at once; for one more, the idle model that was unused longest is "
        "unloaded. 0 means no bound.",
    )
    idle_unload_ms: Milliseconds = Field(
        default=0, description="Unload models that were unused for so many milliseconds; 0 keeps them."
    )
    min_free_memory_mb: Count = Field(
        default=0,
        description="Refuse a load whose estimated need would leave less free memory than this, in MiB; 0 refuses "
        "none.",
    )
    certfile: FilePath | None = Field(
        default=None,
        description="PEM file with the TLS certificate chain; together with keyfile it turns TLS on.",
        json_schema_extra={"default_text": "no TLS"},
    )
    keyfile: FilePath | None = Field(
        default=None,
        validate_default=True,
        description="PEM file with the private key that belongs to certfile.",
        json_schema_extra={"default_text": "no TLS"},
    )
    keep_alive_timeout_ms: Milliseconds = Field(
        default=75_000,
        description="How long an HTTP connection is kept open while it waits for a request's head, in milliseconds.",
    )
    sse_ping_interval_ms: Milliseconds = Field(
        default=15_000,
        description="A stream that was silent for so many milliseconds sends a comment, so that no proxy takes it for "
        "dead; 0 sends none.",
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Form of the log on stderr: lines of text, or one JSON object per line."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe events that are logged."
    )
    log_prompts: bool = Field(
        default=False, description="Write prompts to the log. Off, no text of a user's gets there."
    )
    models: tuple[ModelConfig, ...] = Field(default=(), strict=False, description="The models, each with its own id.")

    @field_validator("host")
    @classmethod
    def _host_is_an_address(cls, value: str) -> str:
        if value in {"", "unix:"}:
            raise ValueError(f"{value!r} names no address")
        if not value.isprintable():
            raise ValueError(f"{value!r} holds characters that cannot be printed")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins_are_as_browsers_send_them(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin: write scheme://host or scheme://host:port, or *")
        return value

    @field_validator("keyfile")
    @classmethod
    def _both_halves_of_tls(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if "certfile" in info.data and (value is None) != (info.data["certfile"] is None):
            raise ValueError("certfile and keyfile are needed together")
        return value

    @field_validator("models")
    @classmethod
    def _ids_differ(cls, value: tuple[ModelConfig, ...]) -> tuple[ModelConfig, ...]:
        seen: set[str] = set()
        for model in value:
            if model.id in seen:
                raise ValueError(f"two models have the id {model.id!r}")
            seen.add(model.id)
        return value

    @field_validator("models")
    @classmethod
    def _models_that_load_at_the_start_fit(
        cls, value: tuple[ModelConfig, ...], info: ValidationInfo
    ) -> tuple[ModelConfig, ...]:
        limit, at_start = info.data.get("max_loaded_models", 0), sum(not model.lazy for model in value)
        if limit and at_start > limit:
            raise ValueError(f"{at_start} models load at the start (lazy is false), but max_loaded_models is {limit}")
        return value
