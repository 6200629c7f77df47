"""The template for a model file that brings none."""

from __future__ import annotations

#: ChatML: a header line with the role, the content, an end marker; the layout most instruction-tuned models know.
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' ~ message['role'] ~ '\n' ~ (message['content'] or '') ~ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def default_template(source: str | None) -> str:
    """The model's own template, or ChatML where the file has none or a blank one.

    Arguments:
        source: text of the GGUF key ``tokenizer.chat_template``, or None where the key is missing.
    """
    return source if source is not None and source.strip() else CHATML_TEMPLATE
