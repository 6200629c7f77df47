"""What is evaluated anew when several conversations with one system prompt take turns.

Each server gets the same conversations, one request at a time, and is asked how many tokens of each prompt it had kept
(``usage.prompt_tokens_details.cached_tokens``). Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx

WORDS = ["river", "stone", "fox", "cloud", "lantern", "harbor", "winter", "garden", "engine", "violet"]


class Cost(NamedTuple):
    """Tokens of all prompts, those of them that were evaluated, and seconds of each answer."""

    tokens: int
    evaluated: int
    seconds: list[float]


def converse(url: str, options: argparse.Namespace) -> Cost:
    """Have the conversations with one server."""
    chance = random.Random(options.seed)

    def text(words: int) -> str:
        return " ".join(chance.choice(WORDS) for _ in range(words))

    with httpx.Client(base_url=url, timeout=600) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        system = {"role": "system", "content": text(options.system_words)}
        conversations = [[system] for _ in range(options.conversations)]
        tokens, evaluated, seconds = 0, 0, []
        for _ in range(options.turns):
            for messages in conversations:
                messages.append({"role": "user", "content": text(options.words)})
                began = time.perf_counter()
                answer = ask(client.post, model, messages, options.tokens)
                seconds.append(time.perf_counter() - began)
                messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
                usage = answer["usage"]
                tokens += usage["prompt_tokens"]
                if (details := usage.get("prompt_tokens_details")) is None:
                    raise SystemExit(f"{url} does not tell what it had kept: no usage.prompt_tokens_details")
                evaluated += usage["prompt_tokens"] - details["cached_tokens"]
    return Cost(tokens, evaluated, seconds)


def ask(post: Callable[..., httpx.Response], model: str, messages: list[dict[str, str]], tokens: int) -> Any:
    """Get the next answer of a conversation, of so many tokens."""
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return post("/v1/chat/completions", json=body).raise_for_status().json()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls", nargs="+", metavar="URL", help="a server")
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5, help="of each conversation")
    parser.add_argument("--system-words", type=int, default=250, help="of the system prompt that all have")
    parser.add_argument("--words", type=int, default=60, help="of each question")
    parser.add_argument("--tokens", type=int, default=40, help="of each answer")
    parser.add_argument("--seed", type=int, default=3)
    options = parser.parse_args()
    print("| server | tokens of prompts | evaluated | mean seconds of an answer |\n|---|---|---|---|")
    for url in options.urls:
        cost = converse(url, options)
        print(f"| {url} | {cost.tokens} | {cost.evaluated} | {statistics.mean(cost.seconds):.2f} |", flush=True)


if __name__ == "__main__":
    main()
