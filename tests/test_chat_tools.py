"""Prompts of conversations with tools, and grammars for calls, with the real grammar engine."""

from __future__ import annotations

import json

import chat_families
import jsonschema
import llguidance
import pytest

from trioserve.chat import (
    CHATML_TEMPLATE,
    Arguments,
    CallBegun,
    ChatTemplate,
    Expected,
    Tool,
    ToolUse,
    history,
    normalise_messages,
    render_chat,
)
from trioserve.chat.dialects import GENERIC, HERMES, LLAMA, MISTRAL
from trioserve.chat.history import with_spoken_tools
from trioserve.errors import ChatTemplateError

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}


def tool(name, parameters=None, **more):
    function = {"name": name, "parameters": parameters, **more}
    return Tool(name, parameters, {"type": "function", "function": function})


WEATHER, TIME = tool("weather", {**PARAMETERS, "required": ["city"]}, description="Tells."), tool("time")
USE = ToolUse([WEATHER, TIME])
USER = [{"role": "user", "content": "How is it?"}]
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}],
}
HISTORY = [*USER, CALLED, {"role": "tool", "tool_call_id": "1", "content": "Sunny"}]
NATIVE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments BY }}{% endfor %}]{% endfor %}"
)


def rendered(source, messages, use=None):
    text, _ = render_chat(ChatTemplate(source, bos_token="", eos_token=""), normalise_messages(messages), use)
    return text


# Prompts


def test_a_template_that_knows_tools_gets_them():
    text = rendered(NATIVE.replace("BY", ""), USER, USE)
    assert text.startswith(json.dumps([WEATHER.given, TIME.given]))
    assert "[user|How is it?|]" in text


def test_a_template_gets_arguments_as_it_wants_them():
    as_object = rendered(NATIVE.replace("BY", ".city"), HISTORY)
    assert "[assistant|None|Bonn]" in as_object
    assert "[tool|Sunny|]" in as_object
    as_text = rendered(NATIVE.replace("BY", "+ ''"), HISTORY)
    assert '[assistant|None|{"city": "Bonn"}]' in as_text


@pytest.mark.parametrize("arguments", ["no JSON", "[" * 100_000, "NaN", '{"a": NaN}', r'{"a": "\ud800"}', "5", 5, None])
def test_arguments_that_are_no_object_stay_as_they_are(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    text = rendered(NATIVE.replace("BY", "| string"), [*USER, {**CALLED, "tool_calls": [call]}])
    assert str(arguments) in text


@pytest.mark.parametrize("calls", ["a", 5, {"a": 1}, ["a"], [{}], [{"function": 5}]])
def test_calls_of_any_shape_are_no_accident(calls):
    for use in (None, USE):
        assert "How is it?" in rendered(CHATML_TEMPLATE, [*USER, {**CALLED, "tool_calls": calls}, *USER], use)


def test_a_template_that_knows_no_tools_is_told_in_words():
    text = rendered(CHATML_TEMPLATE, HISTORY, USE)
    system, user, assistant, result, _ = text.split("<|im_start|>")[1:]
    assert system.startswith("system\n")
    assert all(json.dumps(each.given["function"]) in system for each in USE.tools)
    assert '{"tool_calls": [' in system
    assert user == "user\nHow is it?<|im_end|>\n"
    assert assistant == ('assistant\n{"tool_calls": [{"name": "weather", "arguments": {"city": "Bonn"}}]}<|im_end|>\n')
    assert result == 'user\n{"tool_result": {"name": "weather", "content": "Sunny"}}<|im_end|>\n'


def test_what_the_system_says_stays_first():
    text = rendered(CHATML_TEMPLATE, [{"role": "system", "content": "Be brief."}, *USER], USE)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call")
    assert text.count("<|im_start|>system") == 1


def test_a_named_tool_is_the_only_one_that_words_tell_of():
    text = rendered(CHATML_TEMPLATE, USER, ToolUse(USE.tools, required=True, named="time"))
    assert "time" in text
    assert "weather" not in text


def test_required_calls_of_a_model_with_a_control_token_begin_in_the_prompt():
    source = "{{ tools }}[TOOL_CALLS]{{ messages[0].content }}"
    assert rendered(source, USER, ToolUse(USE.tools, required=True)).endswith("How is it?[TOOL_CALLS]")
    assert rendered(source, USER, USE).endswith("How is it?")


def test_each_call_of_a_turn_is_decoded_once(monkeypatch):
    decoded = []
    monkeypatch.setattr(history, "_decode", lambda arguments: decoded.append(arguments) or arguments)
    many = [{"id": str(number), "function": {"name": "time", "arguments": "{}"}} for number in range(100)]
    with_spoken_tools([{"role": "assistant", "content": "", "tool_calls": many}], None)
    assert len(decoded) == 100


def our_own(*names):
    """A conversation in which one answer of this server, with all that an answer can hold, has been followed up."""
    calls = [
        {
            "id": f"call_{name}0123456789",
            "type": "function",
            "function": {"name": name, "arguments": '{"city": "Bonn"}'},
        }
        for name in names
    ]
    answer = {"role": "assistant", "content": "Let me see.", "refusal": None, "reasoning_content": "Hm"}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"{call['id']} knows"} for call in calls]
    return [*USER, {**answer, "tool_calls": calls}, *results]


@pytest.mark.parametrize("use", [None, USE], ids=["without tools", "with tools"])
@pytest.mark.parametrize("names", [["weather"], ["weather", "time"]], ids=["one call", "two calls"])
@pytest.mark.parametrize("ending", [[], [{"role": "assistant", "content": "Well."}, *USER]], ids=["result", "question"])
@pytest.mark.parametrize("family", chat_families.FAMILIES)
def test_an_answer_of_this_server_is_never_refused_as_history(family, names, ending, use):
    text = rendered(chat_families.FAMILIES[family], [*our_own(*names), *ending], use)
    places = [text.rindex(f"call_{name}0123456789 knows") for name in names]
    assert places == sorted(places)
    assert [text.count(f"call_{name}0123456789 knows") for name in names] == [1] * len(names)
    assert all(text.count(f'"{name}"') + text.count(f"{name}\n```json") >= 1 for name in names)


def test_calls_are_told_one_by_one_only_where_they_have_to_be():
    calls = our_own("weather", "time")
    together, apart = (rendered(chat_families.FAMILIES[name], calls) for name in ("qwen2.5", "llama3.1"))
    assert together.index("call_weather") > together.index('"time"')
    assert apart.index("call_weather") < apart.index('"time"')


def test_ids_are_shortened_only_where_they_have_to_be():
    shows = "{% if tools %}{% endif %}[TOOL_CALLS]{% for m in messages %}{{ m.tool_call_id }}{% endfor %}"
    assert "call_weather0123456789" in rendered(shows, our_own("weather"), USE)
    strict = shows.replace(
        "{{ m", "{{ raise_exception('nine') if m.tool_call_id and m.tool_call_id | length != 9 }}{{ m"
    )
    text = rendered(strict, our_own("weather"), USE)
    assert "call_weather" not in text
    assert len(text.removeprefix("[TOOL_CALLS]")) == 9


@pytest.mark.parametrize("more", [{}, {"parameters": None, "description": None}, {"parameters": {"type": "object"}}])
def test_a_template_may_look_into_parts_of_tools_that_were_left_out(more):
    given = {"type": "function", "function": {"name": "time", **more}}
    use = ToolUse([Tool("time", more.get("parameters"), given)])
    text = rendered(chat_families.FAMILIES["hermes3"], USER, use)
    assert '{"name": "time", "signature": "time() - ' in text
    assert json.dumps(given, ensure_ascii=False) in rendered(NATIVE.replace("BY", ""), USER, use)


def test_a_refusal_that_no_other_way_helps_is_told_as_it_was():
    with pytest.raises(ChatTemplateError, match="no: 1 call"):
        rendered(
            "{{ tools }}<tool_call>{{ raise_exception('no: ' ~ messages[1].tool_calls | length ~ ' call') }}", HISTORY
        )


def test_tools_are_told_by_the_user_where_there_is_no_place_for_a_system():
    text = rendered(chat_families.FAMILIES["mistral v1"], USER, USE)
    assert text.startswith("[INST] You can call these tools")
    assert text.endswith("\n\nHow is it? [/INST]")
    with pytest.raises(ChatTemplateError, match="nobody else"):
        rendered(chat_families.FAMILIES["mistral v1"], [{"role": "system", "content": "Be brief."}, *USER], USE)


# Grammars

TOKENIZER = llguidance.LLTokenizer("byte")
NATIVES = pytest.mark.parametrize("dialect", [HERMES, LLAMA, MISTRAL, GENERIC], ids=lambda dialect: dialect.name)


def accepts(grammar, text):
    matcher = llguidance.LLMatcher(TOKENIZER, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def calls(dialect, *told):
    each = [f'{{"name": "{name}", "{dialect.arguments}": {json.dumps(value)}}}' for name, value in told]
    return dialect.opening + dialect.separator.join(each) + dialect.closing


@NATIVES
def test_required_calls_and_nothing_else(dialect):
    grammar = dialect.grammar(ToolUse(USE.tools, required=True))
    good = ("weather", {"city": "Bonn", "days": 2})
    assert accepts(grammar, calls(dialect, good))
    assert accepts(grammar, calls(dialect, good, ("time", {})))
    assert accepts(grammar, calls(dialect, *[good] * 16))
    assert not accepts(grammar, calls(dialect, *[good] * 17))
    assert not accepts(grammar, "Well")
    assert not accepts(grammar, "")
    for arguments in ({}, {"city": 5}, {"city": "Bonn", "days": 1.5}, {"city": "Bonn", "more": 1}):
        assert not accepts(grammar, calls(dialect, ("weather", arguments)))
    assert not accepts(grammar, calls(dialect, ("other", {})))


@NATIVES
def test_one_call_where_there_may_be_no_more(dialect):
    for use in (
        ToolUse(USE.tools, required=True, parallel=False),
        ToolUse(USE.tools, required=True, named="time"),
    ):
        assert accepts(dialect.grammar(use), calls(dialect, ("time", {})))
        assert not accepts(dialect.grammar(use), calls(dialect, ("time", {}), ("time", {})))
        assert accepts(dialect.grammar(use), calls(dialect, ("weather", {"city": "B"}))) is (use.named is None)


@NATIVES
@pytest.mark.parametrize("thinking", [False, True])
def test_thoughts_may_come_before_required_calls(dialect, thinking):
    grammar = Expected(thinking, ToolUse(USE.tools, required=True), dialect).grammar("{{ '</think>' }}")
    call = calls(dialect, ("time", {}))
    assert accepts(grammar, ("" if thinking else "<think>") + "Hm {\n</think>\n\n" + call)
    assert accepts(grammar, call) is not thinking


def test_an_answer_without_native_calls_is_text_or_calls():
    grammar = Expected(False, USE, GENERIC).grammar("</think>")
    for text in ("", "Well {", "a\n\nb", "<b>", calls(GENERIC, ("time", {})), "<think>a</think> Yes"):
        assert accepts(grammar, text)
    for text in ("{", " {", '{"a": 1}', calls(GENERIC, ("time", {"a": 1})), "<think>a</think>{"):
        assert not accepts(grammar, text)


@NATIVES
def test_where_nothing_is_required_native_calls_are_free(dialect):
    assert (Expected(False, USE, dialect).grammar("") is None) is (dialect is not GENERIC)
    assert Expected(False, None, dialect).grammar("") is None


@pytest.mark.parametrize(
    ("dialect", "good", "bad"),
    [
        (
            HERMES,
            [
                '\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>',
                '{"name": "time", "arguments": {}}</tool_call>',
            ],
            ['\n{"name": "other", "arguments": {}}\n</tool_call>', '{"name": "time", "arguments": {}}', "Well", ""],
        ),
        (
            LLAMA,
            ['{"name": "weather", "parameters": {"city": "Bonn"}}'],
            ['{"name": "weather", "parameters": {}}', "print(5)"],
        ),
        (
            MISTRAL,
            [' [{"name": "time", "arguments": {}}, {"name": "weather", "arguments": {"city": "Bonn", "days": 1}}]'],
            ["[]", '[{"name": "weather", "arguments": {"city": 5}}]', '[{"name": "time", "arguments": {}}'],
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_follows_the_word_for_a_call(dialect, good, bad):
    grammar = dialect.triggered(USE)
    assert all(accepts(grammar, text) for text in good)
    assert not any(accepts(grammar, text) for text in bad)
    hidden = "" if dialect is MISTRAL else dialect.trigger  # a control token, which is no part of the text
    for text in good:
        reader = dialect.read(dialect, USE)
        events = [*reader.feed(hidden + text), *reader.finish()]
        assert [type(event) for event in events[:2]] == [CallBegun, Arguments]


def test_a_list_of_calls_has_one_where_there_may_be_no_more():
    two = '[{"name": "time", "arguments": {}}, {"name": "time", "arguments": {}}]'
    assert accepts(MISTRAL.triggered(USE), two)
    assert not accepts(MISTRAL.triggered(ToolUse(USE.tools, parallel=False)), two)


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        (None, {}, {"a": 1}),
        ({}, {}, {"a": 1}),
        ({"properties": {"a": {"type": "integer"}}}, {"a": 1}, {"a": "1"}),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"b": 1}, {"b": "1"}),
        ({"$defs": {"x": {"enum": [1]}}, "properties": {"a": {"$ref": "#/$defs/x"}}}, {"a": 1}, {"a": 2}),
        ({"anyOf": [{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}]}, {"a": 1}, {"a": 2}),
        ({"properties": {"a": {}}, "required": ["b"]}, {"b": 5}, {}),
    ],
)
def test_parameters_are_followed(parameters, good, bad):
    use = ToolUse([tool("f", parameters)], required=True)
    assert accepts(GENERIC.grammar(use), calls(GENERIC, ("f", good)))
    assert not accepts(GENERIC.grammar(use), calls(GENERIC, ("f", bad)))
    jsonschema.validate(good, parameters or {})
