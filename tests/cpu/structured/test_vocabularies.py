"""Structured output on seven kinds of vocabulary: what ends is valid, and forced text is said in its usual tokens."""

from __future__ import annotations

import json
import re

import pytest
from jsonschema import Draft202012Validator
from tests.cpu.engine.engines import check_nothing_left, open_llm, run
from tests.cpu.structured.vocabularies import END, VOCABULARIES
from tests.thinned import covering

from tokenmill import SamplingParams
from tokenmill.testing.tiny import make_tiny
from tokenmill.text.messages.describe import MessageFormat
from tokenmill.text.messages.families import CALL_FORMATS
from tokenmill.text.messages.parser import parse_message
from tokenmill.text.messages.structural_tags import held_calls

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["miller", "baker"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
TOOLS = {
    "get_weather": {"type": "object", "properties": {"days": {"type": "integer", "maximum": 9}}, "required": ["days"]}
}
TOOLS["get_weather"]["additionalProperties"] = False
TREE, FORM = held_calls(CALL_FORMATS["hermes"], TOOLS, most=1)


def is_person(text):
    return Draft202012Validator(PERSON).is_valid(json.loads(text))


def is_call(text):
    found = parse_message(MessageFormat(None, FORM), text, tools=TOOLS)
    return len(found.calls) == 1 and Draft202012Validator(TOOLS["get_weather"]).is_valid(
        json.loads(found.calls[0].arguments)
    )


CHOICES = ["yes", "no", "yes, sure", "The mill", " a\nb  c"]
STRUCTURES = {
    "json": ({"json": PERSON}, is_person),
    "json_object": ({"json_object": True}, lambda t: isinstance(json.loads(t), dict)),
    "regex": ({"regex": "[a-c]{3,5} - [0-9]+ (é|😀)x"}, lambda t: re.fullmatch("[a-c]{3,5} - [0-9]+ (é|😀)x", t)),
    "choice": (
        {"choice": ["yes", "no", "yes, sure", "The mill"]},
        lambda t: t in ("yes", "no", "yes, sure", "The mill"),
    ),
    "grammar": (
        {"grammar": 'root ::= "a [" item+ "\\u00e9ab"\nitem ::= [x-z] " " | "(" item ")"\n'},
        lambda t: re.fullmatch(r"a \[(?:\(*[x-z] \)*)+éab", t),
    ),
    "tools": ({"structural_tag": {"type": "structural_tag", "format": TREE}}, is_call),
}
MODES = {
    "plain": ({}, {}),
    "drafts": ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}}, {}),
    "n = 2": ({}, {"n": 2}),
}


@pytest.fixture(scope="module", params=VOCABULARIES)
def folder(request, tmp_path_factory):
    tokenizer = VOCABULARIES[request.param]()
    end = tokenizer.token_to_id(END)
    made = make_tiny(
        tmp_path_factory.mktemp("model"), hidden=32, heads=4, kv_heads=2, layers=1, vocab=tokenizer.get_vocab_size()
    )
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "eos_token_id": end}))
    return made


@pytest.mark.parametrize(("folder", "mode"), covering(VOCABULARIES, MODES), indirect=["folder"])
def test_what_ends_is_valid(folder, mode):
    options, more = MODES[mode]
    params, kinds = [], []
    with open_llm(folder, threads=1, max_num_seqs=32, **options) as llm:
        # A random model would go on inside of an open object for ever.
        closing = dict.fromkeys(llm.get_tokenizer().encode_inside('}"'), 6.0)
        for kind, (spec, _) in STRUCTURES.items():
            for seed in range(4):
                held = {"structured_outputs": spec, "logit_bias": closing if kind == "json_object" else None}
                params.append(SamplingParams(temperature=1.0, seed=seed, max_tokens=150, **held, **more))
                kinds.append(kind)
        outputs = run(llm, ["The mill says:"] * len(params), params)
        check_nothing_left(llm.engine)
    ended = dict.fromkeys(STRUCTURES, 0)
    for kind, output in zip(kinds, outputs, strict=True):
        for one in output.outputs:
            assert one.finish_reason in ("stop", "length"), (kind, one)
            if one.finish_reason == "stop":
                ended[kind] += 1
                assert STRUCTURES[kind][1](one.text), (kind, one.text)
    assert all(ended.values()), ended


def test_forced_text_is_said_in_usual_tokens_without_steps(folder):
    """No space is put before it, whatever the tokenizer puts before a text; and it costs no model step."""
    text = '{"name": "mill", "age": 7, "kind": "miller", "friend": null}'
    with open_llm(folder, threads=1) as llm:
        (output,) = run(
            llm, ["x"], SamplingParams(temperature=0.0, max_tokens=90, structured_outputs={"choice": [text]})
        )
        tokenizer = llm.get_tokenizer()
        one = output.outputs[0]
        assert one.text == text and one.finish_reason == "stop"
        assert llm.engine.scheduler.counters.steps <= 3
        spaced = tokenizer.encode("x" + text, add_special_tokens=False)
        assert len(one.token_ids) <= len(spaced), "letter by letter"
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode_inside(text))) == text.encode()
