"""Four streams side by side, each in a slot of its own: python openai_parallel.py [BASE_URL]

With fewer than four slots the rest wait for their turn. Needs: pip install openai
"""

from __future__ import annotations

import asyncio
import sys
import time

from openai import AsyncOpenAI

SUBJECTS = ("the sea", "a mountain", "a long train journey", "the first snow")


async def tell(client: AsyncOpenAI, model: str, subject: str, began: float) -> None:
    """Follow one stream; say when its first and its last words came."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"Write two sentences about {subject}."}],
        max_tokens=60,
        stream=True,
    )
    text, first = "", None
    async for chunk in stream:
        piece = chunk.choices[0].delta.content or ""
        if piece and first is None:
            first = time.perf_counter() - began
        text += piece
    whole = time.perf_counter() - began
    print(f"-- {subject}: first words after {first or whole:.1f} s, the last after {whole:.1f} s\n{text.strip()}\n")


async def main() -> None:
    """Start all of them at once."""
    base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
    async with AsyncOpenAI(base_url=f"{base.rstrip('/')}/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for subject in SUBJECTS:
                group.create_task(tell(client, model, subject, began))


if __name__ == "__main__":
    asyncio.run(main())
