"""Schemas are worked out in a process that may be ended; budgets of reasoning; tags."""

from __future__ import annotations

import os
import threading

import pytest
from tests.pure.structured.bytewise import COMPILER, END, allowed, compiled, says

from tokenmill.core.errors import BusyError, ParameterError, UserError
from tokenmill.core.request import ReasoningSpan
from tokenmill.structured import compile as compile_module
from tokenmill.structured.compile import Compiler
from tokenmill.structured.helper import LoweringProcess
from tokenmill.structured.lowering import lower_spec
from tokenmill.structured.thinking import ThinkingBudget
from tokenmill.structured.vocabulary import Vocabulary
from tokenmill.structured.worker import answer

SPEC = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}


def test_prepared_grammars_are_the_same_ones(compiler):
    compiler.prepare(SPEC).result()
    size = compiler.bytes
    assert says(compiler.constraint(SPEC), '{"a": 1}') and not says(compiler.constraint(SPEC), "{}")
    assert compiler.bytes == size, "it was compiled again"
    with pytest.raises(ParameterError, match="#/pattern"):
        compiler.prepare({"json": {"pattern": "(?=x)"}}).result()


def test_a_grammar_that_is_known_does_not_wait_behind_others(compiler, monkeypatch):
    compiler.prepare(SPEC).result()
    go_on = threading.Event()
    lower = compiler._helper.lower
    monkeypatch.setattr(compiler._helper, "lower", lambda *given: (go_on.wait(60), lower(*given))[1])
    slow = compiler.prepare({"regex": "a"})
    assert compiler.prepare(SPEC).done() and not slow.done()
    go_on.set()
    slow.result()
    assert isinstance(compiler.prepare({"json": {1: object()}}).exception(), ParameterError)


def test_small_structures_need_not_wait_behind_large_ones(compiler, monkeypatch):
    go_on, order = threading.Event(), []
    lower = compiler._helper.lower
    monkeypatch.setattr(
        compiler._helper, "lower", lambda *given: (go_on.wait(60), order.append(given[0]), lower(*given))[2]
    )
    large = [{"choice": [f"{i}" + "a" * 4000]} for i in range(4)]
    small = {"choice": ["a"]}
    first, *others = [compiler.prepare(spec) for spec in large]
    soon, gone = compiler.prepare(small), compiler.prepare({"choice": ["b"]})
    assert gone.cancel()
    go_on.set()
    for future in (first, *others, soon):
        future.result()
    assert order[1] == small and [spec for spec in order if spec != small] == large


REFUSALS = [
    {"json": {"pattern": "(?=x)"}}, {"json": False}, {"regex": "("}, {"choice": []}, {"grammar": "root ::= nobody"},
    {"structural_tag": {"format": {"type": "nothing"}}}, {"json": {"unevaluatedItems": 3}}, {},
]  # fmt: skip


@pytest.mark.parametrize("spec", REFUSALS)
def test_a_refusal_is_worked_out_once(compiler, spec, monkeypatch):
    asked = []
    lower = compiler._helper.lower
    monkeypatch.setattr(compiler._helper, "lower", lambda *given: (asked.append(1), lower(*given))[1])
    first = compiler.prepare(spec).exception()
    again = [compiler.prepare(spec) for _ in range(1000)]
    assert all(future.done() for future in again), "they wait behind others"
    for error in (again[0].exception(), again[-1].exception()):
        assert isinstance(error, ParameterError) and error is not first
        assert str(error) == str(first) and error.param == first.param
    with pytest.raises(ParameterError):
        compiler.constraint(spec)
    assert len(asked) == 1
    assert compiler.prepare({"regex": "b"}).exception() is None


def test_refusals_are_few_and_not_for_good(compiler, monkeypatch):
    clock, asked = [0.0], []
    monkeypatch.setattr(compile_module, "MOST_REFUSALS", 3)
    monkeypatch.setattr(compile_module.time, "monotonic", lambda: clock[0])

    def lower(spec, reasoning):
        asked.append(spec["regex"])
        if spec["regex"] == "busy":
            raise BusyError("not now")
        raise ParameterError("no", param="structured_outputs")

    monkeypatch.setattr(compiler._helper, "lower", lower)
    for name in ("a", "b", "c", "d", "d", "a", "busy", "busy"):
        with pytest.raises(UserError):
            compiler.constraint({"regex": name})
    assert asked == ["a", "b", "c", "d", "a", "busy", "busy"], "the oldest makes room; what is busy is asked again"
    clock[0] = compile_module.REFUSED_S + 1
    with pytest.raises(ParameterError):
        compiler.constraint({"regex": "d"})
    assert asked[-1] == "d"


def test_a_schema_that_overruns_is_ended_and_others_go_on():
    helper = LoweringProcess(budget_s=0.0)
    with pytest.raises(ParameterError, match="with 0 s of work"):
        helper.lower(SPEC, None)
    helper.budget_s = 30.0
    assert helper.lower(SPEC, None) == lower_spec(SPEC)
    (pid,) = helper.pool.pids()
    helper.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_worker_answers_whatever_it_is_asked():
    assert "text" in answer({"spec": SPEC, "reasoning": None})
    assert "nothing is asked for" in answer({"spec": {}, "reasoning": None})["error"]
    assert "KeyError" in answer({"spec": SPEC, "reasoning": {"close": "x"}})["error"]


SPAN = ReasoningSpan(close="</t>")
MAYBE = ReasoningSpan(close="</t>", open="<t>")


def test_a_grammar_begins_after_reasoning():
    inside = COMPILER.constraint({"json": {"type": "integer"}}, SPAN)
    assert says(inside, "hm {1} </t>\n12") and not says(inside, "12") and not says(inside, "</t>x")
    maybe = COMPILER.constraint({"regex": "ab?"}, MAYBE)
    assert says(maybe, "<t>hm</t>ab") and says(maybe, "a") and not says(maybe, "<t>hm</t>b")


def run(constraint, text):
    """Say a text byte by byte where it is allowed -> what was said, forced bytes in their places."""
    said = bytearray()
    left = list(text.encode())
    while left and not constraint.finished():
        forced = constraint.forced()
        token = forced[0] if forced else left.pop(0)
        assert constraint.validate([token]) == 1
        constraint.accept([token])
        said.append(token)
    return said.decode()


def test_reasoning_ends_when_its_tokens_are_spent():
    constraint = COMPILER.constraint({"regex": "[0-9]+;"}, SPAN, 5)
    assert isinstance(constraint, ThinkingBudget)
    assert run(constraint, "abcde12;") == "abcde</t>12;"
    for budget in (2, 3, 4):  # spent inside a character, which the grammar has finished
        begun = COMPILER.constraint({"regex": "[0-9]+;"}, SPAN, budget)
        assert run(begun, "a\U0001f33e12;") == "a\U0001f33e</t>12;"
    free = COMPILER.constraint(None, SPAN, 3)
    assert run(free, "abcdef") == "abc</t>def"
    assert not free.finished() and free.mask() is None
    early = COMPILER.constraint(None, SPAN, 30)
    assert run(early, "ab</t>" + "x" * 40) == "ab</t>" + "x" * 40
    none = COMPILER.constraint(None, SPAN, 0)
    assert run(none, "a") == "</t>a"
    maybe = COMPILER.constraint(None, MAYBE, 2)
    assert run(maybe.fork(), "<t>abcd") == "<t>ab</t>cd"
    assert run(maybe.fork(), "no reasoning") == "no reasoning"


def test_borders_of_reasoning_that_share_a_token_are_seen():
    table = [*(bytes([i]) for i in range(256)), b"></", b"t><t>", b"<t></t>", b""]
    vocabulary = Vocabulary.of(table, {259}, (259,), lambda text: list(text.encode()))
    for said in ([*b"<t", 256, *b"t>"], [258], [*b"<t>", *b"a</t>"], [*b"<t>a</", 116, 62]):
        constraint = Compiler(lambda: vocabulary).constraint(None, MAYBE, 20)
        constraint.accept(said)
        assert constraint.mask() is None and constraint.state == "done", said
        constraint.accept(list(b"x" * 50))
        assert constraint.forced() == []
    half = Compiler(lambda: vocabulary).constraint(None, MAYBE, 0)
    half.accept([*b"<t", 256])
    assert half.forced() == list(b"</t>")


def test_reasoning_cannot_end_the_answer():
    constraint = COMPILER.constraint(None, SPAN, 9)
    mask = constraint.mask()
    assert not mask[END >> 3] >> (END & 7) & 1 and mask[0] == 0xFF
    assert constraint.validate([97, END]) == 1
    twin = constraint.fork()
    twin.accept([97] * 9)
    assert twin.forced() == list(b"</t>") and constraint.forced() == []


def tree(node, **more):
    return COMPILER.constraint({"structural_tag": {"type": "structural_tag", "format": node, **more}})


INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TAG = {"type": "tag", "begin": "<n>", "content": INTEGER, "end": "</n>"}
TREES = [
    ({"type": "const_string", "value": "ab"}, ["ab"], ["a", "abc"]),
    (TAG, ["<n>12</n>"], ["<n>x</n>", "12"]),
    ({"type": "sequence", "elements": [{"type": "regex", "pattern": "a+"}, TAG]}, ["aa<n>1</n>"], ["<n>1</n>"]),
    ({"type": "or", "elements": [TAG, {"type": "const_string", "value": "no"}]}, ["no", "<n>1</n>"], ["no<n>1</n>"]),
    ({"type": "optional", "content": TAG}, ["", "<n>1</n>"], ["<n>1</n><n>1</n>"]),
    ({"type": "star", "content": TAG}, ["", "<n>1</n><n>2</n>"], ["<n>"]),
    ({"type": "plus", "content": TAG}, ["<n>1</n>"], [""]),
    ({"type": "tag", "begin": "(", "content": {"type": "any_text"}, "end": ")"}, ["(a b)", "()"], ["(a", "(a)b"]),
    ({"type": "any_text", "excludes": ["bad"]}, ["good", ""], ["so bad"]),
    ({"type": "triggered_tags", "triggers": ["<n"], "tags": [TAG]}, ["a", "a<n>1</n>b"], ["a<n>x</n>", "<nb"]),
    (
        {"type": "triggered_tags", "triggers": ["<n"], "tags": [TAG], "at_least_one": True},
        ["a<n>1</n>b"],
        ["a"],
    ),
    (
        {"type": "tags_with_separator", "tags": [TAG], "separator": ", ", "at_least_one": True},
        ["<n>1</n>", "<n>1</n>, <n>2</n>"],
        ["", "<n>1</n><n>2</n>"],
    ),
    (
        {"type": "tags_with_separator", "tags": [TAG], "separator": "", "stop_after_first": True},
        ["", "<n>1</n>"],
        ["<n>1</n><n>2</n>"],
    ),
]


@pytest.mark.parametrize(("node", "good", "bad"), TREES, ids=lambda v: v.get("type") if isinstance(v, dict) else None)
def test_trees_of_tags(node, good, bad):
    constraint = tree(node)
    assert [t for t in good if not says(constraint, t)] == []
    assert [t for t in bad if says(constraint, t)] == []


@pytest.mark.parametrize(
    "node",
    [
        None,
        {},
        {"type": "other"},
        {"type": "sequence"},
        {"type": "or", "elements": [3]},
        {"type": "tag", "content": INTEGER},
        {"type": "regex", "pattern": "("},
        {"type": "any_text", "excludes": [1]},
        {"type": "token", "token": -1},
        {"type": "triggered_tags", "triggers": ["x"], "tags": [TAG]},
        {"type": "triggered_tags", "triggers": ["<", "<n"], "tags": [TAG]},
        {"type": "json_schema", "json_schema": {"pattern": "(?=x)"}},
    ],
)
def test_bad_trees_are_refused(node):
    with pytest.raises(UserError):
        tree(node)
    deep = {"type": "const_string", "value": "x"}
    for _ in range(5000):
        deep = {"type": "optional", "content": deep}
    with pytest.raises(UserError):
        tree(deep)


def test_control_tokens_in_literals_are_tokens():
    table = [bytes([i]) for i in range(256)] + [b"<E>", b""]
    vocabulary = Vocabulary.of(table, {256, 257}, (257,), lambda text: list(text.encode()))
    node = {"type": "sequence", "elements": [{"type": "const_string", "value": "a<E>b"}, {"type": "any_text"}]}
    spec = {"structural_tag": {"type": "structural_tag", "format": node, "special_tokens": {"<E>": 256}}}
    constraint = Compiler(lambda: vocabulary).constraint(spec)
    assert constraint.validate([97, 256, 98, 99]) == 4
    assert constraint.validate([97, *b"<E>b"]) == 1, "control tokens cannot be spelled"
    assert constraint.validate([97, 256, 98, 256]) == 3, "free text holds none"
    with pytest.raises(UserError):
        tree({"type": "const_string", "value": "a"}, special_tokens={"a": "b"})


ENDLESS = {
    "at once": 'start: <[256]> "b"',
    "forced": 'start: "ab" <[256]> "c"',
    "behind a choice": 'start: /[a-c]{2}/ <[256]> "c"',
    "of two ways": 'start: "a" (<[256]> "c" | <[256]> "d")',
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_grammar_cannot_go_on_behind_the_end(name):
    """A token that ends answers ends them: nothing can follow it, and whoever asks for that is told so."""
    with pytest.raises(ParameterError, match="what must follow"):
        COMPILER.constraint({"grammar": ENDLESS[name]})


def test_where_a_grammar_may_end_it_may_name_the_end():
    mixed = COMPILER.constraint({"grammar": 'start: ("a" | "a" <[256]> "c") "b"?'})
    assert says(mixed, "a") and says(mixed, "ab") and not says(mixed, "b")
    mixed.accept([97])
    assert END in allowed(mixed.mask())
    for grammar in ('start: "a" (<[256]> "c" | "b"+ "c")', 'start: "a" (<[255-256]> | "b"+) "c"'):
        other = COMPILER.constraint({"grammar": grammar})
        other.accept([97])
        assert END not in allowed(other.mask()) and 98 in allowed(other.mask())
        assert other.validate([END]) == 0 and other.failure() is None


def test_base64_is_enforced_where_it_is_asked_for():
    constraint = compiled({"type": "string", "contentEncoding": "base64"})
    assert all(says(constraint, f'"{t}"') for t in ("", "eyJm", "ezp9Cg=="))
    assert not any(says(constraint, f'"{t}"') for t in ("eyJ%", "abc", "ab="))
    with pytest.raises(UserError, match="contentMediaType"):
        compiled({"contentMediaType": "application/json"})


def test_tokens_of_a_text_have_its_bytes_whatever_the_tokenizer_makes_of_it():
    table = [bytes([i]) for i in range(256)] + [b"mill", b"M", b"<s>", b""]
    for wrong in (lambda t: list(t.lower().encode()), lambda t: [32, *t.encode()], lambda t: [], lambda t: [258, 999]):
        vocabulary = Vocabulary.of(table, {258, 259}, (259,), wrong)
        assert vocabulary.encode("A mill<s>") == [65, 32, 256, *b"<s>"]
        constraint = Compiler(lambda made=vocabulary: made).constraint({"choice": ["Ah mill", "Bee"]})
        constraint.accept([65])
        assert constraint.forced() and constraint.validate([*b"h ", 256]) == 3
