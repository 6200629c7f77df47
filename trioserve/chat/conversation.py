"""The prompt of a conversation that may hold tools, and how to read what follows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from trioserve.chat.answer import Expected
from trioserve.chat.dialects import Dialect, dialect_of
from trioserve.chat.history import (
    has_calls,
    shows_calls,
    with_decoded_arguments,
    with_one_call_a_turn,
    with_short_ids,
    with_spoken_tools,
)
from trioserve.chat.prompt import render_prompt
from trioserve.chat.template import ChatTemplate
from trioserve.chat.tools import Tool, ToolUse
from trioserve.errors import ChatTemplateError

Messages = Sequence[Mapping[str, object]]


def render_chat(template: ChatTemplate, messages: Messages, use: ToolUse | None) -> tuple[str, Expected]:
    """The prompt for normalised messages, and what is to be expected of its answer.

    Arguments:
        template: of the model.
        messages: as ``normalise_messages`` gives them.
        use: of the tools that the answer may call.

    Errors: ChatTemplateError, as ``render_prompt``.
    """
    dialect = dialect_of(template.source)
    text = _render(template, messages, use, dialect)
    expected = Expected.after(text, use, dialect)
    return text + (dialect.prefix if use is not None and use.required else ""), expected


def _render(template: ChatTemplate, messages: Messages, use: ToolUse | None, dialect: Dialect) -> str:
    spoken = not dialect.native if use else has_calls(messages) and not shows_calls(dialect, template.source)
    if spoken:
        return _first_prompt(template, _spoken(messages, use), (None,))
    ways = _shown(messages) if has_calls(messages) else iter([messages])
    return _first_prompt(template, ways, _described(use) if use else (None,))


def _first_prompt(template: ChatTemplate, ways: Iterator[Messages], tools: Sequence[Messages | None]) -> str:
    """The prompt of the first way to put a conversation that a template takes; else what it said of the first one."""
    refusal: ChatTemplateError | None = None
    for messages in ways:
        for described in tools:
            try:
                return render_prompt(template, messages, tools=described)
            except ChatTemplateError as error:
                refusal = refusal or error
    assert refusal is not None, "there is at least one way"
    raise refusal


def _described(use: ToolUse) -> Sequence[Messages]:
    """Tools as they were given, and, for templates that look into all parts, with those that were left out."""
    given = [tool.given for tool in use.tools]
    whole = [{**tool.given, "function": _whole(tool)} for tool in use.tools]
    return (given,) if whole == given else (given, whole)


def _whole(tool: Tool) -> Mapping[str, object]:
    given = tool.given.get("function")
    function = {"description": "", **(given if isinstance(given, Mapping) else {})}
    parameters = {"type": "object", "properties": {}, **(tool.parameters or {})}
    return {**function, "description": function["description"] or "", "parameters": parameters}


def _shown(messages: Messages) -> Iterator[Messages]:
    """Ways to put calls to a template that shows them: an answer of this server is never refused for its layout."""
    decoded = with_decoded_arguments(messages)
    yield decoded
    yield messages  # some templates write the JSON text as it is
    short = with_short_ids(decoded)
    yield short  # Mistral's want ids of nine characters
    yield with_one_call_a_turn(short)  # Llama 3's know no more


def _spoken(messages: Messages, use: ToolUse | None) -> Iterator[Messages]:
    """Ways to put calls to a template that knows none."""
    yield with_spoken_tools(messages, use)
    if use is not None and messages[0].get("role") == "user":  # some templates know no system message either
        yield with_spoken_tools(messages, use, by_the_user=True)
