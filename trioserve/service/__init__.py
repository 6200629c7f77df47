"""Use cases without HTTP: a request becomes a prompt, takes a lease, and gives events until it ends."""

from trioserve.service.events import Done, Part, TextDelta, Usage
from trioserve.service.generate import Generation
from trioserve.service.requests import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt
from trioserve.service.service import Service, open_service

__all__ = [
    "ChatPrompt",
    "Done",
    "Generation",
    "GenerationRequest",
    "Part",
    "Service",
    "TextDelta",
    "TextPrompt",
    "TokenPrompt",
    "Usage",
    "open_service",
]
