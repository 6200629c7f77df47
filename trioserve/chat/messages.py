"""Messages of a request in the one form that templates expect: a role and a text.

Source of the format: the ``messages`` of OpenAI's chat completions. Normal form:

- ``content`` in parts becomes the parts' texts, joined with nothing between, so both ways give the same prompt;
- ``content`` null or missing stays None beside an assistant's ``tool_calls`` (templates tell the two kinds of turn
  apart by it) and becomes "" everywhere else;
- the role ``developer`` becomes ``system``, the name that templates know;
- every other key passes through.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from trioserve.errors import InvalidRequestError

#: Part types that carry text, with the key that holds it.
_TEXT_KEYS = {"text": "text", "refusal": "refusal"}
_ROLE_NAMES = {"developer": "system"}
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")


def normalise_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """A copy of the messages in normal form, as the module describes it.

    Errors: InvalidRequestError, with the field's path as ``param``, for no messages at all, a part that is no text, a
    text that is no valid Unicode, or a field of the wrong type.
    """
    if not messages:
        raise InvalidRequestError("messages must hold at least one message.", param="messages")
    return [_normalise(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalise(message: Mapping[str, object], path: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{path} must be an object.", param=path)
    _refuse_surrogates(message, path)
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequestError(f"{path}.role must be a string.", param=f"{path}.role")
    content = _content_text(message.get("content"), f"{path}.content")
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        content = ""
    return {**message, "role": _ROLE_NAMES.get(role, role), "content": content}


def _content_text(content: object, path: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequestError(f"{path} must be a string or an array of parts.", param=path)
    return "".join(_part_text(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part_text(part: object, path: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{path} must be an object.", param=path)
    kind = part.get("type")
    key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise InvalidRequestError(f"{path}.type is {kind!r:.100}; this server takes text only.", param=f"{path}.type")
    text = part.get(key)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{path}.{key} must be a string.", param=f"{path}.{key}")
    return text


def _refuse_surrogates(value: object, path: str) -> None:
    """Half a surrogate pair is no character: no tokenizer can encode it. JSON can still spell it, as "\\ud800"."""
    # A stack of our own: nesting comes from the client, so recursion would let it choose our depth.
    pending: list[tuple[object, str]] = [(value, path)]
    while pending:
        current, where = pending.pop()
        if isinstance(current, str):
            if _LONE_SURROGATE.search(current):
                raise InvalidRequestError(f"{where} holds a lone surrogate, which is not valid Unicode.", param=where)
        elif isinstance(current, Mapping):
            pending.extend((key, where) for key in current)
            pending.extend((item, f"{where}.{_printable(key)}") for key, item in current.items())
        elif isinstance(current, Sequence):
            pending.extend((item, f"{where}[{index}]") for index, item in enumerate(current))


def _printable(key: object) -> str:
    return str(key).encode("ascii", "backslashreplace").decode("ascii")[:100]
