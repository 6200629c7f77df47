"""What is asked for, free of any wire format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trioserve.engine.sampling import Sampling


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


def describe(prompt: Prompt) -> str:
    """A prompt for the log, where the operator wants prompts there."""
    if isinstance(prompt, TextPrompt):
        return prompt.text
    return str(list(prompt.messages if isinstance(prompt, ChatPrompt) else prompt.tokens))


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
        busy_timeout_ms: how long to wait for a slot; None leaves it to model and server, 0 is not at all.
        request_id: for the log.
    """

    prompt: Prompt
    model: str | None = None
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    busy_timeout_ms: int | None = None
    request_id: str = "-"
