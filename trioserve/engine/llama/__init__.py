"""llama.cpp behind the engine's ports. The only room that imports ``llama_cpp`` and numpy."""

from trioserve.engine.llama.weights import LlamaEngine

__all__ = ["LlamaEngine"]
