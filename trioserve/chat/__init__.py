"""Chat: from a list of messages to the prompt text that a model was trained on, and from the
text of an answer to thoughts, words and tool calls.

Pure: no Trio, no HTTP, no llama.cpp. A chat template is a program from a model file, so it runs in a sandbox with
bounds on time and size (``sandbox``, ``meter``); everything it can do wrong ends as one ``ChatTemplateError``.
"""

from __future__ import annotations

from trioserve.chat.answer import AnswerParser, Expected
from trioserve.chat.conversation import render_chat
from trioserve.chat.events import Arguments, CallBegun, Content, Event, Reasoning
from trioserve.chat.fallback import CHATML_TEMPLATE, default_template
from trioserve.chat.messages import normalise_messages
from trioserve.chat.prompt import render_prompt
from trioserve.chat.template import ChatTemplate
from trioserve.chat.tools import Tool, ToolUse

__all__ = [
    "AnswerParser",
    "Arguments",
    "CHATML_TEMPLATE",
    "CallBegun",
    "ChatTemplate",
    "Content",
    "Event",
    "Expected",
    "Reasoning",
    "Tool",
    "ToolUse",
    "default_template",
    "normalise_messages",
    "render_chat",
    "render_prompt",
]
