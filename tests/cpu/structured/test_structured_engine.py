"""Whole engines held to grammars: what ends is valid, what is cut is a prefix, and how it is computed does not show."""

from __future__ import annotations

import json
import random
import re

import pytest
from jsonschema import Draft202012Validator
from tests.cpu.engine.engines import check_nothing_left, exact, run
from tests.cpu.engine.engines import open_usual as open_llm
from tests.pure.structured.bytewise import compiled, says, typed

from tokenmill import LLM, SamplingParams
from tokenmill.core.request import ReasoningSpan

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["miller", "baker"]},
        "friend": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "age", "kind", "friend"],
    "additionalProperties": False,
}
SCHEMAS = [
    PERSON,
    {"type": "array", "items": {"type": ["integer", "boolean"]}, "minItems": 1, "maxItems": 4},
    {"oneOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 9}, {"const": "mill"}]},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "dependentRequired": {"a": ["b"]}, "maxProperties": 2},
    {"type": "string", "pattern": "^[a-f]{2,9}$", "not": {"enum": ["bad", "cafe"]}},
    {
        "type": "object",
        "properties": {"day": {"type": "string", "format": "date"}, "at": {"type": "number", "multipleOf": 0.5}},
        "required": ["day", "at"],
        "if": {"properties": {"day": {"const": "2026-11-21"}}},
        "then": {"properties": {"at": {"maximum": 3}}},
    },
]
ENGINES = {
    "depth 2": {"depth": 2},
    "process": {"executor": "process"},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}},
    "drafts, depth 2": {"depth": 2, "speculative_config": {"method": "ngram", "prompt_lookup_min": 1}},
    "preemption": {"num_blocks": 12, "max_model_len": 190, "long_prefill_token_threshold": 5},
    "preemption, depth 2": {"num_blocks": 12, "max_model_len": 190, "depth": 2},
}
PROMPT = 'A person: {"name": "mill", "age": 7, "kind": "miller", "friend": null}. Another one: '


def parameters():
    """Each schema greedily, sampled, with log-probabilities, and three at once."""
    found = []
    for i, schema in enumerate(SCHEMAS):
        for more in ({"temperature": 0.0}, {"temperature": 1.0, "n": 3}, {"temperature": 1.0, "logprobs": 1}):
            found.append(SamplingParams(seed=i, max_tokens=80, structured_outputs={"json": schema}, **more))
    return found


def opened(tiny, **options):
    return open_llm(tiny, **{"max_num_seqs": 8, "threads": 1, **options})


def check(schema, one):
    """Valid if it has ended, else the beginning of something."""
    if one.finish_reason == "stop":
        assert Draft202012Validator(schema).is_valid(json.loads(one.text)), (schema, one.text)
    else:
        assert one.finish_reason == "length", one
        data = list(one.text.split("\ufffd")[0].encode())
        assert compiled(schema).validate(data) == len(data), (schema, one.text)


@pytest.fixture(scope="module")
def expected(tiny):
    with opened(tiny, max_num_seqs=32) as llm:
        params = parameters()
        outputs = run(llm, [PROMPT] * len(params), params)
        check_nothing_left(llm.engine)
    for param, output in zip(params, outputs, strict=True):
        for one in output.outputs:
            check(param.structured_outputs["json"], one)
    ended = [one.finish_reason == "stop" for output in outputs for one in output.outputs]
    assert sum(ended) > len(ended) / 2
    return [exact(o) for o in outputs]


@pytest.mark.parametrize("title", ENGINES)
def test_the_same_however_it_is_computed(title, tiny, expected):
    with opened(tiny, **ENGINES[title]) as llm:
        params = parameters()
        found = run(llm, [PROMPT] * len(params), params)
        assert [exact(o) for o in found] == expected
        counters = llm.engine.scheduler.counters
        if "preemption" in title:
            assert counters.preemptions > 0
        if "drafts" in title:
            assert counters.accepted > 0
        check_nothing_left(llm.engine)


def test_forced_text_costs_no_steps(tiny):
    schema = {"const": {"the mill grinds grain": "into flour, and flour becomes bread"}}
    with opened(tiny) as llm:
        (output,) = run(llm, ["x"], SamplingParams(temperature=0.0, max_tokens=80, structured_outputs={"json": schema}))
        assert json.loads(output.outputs[0].text) == schema["const"]
        assert output.outputs[0].finish_reason == "stop"
        assert llm.engine.scheduler.counters.steps < len(output.outputs[0].token_ids) / 3


def test_every_kind_of_structure(tiny):
    tag = {"begin": "<f=a>", "schema": {"type": "integer", "maximum": 9}, "end": "</f>"}
    kinds = {
        "regex": "^[a-c]{3,5}-\\d+x$",
        "choice": ["yes", "no", "yes, sure"],
        "grammar": 'root ::= "a" item+ "\\u00e9ab"\nitem ::= [x-z] | "(" item ")"\n',
        "json_object": True,
        "structural_tag": {"structures": [tag], "triggers": ["<f="]},
    }
    checks = {
        "regex": lambda t: re.fullmatch(r"[a-c]{3,5}-\d+x", t),
        "choice": lambda t: t in kinds["choice"],
        "grammar": lambda t: re.fullmatch(r"a(?:\(*[x-z]\)*)+éab", t),
        "json_object": lambda t: isinstance(json.loads(t), dict),
        "structural_tag": lambda t: t.count("<f=") == len(re.findall(r"<f=a>-?\d+</f>", t)),
    }
    with opened(tiny) as llm:
        for kind, value in kinds.items():
            params = [
                SamplingParams(temperature=1.0, seed=i, max_tokens=120, structured_outputs={kind: value})
                for i in range(12)
            ]
            ended = [o.outputs[0] for o in run(llm, ["x"] * 12, params) if o.outputs[0].finish_reason == "stop"]
            assert ended, kind
            assert all(checks[kind](one.text) for one in ended), (kind, ended)


def test_random_schemas(tiny):
    from tests.pure.structured.schemas import random_schema

    from tokenmill.core.errors import UserError

    rng = random.Random(5)
    chosen = []
    while len(chosen) < 60:
        schema = random_schema(rng, 3)
        try:
            compiled(schema)
        except UserError:
            continue
        chosen.append(schema)
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=50, structured_outputs={"json": json.dumps(typed(s))})
        for i, s in enumerate(chosen)
    ]
    with opened(tiny, max_num_seqs=32) as llm:
        outputs = run(llm, ["x"] * len(params), params)
    for schema, output in zip(chosen, outputs, strict=True):
        check(schema, output.outputs[0])
    assert sum(o.outputs[0].finish_reason == "stop" for o in outputs) > 30


def test_a_request_that_cannot_be_enforced_leaves_nothing_behind(tiny):
    from tokenmill.core.errors import ParameterError

    with opened(tiny) as llm:
        with pytest.raises(ParameterError, match="#/properties/a/pattern"):
            bad = {"json": {"type": "object", "properties": {"a": {"pattern": "(?=x)"}}}}
            run(llm, ["x"], SamplingParams(structured_outputs=bad))
        check_nothing_left(llm.engine)
        assert says(compiled({"const": 1}), "1")


def test_beams_are_held_to_a_grammar(tiny):
    schema = {"type": "array", "items": {"type": ["integer", "boolean"], "maximum": 99}, "minItems": 1, "maxItems": 2}
    params = SamplingParams(
        use_beam_search=True, n=3, temperature=0.0, max_tokens=40, structured_outputs={"json": schema}
    )
    with opened(tiny) as llm:
        outputs = run(llm, [PROMPT, "x"], [params, params])
        check_nothing_left(llm.engine)
    for output in outputs:
        assert len({o.text for o in output.outputs}) == len(output.outputs) == 3
        for one in output.outputs:
            check(schema, one)
    assert any(o.finish_reason == "stop" for output in outputs for o in output.outputs)


REASONS = ReasoningSpan(close="</think>", tokens={"</think>": 4})


@pytest.mark.parametrize("title", ["plain", "drafts", "depth 2", "preemption"])
def test_the_demo_model_in_every_engine(title):
    """Greedy: the constrained answers do not depend on drafts, plans in flight or preemption."""
    ask = "<|im_start|>user\nWhat is 12 plus 5?<|im_end|>\n<|im_start|>assistant\n"
    # Bounded and closed: a small model may write digits or a property of its own without end.
    items = {"type": ["integer", "boolean"], "minimum": -9, "maximum": 99}
    few = {"type": "array", "items": items, "minItems": 1, "maxItems": 4}
    number = {"type": "integer", "minimum": -99, "maximum": 999}
    closed = {"type": "object", "properties": {"answer": number}, "required": ["answer"]}
    closed["additionalProperties"] = False
    kinds = [
        ({"json": few}, None, None),
        ({"json": closed}, None, None),
        ({"regex": "12 \\+ 5 = [0-9]+\\."}, None, None),
        ({"json": number}, REASONS, None),
        ({"json": number}, REASONS, 4),
        (None, REASONS, 4),
    ]
    prompts = [ask + ("<think>\n" if reasons else "") for _, reasons, _ in kinds]
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=90, structured_outputs=s, reasoning=r, thinking_token_budget=b, seed=1
        )
        for s, r, b in kinds
    ]
    options = {"num_blocks": 16, "max_model_len": 200} if title == "preemption" else ENGINES.get(title, {})
    with LLM("demo", threads=1, max_num_seqs=8, **options) as llm:
        found = [o.outputs[0] for o in run(llm, prompts, params)]
        check_nothing_left(llm.engine)
    for one, (structure, reasons, budget) in zip(found, kinds, strict=True):
        thought, mark, answer = one.text.rpartition("</think>")
        assert one.finish_reason == "stop" and bool(mark) == bool(reasons)
        if budget is not None:
            assert len(llm.get_tokenizer().encode(thought)) <= budget
        if structure and "json" in structure:
            assert Draft202012Validator(structure["json"]).is_valid(json.loads(answer))
    expected = demo_answers.setdefault("texts", [o.text for o in found])
    assert [o.text for o in found] == expected


demo_answers: dict[str, list[str]] = {}
"""The first engine's texts, for the others to equal."""


def test_pydantic_models_offline():
    from pydantic import BaseModel, Field

    class City(BaseModel):
        name: str = Field(max_length=20)  # so that it ends, whatever the weights say
        sunny: bool

    with LLM("demo", threads=1, max_num_seqs=2) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs={"json": City})
        (output,) = llm.chat([{"role": "user", "content": "Tell me about Paris."}], params, use_tqdm=False)
    assert City.model_validate_json(output.outputs[0].text)


@pytest.mark.parametrize("fuel", [None, 300])
def test_a_grammar_that_runs_out_harms_nobody_else(tiny, monkeypatch, fuel):
    """One sequence uses up the lexer that it shares: it goes on, or names the limit; the others say the same."""
    from tokenmill.structured import compiled_grammar as lexers

    spec = {"regex": "(?:x(.{1,30} ){5}.{1,30}x|y[a-d]{20})"}
    with opened(tiny) as llm:
        ids = {letter: llm.get_tokenizer().encode(letter)[-1] for letter in "xy"}
        params = [
            SamplingParams(
                temperature=1.0, seed=i, max_tokens=60, structured_outputs=spec, logit_bias={ids[letter]: 100.0}
            )
            for i, letter in enumerate("yyyxyyy")
        ]
        others = [i for i in range(7) if i != 3]
        expected = run(llm, ["a"] * 6, [params[i] for i in others])
        compiler = llm.engine.admission.compiler
        ((source, _),) = compiler._cache.values()
        monkeypatch.setattr(lexers, "MOST_STATES", 400 if fuel is None else 20_000)
        monkeypatch.setattr(lexers, "STEP_FUEL", lexers.STEP_FUEL if fuel is None else fuel)
        first = source.root = source._fresh(1)
        found = run(llm, ["a"] * 7, params)
        assert source.root is not first, "nothing ran out: the test shows nothing"
        check_nothing_left(llm.engine)
    assert [exact(found[i]) for i in others] == [exact(o) for o in expected]
    assert all(re.fullmatch("y[a-d]{20}", found[i].outputs[0].text) for i in others)
    culprit = found[3].outputs[0]
    if fuel is None:
        assert culprit.finish_reason in ("stop", "length") and len(culprit.token_ids) > 20
    else:
        assert culprit.finish_reason == "error"
        assert "too many expressions" in culprit.stop_reason and "more than this engine grants" in culprit.stop_reason
