"""Chat templates in the manner of well-known model families, for the tests that render them."""

from __future__ import annotations

CHATML = """\
{%- if tools %}
<|im_start|>system
{%- if messages[0].role == 'system' %}{{- '\\n' + messages[0].content }}{%- endif %}
{{- '\\nCall any of these functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and tools and loop.first %}{%- continue %}{%- endif %}
    {%- if message.role == 'assistant' %}
        {%- set text = message.content or '' %}
        {%- if '</think>' in text %}{%- set text = text.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {%- if message.reasoning_content and loop.index0 > ns.last %}
            {%- set text = '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + text %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}{{- text }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}{% endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

HEADERS = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set opening = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set opening = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{- 'Functions: ' }}{{ tools | tojson(indent=4) }}{{- '\\n' }}{%- endif %}
{{- opening }}{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role in ['tool', 'ipython'] %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

INST = """\
{%- if messages[0]['role'] == 'system' %}{%- set first = messages[0]['content'] %}{%- set rest = messages[1:] %}
{%- else %}{%- set first = '' %}{%- set rest = messages %}{%- endif %}
{{- bos_token }}
{%- set turn = namespace(n=0) %}
{%- for message in rest if message.role in ('user', 'assistant') and not message.tool_calls %}
    {%- if (message['role'] == 'user') != (turn.n % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- set turn.n = turn.n + 1 %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' }}{%- if loop.last and first %}{{- first + '\\n\\n' }}{%- endif %}
        {{- message['content'] + '[/INST]' }}
    {%- else %}{{- ' ' + message['content'] | trim + eos_token }}{%- endif %}
{%- endfor %}
"""

TURNS = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}
{% for message in messages %}
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' }}
{%- if message['content'] is string -%}
    {{ message['content'] | trim }}
{%- else -%}
    {%- for part in message['content'] -%}
        {%- if part['type'] == 'image' -%}{{ '<start_of_image>' }}
        {%- elif part['type'] == 'text' -%}{{ part['text'] | trim }}{%- endif -%}
    {%- endfor -%}
{%- endif -%}
{{ '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

BARS = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(system='', after_tool=false) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system = message['content'] %}{%- endif %}
{%- endfor %}{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.after_tool = false -%}{{ '<｜User｜>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{%- if ns.after_tool %}{{ '<｜tool▁outputs▁end｜>' }}{%- set ns.after_tool = false %}
{%- else %}{{ '<｜Assistant｜>' }}{%- endif %}{{ message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- if message['role'] == 'tool' %}{%- set ns.after_tool = true -%}{{ '<｜tool▁output▁begin｜>' + message['content'] }}
{%- endif %}
{%- endfor -%}
{% if add_generation_prompt and not ns.after_tool %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}
"""

FAMILIES = {"chatml": CHATML, "headers": HEADERS, "inst": INST, "turns": TURNS, "bars": BARS}
STRINGS = {"bos_token": "<s>", "eos_token": "</s>"}

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "é": ["<b>", "'"]}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Köln", "days": [1, 2]}}}
CHATS = {
    "one turn": [{"role": "user", "content": "How does a mill work? \n"}],
    "system": [
        {"role": "system", "content": "You are a miller."},
        {"role": "user", "content": "Hi 風車 😀"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nGood day."},
        {"role": "user", "content": "And <b>now</b>?"},
    ],
    "call": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"rain": true}'},
    ],
    "no turns": [{"role": "assistant", "content": "I begin"}, {"role": "assistant", "content": "and go on "}],
    "reasoning": [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2", "reasoning": "easy"},
    ],
}
