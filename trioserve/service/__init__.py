"""Use cases without HTTP: a request becomes a prompt, takes a lease, and gives events until it ends."""

from trioserve.service.embed import Embedding
from trioserve.service.events import Done, Failure, Part, TextDelta, Timings, Usage
from trioserve.service.generate import Generation
from trioserve.service.requests import (
    BatchRequest,
    ChatPrompt,
    EmbeddingRequest,
    GenerationRequest,
    TextPrompt,
    TokenPrompt,
)
from trioserve.service.service import Service, open_service

__all__ = [
    "BatchRequest",
    "ChatPrompt",
    "Done",
    "Embedding",
    "EmbeddingRequest",
    "Failure",
    "Generation",
    "GenerationRequest",
    "Part",
    "Service",
    "TextDelta",
    "TextPrompt",
    "Timings",
    "TokenPrompt",
    "Usage",
    "open_service",
]
