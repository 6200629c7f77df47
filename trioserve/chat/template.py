"""A model's own chat template: compiled once, rendered within bounds.

Source of the format: Jinja text in the GGUF key ``tokenizer.chat_template``, written for Hugging Face transformers'
``apply_chat_template``, whose variables and helpers are given here.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, NoReturn

from trioserve.chat.filters import gather
from trioserve.chat.meter import METER, Meter
from trioserve.chat.sandbox import BoundedEnvironment
from trioserve.errors import ChatTemplateError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jinja2 import Template

#: Compiling has no time bound; the densest text of this length, in characters, takes about three seconds.
MAX_SOURCE_CHARS = 131_072
_MAX_FORMAT_CHARS = 1_000
_MAX_COMPLAINT_CHARS = 1_000
_MAX_DETAIL_CHARS = 300


class ChatTemplate:
    """One compiled template. Rendering changes nothing in it, so several threads may render at once.

    Arguments:
        source: the Jinja text.
        bos_token, eos_token: the model's texts for beginning and end, as the template's variables of the same names.
        time_limit_s: seconds that one rendering may take.
        max_chars: characters that the prompt, and each value on the way to it, may have.

    Errors: ChatTemplateError when the text does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str,
        eos_token: str,
        time_limit_s: float = 1.0,
        max_chars: int = 8 * 1024 * 1024,
    ) -> None:
        self.source = source
        self._special_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._time_limit_s = time_limit_s
        self._max_chars = max_chars
        self._compiled = _compile(source)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        extra: Mapping[str, object] | None = None,
        now: datetime | None = None,
    ) -> str:
        """The prompt for these messages.

        Arguments:
            messages: as ``normalise_messages`` gives them.
            add_generation_prompt: end with the header of the assistant's turn.
            tools: tool descriptions for the template, or None.
            extra: further variables (such as ``enable_thinking``); they cannot replace those above.
            now: the time that ``strftime_now`` tells; None for the local time.

        Errors: ChatTemplateError when the template complains (``param`` is then "messages"), fails, reaches for
        something the sandbox refuses, or exceeds a bound. Nothing else is ever raised.
        """
        variables: dict[str, object] = {
            "documents": None,
            **self._special_tokens,
            **(extra or {}),
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
            "raise_exception": _raise_exception,
            "strftime_now": _clock(now),
        }
        return self._run(variables)

    def _run(self, variables: dict[str, object]) -> str:
        meter = Meter(time_limit_s=self._time_limit_s, max_chars=self._max_chars)
        token = METER.set(meter)
        try:
            for value in variables.values():
                meter.keep(value)
            return gather(meter, self._compiled.generate(variables))
        except ChatTemplateError:
            raise
        # A template can raise whatever Python can; here is the one place where that becomes an error with a name.
        except Exception as error:
            raise ChatTemplateError(f"The model's chat template failed: {_describe(error)}") from error
        finally:
            METER.reset(token)


def _compile(source: str) -> Template:
    if len(source) > MAX_SOURCE_CHARS:
        raise ChatTemplateError(f"The model's chat template is longer than {MAX_SOURCE_CHARS} characters.")
    try:
        return BoundedEnvironment().from_string(source)
    # Beside Jinja's own errors: Python's compiler (too many nested blocks), recursion in the parser.
    except Exception as error:
        raise ChatTemplateError(f"The model's chat template does not compile: {_describe(error)}") from error


def _describe(error: Exception) -> str:
    """One line about a foreign exception."""
    if isinstance(error, RecursionError):
        return "it recurses too deeply (recursion bound)"
    line = getattr(error, "lineno", None)
    where = f" (line {line})" if line else ""
    detail = " ".join(str(getattr(error, "message", None) or error).split())[:_MAX_DETAIL_CHARS]
    return f"{type(error).__name__}: {detail}{where}" if detail else f"{type(error).__name__}{where}"


def _raise_exception(message: object = "") -> NoReturn:
    text = str(message)[:_MAX_COMPLAINT_CHARS]
    raise ChatTemplateError(f"The model's chat template refused the messages: {text}", param="messages")


def _clock(now: datetime | None) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        if len(form) > _MAX_FORMAT_CHARS:
            raise ChatTemplateError(
                f"The model's chat template exceeded {_MAX_FORMAT_CHARS} characters in a date format."
            )
        return (datetime.now() if now is None else now).strftime(form)

    return strftime_now
