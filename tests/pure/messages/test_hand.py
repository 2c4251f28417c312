"""Texts that models really write, with what they mean; what is no call stays content; hostile text is read linearly."""

from __future__ import annotations

import json

import pytest

from tests.pure.messages.writing import TOOLS, write
from tokenmill.core.errors import ParameterError
from tokenmill.testing.fake_generator import byte_tokenizer
from tokenmill.text.messages.describe import MessageFormat
from tokenmill.text.messages.detect import find_format, opens_thinking, thinks_by_itself
from tokenmill.text.messages.families import CALL_FORMATS, THINKING
from tokenmill.text.messages.message import Call, Message
from tokenmill.text.messages.parser import MessageParser, parse_message
from tokenmill.text.messages.span import span_after, text_of

PARIS = ("get_weather", {"city": "Paris", "days": 2})
GOOD = [
    (
        "hermes",
        '<tool_call>{"arguments": {"city": "Paris", "days": 2}, "name": "get_weather"}</tool_call>',
        "",
        [PARIS],
    ),
    (
        "hermes",
        'A\n<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 2}"}',
        "A",
        [PARIS],
    ),
    ("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>\nDone', "Done", [("now", {})]),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": null}\n</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}</tool_call> b', "b", [("now", {})]),
    ("hermes", "<tool_call>\nnothing\n</tool_call>", "<tool_call>\nnothing\n</tool_call>", []),
    ("hermes", '<tool_call>{"no": "name"}</tool_call>x', '<tool_call>{"no": "name"}</tool_call>x', []),
    ("hermes", 'Use <tool_call> tags: {"a": 1}', 'Use <tool_call> tags: {"a": 1}', []),
    (
        "step3",
        '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">\n'
        '<steptml:parameter name="city">Paris</steptml:parameter>\n<steptml:parameter name="days">2</steptml:parameter>'
        "\n</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
        "",
        [PARIS],
    ),
    ("xlam", '[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]', "", [PARIS]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [PARIS],
    ),
    ("qwen3_coder", "<function=now>\n</function>", "", [("now", {})]),
    (
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\n\nif a < b:\n    <p>\n\n</parameter>\n</function>",
        "",
        [("get_weather", {"city": "\nif a < b:\n    <p>\n"})],
    ),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}', "", [PARIS]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
        "",
        [("now", {})] * 2,
    ),
    ("llama3_json", '{"name": "Bob", "parameters": {"age": 3}}', '{"name": "Bob", "parameters": {"age": 3}}', []),
    (
        "llama3_json",
        'Let me see.\n{"name": "now", "parameters": {}}; {"type": "function", "name": "now", "parameters": {}}\nDone.',
        "Let me see.\nDone.",
        [("now", {})] * 2,
    ),
    ("llama3_json", "Use `f(x) { return {}; }`; {now}", "Use `f(x) { return {}; }`; {now}", []),
    ("llama3_json", 'It is {"name": "now"}.', 'It is {"name": "now"}.', []),
    ("llama3_json", 'So: {"name": "Bob", "age": 3} {', 'So: {"name": "Bob", "age": 3} {', []),
    (
        "llama3_json",  # a function's description
        'It is {"name": "now", "description": "", "parameters": {}}.',
        'It is {"name": "now", "description": "", "parameters": {}}.',
        [],
    ),
    ("llama3_json", '{"a": [1, {"name": "now"}]} is JSON', '{"a": [1, {"name": "now"}]} is JSON', []),
    ("pythonic", "[get_weather(city='Paris', days=2), now()]", "", [PARIS, ("now", {})]),
    ("pythonic", '[get_weather("Paris", 2)]', "", [PARIS]),
    ("pythonic", "[1, 2, 3] are numbers", "[1, 2, 3] are numbers", []),
    ("pythonic", "[other(a=1)]", "[other(a=1)]", []),
    (
        "pythonic",
        "[get_weather(city='it\\'s \\x41\\n' \"b\", extra={'k': (1, None, [True])})]",
        "",
        [("get_weather", {"city": "it's A\nb", "extra": {"k": [1, None, [True]]}})],
    ),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]now{}', "", [PARIS, ("now", {})]),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abc123DEF"}]', "", [("now", {})]),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        [PARIS],
    ),
    (
        "deepseek_v32",
        'Let me look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "Let me look.",
        [PARIS, ("now", {})],
    ),
    (
        "deepseek_v32",  # the model says what is text, whatever the schema says
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="false">["Paris", "Rome"]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="true">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "",
        [("get_weather", {"city": ["Paris", "Rome"], "days": "2"})],
    ),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">a < b\n"c"</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>",
        "",
        [("get_weather", {"city": 'a < b\n"c"'})],
    ),
    (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        "",
        [PARIS],
    ),
    ("glm45", "<tool_call>now</tool_call>", "", [("now", {})]),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Paris", "days": 2}<|call|>',
        "",
        [PARIS],
    ),
    (
        "harmony",
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        "",
        [("now", {})],
    ),
    ("harmony", ' to=files.list<|channel|>commentary json<|message|>{"a": 1}<|call|>', "", [("files.list", {"a": 1})]),
    ("harmony", "<|channel|>final<|message|>Yes.", "Yes.", []),
    (
        "cohere",
        '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        "",
        [("now", {})],
    ),
    ("cohere", "<|START_RESPONSE|>Hi.<|END_RESPONSE|>", "Hi.", []),
    (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}<end_function_call>",
        "",
        [PARIS],
    ),
    ("gemma", 'Sure.\n```tool_code\nget_weather(city="Paris", days=2)\n```', "Sure.", [PARIS]),
    ("phi4_mini", 'functools[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]', "", [PARIS]),
    ("phi4_mini", "functools[0] is wrong", "functools[0] is wrong", []),
    ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]', "", [("now", {})]),
    ("functionary_v32", 'all\nOne moment.>>>get_weather\n{"city": "Paris", "days": 2}', "One moment.", [PARIS]),
    ("functionary_v32", "Type\n>>> print(1)\n1", "Type\n>>> print(1)\n1", []),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>2</parameter>\n"
        "</function>\n</seed:tool_call>",
        "",
        [PARIS],
    ),
    (
        "lfm2",
        '<|tool_call_start|>[get_weather(city="Paris", days=2)]<|tool_call_end|>Checking the weather.',
        "Checking the weather.",
        [PARIS],
    ),
    (
        "olmo3",
        '<function_calls>\nget_weather(city="Paris", days=2)\nnow()\n</function_calls>',
        "",
        [PARIS, ("now", {})],
    ),
    (
        "apertus",
        '<|tools_prefix|>[{"get_weather": {"city": "Paris", "days": 2}}, {"now": {}}]<|tools_suffix|>',
        "",
        [PARIS, ("now", {})],
    ),
    (
        "nemotron",
        'Let me see.\n<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]</TOOLCALL>',
        "Let me see.",
        [PARIS],
    ),
    (
        "tool_calls",
        '<tool_calls>[\n    {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n]</tool_calls>',
        "",
        [PARIS],
    ),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}}\n</tool_call>\nb', "b", [("now", {})]),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n}] b', "}] b", [("now", {})]),
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a\n\tb",\n "days": 2}}\n</tool_call>',
        "",
        [("get_weather", {"city": "a\n\tb", "days": 2})],
    ),
    (
        "qwen3_coder",
        "<function=search.web-2>\n<parameter=filters>\n{'a': None, 'b': (1, True)}\n</parameter>\n<parameter=tags>\n"
        "['x']\n</parameter>\n<parameter=query>\n['x']\n</parameter>\n</function>",
        "",
        [("search.web-2", {"filters": {"a": None, "b": [1, True]}, "tags": ["x"], "query": "['x']"})],
    ),
    ("xlam", '<tool_call>[{"name": "now", "arguments": {}}]</tool_call>', "", [("now", {})]),
    ("xlam", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', "", [("now", {})]),
    ("harmony", '<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>', '{"a": 1}', []),
    (
        "harmony",
        "<|channel|>commentary json<|message|>A.<|end|><|start|>assistant<|channel|>final<|message|>B",
        "A.B",
        [],
    ),
    ("harmony", "<|channel|>commentary to=functions.now <|constrain|>json<|message|><|call|>", "", [("now", {})]),
    (
        "gigachat3",
        'A<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "now", "arguments": {}}<|message_sep|>\n\n',
        "A",
        [("now", {})],
    ),
    ("gigachat3", 'A function call<|function_call|>{"name": "now"}', "A function call", [("now", {})]),
    (
        "pythonic",
        "[ get_weather(city='a', days=2, extra=[(1,), {'k': [.5, -.5, 5.,],}], dots='.')]",
        "",
        [("get_weather", {"city": "a", "days": 2, "extra": [[1], {"k": [0.5, -0.5, 5.0]}], "dots": "."})],
    ),
    (
        "lfm2",
        '<|tool_call_start|>[{"name": "now", "arguments": {}}, {"name": "now"}]<|tool_call_end|>',
        "",
        [("now", {})] * 2,
    ),
    ("lfm2", '<|tool_call_start|>{"name": "now", "arguments": {}}<|tool_call_end|>', "", [("now", {})]),
    ("lfm2", "<|tool_call_start|>now()<|tool_call_end|>", "", [("now", {})]),
    ("cohere", "<|START_ACTION|>[]<|END_ACTION|>a", "a", []),
    ("granite", "a<|tool_call|>[ ]", "a", []),
    ("pythonic", "[] is a list", "[] is a list", []),
    ("minimax", '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>', "", [("now", {})]),
    ("minimax", '<tool_calls>\n{"name": "now", "arguments": {}}\n</tool_calls>', "", [("now", {})]),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), GOOD)
def test_real_texts(name, text, content, calls):
    thinking = THINKING["harmony"] if name == "harmony" else None
    found = parse_message(MessageFormat(thinking, CALL_FORMATS[name]), text, tools=TOOLS)
    assert (found.content, [(c.name, json.loads(c.arguments)) for c in found.calls]) == (content, calls)


def test_reasoning():
    form = MessageFormat(THINKING["think"], CALL_FORMATS["hermes"])
    for text, thinking in (
        ("<think>\nA <b>\n</think>\n\nB", False),
        ("A <b></think>B", True),
        ("<think>A <b></think>B", True),
    ):
        found = parse_message(form, text, thinking=thinking)
        assert (found.reasoning, found.content) == ("A <b>", "B")
    assert parse_message(form, "The <think> tag").content == "The <think> tag"
    assert parse_message(form, "  no thought\n").content == "  no thought\n"
    assert parse_message(form, "cut", thinking=True) == Message("", "cut")


def test_a_closing_mark_may_come_once_more():
    """The prompt has switched reasoning off, and the model closes it all the same."""
    form = MessageFormat(THINKING["think"], CALL_FORMATS["hermes"])
    assert parse_message(form, "\n\n</think>\n\nB") == Message("B")
    assert parse_message(form, "</thing> B").content == "</thing> B"


@pytest.mark.parametrize("name", ["qwen3_coder", "kimi_k2"])
def test_a_call_of_a_known_function_ends_reasoning(name):
    form = MessageFormat(THINKING["think"], CALL_FORMATS[name])
    calls = MessageFormat(None, CALL_FORMATS[name])
    known, other = (write(calls, Message(calls=[Call(n, "{}")])) for n in ("now", "other"))
    found = parse_message(form, f"A {other} B\n{known}\n</think>\n\nC", tools=TOOLS, thinking=True)
    assert (found.reasoning, found.content, [c.name for c in found.calls]) == (f"A {other} B", "C", ["now"])
    text = f"A {form.calls.blocks[0].open.strip()} is a mark"
    assert parse_message(form, text + "</think>B", tools=TOOLS, thinking=True) == Message("B", text)


def test_a_text_that_is_cut_within_a_mark():
    """Nothing of it is left, nor of marks of no meaning, where control tokens tell."""
    form = MessageFormat(THINKING["harmony"], CALL_FORMATS["harmony"])
    tokens = ("<|channel|>", "<|start|>", "<|message|>")
    for text in ("<|channel|>comm", "<|message|>", "<|channel|>analysis<|message|>A<|end|><|start|>assis"):
        assert parse_message(form, text, tools=TOOLS, drop=tokens).content == ""
    assert parse_message(form, "a <|cha", tools=TOOLS, drop=tokens).content == "a <|cha"


def test_arguments_that_are_no_object():
    """A known function gets them as they stand."""
    form = MessageFormat(THINKING["harmony"], CALL_FORMATS["harmony"])
    text = "<|channel|>commentary to={} code<|message|>print(1)<|call|>"
    found = parse_message(form, text.format("now"), tools=TOOLS)
    assert (found.content, found.calls) == ("", [Call("now", "print(1)")])
    assert not parse_message(form, text.format("python"), tools=TOOLS).calls


@pytest.mark.parametrize("name", ["pythonic", "gemma", "qwen3_coder", "glm45", "gemma4"])
def test_brackets_in_texts_nest_nothing(name):
    """Code is an argument, too, and part of it may open more than it closes."""
    said = {"query": "{[(" * 200, "filters": {"a": ["{" * 200, '"[' * 200]}}
    meant = Message(
        calls=[Call(name="now" if name in ("pythonic", "gemma") else "search.web-2", arguments=json.dumps(said))]
    )
    form = MessageFormat(None, CALL_FORMATS[name])
    (call,) = parse_message(form, write(form, meant), tools=TOOLS).calls
    assert json.loads(call.arguments) == said


def test_calls_are_read_only_where_tools_are_given():
    form = MessageFormat(None, CALL_FORMATS["hermes"])
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert parse_message(form, text).content == text
    twice = parse_message(form, text + "\n" + text, tools=TOOLS, most=1)
    assert [c.name for c in twice.calls] == ["now"] and twice.content == ""


def test_cut_calls_keep_what_was_said():
    form = MessageFormat(None, CALL_FORMATS["hermes"])
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Par'
    found = parse_message(form, text, tools=TOOLS)
    assert (found.calls[0].name, found.calls[0].arguments) == ("get_weather", '{"city": "Par')


def test_arguments_stream_as_they_come():
    form = MessageFormat(None, CALL_FORMATS["qwen3_coder"])
    parser = MessageParser(form, tools=TOOLS)
    parser.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\nPar")
    assert [e.text for e in parser.feed("is by")] == ["is by"]


TEMPLATES = {
    "hermes": '{{ \'<tool_call>\\n{"name": "\' }} <think>',
    "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=a>",
    "deepseek_v31": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'}}",
    "deepseek_v3": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + '```json'}}",
    "deepseek_v32": "{% set dsml_token = '｜DSML｜' %}{{ '<' + dsml_token + 'function_calls>' }} tool_calls",
    "deepseek_v4": "{% set dsml_token = '｜DSML｜' %}{{ '<' + dsml_token + 'tool_calls>' }}",
    "longcat": "{{ '<longcat_tool_call>\\n' }}",
    "glm45": "<tool_call>{function-name}\n<arg_key>",
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.",
    "mistral": "[TOOL_CALLS]' + name + '[ARGS]",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "cohere": "<|START_ACTION|>",
    "step3": '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
    "seed_oss": "<seed:tool_call>\n<function=example_function>\n<parameter=example_parameter_1>value_1</parameter>",
    "lfm2": "{{- '<|tool_call_start|>[' }}",
    "olmo3": "within <function_calls></function_calls> XML tags",
    "apertus": "{{ assistant_token + '<|tools_prefix|>[' }}<|inner_prefix|>",
    "nemotron": "{{- '<TOOLCALL>[' -}}",
    "tool_calls": "{{- '<tool_calls>[\\n' }}",
    "gigachat3": 'role_sep="<|role_sep|>\\n", message_sep="<|message_sep|>\\n\\n"',
    "minimax": "{{- '<tool_calls>\\n' }}",
    "llama3_json": 'respond {"name": function name, "parameters": dictionary of argument name and its value}',
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_tells_the_format(name):
    found = find_format(TEMPLATES[name])
    assert found.calls is CALL_FORMATS[name]
    assert find_format(TEMPLATES[name], calls="none").calls is None
    assert find_format(TEMPLATES[name], calls="qwen25").calls is CALL_FORMATS["hermes"]


def test_answers_in_marks():
    """ERNIE writes its answer between marks, which mean nothing."""
    form = find_format("<think>\n</think>\n\n<response>\n</response>\n<tool_call>")
    assert form == MessageFormat(THINKING["ernie45"], CALL_FORMATS["hermes"])
    found = parse_message(form, "<think>\nA\n</think>\n\n<response>\nB\n</response>")
    assert (found.reasoning, found.content) == ("A", "B")
    assert find_format("a <response> alone").thinking is None
    form = find_format("<|extra_0|><think>\n\n</think>\n<answer>")
    found = parse_message(form, "<think>\nA\n</think>\n<answer>\nB\n</answer>")
    assert (found.reasoning, found.content) == ("A", "B")
    found = parse_message(MessageFormat(THINKING["apertus"]), "<|inner_prefix|>A<|inner_suffix|>B")
    assert (found.reasoning, found.content) == ("A", "B")


def test_the_span_of_a_continued_answer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "<think>"
    for begun, opened in (("<think>a", ""), ("a", "<think>"), ("<think>a</think>b", "<think>")):
        span = span_after("prompt", tokenizer, text_of({"content": [{"type": "text", "text": begun}]}))
        assert span is not None and span.open == opened


def test_published_templates_that_show_tools_alone():
    """LFM2's leave the text of calls to the client."""
    for template in ("List of tools: <|tool_list_start|>[", '"List of tools: [" keep_past_thinking'):
        assert find_format(template).calls is CALL_FORMATS["lfm2"]
    assert find_format("List of tools: [").calls is None
    form = find_format("[BEGIN FINAL RESPONSE]<tool_calls>[")
    assert form == MessageFormat(THINKING["apriel"], CALL_FORMATS["tool_calls"])
    said = "Hm.\n[BEGIN FINAL RESPONSE]\nYes.\n[END FINAL RESPONSE]"
    assert opens_thinking("<|assistant|>\nHere are my reasoning steps:\n", form.thinking)
    assert parse_message(form, said, thinking=True) == Message("Yes.", "Hm.")


def test_names_and_prompts():
    with pytest.raises(ParameterError, match="tool-call parser"):
        find_format("", calls="other")
    found = find_format("", calls="step3p5", thinking="step3p5")
    assert (found.calls, found.thinking) == (CALL_FORMATS["qwen3_coder"], THINKING["think"])
    with pytest.raises(ParameterError, match="reasoning parser"):
        find_format("", thinking="other")
    assert find_format("plain") == MessageFormat()
    think = THINKING["think"]
    assert opens_thinking("<|im_start|>assistant\n<think>\n", think) and not opens_thinking("a <think> b", think)
    assert thinks_by_itself("{% if add_generation_prompt %}assistant\n<think>\n\n</think>{% endif %}", think)
    assert not thinks_by_itself("<think></think>{% if add_generation_prompt %}assistant\n<think>\n{% endif %}", think)


@pytest.mark.parametrize("name", [*CALL_FORMATS, "think"])
@pytest.mark.parametrize(
    "piece",
    [
        "[",
        "{",
        '{"a":',
        "<tool_call>",
        '"',
        "\\",
        "<",
        "[TOOL_CALLS]",
        "f(",
        "'",
        " ",
        "<think>",
        '{"name":"now","arguments":',
    ],
)
def test_hostile_text_is_read_in_linear_time(name, piece):
    """Counted, not timed: what is left to look at again stays as small as the longest marker."""
    form = MessageFormat(THINKING["think"], CALL_FORMATS.get(name))
    opens = {b.open for b in form.calls.blocks} if form.calls is not None else {"<think>"}
    for opened in opens:
        parser = MessageParser(form, tools=TOOLS)
        text = opened + piece * (4000 // len(piece))
        said = 0
        for i in range(0, len(text), 5):
            said += sum(len(e.text) for e in parser.feed(text[i : i + 5]))
            assert len(parser.source.text) - parser.source.at <= 64
        said += sum(len(e.text) for e in parser.finish())
        assert said <= 4 * len(text)
