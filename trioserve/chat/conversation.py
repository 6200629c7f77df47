"""The prompt of a conversation that may hold tools, and how to read what follows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trioserve.chat.answer import Expected
from trioserve.chat.dialects import Dialect, dialect_of
from trioserve.chat.history import has_calls, shows_calls, with_decoded_arguments, with_spoken_tools
from trioserve.chat.prompt import render_prompt
from trioserve.chat.template import ChatTemplate
from trioserve.chat.tools import ToolUse
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
        return render_prompt(template, with_spoken_tools(messages, use))
    tools = [tool.given for tool in use.tools] if use else None
    if not has_calls(messages):
        return render_prompt(template, messages, tools=tools)
    try:
        return render_prompt(template, with_decoded_arguments(messages), tools=tools)
    except ChatTemplateError as refusal:  # some templates write the JSON text as it is
        try:
            return render_prompt(template, messages, tools=tools)
        except ChatTemplateError:
            raise refusal from None
