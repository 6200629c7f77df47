"""A streamed chat with OpenAI's own client: python openai_chat.py [BASE_URL]

Needs: pip install openai
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main() -> None:
    """Ask one question and print the answer while it grows."""
    base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
    client = OpenAI(base_url=f"{base.rstrip('/')}/v1", api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": "You answer in one short sentence."},
            {"role": "user", "content": "Why do leaves fall in autumn?"},
        ],
        max_tokens=60,
        stream=True,
        stream_options={"include_usage": True},
        # A field of this server: rather be told at once that all slots are busy than wait for longer than ten seconds.
        extra_body={"busy_timeout_ms": 10_000},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n[{model}: {chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out]")


if __name__ == "__main__":
    main()
