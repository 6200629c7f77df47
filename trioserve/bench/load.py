"""The load itself: clients that keep a server busy and take the time."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import trio

from trioserve.bench.measures import Answer, StreamError, ends_stream, read_chunk
from trioserve.bench.plan import Server, Workload

# Short words that common tokenizers have as one or two tokens each.
_VOCABULARY = """
apple bell boat bread brick cabin chalk clock coast coin corn dawn desk drum dust feather fence field flame flute glass
grass hill honey horse island kettle lake lamp leaf lemon maple moon nest oak pearl pine plum rain ring salt sand shell
snow spoon star straw table tower valley wheat wool
"""
_CONNECT_SECONDS = 10
_SAID = 200  # characters of a refusal


class NoTargetError(Exception):
    """There is no model to ask; one sentence that says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server and the model to ask.

    Attributes:
        url: with or without ``/v1`` at its end.
        model: id of the model.
        key: API key, or None.
    """

    url: str
    model: str
    key: str | None = None

    @property
    def base(self) -> str:
        """Where the routes are."""
        return self.url.rstrip("/").removesuffix("/v1") + "/v1"

    @property
    def endpoint(self) -> str:
        """Where chat completions are."""
        return self.base + "/chat/completions"


def body(workload: Workload, model: str, seed: int) -> dict[str, Any]:
    """The body of one request.

    Arguments:
        workload: what it asks for.
        model: id of the model.
        seed: chooses the prompt; equal seeds give equal prompts.
    """
    # The length is drawn apart from the words: prompts of one length are those that they would be without it.
    most = max(workload.prompt_words, workload.most_prompt_words)
    length = random.Random(f"length of {seed}").randint(workload.prompt_words, most)
    words = " ".join(random.Random(seed).choices(_VOCABULARY.split(), k=length))
    fields: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"Write a long tale in which these appear: {words}"}],
        "max_tokens": workload.tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if workload.extended:
        fields |= {"ignore_eos": True, "cache_prompt": False}
    return fields


async def find_target(server: Server) -> Target:
    """Return a server with a model to ask: the given one, or the first that it lists and that is not for embeddings.

    Raises:
        NoTargetError: the server lists none.
    """
    if server.model is not None:
        return Target(server.url, server.model, server.key)
    target = Target(server.url, "", server.key)
    try:
        async with _open_client(target, Workload(timeout=_CONNECT_SECONDS)) as client:
            response = await client.get(target.base + "/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoTargetError(f"{server.url} can't be asked for its models: {_told(error)}") from None
    if response.status_code != httpx.codes.OK:
        raise NoTargetError(f"{server.url} does not tell its models: {_refusal(response.status_code, response.text)}")
    try:
        return replace(target, model=next(_listed(response.json())))
    except (ValueError, AttributeError, LookupError, TypeError, StopIteration):
        raise NoTargetError(f"{server.url} lists no model to ask; name one") from None


def _listed(answer: Any) -> Iterator[str]:
    """Ids of models that may answer; servers that don't tell a model's task are believed to serve one that does."""
    return (str(entry["id"]) for entry in answer["data"] if entry.get("task") != "embed")


async def run_load(
    target: Target, workload: Workload, *, clients: int, requests: int, first_seed: int
) -> tuple[list[Answer], float]:
    """Keep ``clients`` streams going until ``clients * requests`` have ended.

    Arguments:
        target: the server.
        workload: of each request.
        clients: streams at a time.
        requests: how many there are for each client.
        first_seed: of the first prompt; each request has the next one.

    Returns:
        The answers in the order in which they ended, and the wall time in seconds.
    """
    answers: list[Answer] = []
    seeds = iter(range(first_seed, first_seed + clients * requests))
    async with _open_client(target, workload) as client:
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(clients):
                nursery.start_soon(_keep_asking, client, target, workload, seeds, answers)
        return answers, trio.current_time() - began


async def ask(client: httpx.AsyncClient, target: Target, workload: Workload, seed: int) -> Answer:
    """Send one request and follow its stream to the end. Whatever goes wrong is part of the answer."""
    sent = trio.current_time()
    try:
        async with client.stream("POST", target.endpoint, json=body(workload, target.model, seed)) as response:
            if response.status_code != httpx.codes.OK:
                said = (await response.aread()).decode("utf-8", "replace")
                return Answer(sent, error=_refusal(response.status_code, said))
            return await _follow(response, sent)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Answer(sent, error=_told(error))


def _refusal(status: int, said: str) -> str:
    return f"status {status}: {said[:_SAID]}"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


async def _follow(response: httpx.Response, sent: float) -> Answer:
    """Read a stream to its end, also after an error: httpx closes its iterators only when they are exhausted."""
    texts: list[float] = []
    counted: int | None = None
    whole, failure = False, None
    async for line in _lines(response):
        whole = whole or ends_stream(line)
        try:
            chunk = read_chunk(line)
        except StreamError as error:
            failure = str(error)
            continue
        if chunk is None:
            continue
        if chunk.text:
            texts.append(trio.current_time())
        counted = counted if chunk.completion_tokens is None else chunk.completion_tokens
    if not whole:
        failure = failure or "the stream ended without [DONE]"
    return Answer(sent, tuple(texts), len(texts) if counted is None else counted, failure)


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """The lines of a stream of events.

    httpx's own end also where Python's ``splitlines`` does, such as at U+2028, which JSON may hold as it is.
    """
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace").rstrip("\r")
    if rest:
        yield rest.decode("utf-8", "replace")


async def ask_once(target: Target, workload: Workload) -> Answer:
    """Send one request on a connection of its own."""
    async with _open_client(target, workload) as client:
        return await ask(client, target, workload, seed=0)


def _open_client(target: Target, workload: Workload) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        headers={"authorization": f"Bearer {target.key}"} if target.key else {},
        timeout=httpx.Timeout(workload.timeout, connect=_CONNECT_SECONDS),
        # A connection for each request: some servers close idle ones in the very moment of the next request.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,  # a proxy named in the environment would be measured too
    )


async def _keep_asking(
    client: httpx.AsyncClient, target: Target, workload: Workload, seeds: Iterator[int], answers: list[Answer]
) -> None:
    for seed in seeds:
        answer = await ask(client, target, workload, seed)
        answers.append(answer)
