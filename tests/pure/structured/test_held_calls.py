"""Tools that must be called, in every format: what the grammar says is read back as calls that fit their schemas."""

from __future__ import annotations

import json
import random

import pytest
from jsonschema import Draft202012Validator
from tests.pure.messages.writing import write_answer
from tests.pure.structured.bytewise import COMPILER, says, speak
from tests.thinned import WHOLE

from tokenmill.core.errors import ParameterError
from tokenmill.core.request import SamplingParams
from tokenmill.server.assistant_turn import ToolWish, plan_turn
from tokenmill.text.messages.describe import MessageFormat
from tokenmill.text.messages.families import CALL_FORMATS, THINKING
from tokenmill.text.messages.message import Call, Message
from tokenmill.text.messages.parser import parse_message
from tokenmill.text.messages.structural_tags import held_calls, literals, triggered_calls

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"days": {"type": "integer", "maximum": 9}, "units": {"type": "string", "enum": ["C", "F"]}},
        "required": ["days"],
        "additionalProperties": False,
    },
    "now": None,
}
FREE = {"say": {"type": "object", "properties": {"text": {"type": "string", "maxLength": 9}}, "required": ["text"]}}
OPEN = {
    "say": {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
        "additionalProperties": False,
    }
}


def compiled(tree):
    return COMPILER.constraint({"structural_tag": {"type": "structural_tag", "format": tree}})


@pytest.mark.parametrize("name", CALL_FORMATS)
@pytest.mark.parametrize("most", [None, 1])
def test_what_is_said_is_read(name, most):
    rng = random.Random(name)
    tree, form = held_calls(CALL_FORMATS[name], TOOLS, most=most)
    constraint = compiled(tree)
    seen = set()
    for turn in range(40):
        if turn >= 15 and seen == set(TOOLS) and not WHOLE:
            break
        text = speak(constraint, rng)
        if text is None:
            continue
        found = parse_message(MessageFormat(None, form), text, tools=TOOLS)
        assert found.content == "" and found.calls and (most is None or len(found.calls) == 1), text
        for call in found.calls:
            schema = TOOLS[call.name] or {"type": "object", "maxProperties": 0}
            assert Draft202012Validator(schema).is_valid(json.loads(call.arguments)), text
        seen |= {call.name for call in found.calls}
    assert seen == set(TOOLS)


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_what_is_written_is_allowed(name):
    tree, form = held_calls(CALL_FORMATS[name], TOOLS, most=None)
    constraint = compiled(tree)
    one = Message(calls=[Call("get_weather", '{"days": 3, "units": "C"}')])
    several = Message(calls=[Call("now", "{}"), Call("get_weather", '{"days": 3}')])
    for message in (one, several):
        text = write_answer(form, message)
        if form.blocks[0].ends:
            text = text.removesuffix(form.blocks[0].close)
            if len(message.calls) > 1:
                continue
        assert says(constraint, text), text


def test_plain_text_parameters_and_others():
    coder, form = held_calls(CALL_FORMATS["qwen3_coder"], OPEN, most=1)
    assert form is CALL_FORMATS["qwen3_coder"]
    body = '<tool_call>\n<function=say>\n<parameter=text>\na <b> "c"\n</parameter>\n</function>\n</tool_call>'
    assert says(compiled(coder), body)
    assert held_calls(CALL_FORMATS["qwen3_coder"], FREE, most=1)[1].name == "plain", "maxLength is not plain text"
    assert held_calls(CALL_FORMATS["pythonic"], OPEN, most=1)[1].name == "plain"


ODD = [
    "a b",
    " a",
    "a ",
    "a\nb",
    "a>b",
    "a<b",
    "a(b",
    "a{b",
    "a[b",
    'a"b',
    "a:b",
    "a=b",
    "a,b",
    "a\\b",
    "\u00e9",
    "0",
    "-",
]
ODD += ["a.b", "functions.f", "a:0", "</function>", "</arg_value>", "<|end|>", "a\u2028b", "[ARGS]", "a" * 256]


def written(tree):
    """The first text of a tree."""
    match tree["type"]:
        case "const_string":
            return tree["value"]
        case "sequence":
            return "".join(map(written, tree["elements"]))
        case "or":
            return written(tree["elements"][0])
        case "tag":
            return tree["begin"] + written(tree["content"]) + tree["end"]
        case "tags_with_separator":
            return written(tree["tags"][0])
        case "star":
            return ""
        case "regex":
            return "0"
        case "any_text":
            return "x"
        case "json_schema":
            return json.dumps({"a": 1} if tree["json_schema"].get("type") == "object" else 1)
    raise AssertionError(tree["type"])


@pytest.mark.parametrize("family", CALL_FORMATS)
def test_odd_names_are_read_back(family):
    """Where a family writes names bare, some of them ended early, and the call was of another function or none."""
    for name in ODD:
        tree, form = held_calls(CALL_FORMATS[family], {name: {"type": "object"}}, most=1)
        found = parse_message(MessageFormat(None, form), written(tree), tools={name: {"type": "object"}})
        assert [call.name for call in found.calls] == [name] and not found.content, written(tree)


@pytest.mark.parametrize("family", CALL_FORMATS)
def test_odd_parameters_are_read_back(family):
    for name in ODD:
        for value in ({"type": "string"}, {"enum": [name, "b"]}, {"type": "integer"}):
            schema = {"type": "object", "properties": {name: value}, "required": [name], "additionalProperties": False}
            tree, form = held_calls(CALL_FORMATS[family], {"f": schema}, most=1)
            if form.name == "plain" or json.dumps({"a": 1}) in written(tree):
                continue  # JSON, whose names are the grammar's
            (call,) = parse_message(MessageFormat(None, form), written(tree), tools={"f": schema}).calls
            assert Draft202012Validator(schema).is_valid(json.loads(call.arguments)), call


def test_a_name_has_a_length():
    with pytest.raises(ParameterError, match="257 characters"):
        plan(MessageFormat(None, CALL_FORMATS["hermes"]), ToolWish({"a" * 257: None}))


def test_optional_calls_are_held_once_begun():
    constraint = compiled(triggered_calls(CALL_FORMATS["hermes"], TOOLS))
    good = 'Hm.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert says(constraint, "no call") and says(constraint, good) and not says(constraint, good.replace("now", "then"))
    assert triggered_calls(CALL_FORMATS["pythonic"], TOOLS) is None


def plan(form, wish, prompt="<|im_start|>assistant\n", **params):
    return plan_turn(form, wish, SamplingParams(**params), prompt, tokenizer=None, template="{{ x }}")


@pytest.mark.parametrize("name", ["qwen3_coder", "kimi_k2"])
@pytest.mark.parametrize(("choice", "ends"), [("auto", True), ("required", False)])
def test_a_call_that_must_come_comes_after_reasoning(name, choice, ends):
    """The grammar holds what follows the reasoning's own end; a call before it would be one that nothing holds."""
    form = MessageFormat(THINKING["think"], CALL_FORMATS[name])
    turn, _ = plan(form, ToolWish(TOOLS, choice=choice), prompt="<think>\n")
    call = write_answer(CALL_FORMATS[name], Message(calls=[Call("now", "{}")]))
    assert bool(turn.read(f"Hm. {call}").calls) == ends
    assert [c.name for c in turn.read(f"Hm.</think>{call}").calls] == ["now"]


def test_a_format_with_heads_keeps_them_around_structures():
    """Harmony: reasoning, then the head of the final channel, then JSON; or reasoning, then a call."""
    form = MessageFormat(THINKING["harmony"], CALL_FORMATS["harmony"])
    turn, params = plan(form, ToolWish(), structured_outputs={"json": {"type": "integer"}})
    constraint = COMPILER.constraint(params.structured_outputs)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert says(constraint, thought + "<|channel|>final<|message|>12") and says(
        constraint, "<|channel|>final<|message|>12"
    )
    assert not says(constraint, thought + "12") and params.reasoning is None
    assert turn.read(thought + "<|channel|>final<|message|>12").content == "12"
    turn, params = plan(form, ToolWish(TOOLS, choice="required"))
    text = thought + "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    assert says(COMPILER.constraint(params.structured_outputs), text)
    assert [c.name for c in turn.read(text).calls] == ["now"]


def test_reasoning_goes_before_what_is_held():
    form = MessageFormat(THINKING["think"], CALL_FORMATS["hermes"])
    _, params = plan(form, ToolWish(TOOLS, choice="required"), "assistant\n<think>\n")
    constraint = COMPILER.constraint(params.structured_outputs, params.reasoning)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert says(constraint, f"Hm.</think>\n\n{call}") and not says(constraint, call)
    _, params = plan(form, ToolWish(TOOLS, choice="required"), "assistant\n<think>\n\n</think>\n\n")
    assert params.reasoning is None


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (ToolWish(choice="required"), "needs tools"),
        (ToolWish(TOOLS, named="x"), "'x'"),
    ],
)
def test_wishes_that_cannot_be(wish, words):
    with pytest.raises(Exception, match=words):
        plan(MessageFormat(None, CALL_FORMATS["hermes"]), wish)
    with pytest.raises(Exception, match="no format for tool calls"):
        plan(MessageFormat(), ToolWish(TOOLS))
    with pytest.raises(Exception, match="strict"):
        plan(MessageFormat(None, CALL_FORMATS["pythonic"]), ToolWish(TOOLS, frozenset(TOOLS)))


TAGGED = {
    "type": "sequence",
    "elements": [{"type": "const_string", "value": "<go>"}, {"type": "regex", "pattern": "[0-9]"}],
}
HARMONY = MessageFormat(THINKING["harmony"], CALL_FORMATS["harmony"])


@pytest.mark.parametrize("form", [MessageFormat(None, CALL_FORMATS["hermes"]), HARMONY], ids=["hermes", "harmony"])
@pytest.mark.parametrize("wish", [ToolWish(), ToolWish(TOOLS)], ids=["alone", "beside tools"])
@pytest.mark.parametrize("written", [False, True], ids=["data", "text"])
def test_a_tag_keeps_its_tokens(form, wish, written):
    """A person's own table of tokens holds wherever the tag ends up."""
    tag = {"type": "structural_tag", "format": TAGGED, "special_tokens": {"<go>": 7}}
    _, params = plan(form, wish, structured_outputs={"structural_tag": json.dumps(tag) if written else tag})
    begun = COMPILER.constraint(params.structured_outputs, params.reasoning)
    if form is HARMONY:
        head = list(b"<|channel|>final<|message|>")
        assert begun.validate(head) == len(head)
        begun.accept(head)
    assert begun.validate([7, ord("3")]) == 2 and begun.validate(list(b"<g")) < 2


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"special_tokens": {"<tool_call>": 7}}, "'<tool_call>' a token, which is text in this model's tool calls"),
        ({"special_tokens": [1]}, "must map texts"),
        ({"begin": "x"}, "has no field 'begin'"),
    ],
)
def test_what_a_tag_says_besides_its_format_is_never_lost(more, words):
    tag = {"type": "structural_tag", "format": TAGGED, **more}
    with pytest.raises(ParameterError, match=words):
        _, params = plan(MessageFormat(None, CALL_FORMATS["hermes"]), ToolWish(TOOLS), structured_outputs={
            "structural_tag": tag})  # fmt: skip
        COMPILER.constraint(params.structured_outputs)


def test_switches_beside_a_tag_stay():
    _, params = plan(MessageFormat(), ToolWish(), structured_outputs={
        "structural_tag": {"format": {"type": "json_schema", "json_schema": {"type": "array"}}},
        "disable_any_whitespace": True})  # fmt: skip
    assert params.structured_outputs["disable_any_whitespace"] is True


def test_control_tokens_are_found_wherever_a_tree_holds_text():
    tree = {"type": "tags_with_separator", "separator": "<s>", "tags": [
        {"type": "tag", "begin": "<b>", "end": ["<e>", "<f>"], "content": {"type": "or", "elements": [
            {"type": "token", "token": "<t>"}, {"type": "token", "token": 3},
            {"type": "triggered_tags", "triggers": ["<g>"], "tags": []}]}}]}  # fmt: skip
    assert sorted(literals(tree)) == ["<b>", "<e>", "<f>", "<g>", "<s>", "<t>"]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "deepseek_v32"])
def test_a_schema_that_cannot_be_enforced_names_its_function(name):
    """Among many tools, that is what a person looks for."""
    wrong = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}}, "required": ["a"]}
    tree, _ = held_calls(CALL_FORMATS[name], {**TOOLS, "bad": wrong}, most=None)
    with pytest.raises(ParameterError, match=r"^structured_outputs: 'bad(\.a)?': no value fits the schema\.$"):
        compiled(tree)
