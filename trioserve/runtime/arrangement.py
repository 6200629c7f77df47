"""How a pool's slots come by their contexts: each by one of its own, or all by one that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trioserve.config import ModelConfig
from trioserve.engine.base import Adapter, SessionOptions, Task
from trioserve.runtime.cores import Cores

DEFAULT_N_CTX = 4096
LARGE = 512 << 20
"""Bytes of weights from which private contexts, each of which reads all of them for each token, are slower than a
shared one on any number of cores (1.2B and 8B in Q8_0 on 2 and 16)."""


class Described(Protocol):
    """A model's file or its weights: both say what a pool's shape depends on.

    Attributes:
        n_ctx_train: context length the model was trained for, in tokens; 0 where it doesn't say.
        offloads: whether layers that are to be offloaded go to another device than the CPU.
        size: bytes of its weights.
        rows_alike: whether, on the CPU, sequences that are evaluated together have the bits that each has alone.
    """

    n_ctx_train: int
    offloads: bool
    size: int
    rows_alike: bool


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What sessions a pool has.

    Attributes:
        options: of each of them.
        sessions: how many.
        fused: whether the slots are sequences of one session, and don't have one each.
        private: options of a session that one slot has to itself.
    """

    options: SessionOptions
    sessions: int
    fused: bool
    private: SessionOptions


def arrange(config: ModelConfig, model: Described) -> Arrangement:
    """Find the arrangement that a configuration asks for.

    Private contexts keep answers independent of each other's load; a shared one reads the weights once for the tokens
    of all slots, which is what GPUs want.

    Arguments:
        config: of the model.
        model: its file or its weights; the default context stays within what it was trained for.
    """
    private = _private(config, model)
    if not _is_fused(config, model):
        return Arrangement(private, config.slots, fused=False, private=private)
    shared = _options(config, model, sequences=config.slots)
    return Arrangement(shared, 1, fused=True, private=private)


def _is_fused(config: ModelConfig, model: Described) -> bool:
    if config.slots == 1 or config.task == "embed":
        return False  # a lone sequence shares nothing, and inputs of one request are computed together anyway
    if config.execution == "auto":
        offloaded = config.gpu_layers != 0 and model.offloads
        return offloaded or (model.rows_alike and model.size >= LARGE and _is_exact(config))
    return config.execution == "fused"


def _is_exact(config: ModelConfig) -> bool:
    """Whether no flash attention stands in the way of equal bits, which a quantised cache needs, and no adapter."""
    return config.flash_attention != "on" and not config.kv_dtype.startswith("q") and not config.lora


def _private(config: ModelConfig, model: Described) -> SessionOptions:
    # Inputs side by side share one context, so room for many of them costs nothing; prompts need one cache each.
    return _options(config, model, sequences=config.batch_capacity if config.task == "embed" else 1)


def _options(config: ModelConfig, model: Described, sequences: int) -> SessionOptions:
    return SessionOptions(
        task=Task(config.task),
        n_ctx=config.n_ctx or min(DEFAULT_N_CTX, model.n_ctx_train or DEFAULT_N_CTX),
        n_batch=config.n_batch,
        n_ubatch=config.n_ubatch,
        max_sequences=sequences,
        prefill_chunk=config.prefill_chunk or 0,
        kv_dtype=config.kv_dtype,
        flash_attention={"auto": None, "on": True, "off": False}[config.flash_attention],
        pooling=config.pooling,
        adapters=tuple(Adapter(adapter.path, adapter.scale) for adapter in config.lora),
        threads=Cores().share(config.threads),
    )
