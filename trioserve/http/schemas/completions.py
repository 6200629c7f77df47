"""``POST /v1/completions``"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, WithJsonSchema, field_validator

from trioserve.errors import InvalidRequestError
from trioserve.http.schemas.base import MAX_LOGPROBS, TOKENS, GenerationFields, Text, encodable, is_tokens
from trioserve.service import TextPrompt, TokenPrompt

MAX_PROMPTS = 2048

_PROMPTS = {
    "type": "array",
    "items": {"anyOf": [{"type": "string"}, TOKENS]},
    "minItems": 1,
    "maxItems": MAX_PROMPTS,
}
_PROMPT = {"anyOf": [{"type": "string"}, TOKENS, _PROMPTS]}


class CompletionRequest(GenerationFields):
    """Body of a text completion."""

    defaults: ClassVar[Mapping[str, object]] = {**GenerationFields.defaults, "echo": False}

    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Tell how likely each token was, and so many of the most likely ones."
    )
    prompt: Annotated[Any, WithJsonSchema(_PROMPT)] = Field(
        description="Text or token ids, or a list of such prompts: they are decoded together and answered by index."
    )

    suffix: Text | None = Field(
        None, description="Text that follows the answer, which fills the gap; for models that have tokens for that."
    )
    echo: bool | None = Field(None, description="Tell the prompt's text before the answer.")

    @classmethod
    def parse(cls, body: Mapping[str, object]) -> Self:
        """Validate a decoded JSON object; also bound how many answers it asks for."""
        parsed = super().parse(body)
        if parsed.echo and parsed.logprobs is not None:
            raise InvalidRequestError(
                "echo and logprobs are both given: how likely a prompt's tokens are is not told", param="echo"
            )
        if (answers := len(parsed.prompts) * parsed.choices) > MAX_PROMPTS:
            raise InvalidRequestError(
                f"n: {len(parsed.prompts)} prompts times {parsed.choices} choices are {answers} answers, at most "
                f"{MAX_PROMPTS} are allowed",
                param="n",
            )
        return parsed

    @property
    def prompts(self) -> Sequence[TextPrompt | TokenPrompt]:
        """What to continue."""
        prompts: Sequence[TextPrompt | TokenPrompt] = self.prompt
        return prompts

    @property
    def reported(self) -> int | None:
        """How many of the most likely tokens to report at each place; None reports nothing."""
        return self.logprobs

    @property
    def following(self) -> str:
        """The text that follows the answer."""
        return self.suffix or ""

    @property
    def echoed(self) -> bool:
        """Whether the prompt is told before the answer."""
        return bool(self.echo)

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_tokens

    @field_validator("prompt")
    @classmethod
    def _prompts(cls, value: Any) -> Sequence[TextPrompt | TokenPrompt]:
        if not isinstance(value, list) or not value or is_tokens(value):
            return (_prompt(value),)
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"holds {len(value)} prompts, at most {MAX_PROMPTS} are allowed")
        return [_prompt(item) for item in value]


def _prompt(value: Any) -> TextPrompt | TokenPrompt:
    if isinstance(value, str):
        return TextPrompt(encodable(value))
    if is_tokens(value):
        return TokenPrompt(value)
    raise ValueError("must be a string or a non-empty list of token ids, or a list of such prompts")
