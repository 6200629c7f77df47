"""Use cases without HTTP: a request becomes a prompt, takes a lease, and gives events until it ends."""

from trioserve.service.embed import Embedding
from trioserve.service.events import Done, Failure, Part, TextDelta, Timings, Usage
from trioserve.service.generate import Generation
from trioserve.service.reading import Count, Detokenization, Piece, ReadingRequest, Rendering, Tokenization
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
    "Count",
    "Detokenization",
    "Done",
    "Embedding",
    "EmbeddingRequest",
    "Failure",
    "Generation",
    "GenerationRequest",
    "Part",
    "Piece",
    "ReadingRequest",
    "Rendering",
    "Service",
    "TextDelta",
    "TextPrompt",
    "Timings",
    "TokenPrompt",
    "Tokenization",
    "Usage",
    "open_service",
]
