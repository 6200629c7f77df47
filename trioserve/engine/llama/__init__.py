"""llama.cpp behind the engine's ports. The only room that imports ``llama_cpp`` and numpy."""

import os

from trioserve.engine.llama.waiting import bound_spinning

bound_spinning(os.environ)  # before anything here imports llama_cpp, which loads libgomp

from trioserve.engine.llama.weights import LlamaEngine  # noqa: E402

__all__ = ["LlamaEngine"]
