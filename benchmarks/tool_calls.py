"""Tokenizers whose chat template has tools and images, with one token per tool call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from benchmarks.models import make_tokenizer


FIRST_WORD_ID = 99  # the first token that is not a character
CALL_OPEN, CALL_CLOSE = "<call>", "</call>"

# `IMAGE` represents the image token. `greeting` is for tests of `chat_template_kwargs`.
CHAT_TEMPLATE = """
{%- if greeting %}{{ greeting }}{% endif %}
{%- for tool in tools or [] %}{{ 'tool ' + tool['function']['name'] + '\n' }}{% endfor %}
{%- for message in messages %}
    {{- message['role'] + ': ' }}
    {%- if message['content'] is string %}{{ message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'image' %}{{ 'IMAGE' }}{% else %}{{ part['text'] }}{% endif %}
        {%- endfor %}
    {%- endif %}
    {%- for call in message['tool_calls'] or [] %}
        {{- '<call>{"name": "' + call['function']['name'] + '", "arguments": ' }}
        {{- call['function']['arguments'] | tojson }}
        {{- '}</call>' }}
    {%- endfor %}
    {{- '<eos>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""

# Schema with which transformers parses tool calls.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant: ",
    "fields": {
        "tool_calls": {
            "open": CALL_OPEN,
            "close_pattern": CALL_CLOSE,
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": "<eos>", "content": "text"},
    },
}


def make_chat_tokenizer(words: Sequence[str] = (), image: str = "", tools: bool = False) -> PreTrainedTokenizerBase:
    """
    Builds a tokenizer with one token per character, then one per word, such as a [`tool_call`]. The chat template
    inserts `image` for an image. With `tools`, tool calls in answers are parsed.
    """
    tokenizer = make_tokenizer(FIRST_WORD_ID)
    tokenizer.add_tokens(list(words))
    tokenizer.chat_template = CHAT_TEMPLATE.replace("IMAGE", image)
    if tools:
        tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def tool_call(name: str, **arguments: Any) -> str:
    """Returns the text of a tool call."""
    return f"{CALL_OPEN}{json.dumps({'name': name, 'arguments': arguments})}{CALL_CLOSE}"
