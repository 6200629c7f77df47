"""What is asked, by whom, and who loses patience when. Pure: a function of the seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

MODELS = ("a", "b")
"""Two ids over one file, so both have to give the same answers."""

EMBEDDER = "e"
"""A third one over the same file, for vectors."""

SLOTS = {"a": 4, "b": 2, EMBEDDER: 2}
MIN_CONTEXT = 512  # whatever is asked has to fit into it together with its answer
CONTEXTS = (MIN_CONTEXT, 640, 768, 1024)
PATIENT_MS = 300_000
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BATCH, EMBEDDINGS = "/v1/tasks/batch", "/v1/embeddings"
LOAD, UNLOAD = "/v1/models/load", "/v1/models/unload"
UNLOAD_MANY, UNLOAD_ALL = "/v1/tasks/unload_models", "/v1/tasks/unload_all_models"

_IDS = tuple(SLOTS)
_CUT_SHARE = 0.3
_OPERATION_CUT_SHARE = 0.2
_FRESH_SHARE = 0.2
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
_SYLLABLES_OF_A_WORD = 4
_SCHEMA = {
    "type": "object",
    "properties": {
        "password": {"type": "string", "maxLength": 16},
        "sure": {"type": "boolean"},
        "reason": {"enum": ["told", "guessed", None]},
    },
    "required": ["password", "sure", "reason"],
    "additionalProperties": False,
}
_FORM = {"type": "json_schema", "json_schema": {"name": "password", "strict": True, "schema": _SCHEMA}}
_ROUTES = {"messages": CHAT, "prompt": COMPLETIONS, "requests": BATCH, "input": EMBEDDINGS}
_FILLER = "The sea was calm and the boat went on past the old harbour. "


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a soak is.

    Attributes:
        clients: how many ask at a time.
        turns: of each client's conversation, 1 to 3.
        filler: sentences between the password and the question in a long prompt, about 14 tokens each.
        tale: tokens of the longest answers.
        threads: that models are reconfigured to; 0 is all cores. More than one makes a crowded machine slow.
    """

    clients: int = 16
    turns: int = 2
    filler: int = 14
    tale: int = 64
    threads: tuple[int, ...] = (1, 1, 2, 0)


@dataclass(frozen=True, slots=True)
class Question:
    """What decides an answer: a body without its model, its stream and its patience.

    Attributes:
        kind: of the question, for reports.
        owner: number of the client whose word it holds.
        body: that every way to ask it shares.
    """

    kind: str
    owner: int
    body: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Equal for equal questions."""
        return json.dumps(self.body, sort_keys=True)

    @property
    def route(self) -> str:
        """Where it belongs."""
        return next(route for name, route in _ROUTES.items() if name in self.body)

    @property
    def requests(self) -> Sequence[Mapping[str, Any]]:
        """The bodies of what it asks together, or its own."""
        return self.body.get("requests", [self.body])

    @property
    def parts(self) -> Sequence[Question]:
        """What it asks together, one by one; none where it asks one thing only."""
        if self.route == BATCH:
            bodies = self.requests
        elif self.route == EMBEDDINGS and isinstance(self.body["input"], list):
            bodies = [{"input": text} for text in self.body["input"]]
        else:
            bodies = []
        return [Question(self.kind, self.owner, body) for body in bodies]

    @property
    def models(self) -> Sequence[str]:
        """Who can be asked."""
        return (EMBEDDER,) if self.route == EMBEDDINGS else MODELS


@dataclass(frozen=True, slots=True)
class Cut:
    """How a client leaves before its answer is whole.

    Attributes:
        where: ``upload``, within its own request; ``waiting``, after a time; ``prefill`` or ``decode``, that time after
            the server was seen in that phase; ``events``, after so many events of a stream.
        seconds: that time.
        events: that count.
        reset: leave with a TCP reset.
    """

    where: str
    seconds: float = 0
    events: int = 0
    reset: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """One request.

    Attributes:
        question: what is asked.
        model: who is asked.
        stream: whether the answer is streamed. That of a batch always is, and vectors never are.
        busy_timeout_ms: longest wait for a slot; None says nothing of it.
        fresh: let the slot reuse nothing of what it has kept.
        cut: how the client leaves early, if it does.
        pause: seconds until the client's next order, where this one was refused.
    """

    question: Question
    model: str
    stream: bool = False
    busy_timeout_ms: int | None = None
    fresh: bool = False
    cut: Cut | None = None
    pause: float = 0

    @property
    def body(self) -> dict[str, Any]:
        """What is sent."""
        body = {**self.question.body, "model": self.model}
        if self.question.route in (CHAT, COMPLETIONS):
            body["stream"] = self.stream
            if self.stream:
                body["stream_options"] = {"include_usage": True}
            if self.fresh:
                body["cache_prompt"] = False
        if self.busy_timeout_ms is not None:
            body["busy_timeout_ms"] = self.busy_timeout_ms
        return body


@dataclass(frozen=True, slots=True)
class Operation:
    """One management call.

    Attributes:
        route: where it goes.
        body: what is sent.
        statuses: what the contract lets the server answer.
        patience: seconds after which the manager leaves; None is never.
        pause: seconds until the next one.
    """

    route: str
    body: Mapping[str, Any]
    statuses: frozenset[int]
    patience: float | None
    pause: float


def secret_words(seed: int, count: int) -> list[str]:
    """Words that mean nothing, one for each client; none is part of another."""
    chance = random.Random(f"{seed}/words")
    words: list[str] = []
    while len(words) < count:
        word = "".join(chance.sample(_SYLLABLES, _SYLLABLES_OF_A_WORD))
        if word not in words:  # all are of one length
            words.append(word)
    return words


def questions(seed: int, shape: Shape) -> list[list[Question]]:
    """All that each client may ask; its word is in each of them, and prompts differ in nothing else."""
    return [
        [Question(kind, owner, body) for kind, body in _bodies(word, seed + owner, shape)]
        for owner, word in enumerate(secret_words(seed, shape.clients))
    ]


def farewell(seed: int, shape: Shape) -> list[Order]:
    """Long answers, one for each client, that are under way when the server is told to stop."""
    chance = random.Random(f"{seed}/farewell")
    kinds = ["tale", "tale", "tale", "batch"]
    asked = [
        next(question for question in own if question.kind == kinds[owner % len(kinds)])
        for owner, own in enumerate(questions(seed, shape))
    ]
    return [Order(one, chance.choice(MODELS), stream=_streams(chance, one)) for one in asked]


def patience() -> list[Operation]:
    """Calls after which every model lets its requests wait for as long as they like, and is loaded."""
    bodies = [{"id": model, "busy_timeout_ms": PATIENT_MS} for model in SLOTS]
    return [Operation(LOAD, body, frozenset({200}), patience=None, pause=0) for body in bodies]


def orders(seed: int, client: int, own: Sequence[Question]) -> Iterator[Order]:
    """A client's requests, without end."""
    chance = random.Random(f"{seed}/client/{client}")
    while True:
        cut = _cut(chance) if chance.random() < _CUT_SHARE else None
        question = _asked(chance, own, cut)
        yield Order(
            question=question,
            model=chance.choice(question.models),
            stream=_streams(chance, question) or (cut is not None and cut.where == "events"),
            busy_timeout_ms=_busy_timeout(chance),
            fresh=chance.random() < _FRESH_SHARE,
            cut=cut,
            pause=chance.uniform(0.05, 0.5),
        )


def operations(seed: int, shape: Shape) -> Iterator[Operation]:
    """The manager's calls, without end."""
    chance = random.Random(f"{seed}/manager")
    reconfigure = partial(_reconfigure, threads=shape.threads)
    makers = [reconfigure, reconfigure, reconfigure, _unload, _unload, _unload_many, _unload_all, _nonsense]
    while True:
        route, body, statuses = chance.choice(makers)(chance)
        yield Operation(
            route,
            body,
            frozenset(statuses),
            patience=chance.uniform(0, 1) if chance.random() < _OPERATION_CUT_SHARE else None,
            pause=chance.uniform(0.1, 2),
        )


def _bodies(word: str, sampling_seed: int, shape: Shape) -> Iterator[tuple[str, dict[str, Any]]]:
    greedy = {"temperature": 0}
    talk = [{"role": "user", "content": f"The password is {word}. Please remember it."}]
    for turn in range(shape.turns):
        talk += [
            # No answer of this model begins so: what a slot keeps of an answer, and not of a prompt, is never reused.
            # That is computed in another way, and may change the last bits of the next answer.
            {"role": "assistant", "content": f"Noted: {word}."},
            {"role": "user", "content": ("What is the password?", "Say it again.", "And once more?")[turn]},
        ]
        yield f"turn {turn}", {"messages": list(talk), "max_tokens": 16, **greedy}
    diary = f"Dear diary, the password of the cellar is {word}. What is it? The password of the cellar is"
    yield "diary", {"prompt": diary, "max_tokens": 12, **greedy}
    long = f"The password is {word}. {_FILLER * shape.filler}Now say it: the password is"
    yield "long", {"prompt": long, "max_tokens": 12, **greedy}
    yield "dice", {"prompt": diary, "max_tokens": 16, "temperature": 0.8, "seed": sampling_seed}
    story = f"This is a tale of a wizard whose name was {word}. Once upon a time the wizard {word}"
    tale = {"prompt": story, "max_tokens": shape.tale, "ignore_eos": True, **greedy}
    yield "tale", tale
    gate = f"The password of the gate is {word}. Say the password, and whether you are sure. The password is"
    pattern = {"prompt": gate, "regex": r" [a-z]{8}, (yes|no)\.", "max_tokens": 24, "temperature": 0.8}
    pattern["seed"] = sampling_seed
    yield "pattern", pattern
    talk = [{"role": "user", "content": f"The password is {word}. Tell it as JSON, and how sure you are."}]
    form = {"messages": talk, "response_format": _FORM, "max_tokens": 48, **greedy}
    yield "form", form
    yield "batch", {"requests": [{"prompt": diary, "max_tokens": 12, **greedy}, tale, form, pattern]}
    yield "vector", {"input": diary}
    yield "vectors", {"input": [gate, diary, f"{word}!", long], "encoding_format": "base64"}


def _asked(chance: random.Random, own: Sequence[Question], cut: Cut | None) -> Question:
    """Any question, but one whose phase lasts where the client means to leave in it."""
    wanted = {"prefill": ["long"], "decode": ["tale", "batch"], "events": ["tale", "batch"]}
    kinds = wanted.get(cut.where if cut else "")
    return chance.choice([question for question in own if kinds is None or question.kind in kinds])


def _streams(chance: random.Random, question: Question) -> bool:
    """Whether an answer comes in a stream, where that is free."""
    return question.route == BATCH or (chance.random() < 0.5 and question.route != EMBEDDINGS)


def _cut(chance: random.Random) -> Cut:
    where = chance.choice(["upload", "waiting", "waiting", "prefill", "decode", "events"])
    longest = {"waiting": chance.choice([0.05, 0.5, 5]), "prefill": 0.3, "decode": 0.5}.get(where, 0)
    return Cut(where, chance.uniform(0, longest), chance.randint(1, 20), reset=chance.random() < 0.5)


def _busy_timeout(chance: random.Random) -> int | None:
    kind = chance.choice(["none", "none", "none", "zero", "short", "middle", "long"])
    longest = {"short": 500, "middle": 10_000, "long": 60_000}
    return {"none": None, "zero": 0}[kind] if kind in ("none", "zero") else chance.randint(1, longest[kind])


_Call = tuple[str, dict[str, Any], set[int]]


def _reconfigure(chance: random.Random, threads: Sequence[int]) -> _Call:
    body: dict[str, Any] = {"id": chance.choice(_IDS)}
    body |= {
        "slots": chance.randint(1, 4),
        "n_ctx": chance.choice(CONTEXTS),
        "threads": chance.choice(threads),
        # It becomes the model's bound for everybody, so it is never so short that nobody gets in any more.
        "busy_timeout_ms": chance.choice([2000, 20_000, 60_000, PATIENT_MS]),
    }
    for name in ("slots", "n_ctx", "threads"):
        if chance.random() < 0.3:
            del body[name]
    return LOAD, body, {200, 503}


def _unload(chance: random.Random) -> _Call:
    return UNLOAD, _bounded(chance, {"id": chance.choice(_IDS)}), {200, 503}


def _unload_many(chance: random.Random) -> _Call:
    ids = [chance.choice([*_IDS, "nobody"]) for _ in range(chance.randint(1, 3))]
    return UNLOAD_MANY, _bounded(chance, {"model_ids": ids}), {200, 503}


def _unload_all(chance: random.Random) -> _Call:
    return UNLOAD_ALL, _bounded(chance, {}), {200, 503}


def _nonsense(chance: random.Random) -> _Call:
    """What can't be, and must not change anything."""
    known = chance.choice(_IDS)
    return chance.choice(
        [
            (LOAD, {"id": known, "slots": 17}, {400}),
            (LOAD, {"id": known, "path": "/nowhere.gguf"}, {400}),
            (LOAD, {"id": known, "slot": 2}, {400}),
            (UNLOAD, {"id": "nobody"}, {404}),
        ]
    )


def _bounded(chance: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    timeout = _busy_timeout(chance)
    return body if timeout is None else {**body, "busy_timeout_ms": timeout}
