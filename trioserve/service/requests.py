"""What is asked for, free of any wire format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from trioserve.chat.tools import ToolUse
from trioserve.engine.base import Constraint, Task
from trioserve.engine.sampling import Sampling
from trioserve.errors import TrioserveError


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation that the model's chat template turns into text.

    Attributes:
        messages: each has a ``role`` and ``content``.
        tools: that the answer may call.
    """

    messages: Sequence[Mapping[str, object]]
    tools: ToolUse | None = None


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text that is continued, or turned into a vector, as it stands."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids that are continued, or turned into a vector, as they stand."""

    tokens: Sequence[int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to one prompt.

    Attributes:
        prompt: what to continue.
        model: id of a registered model; None where there is only one.
        max_tokens: tokens that may follow, at least 1; None is up to the context's end.
        sampling: how tokens are chosen.
        stops: strings that end the answer and never appear in it.
        ignore_eos: go on after an end-of-generation token.
        cache_prompt: don't evaluate again what the slot has kept of an earlier prompt or answer.
        logprobs: how many of the most likely tokens to report with each token; None reports nothing.
        constraint: what the answer has to look like.
        constraint_field: what the client calls it.
        suffix: text that follows the answer, which fills the gap between the prompt and it; empty where there is none.
        echo: tell the prompt's text before the answer.
        prompt_field: what the client calls the prompt; None where that follows from its kind.
        busy_timeout_ms: how long to wait for a slot; None leaves it to model and server, 0 is not at all.
        request_id: for the log.
    """

    prompt: Prompt
    model: str | None = None
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache_prompt: bool = True
    logprobs: int | None = None
    constraint: Constraint | None = None
    constraint_field: str = "constraint"
    suffix: str = ""
    echo: bool = False
    prompt_field: str | None = None
    busy_timeout_ms: int | None = None
    request_id: str = "-"


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Answers to several prompts, decoded together in one slot.

    Attributes:
        items: what is asked for, or why that can't be honoured. Their own ``model``, ``busy_timeout_ms`` and
            ``request_id`` are without effect.
        all_or_nothing: one that can't be honoured refuses the whole batch, one that fails ends it.
        choices: how many items in a row are for the same prompt.
        model, busy_timeout_ms, request_id: as in ``GenerationRequest``.
    """

    task: ClassVar[Task] = Task.GENERATE

    items: Sequence[GenerationRequest | TrioserveError]
    all_or_nothing: bool = False
    choices: int = 1
    model: str | None = None
    busy_timeout_ms: int | None = None
    request_id: str = "-"

    @classmethod
    def of(cls, request: GenerationRequest) -> BatchRequest:
        """A request for one answer."""
        return cls(
            (request,),
            all_or_nothing=True,
            model=request.model,
            busy_timeout_ms=request.busy_timeout_ms,
            request_id=request.request_id,
        )


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Vectors of several texts, computed together in one slot. One that can't be honoured refuses all of them.

    Attributes:
        inputs: the texts, at least one.
        dimensions: keep so many of each vector's numbers, at unit length; None is all of them.
        model, busy_timeout_ms, request_id: as in ``GenerationRequest``.
    """

    task: ClassVar[Task] = Task.EMBED

    inputs: Sequence[TextPrompt | TokenPrompt]
    dimensions: int | None = None
    model: str | None = None
    busy_timeout_ms: int | None = None
    request_id: str = "-"


Request = BatchRequest | EmbeddingRequest
"""What takes one lease."""


def describe(request: Request) -> str:
    """A request's prompts for the log, where the operator wants prompts there."""
    prompts = [_text(prompt) for prompt in prompts_of(request)]
    return prompts[0] if len(prompts) == 1 else str(prompts)


def prompts_of(request: Request) -> Sequence[Prompt]:
    """All prompts or inputs of a request that could be read."""
    if isinstance(request, EmbeddingRequest):
        return request.inputs
    return [item.prompt for item in request.items if isinstance(item, GenerationRequest)]


def _text(prompt: Prompt) -> str:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    return str(list(prompt.messages if isinstance(prompt, ChatPrompt) else prompt.tokens))
