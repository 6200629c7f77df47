"""What is asked for, free of any wire format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trioserve.engine.base import Constraint
from trioserve.engine.sampling import Sampling
from trioserve.errors import TrioserveError


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation that the model's chat template turns into text. Each message has a ``role`` and ``content``."""

    messages: Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text that is continued as it stands."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids that are continued as they stand."""

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
    busy_timeout_ms: int | None = None
    request_id: str = "-"


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Answers to several prompts, decoded together in one slot.

    Attributes:
        items: what is asked for, or why that can't be honoured. Their own ``model``, ``busy_timeout_ms`` and
            ``request_id`` are without effect.
        all_or_nothing: one that can't be honoured refuses the whole batch, one that fails ends it.
        model, busy_timeout_ms, request_id: as in ``GenerationRequest``.
    """

    items: Sequence[GenerationRequest | TrioserveError]
    all_or_nothing: bool = False
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


def describe(request: BatchRequest) -> str:
    """A request's prompts for the log, where the operator wants prompts there."""
    prompts = [_text(item.prompt) for item in request.items if isinstance(item, GenerationRequest)]
    return prompts[0] if len(prompts) == 1 else str(prompts)


def _text(prompt: Prompt) -> str:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    return str(list(prompt.messages if isinstance(prompt, ChatPrompt) else prompt.tokens))
