"""Chat templates in the shapes of common families, and conversations to render with them.

They were written for these tests: they have the families' markers and do the same kinds of things as the families' own
templates (namespaces, messages that are reversed, sliced or looked at from their neighbours, macros, tests for what is
defined, text or a list, filters with arguments, complaints). What they say is of no matter; that it comes out as it
does from plain Jinja is.
"""

from __future__ import annotations

QWEN25 = """
{%- set opening = messages[0].content if messages[0].role == 'system' else 'I am a default.' %}
{{- '<|im_start|>system\\n' ~ opening }}
{%- if tools %}
    {{- '\\n\\nThese can be called:\\n<tools>' }}
    {%- for entry in tools %}{{- '\\n' }}{{- entry | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nCall with <tool_call></tool_call>.' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for turn in (messages[1:] if messages[0].role == 'system' else messages) %}
    {%- if turn.role == 'tool' %}
        {%- set before = loop.previtem.role if loop.previtem is defined else '' %}
        {%- set after = loop.nextitem.role if loop.nextitem is defined else '' %}
        {{- '<|im_start|>user' if before != 'tool' }}
        {{- '\\n<tool_response>\\n' ~ turn.content ~ '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if after != 'tool' }}
    {%- elif turn.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if turn.content %}{{- '\\n' + turn.content }}{%- endif %}
        {%- for asked in turn.tool_calls %}
            {%- if asked.function is defined %}{% set asked = asked.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' + asked.name + '", "arguments": ' + asked.arguments | tojson + '}' }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ turn['role'] ~ '\\n' ~ turn['content'] ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""

QWEN3 = """
{%- set place = namespace(question=-1, open=true) %}
{%- for turn in messages[::-1] %}
    {%- if place.open and turn.role == 'user' and turn.content is string %}
        {%- set place.question = messages | length - 1 - loop.index0 %}
        {%- set place.open = false %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>\\n' }}
    {%- for entry in tools %}{{ entry | tojson ~ '\\n' }}{% endfor %}
    {{- '</tools> to be called in <tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for turn in messages %}
    {%- set words = turn.content if turn.content is string else '' %}
    {%- set thoughts = turn.reasoning_content if turn.reasoning_content is defined else none %}
    {%- if thoughts is none and '</think>' in words %}
        {%- set thoughts = words.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- set words = words.split('</think>', 1)[1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' ~ ('user' if turn.role == 'tool' else turn.role) ~ '\\n' }}
    {%- if turn.role == 'assistant' and thoughts is not none and loop.index0 > place.question %}
        {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- words if turn.role != 'tool' else ('<tool_response>\\n', words, '\\n</tool_response>') | join }}
    {%- for asked in turn.tool_calls or [] %}
        {{- '\\n' if words or not loop.first }}
        {%- set given = asked.function.arguments %}
        {{- '<tool_call>\\n{"name": "%s", "arguments": ' | format(asked.function.name) }}
        {{- given if given is string else given | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

LLAMA31 = """
{%- macro head(role) %}{{ '<|start_header_id|>' ~ role ~ '<|end_header_id|>\\n\\n' }}{% endmacro %}
{%- set tools = custom_tools if custom_tools is defined else tools | default(none) %}
{%- set today = strftime_now('%d %b %Y') if strftime_now is defined else 'unknown' %}
{%- set rest = messages %}
{%- set rules = '' %}
{%- if rest[0]['role'] == 'system' %}
    {%- set rules = rest[0]['content'] | trim %}
    {%- set rest = rest[1:] %}
{%- endif %}
{{- bos_token ~ head('system') }}
{%- if builtin_tools is defined %}
    {{- 'Tools: ' + builtin_tools | reject('equalto', 'code_interpreter') | join(', ') + '\\n\\n' }}
{%- endif %}
{{- 'Date: ' + today + '\\n\\n' + rules + '<|eot_id|>' }}
{%- if tools is not none %}
    {%- if not rest %}{{ raise_exception('There is no user whose message could hold the tools') }}{% endif %}
    {{- head('user') }}
    {%- for entry in tools %}{{- entry | tojson(indent=4) ~ '\\n\\n' }}{%- endfor %}
    {{- rest[0].content | trim ~ '<|eot_id|>' }}
    {%- set rest = rest[1:] %}
{%- endif %}
{%- for turn in rest %}
    {%- if turn.role in ['tool', 'ipython'] %}
        {{- head('ipython') }}
        {{- turn.content | tojson if turn.content is mapping or turn.content is iterable else turn.content }}
    {%- elif 'tool_calls' in turn %}
        {%- if turn.tool_calls | length > 1 %}{{ raise_exception('One call at a time, please!') }}{% endif %}
        {%- set asked = (turn.tool_calls | first).function %}
        {{- head('assistant') }}
        {%- if builtin_tools is defined and asked.name in builtin_tools %}
            {{- '<|python_tag|>' + asked.name + '.call(' }}
            {%- for key, value in asked.arguments | items %}
                {{- key ~ '="' ~ value ~ '"' }}{{ ', ' if not loop.last }}
            {%- endfor %}
            {{- ')' }}
        {%- else %}
            {{- '{"name": "' + asked.name + '", "parameters": ' + asked.arguments | tojson + '}' }}
        {%- endif %}
    {%- else %}
        {{- head(turn.role) ~ turn.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}
"""

MISTRAL_V1 = """{{ bos_token }}{% for turn in messages %}
    {% if loop.index0 % 2 == 0 and turn.role != 'user' or loop.index0 % 2 and turn.role != 'assistant' %}
{{ raise_exception('User and assistant take turns, and there is nobody else') }}
{% endif %}
{{ ('[INST] ' + turn.content + ' [/INST]') if turn.role == 'user' else turn.content ~ eos_token }}{% endfor %}"""

MISTRAL_V3 = """
{%- set rules = messages[0].content if messages[0].role == 'system' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- set questions = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set spoken = namespace(count=0) %}
{%- for turn in turns if turn.role != 'tool' and not (turn.tool_calls is defined and turn.tool_calls is not none) %}
    {%- if (turn.role == 'user') == (spoken.count % 2 == 1) %}
        {{- raise_exception('It is not the turn of ' ~ turn.role) }}
    {%- endif %}
    {%- set spoken.count = spoken.count + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for turn in turns %}
    {%- if turn.role == 'user' %}
        {%- if tools and turn == questions[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for entry in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in entry.function.items() if key != 'return' %}
                    {{- '"' ~ key ~ '": ' ~ ('"' ~ value ~ '"' if value is string else value | tojson) }}
                    {{- '' if loop.last else ', ' }}
                {%- endfor %}
                {{- '}}' ~ ('' if loop.last else ', ') }}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' ~ (rules ~ '\\n\\n' if loop.last and rules is defined and rules) ~ turn.content ~ '[/INST]' }}
    {%- elif turn.tool_calls is defined and turn.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for asked in turn.tool_calls %}
            {%- if asked.id is not defined or asked.id | length != 9 %}
                {{- raise_exception('The id of a call has nine characters, this has not: ' ~ asked.id) }}
            {%- endif %}
            {%- set text = asked.function | tojson %}
            {{- text[:-1] ~ ', "id": "' ~ asked.id ~ '"}' ~ (', ' if not loop.last else ']') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif turn.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + turn.content | string + ', "call_id": "' + turn.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- elif turn.role == 'assistant' %}
        {{- ' ' + turn.content | trim + eos_token }}
    {%- else %}
        {{- raise_exception('Who is ' + turn.role + '?') }}
    {%- endif %}
{%- endfor %}
"""

MISTRAL_TEKKEN = """
{%- macro text(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if part['type'] == 'text' %}{{- part['text'] }}
            {%- elif part['type'] in ('image', 'image_url') %}{{- '[IMG]' }}
            {%- else %}{{- raise_exception('What is a ' ~ part['type'] ~ '?') }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- if messages[0].role != 'system' %}
    {{- '[SYSTEM_PROMPT]It is ' ~ strftime_now('%A, %Y-%m-%d') ~ '.[/SYSTEM_PROMPT]' }}
{%- endif %}
{%- for turn in messages %}
    {%- if turn.role == 'system' %}{{- '[SYSTEM_PROMPT]' ~ text(turn.content) ~ '[/SYSTEM_PROMPT]' }}
    {%- elif turn.role == 'user' %}{{- '[INST]' ~ text(turn.content) ~ '[/INST]' }}
    {%- elif turn.role == 'assistant' %}{{- text(turn.content) ~ eos_token }}
    {%- else %}{{- raise_exception('No place for ' ~ turn.role) }}{%- endif %}
{%- endfor %}
"""

GEMMA3 = """{{ bos_token }}
{%- set rules, turns = '', messages -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] -%}
    {%- set rules = (first if first is string else first[0]['text']) + '

' -%}
    {%- set turns = messages[1:] -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if loop.index0 is even and turn['role'] != 'user' or loop.index0 is odd and turn['role'] == 'user' -%}
        {{ raise_exception("It is somebody else's turn than that of the " ~ turn['role']) }}
    {%- endif -%}
    {{ '<start_of_turn>' + {'assistant': 'model'}.get(turn['role'], turn['role']) + '
' + (rules if loop.first else '') }}
    {%- if turn['content'] is string -%}
        {{ turn['content'] | trim }}
    {%- elif turn['content'] is iterable and turn['content'] is not mapping -%}
        {%- for part in turn['content'] -%}
            {{ part['text'] | trim if part['type'] == 'text' else '<start_of_image>' }}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception('Neither text nor parts') }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""

PHI35 = """{% for turn in messages %}{% if turn['role'] != 'system' or turn['content'] %}<|{{ turn['role'] }}|>
{{ turn['content'] }}<|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}"""

PHI4 = """{% for turn in messages %}
    {% set tail = '<|tool|>' + turn.tools + '<|/tool|>' if turn.tools is defined and turn.tools is not none else '' %}
{{ '<|' + turn.role + '|>' + turn.content + tail + '<|end|>' }}
{% endfor %}
{{ '<|assistant|>' if add_generation_prompt else eos_token }}"""

SMOLLM2 = """{% for turn in messages %}{% if loop.first and turn.role != 'system' %}<|im_start|>system
I am small<|im_end|>
{% endif %}{{ '<|im_start|>' + turn['role'] + '
' + turn['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

DEEPSEEK = """
{%- set state = namespace(rules=[], outputs=false) -%}
{%- for turn in messages if turn.role == 'system' -%}
    {%- set state.rules = state.rules + [turn.content] -%}
{%- endfor -%}
{{- bos_token ~ state.rules | join('\\n\\n') -}}
{%- for turn in messages -%}
    {%- if turn.role == 'tool' -%}
        {{- '<|tool_outputs_begin|>' if not state.outputs -}}
        {%- set state.outputs = true -%}
        {{- '<|tool_output_begin|>' ~ turn.content ~ '<|tool_output_end|>' -}}
        {%- continue -%}
    {%- endif -%}
    {%- if state.outputs -%}{{- '<|tool_outputs_end|>' -}}{%- endif -%}
    {%- set state.outputs = false -%}
    {%- if turn.role == 'user' -%}
        {{- '<|User|>' ~ turn.content -}}
    {%- elif turn.role == 'assistant' -%}
        {%- set words = turn.content or '' -%}
        {{- '<|Assistant|>' ~ (words.split('</think>') | last if '</think>' in words else words) -}}
        {%- for asked in turn.tool_calls | default([], true) -%}
            {{- '<|tool_calls_begin|>' if loop.first -}}
            {{- '<|tool_call_begin|>' + asked.type + '<|tool_sep|>' + asked['function']['name'] -}}
            {{- '\\n```json\\n' + asked['function']['arguments'] | tojson + '\\n```<|tool_call_end|>' -}}
            {{- '<|tool_calls_end|>' if loop.last -}}
        {%- endfor -%}
        {{- '<|end_of_sentence|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if state.outputs -%}{{- '<|tool_outputs_end|>' -}}{%- endif -%}
{%- if add_generation_prompt and not state.outputs -%}{{- '<|Assistant|><think>\\n' -}}{%- endif -%}
""".replace("<|", "<\uff5c").replace("|>", "\uff5c>")

HERMES3 = """
{%- macro kind(schema) %}
{%- set names = {'string': 'str', 'number': 'float', 'integer': 'int', 'boolean': 'bool', 'null': 'None'} %}
{%- if schema.type is string and schema.type in names %}
{{- names[schema.type] }}
{%- elif schema.type == 'object' %}
{{- 'dict[str, ' ~ kind(schema.additionalProperties) ~ ']' if schema.additionalProperties is mapping else 'dict' }}
{%- elif schema.type is iterable and schema.type is not string %}
{%- for one in schema.type %}{{- kind({'type': one}) }}{{ ' or ' if not loop.last }}{% endfor %}
{%- else %}
{{- 'Any' }}
{%- endif %}
{%- endmacro %}
{{- bos_token ~ '<|im_start|>system\\n<tools>' }}
{%- for entry in tools or [] %}
{%- set entry = entry.function or entry %}
{{- '{"name": "' ~ entry.name ~ '", "signature": "' ~ entry.name ~ '(' }}
{%- for name, schema in entry.parameters.properties | items %}
{{- name ~ ': ' ~ kind(schema) }}{{ ', ' if not loop.last }}
{%- endfor %}
{{- ')' }}{{ ' -> ' ~ kind(entry.return) if entry.return is defined }}
{{- ' - ' ~ entry.description | replace('"', "'") }}
{%- for name, schema in entry.parameters.properties | dictsort %}
{{- '\\n' if loop.first }}{{ name | upper }}: {{ schema.description | default('no words') | trim | title }};
{%- endfor %}
{{- '", "parameters": ' ~ ('{}' if entry.parameters.properties | length == 0 else entry.parameters | tojson) ~ '}' }}
{{- '\\n' if not loop.last }}
{%- endfor %}
{{- '</tools> answer in <tool_call><|im_end|>\\n' }}
{%- for turn in messages %}
{%- if turn.role == 'tool' %}
{{- '<|im_start|>tool\\n' if not loop.previtem or loop.previtem.role != 'tool' }}
{{- '<tool_response>\\n' + turn.content + '\\n</tool_response>' + ('' if loop.last else '\\n') }}
{{- '<|im_end|>' if loop.last or loop.nextitem.role != 'tool' }}
{%- elif turn.tool_calls is defined %}
{{- '<|im_start|>' + turn.role }}
{%- for asked in turn.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + asked.function.name + '", "arguments": ' + asked.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + turn.role + '\\n' + turn.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""

FAMILIES = {
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "llama3.1": LLAMA31,
    "mistral v1": MISTRAL_V1,
    "mistral v3": MISTRAL_V3,
    "mistral tekken": MISTRAL_TEKKEN,
    "gemma3": GEMMA3,
    "phi3.5": PHI35,
    "phi4": PHI4,
    "smollm2": SMOLLM2,
    "deepseek": DEEPSEEK,
    "hermes3": HERMES3,
}
# Those that read lists of parts themselves.
READ_PARTS = ("mistral tekken", "gemma3")
# Those with a place for calls and their results, and of these those in whose layouts calls are understood.
KNOW_TOOLS = ("qwen2.5", "qwen3", "llama3.1", "mistral v3", "deepseek", "hermes3")
UNDERSTOOD = ("qwen2.5", "qwen3", "llama3.1", "mistral v3", "hermes3")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather in a <city> & 'more': naïve ✓",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": " é "},
                    "days": {"type": ["integer", "null"]},
                    "exact": {"type": "boolean"},
                    "where": {"type": "object", "additionalProperties": {"type": "number"}},
                    "else": {"enum": [1]},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"properties": {}}}},
]


def call(identity, name, **arguments):
    """A call in an assistant's message."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


ASKED = [{"role": "system", "content": " Be brief. \n"}, {"role": "user", "content": " Weather in <Zürich>? "}]
CALLED = {"role": "assistant", "content": None, "tool_calls": [call("abcdefgh1", "weather", city="Zürich", days=None)]}
TOLD = {"role": "tool", "tool_call_id": "abcdefgh1", "content": '{"sky": "blue & clear"}'}
ANSWERED = {"role": "assistant", "content": "<think>\nWell.\n</think>\n\nBlue.\n"}
THANKED = {"role": "user", "content": "Thanks\n\n  'you'"}
TWICE = {**CALLED, "tool_calls": [*CALLED["tool_calls"], call("abcdefgh2", "now")]}
CONVERSATIONS = {
    "user": ASKED[1:],
    "system": ASKED,
    "answered": [*ASKED, ANSWERED, THANKED],
    "ends with an answer": [*ASKED, ANSWERED],
    "two users": [*ASKED, THANKED],
    "call": [*ASKED, CALLED],
    "call with words": [*ASKED, {**CALLED, "content": "Let me see."}],
    "call with a long id": [*ASKED, {**CALLED, "tool_calls": [call("call_123456789", "now")]}],
    "result": [*ASKED, CALLED, TOLD],
    "result and answer": [*ASKED, CALLED, TOLD, ANSWERED, THANKED],
    "two calls": [*ASKED, TWICE, TOLD, {**TOLD, "tool_call_id": "abcdefgh2"}, ANSWERED, THANKED],
    "thoughts apart": [*ASKED, {**ANSWERED, "content": "Blue.", "reasoning_content": "\nWell.\n"}],
    "unknown role": [*ASKED, {"role": "narrator", "content": "Later"}],
}
