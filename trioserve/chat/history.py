"""Earlier turns with tool calls and their results, as a template takes them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trioserve.chat.dialects import GENERIC, Dialect
from trioserve.chat.tools import ToolUse

Messages = Sequence[Mapping[str, object]]


def has_calls(messages: Messages) -> bool:
    """Whether a conversation holds calls or results."""
    return any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)


def with_decoded_arguments(messages: Messages) -> list[Mapping[str, object]]:
    """Messages whose calls have objects for arguments, as most templates want them, and not their JSON text."""
    return [_with_calls(message, _decode) for message in messages]


def with_short_ids(messages: Messages) -> list[Mapping[str, object]]:
    """Messages whose calls and results have ids of nine letters and digits, equal ones where they were equal."""
    changed: list[Mapping[str, object]] = []
    for message in messages:
        calls = [{**call, "id": _short(call["id"])} if "id" in call else call for call in _calls(message)]
        result = {"tool_call_id": _short(message["tool_call_id"])} if "tool_call_id" in message else {}
        changed.append({**message, **({"tool_calls": calls} if calls else {}), **result})
    return changed


def _short(identity: object) -> object:
    if not isinstance(identity, str) or re.fullmatch("[a-zA-Z0-9]{9}", identity):
        return identity
    return hashlib.sha256(identity.encode()).hexdigest()[:9]


def with_one_call_a_turn(messages: Messages) -> list[Mapping[str, object]]:
    """Messages that say one after another what was called at once, each call followed by its result."""
    said: list[Mapping[str, object]] = []
    for message, results in _with_results(messages):
        calls = _calls(message)
        if len(calls) < 2:
            said += [message, *results]
            continue
        for call in calls:
            words = message if call is calls[0] else {"role": message.get("role"), "content": None}
            said.append({**words, "tool_calls": [call]})
            said += [result for result in results if result.get("tool_call_id") == call.get("id")]
        known = [call.get("id") for call in calls]
        said += [result for result in results if result.get("tool_call_id") not in known]
    return said


def _with_results(messages: Messages) -> Iterator[tuple[Mapping[str, object], Messages]]:
    """Each message but results, with the results that follow it; results at the beginning stand for themselves."""
    start = 0
    while start < len(messages):
        end = start + 1
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        yield messages[start], messages[start + 1 : end]
        start = end


def with_spoken_tools(
    messages: Messages, use: ToolUse | None, *, by_the_user: bool = False
) -> list[Mapping[str, object]]:
    """Messages for a template that knows no tools: everything about them is said in words.

    Arguments:
        messages: in normal form.
        use: of the tools that the answer may call.
        by_the_user: tell of them in the first message, which is the user's, and not in a system message.
    """
    names = {str(call.get("id")): _function(call).get("name") for message in messages for call in _calls(message)}
    spoken: list[Mapping[str, object]] = []
    for message, results in _with_results(messages):
        spoken.append(_spoken(message, names))
        if results:  # together, since many templates want the user and the assistant to take turns
            texts = [str(_spoken(result, names)["content"]) for result in results]
            spoken.append({"role": "user", "content": "\n".join(texts)})
    if use is None:
        return spoken
    if by_the_user:
        return [{**spoken[0], "content": f"{instructions(use)}\n\n{spoken[0].get('content')}"}, *spoken[1:]]
    first = spoken[0] if spoken and spoken[0].get("role") == "system" else None
    words = f"{first['content']}\n\n" if first and first.get("content") else ""
    system = {**(first or {}), "role": "system", "content": words + instructions(use)}
    return [system, *(spoken[1:] if first else spoken)]


def instructions(use: ToolUse) -> str:
    """What a model is told of its tools where its template doesn't."""
    tools = "\n".join(json.dumps(tool.given.get("function", {}), ensure_ascii=False) for tool in use.callable)
    form = '{"tool_calls": [{"name": "NAME", "arguments": {...}}]}'
    when = "Answer" if use.required else "If one of them helps to answer, answer"
    other = "" if use.required else " Otherwise answer in plain text."
    return f"You can call these tools, described in JSON:\n{tools}\n{when} with nothing but {form} to call one.{other}"


def _spoken(message: Mapping[str, object], names: Mapping[str, object]) -> Mapping[str, object]:
    if message.get("role") == "tool":
        name = message.get("name") or names.get(str(message.get("tool_call_id")))
        result = {"name": name, "content": message.get("content")} if name else {"content": message.get("content")}
        return {"role": "user", "content": json.dumps({"tool_result": result}, ensure_ascii=False)}
    if not message.get("tool_calls"):
        return message
    calls = [_said(call) for call in _calls(_with_calls(message, _decode))]
    words = str(message.get("content") or "")
    text = f"{GENERIC.opening}{GENERIC.separator.join(calls)}{GENERIC.closing}"
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": f"{words}\n{text}" if words else text}


def _said(call: Mapping[str, object]) -> str:
    function = _function(call)
    return json.dumps({"name": function.get("name"), "arguments": function.get("arguments")}, ensure_ascii=False)


def _calls(message: Mapping[str, object]) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, Sequence) else []


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else {}


def _with_calls(message: Mapping[str, object], change: Any) -> Mapping[str, object]:
    if not _calls(message):
        return message
    calls = [
        {**call, "function": {**_function(call), "arguments": change(_function(call)["arguments"])}}
        if "arguments" in _function(call)
        else call
        for call in _calls(message)
    ]
    return {**message, "tool_calls": calls}


def _decode(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        decoded = json.loads(arguments)
        json.dumps(decoded, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):  # no JSON; not finite; or with half a character
        return arguments
    return decoded if isinstance(decoded, dict) else arguments


def shows_calls(dialect: Dialect, template: str) -> bool:
    """Whether a template shows calls of earlier turns by itself."""
    return dialect.native or "tool_calls" in template
