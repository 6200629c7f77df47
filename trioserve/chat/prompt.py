"""Which prompt a conversation asks for: a new answer, or more of the last one."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from trioserve.errors import ChatTemplateError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from trioserve.chat.template import ChatTemplate

    Messages = Sequence[Mapping[str, object]]


def render_prompt(
    template: ChatTemplate,
    messages: Messages,
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    extra: Mapping[str, object] | None = None,
    now: datetime | None = None,
) -> str:
    """The prompt for normalised messages (see ``normalise_messages``); the further arguments go to ``template.render``.

    If the last message is the assistant's words, the answer continues them: the prompt ends with its content, before
    any end-of-turn marker. Otherwise it ends with the header of a new assistant turn.

    Errors: ChatTemplateError, as ``template.render``, and when the template does not show the content to be continued.
    """

    def render(turns: Messages, *, new_turn: bool) -> str:
        return template.render(turns, add_generation_prompt=new_turn, tools=tools, extra=extra, now=now)

    def render_either(turns: Messages) -> str:
        last = turns[-1] if turns else {}
        if last.get("role") != "assistant" or last.get("tool_calls"):
            return render(turns, new_turn=True)
        # Not to be guessed by the author of a message, and with a space that only a trimming template removes.
        mark = f"continued{secrets.token_hex(16)}"
        content = str(last.get("content") or "")
        text = render([*turns[:-1], {**last, "content": f"{content}{mark} "}], new_turn=False)
        return _cut_at_mark(text, mark, content)

    try:
        return render_either(messages)
    except ChatTemplateError as refusal:
        if all(message.get("content") is not None for message in messages):
            raise
        # Many templates add content to a text even where a turn has tool calls only. "" says the same there.
        try:
            return render_either([{**message, "content": message.get("content") or ""} for message in messages])
        except ChatTemplateError:
            raise refusal from None


def _cut_at_mark(text: str, mark: str, content: str) -> str:
    head, found, tail = text.rpartition(mark)
    if not found:
        raise ChatTemplateError(
            "The model's chat template does not show the last assistant message as it is, so it cannot be continued.",
            param="messages",
        )
    # A template that trims contents never showed the model an answer with white space at its end. White space before an
    # empty content belongs to the template.
    words = content.rstrip()
    trimmed = words and not tail.startswith(" ")
    return head.removesuffix(content[len(words) :]) if trimmed else head
