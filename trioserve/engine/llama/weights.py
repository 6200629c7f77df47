"""Loading GGUF files, and what all sessions of a model share."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp

from trioserve.engine.base import (
    MAX_SLOTS,
    Constraint,
    LoadFailure,
    LoadOptions,
    Progress,
    SessionOptions,
    Task,
    UnfitOptions,
    UnusableFile,
)
from trioserve.engine.estimate import InspectedFile
from trioserve.engine.gguf import HeaderError, Tensor
from trioserve.engine.llama.adapters import Adapters
from trioserve.engine.llama.constraint import Constraints
from trioserve.engine.llama.embedder import EmbeddingSession
from trioserve.engine.llama.library import captured_errors, free_device_memory, has_amx, returned_pages, start_backend
from trioserve.engine.llama.session import LlamaSession
from trioserve.engine.llama.vocabulary import Vocabulary
from trioserve.engine.lora_file import inspect_adapters
from trioserve.engine.model_file import inspect_model
from trioserve.engine.rounding import grain, rows_alike

_NO_VOCABULARY, _WORDPIECE = 0, 3  # LLAMA_VOCAB_TYPE_NONE, LLAMA_VOCAB_TYPE_WPM
_NO_POOLING, _RANK = ("", "-1", "0"), "4"  # of llama_pooling_type, as a file's metadata spells it
_POSITIONS = "position_embd.weight"
_TEXT_BYTES = 256
_LOAD_MODES = {  # by (mmap, mlock)
    (False, False): llama_cpp.LLAMA_LOAD_MODE_NONE,
    (True, False): llama_cpp.LLAMA_LOAD_MODE_MMAP,
    (False, True): llama_cpp.LLAMA_LOAD_MODE_MLOCK,
    (True, True): llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK,
}
# What llama.cpp says where trying again won't help. What else it says is taken for a lack of memory, or of luck.
_FAULTS_OF_THE_FILE = (
    "gguf_init_from_reader",
    "unknown model architecture",
    "unsupported model architecture",
    "error loading model hyperparameters",
    "error loading model vocabulary",
    "check_tensor_dims",
    "done_getting_tensors",
    "missing tensor",
    "has wrong type",
    "key not found",
    "within the file bounds",
    "split file",
    "corrupted model",
    "invalid model",
    "CLIP cannot be used",
)


class LlamaWeights:
    """``engine.base.Weights`` over a ``llama_model``.

    Arguments:
        model: the pointer, owned by this object from now on.
        path: of its file.
        options: how it was loaded.
        tensors: of the file; empty where they aren't known.
    """

    def __init__(self, model: Any, path: Path, options: LoadOptions, tensors: Sequence[Tensor]) -> None:
        self._model = model
        self._adapters = Adapters(model, path)
        self._positions = _learnt_positions(tensors)
        self.offloads = options.gpu_layers != 0 and bool(llama_cpp.llama_supports_gpu_offload())
        # The output counts as one layer more.
        all_layers = options.gpu_layers < 0 or options.gpu_layers > llama_cpp.llama_model_n_layer(model)
        self._wholly_offloaded = self.offloads and all_layers
        self._grain = 1 if self.offloads else grain(tensors)
        self.rows_alike = not self.offloads and rows_alike(tensors, amx=has_amx())
        self._vocabulary = Vocabulary(model)
        self._constraints = Constraints(self._vocabulary)
        self._family = _metadata(model, "general.architecture")
        self.vocab_size = self._vocabulary.size
        self.name = _description(model)
        self.n_ctx_train: int = llama_cpp.llama_model_n_ctx_train(model)
        self.n_embd: int = llama_cpp.llama_model_n_embd_out(model)
        self.size: int = llama_cpp.llama_model_size(model)
        self.chat_template = _chat_template(model)
        self.bos = self._vocabulary.bos
        self.bos_text = self._vocabulary.bos_text
        self.eos_text = self._vocabulary.eos_text
        self.gap = self._vocabulary.gap
        self.max_sessions = MAX_SLOTS

    @property
    def longest_piece(self) -> int:
        """Bytes of the longest token."""
        return self._vocabulary.longest_piece

    def tokenize(self, text: str, *, special: bool, add_bos: bool) -> list[int]:
        """Turn text into token ids."""
        return self._vocabulary.tokenize(text, special=special, add_bos=add_bos)

    def piece(self, token: int) -> bytes:
        """The bytes of a token."""
        return self._vocabulary.text_piece(token)

    def check_constraint(self, constraint: Constraint) -> None:
        """See that answers can be held to a constraint."""
        self._constraints.check(constraint)

    def open_session(self, options: SessionOptions) -> LlamaSession | EmbeddingSession:
        """Make a session over these weights."""
        if self._positions is not None and options.n_ctx > self._positions:
            raise UnfitOptions(
                f"n_ctx is {options.n_ctx}, but the model has learnt {self._positions} positions", "n_ctx"
            )
        if options.task is Task.EMBED:
            if options.pooling == "auto" and _pooling(self._model) in _NO_POOLING:
                options = replace(options, pooling="mean")
            return EmbeddingSession(
                self._model, self._vocabulary.size, self._family, options, self._adapters, offloaded=self.offloads
            )
        return LlamaSession(
            self._model,
            self._vocabulary,
            self._constraints,
            self._family,
            options,
            self._adapters,
            offloaded=self.offloads,
            wholly=self._wholly_offloaded,
            grain=self._grain,
        )

    def close(self) -> None:
        """Free the model. Idempotent."""
        if self._model is not None:
            model, self._model = self._model, None
            with returned_pages():
                llama_cpp.llama_model_free(model)


class LlamaEngine:
    """``engine.base.Engine`` over llama.cpp."""

    def free_device_memory(self) -> int | None:
        """Bytes that are free on the GPUs; see ``engine.base.Engine.free_device_memory``."""
        return free_device_memory()

    def inspect(self, path: Path, adapters: Sequence[Path] = ()) -> InspectedFile:
        """Read a file's header, and those of adapters for it; see ``engine.base.Engine.inspect``."""
        try:
            header = inspect_model(path)
        except (OSError, HeaderError) as error:
            raise UnusableFile(str(error)) from None
        try:
            found = inspect_adapters(adapters, header)
        except HeaderError as error:
            raise UnfitOptions(str(error), "lora") from None
        return InspectedFile(
            header, offloads=bool(llama_cpp.llama_supports_gpu_offload()), adapters=found, amx=has_amx()
        )

    def load(self, path: Path, options: LoadOptions, progress: Progress | None = None) -> LlamaWeights:
        """Load a GGUF file; see ``engine.base.Engine.load``."""
        start_backend()
        params = llama_cpp.llama_model_default_params()
        # Any negative number is "all" to llama.cpp too.
        params.n_gpu_layers = options.gpu_layers
        params.load_mode = _LOAD_MODES[options.mmap, options.mlock]
        callback = _progress_callback(progress)
        params.progress_callback = callback
        with captured_errors() as errors:
            model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not model:
            raise _failure(errors)
        if reason := _unusable(model):
            llama_cpp.llama_model_free(model)
            raise UnusableFile(reason)
        return LlamaWeights(model, path, options, _tensors(path))


def _progress_callback(progress: Progress | None) -> Any:
    def report(fraction: float, _data: object) -> bool:
        return progress is None or progress(fraction)

    return llama_cpp.llama_progress_callback(report)


def _failure(errors: Sequence[str]) -> LoadFailure:
    """What to raise for a load that ended with these lines."""
    reason = "; ".join(errors[-3:])
    if any(words in reason for words in _FAULTS_OF_THE_FILE) and "bad_alloc" not in reason:
        return UnusableFile(reason)
    return LoadFailure(reason or "llama.cpp gave no reason")


def _unusable(model: Any) -> str | None:
    """Why this model can neither answer prompts nor make vectors of them, or None."""
    vocab = llama_cpp.llama_model_get_vocab(model)
    if llama_cpp.llama_vocab_type(vocab) == _NO_VOCABULARY or llama_cpp.llama_vocab_n_tokens(vocab) == 0:
        return "the file has no vocabulary"
    if lacking := _lacking_special(vocab):
        return f"its tokenizer puts a {lacking} token into every prompt, but has none"
    if llama_cpp.llama_model_has_encoder(model) and llama_cpp.llama_model_has_decoder(model):
        return "models with an encoder and a decoder are not supported"
    if _pooling(model) == _RANK:
        return "models that rank are not supported"
    if llama_cpp.llama_model_is_diffusion(model):
        return "diffusion models are not supported"
    return None


def _lacking_special(vocab: Any) -> str | None:
    """A special token that the tokenizer would add, and abort the process for want of it; or None."""
    always = llama_cpp.llama_vocab_type(vocab) == _WORDPIECE
    wanted = {
        "beginning-of-sequence": (llama_cpp.llama_vocab_get_add_bos(vocab) or always, llama_cpp.llama_vocab_bos(vocab)),
        "end-of-sequence": (llama_cpp.llama_vocab_get_add_eos(vocab), llama_cpp.llama_vocab_eos(vocab)),
        "separator": (always, llama_cpp.llama_vocab_sep(vocab)),
    }
    return next((name for name, (added, token) in wanted.items() if added and token < 0), None)


def _tensors(path: Path) -> Sequence[Tensor]:
    try:
        return inspect_model(path).tensors
    except (OSError, HeaderError):
        return ()


def _learnt_positions(tensors: Sequence[Tensor]) -> int | None:
    """Rows of a model's table of positions, where it has one; llama.cpp aborts the process at a position beyond it."""
    return next((tensor.shape[-1] for tensor in tensors if tensor.name == _POSITIONS), None)


def _description(model: Any) -> str:
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    llama_cpp.llama_model_desc(model, buffer, _TEXT_BYTES)
    return buffer.value.decode("utf-8", "replace")


def _metadata(model: Any, key: str) -> str:
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    length = llama_cpp.llama_model_meta_val_str(model, key.encode(), buffer, _TEXT_BYTES)
    return "" if length < 0 else buffer.value.decode("utf-8", "replace")


def _pooling(model: Any) -> str:
    return _metadata(model, f"{_metadata(model, 'general.architecture')}.pooling_type")


def _chat_template(model: Any) -> str | None:
    text = llama_cpp.llama_model_chat_template(model, None)
    return None if text is None else text.decode("utf-8", "replace")
