"""How models call tools: the layouts of the common families, told apart by what their chat templates hold.

Sources of the formats: the templates themselves, as published with Hermes and Qwen (``<tool_call>``), Llama 3 (an
object with ``parameters``) and Mistral (``[TOOL_CALLS]``). A model whose template knows no tools, or in a way that is
not known here, is told of them by a message, and its calls are one JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from trioserve.chat.calls import EnforcedCalls, LeadingCalls, MarkedCalls, Reader, decoded_calls
from trioserve.chat.tools import ToolUse

MAX_CALLS = 16
"""Calls in one answer where a grammar holds it to calls."""

OPENED = "thought SPACE"
"""Thoughts that the prompt has begun."""
OPTIONAL = '("<think>" thought SPACE)?'
"""Thoughts that the answer may begin with."""
_THOUGHT = [r'thought[suffix="</think>"]: /(.|\n)*/', r"SPACE: /\s{0,4}/"]

Reading = Callable[["Dialect", ToolUse], Reader]


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way to call tools.

    Attributes:
        name: for people.
        opening, separator, closing: what stands before, between and after calls.
        arguments: the key of the arguments.
        read: makes a reader for answers that no grammar holds to calls.
        native: the template shows the tools, and calls of earlier turns.
        free_text: a grammar for text that is no call, where there has to be one.
        prefix: what a prompt ends with where calls are required: a control token, which is no text to a grammar.
        trigger: the model's own word for a call to come, where that can't be anything else.
    """

    name: str
    opening: str
    separator: str
    closing: str
    arguments: str
    read: Reading
    native: bool = True
    free_text: str | None = None
    prefix: str = ""
    trigger: str = ""

    def enforces(self, use: ToolUse) -> bool:
        """Whether answers are held to a grammar."""
        return use.required or self.free_text is not None

    def reader(self, use: ToolUse) -> Reader:
        """Return what reads one answer."""
        return EnforcedCalls() if use.required else self.read(self, use)

    def grammar(self, use: ToolUse, *, thoughts: str = "") -> str:
        """Return a grammar for answers, in Lark; see ``enforces``.

        Arguments:
            use: of the tools.
            thoughts: what may come first: ``OPENED`` or ``OPTIONAL``.
        """
        calls = _rules(use)
        more = f" ({_literal(self.separator)} call){{0,{MAX_CALLS - 1}}}" if use.several else ""
        opening, closing = (f"{_literal(text)} " if text else "" for text in (self.opening, self.closing))
        free = None if use.required else self.free_text
        lines = [
            f"start: {thoughts} ({'calls | FREE' if free else 'calls'})",
            f"calls: {opening}call{more} {closing}",
            f"call: {' | '.join(calls)}",
        ]
        lines += [f"FREE: {free}"] if free else []
        lines += _THOUGHT if thoughts else []
        return "\n".join([*lines, *self._tools(use)]) + "\n"

    def triggered(self, use: ToolUse) -> str:
        """Return a grammar for what follows the trigger, in Lark: one call, or a list where the dialect has lists.

        A rule whose name begins with ``mark_`` is a text that may be a token of its own.
        """
        if self.opening == "[":
            more = f'("," SPACE call){{0,{MAX_CALLS - 1}}} ' if use.several else ""
            calls = f'"[" call {more}"]"'
        else:
            calls = "call SPACE mark_closing" if self.closing else "call"
        lines = [f"start: SPACE {calls}", r"SPACE: /\s{0,4}/", f"call: {' | '.join(_rules(use))}"]
        lines += [f"mark_closing: {_literal(self.closing.strip())}"]
        return "\n".join([*lines, *self._tools(use)]) + "\n"

    def _tools(self, use: ToolUse) -> list[str]:
        """Rules for a call of each tool."""
        lines = []
        for rule, tool in zip(_rules(use), use.callable, strict=True):
            head = _literal(f'{{"name": "{tool.name}", "{self.arguments}": ')
            lines += [f'{rule}: {head} {rule}_arguments "}}"', f"{rule}_arguments: %json {tool.schema}"]
        return lines


def _rules(use: ToolUse) -> list[str]:
    return [f"call_{index}" for index in range(len(use.callable))]


def _literal(text: str) -> str:
    return json.dumps(text)


def _marked(dialect: Dialect, use: ToolUse) -> Reader:
    opening, closing = dialect.opening.strip(), dialect.closing.strip()
    return MarkedCalls(opening, closing, lambda text: decoded_calls(text, _names(use)), _limit(use))


def _after_tag(dialect: Dialect, use: ToolUse) -> Reader:
    def decode(text: str) -> list[tuple[str, str]] | None:
        return decoded_calls(text.removeprefix("<|python_tag|>"), _names(use), separator=";")

    return LeadingCalls(("{", "<|python_tag|>"), decode, _limit(use))


def _in_list(dialect: Dialect, use: ToolUse) -> Reader:
    def decode(text: str) -> list[tuple[str, str]] | None:
        listed = text.removeprefix("[TOOL_CALLS]").lstrip()
        return decoded_calls(listed, _names(use)) if listed.startswith("[") else None

    return LeadingCalls(("[",), decode, _limit(use))


def _calls_or_text(dialect: Dialect, use: ToolUse) -> Reader:
    return EnforcedCalls(or_text=True)


def _names(use: ToolUse) -> list[str]:
    return [tool.name for tool in use.callable]


def _limit(use: ToolUse) -> int | None:
    return None if use.several else 1


HERMES = Dialect(
    "hermes",
    "<tool_call>\n",
    "\n</tool_call>\n<tool_call>\n",
    "\n</tool_call>",
    "arguments",
    read=_marked,
    trigger="<tool_call>",
)
# A brace alone may as well begin an answer in JSON.
LLAMA = Dialect("llama", "", "; ", "", "parameters", read=_after_tag, trigger="<|python_tag|>")
# Control tokens are no part of an answer's text, so a call without its marker has to be one too.
MISTRAL = Dialect("mistral", "[", ", ", "]", "arguments", read=_in_list, prefix="[TOOL_CALLS]", trigger="[TOOL_CALLS]")
GENERIC = Dialect(
    "generic",
    '{"tool_calls": [',
    ", ",
    "]}",
    "arguments",
    read=_calls_or_text,
    native=False,
    # Text that can't be taken for a call, nor for thoughts.
    free_text=r"/([^{\s](.|\n)*)?/ & ~/<think>(.|\n)*/",
)


def dialect_of(template: str) -> Dialect:
    """How a model calls tools.

    Arguments:
        template: source of its chat template.
    """
    if "tools" not in template:
        return GENERIC
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return HERMES
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return MISTRAL
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return LLAMA
    return GENERIC
