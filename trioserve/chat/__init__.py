"""Chat: from a list of messages to the prompt text that a model was trained on.

Pure: no Trio, no HTTP, no llama.cpp. A chat template is a program from a model file, so it runs in a sandbox with
bounds on time and size (``sandbox``, ``meter``); everything it can do wrong ends as one ``ChatTemplateError``.
"""

from __future__ import annotations

from trioserve.chat.fallback import CHATML_TEMPLATE, default_template
from trioserve.chat.messages import normalise_messages
from trioserve.chat.prompt import render_prompt
from trioserve.chat.template import ChatTemplate

__all__ = ["ChatTemplate", "render_prompt", "normalise_messages", "default_template", "CHATML_TEMPLATE"]
