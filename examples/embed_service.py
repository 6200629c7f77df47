"""The service inside a Trio program, without HTTP: python embed_service.py [MODEL.gguf]

Admission, slots, cancellation and drain are the same as behind the routes. Needs: pip install trioserve
"""

from __future__ import annotations

import sys
from pathlib import Path

import trio

from trioserve import Config, open_service
from trioserve.config import ModelConfig, load_config
from trioserve.service import ChatPrompt, GenerationRequest, Service, TextDelta

QUESTIONS = ("What is a fjord?", "What is a glacier?", "What is a geyser?")


def configuration() -> Config:
    """Two slots for the model that was named, or what the embedded default has."""
    if len(sys.argv) > 1:
        return Config(models=(ModelConfig(path=Path(sys.argv[1]), slots=2),))
    return load_config(None, {}, {})


async def ask(service: Service, question: str) -> None:
    """Get one answer. Leaving the block frees the slot, on every way out."""
    request = GenerationRequest(ChatPrompt([{"role": "user", "content": question}]), max_tokens=40)
    text = ""
    async with service.generate(request) as generation:
        async for part in generation:
            if isinstance(part, TextDelta):
                text += part.text
            else:
                print(f"-- {question}\n{text.strip()}\n[{part.finish_reason}, {part.usage.total_tokens} tokens]\n")


async def main() -> None:
    """Ask everything at once, then one thing with a deadline, then leave in order."""
    async with open_service(configuration()) as service:
        async with trio.open_nursery() as nursery:
            for question in QUESTIONS:
                nursery.start_soon(ask, service, question)
        with trio.move_on_after(0.5) as scope:
            await ask(service, "Tell me everything about water.")
        if scope.cancelled_caught:
            print("-- out of time: the computation was stopped, the slot is free again\n")
        print(await service.drain())


if __name__ == "__main__":
    trio.run(main)
