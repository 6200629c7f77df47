"""LoRA adapters of one loaded model, shared by the contexts that use them."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp

from trioserve.engine.base import Adapter, LoadFailure, UnfitOptions
from trioserve.engine.gguf import Header, HeaderError
from trioserve.engine.llama.library import captured_errors
from trioserve.engine.lora_file import inspect_adapters
from trioserve.engine.model_file import inspect_model

# What llama.cpp says where a file is in order and the memory isn't.
_LACKS = ("failed to allocate", "bad_alloc")


@dataclass(slots=True)
class _Loaded:
    """An adapter in memory, and how many contexts use it."""

    pointer: Any
    users: int = 0


class Adapters:
    """Loads an adapter with the first context that uses it, and frees it with the last.

    An adapter changes no weights: each context is told which adapters to reckon in, and how strongly. So contexts with
    different adapters, and with none, share one copy of a model, and those with the same file one copy of that. While
    it is in use a file is not read again: what has changed in it counts once all have let go of it.

    llama.cpp has a set of a model's adapters, and goes through it without any guard when it plans a context's graphs,
    whether that context uses some or not. So nobody may plan while an adapter comes or goes: a context is made, and
    told of its adapters, under ``lock``.

    Arguments:
        model: a ``llama_model`` pointer that outlives this object.
        path: of its file, which adapters have to fit.

    Attributes:
        lock: see above.
    """

    def __init__(self, model: Any, path: Path) -> None:
        self.lock = threading.Lock()
        self._model = model
        self._path = path
        self._header: Header | None = None
        self._loaded: dict[Path, _Loaded] = {}

    def apply(self, context: Any, wanted: Sequence[Adapter], plan: Callable[[], None]) -> None:
        """Have a context use adapters. Paired with one ``let_go``, where it doesn't raise.

        Arguments:
            context: a ``llama_context`` pointer, not used so far.
            wanted: the adapters, each file once.
            plan: makes the context plan its graphs with them.

        Raises:
            UnfitOptions: a file can't be used, or not with this model.
            LoadFailure: there is too little memory.
        """
        if not wanted:
            return
        with self.lock:
            pointers = self._take(wanted)
            array = (llama_cpp.llama_adapter_lora_p_ctypes * len(wanted))(*pointers)
            scales = (ctypes.c_float * len(wanted))(*(adapter.scale for adapter in wanted))
            llama_cpp.llama_set_adapters_lora(context, array, len(wanted), scales)
            plan()

    def let_go(self, held: Sequence[Adapter]) -> None:
        """Give adapters back, after the context that used them is freed."""
        if held:
            with self.lock:
                self._drop(held)

    def _take(self, wanted: Sequence[Adapter]) -> list[Any]:
        taken: list[Adapter] = []
        try:
            for adapter in wanted:
                if adapter.path not in self._loaded:
                    self._loaded[adapter.path] = _Loaded(self._load(adapter.path))
                self._loaded[adapter.path].users += 1
                taken.append(adapter)
        except BaseException:
            self._drop(taken)
            raise
        return [self._loaded[adapter.path].pointer for adapter in wanted]

    def _drop(self, held: Sequence[Adapter]) -> None:
        for adapter in held:
            loaded = self._loaded[adapter.path]
            loaded.users -= 1
            if not loaded.users:
                del self._loaded[adapter.path]
                llama_cpp.llama_adapter_lora_free(loaded.pointer)

    def _load(self, path: Path) -> Any:
        self._check(path)
        with captured_errors() as errors:
            pointer = llama_cpp.llama_adapter_lora_init(self._model, os.fsencode(path))
        if pointer:
            return pointer
        reason = f"adapter file {str(path)!r} can't be used: {'; '.join(errors[-2:]) or 'llama.cpp gave no reason'}"
        if any(words in reason for words in _LACKS):
            raise LoadFailure(reason)
        raise UnfitOptions(reason, "lora")

    def _check(self, path: Path) -> None:
        """See that llama.cpp survives a file: it may have changed since somebody looked at it."""
        try:
            if self._header is None:
                self._header = inspect_model(self._path)
            inspect_adapters([path], self._header)
        except (OSError, HeaderError) as error:
            raise UnfitOptions(str(error), "lora") from None
