"""How much memory a model will take, told from its file's header before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trioserve.engine.base import Footprint, SessionOptions, Task
from trioserve.engine.gguf import Header
from trioserve.engine.rounding import rows_alike

_ELEMENT_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
_F32 = 4
_CONTEXT_PADDING = 256  # llama.cpp rounds a context up to this many tokens
_ACTIVATIONS = 6  # rows of the model's width that live at once, as measured
_GPU_KERNELS = 64 << 20  # code and tables that CUDA loads at the first steps of a process, as measured
_GPU_SESSION = 14 << 20  # scratch memory of a session's steps beside its buffers, as measured


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes that a loaded model takes.

    Attributes:
        weights: once, however many slots there are. Where llama.cpp keeps a copy of its own that suits the processor
            better, the pages of the file can be dropped, and are, when the room is needed.
        kv_cache: of all slots together.
        compute: buffers of all slots together.
    """

    weights: int
    kv_cache: int
    compute: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.compute


def estimate(header: Header, options: SessionOptions, slots: int) -> Estimate:
    """Estimate a model's memory. Within 15 % of what llama.cpp allocates for a dense transformer.

    The KV cache holds, for each layer and token of context, the keys and values of the KV heads. The compute buffer is
    dominated by the widest activations of one micro-batch: without flash attention the attention scores
    (``heads * n_ctx * n_ubatch``), else the feed-forward layer; and the attention mask (``n_ctx * n_ubatch``).

    A session for embeddings has one context for all of its sequences and evaluates all of it at once. Where the model
    could continue texts too, llama.cpp computes and keeps logits for every token of that (``n_ctx * vocabulary``).

    Arguments:
        header: of the model's file.
        options: of each session.
        slots: how many sessions.
    """
    n_ctx = -(-options.n_ctx // _CONTEXT_PADDING) * _CONTEXT_PADDING
    per_token = _kv_elements(header) * _ELEMENT_BYTES[options.kv_dtype]
    caches = options.max_sequences
    if options.task is Task.EMBED:
        caches = 0 if _is_encoder(header) else 1
    return Estimate(
        weights=header.weights_size,
        kv_cache=int(slots * n_ctx * caches * per_token),
        compute=slots * _compute_bytes(header, options, n_ctx),
    )


def device_share(header: Header, gpu_layers: int) -> tuple[int, float]:
    """What of a model lies on the GPUs: bytes of weights, and the share of the layers.

    llama.cpp offloads the last layers first, and the output as one layer more; the input embeddings stay on the host.
    An output that is tied to them is a copy.

    Arguments:
        header: of the model's file.
        gpu_layers: as asked for; -1 is all.
    """
    layers = header.number("block_count")
    first = _first_offloaded(header, gpu_layers)
    if first > layers:
        return 0, 0.0
    sizes = {tensor.name: tensor.nbytes for tensor in header.tensors}
    weights = sum(size for name, size in sizes.items() if _layer(name, layers) >= first)
    if "output.weight" not in sizes:
        weights += sizes.get("token_embd.weight", 0)
    return weights, (layers - first) / max(layers, 1)


class InspectedFile:
    """``engine.base.ModelFile`` over a GGUF header.

    Arguments:
        header: of the file.
        offloads: whether there is a GPU that layers can go to.
        adapters: headers of the files that sessions may use as adapters.
        amx: whether the engine computes with those instructions of the processor.
    """

    def __init__(
        self,
        header: Header,
        *,
        offloads: bool = False,
        adapters: Mapping[Path, Header] | None = None,
        amx: bool = False,
    ) -> None:
        self._header = header
        self._adapters = adapters or {}
        self.offloads = offloads
        self.architecture = header.architecture
        self.n_ctx_train = header.number("context_length")
        self.size = header.weights_size
        self.rows_alike = rows_alike(header.tensors, amx=amx)

    def memory(self, options: SessionOptions, slots: int, gpu_layers: int = 0) -> Footprint:
        """Estimate what so many sessions take; see ``engine.base.ModelFile.memory``.

        What lies on a GPU was compared with what models of 0.1 to 8 thousand million weights took on one. The context
        that CUDA makes for the process, half a gigabyte there, is not in it: asking for the free memory makes it.

        Adapters lie beside the weights that they are for, once for all sessions. They did not change the size of a
        compute buffer, up to a rank of 500.
        """
        offloaded = gpu_layers if self.offloads else 0
        return self._without_adapters(options, slots, offloaded) + self._adapters_only(options, offloaded)

    def _adapters_only(self, options: SessionOptions, gpu_layers: int) -> Footprint:
        layers, first = self._header.number("block_count"), _first_offloaded(self._header, gpu_layers)
        host = device = 0
        for adapter in options.adapters:
            for tensor in self._adapters[adapter.path].tensors:
                if _layer(tensor.name, layers) >= first:
                    device += tensor.nbytes
                else:
                    host += tensor.nbytes
        return Footprint(host=host, device=device)

    def _without_adapters(self, options: SessionOptions, slots: int, gpu_layers: int) -> Footprint:
        if not gpu_layers:
            return Footprint(host=estimate(self._header, options, slots).total)
        # With layers on a GPU llama.cpp chooses flash attention by itself, wherever the model allows it.
        flash = True if options.flash_attention is None else options.flash_attention
        found = estimate(self._header, replace(options, flash_attention=flash), slots)
        weights, share = device_share(self._header, gpu_layers)
        kv_cache = int(found.kv_cache * share)
        per_slot = _largest_on_host(self._header, gpu_layers) + _GPU_SESSION
        # The kernels are loaded once for all models, but which of them will be the first can't be told here.
        device = weights + kv_cache + found.compute + slots * per_slot + _GPU_KERNELS
        host = max(0, found.weights - weights) + found.kv_cache - kv_cache + slots * _input_bytes(self._header, options)
        return Footprint(host=host, device=device)


def _first_offloaded(header: Header, gpu_layers: int) -> int:
    """The first layer that lies on a GPU; the output is one after the last, and one more stands for none."""
    layers = header.number("block_count")
    return layers + 1 - (layers + 1 if gpu_layers < 0 else min(gpu_layers, layers + 1))


def _largest_on_host(header: Header, gpu_layers: int) -> int:
    """Bytes of the largest tensor among the layers that stay on the host: prompts are evaluated with a copy of it."""
    layers, first = header.number("block_count"), _first_offloaded(header, gpu_layers)
    return max((tensor.nbytes for tensor in header.tensors if 0 <= _layer(tensor.name, layers) < first), default=0)


def _layer(tensor: str, layers: int) -> int:
    """Which layer a tensor belongs to: the output is one after the last, the input embeddings before the first."""
    if found := re.match(r"blk\.(\d+)\.", tensor):
        return int(found[1])
    return layers if tensor.startswith("output") else -1


def _kv_elements(header: Header) -> int:
    """Elements of keys and values that one token takes over all layers."""
    heads = header.number("attention.head_count", 1)
    kv_heads = header.number("attention.head_count_kv", heads)
    width = header.number("embedding_length")
    head = width // max(heads, 1)
    keys = header.number("attention.key_length", head)
    values = header.number("attention.value_length", head)
    return header.number("block_count") * kv_heads * (keys + values)


def _compute_bytes(header: Header, options: SessionOptions, n_ctx: int) -> int:
    """Bytes of one session's compute and output buffers."""
    width, vocabulary = header.number("embedding_length"), _vocabulary_size(header)
    widest = 2 * header.number("feed_forward_length", 4 * width)
    mask = n_ctx
    if _has_flash_attention(options):
        mask //= 2  # of halves, and there are no scores
    else:
        widest = max(widest, header.number("attention.head_count", 1) * n_ctx)
    batch = _rows(options)
    rows, outputs = options.output_rows, options.max_sequences
    if options.task is Task.EMBED:
        rows = outputs = 0 if _is_encoder(header) else batch
        widest = max(widest, vocabulary if outputs else 0)
    computed = max(batch * (widest + mask + _ACTIVATIONS * width), rows * vocabulary)
    return _F32 * (computed + outputs * vocabulary)


def _input_bytes(header: Header, options: SessionOptions) -> int:
    """Bytes of one session's buffers on the host where its layers are on a GPU: embeddings, and a mask of halves."""
    return _rows(options) * (2 * _F32 * header.number("embedding_length") + 2 * options.n_ctx)


def _rows(options: SessionOptions) -> int:
    """Tokens that are evaluated at once."""
    if options.task is Task.EMBED:
        return options.n_ctx
    return min(options.n_ubatch, options.n_batch, options.n_ctx * options.max_sequences)


def _is_encoder(header: Header) -> bool:
    """Whether the model only turns texts into vectors: every token sees all others, and none is kept for later ones."""
    return header.metadata.get(f"{header.architecture}.attention.causal") is False or header.architecture == "t5encoder"


def _has_flash_attention(options: SessionOptions) -> bool:
    """Whether the CPU gets flash attention where it is left to the engine: a quantised cache needs it."""
    return options.kv_dtype.startswith("q") if options.flash_attention is None else options.flash_attention


def _vocabulary_size(header: Header) -> int:
    tokens = header.metadata.get("tokenizer.ggml.tokens", 0)
    return header.number("vocab_size", tokens if isinstance(tokens, int) else 0)
