"""Sequences of one grammar share a lexer that has limits: whoever hits one, the others go on and new ones begin."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest
from tests.pure.structured.bytewise import END, allowed

from tokenmill.core.errors import OUR_FAULT, OVER_LIMIT, BusyError, ParameterError
from tokenmill.core.request import ReasoningSpan
from tokenmill.structured import compiled_grammar, mask_pool, walking_time
from tokenmill.structured import constraint as walking
from tokenmill.structured.compile import Compiler
from tokenmill.structured.sheltered import Sheltered
from tokenmill.structured.vocabulary import Vocabulary

TWO_WORDS = {"json": {"type": "string", "pattern": "^.{1,100} .{1,100}$"}}


def finish(constraint, rng, said=b""):
    """Say any answer to its end."""
    said = bytearray(said)
    while not constraint.finished():
        choices = allowed(constraint.mask())
        assert choices, constraint.failure()
        token = rng.choice(choices)
        constraint.accept([token])
        said += bytes([token]) if token != END else b""
    return json.loads(said)


def test_a_lexer_that_runs_out_of_states_stops_nobody(compiler, monkeypatch):
    monkeypatch.setattr(compiled_grammar, "MOST_STATES", 1500)
    rng = random.Random(2)
    running = [compiler.constraint(TWO_WORDS) for _ in range(8)]
    source = next(iter(compiler._cache.values()))[0]
    first = source.root
    for one in running:
        one.accept([34])
    for _ in range(40):
        assert re.fullmatch("(?s:.{1,100} .{1,100})", finish(compiler.constraint(TWO_WORDS), rng))
    assert source.root is not first, "the limit was never hit: the test shows nothing"
    for one in running:
        assert one.failure() is None
        twin = one.fork()
        assert " " in finish(twin, rng, b'"') and " " in finish(one, rng, b'"')


def dead(compiler, monkeypatch, spec, *texts):
    """Constraints that have said these texts, on a lexer that another one has then used up."""
    monkeypatch.setattr(compiled_grammar, "MOST_STATES", 4000)
    walks = []
    for text in texts:
        walk = compiler.constraint(spec)
        walk.accept(list(text.encode()))
        assert not walk.broken
        walks.append(walk)
    source = next(reversed(compiler._cache.values()))[0]
    root, rng = source.root, random.Random(3)
    culprit = root.deep_copy()
    for _ in range(20_000):
        mask = culprit.compute_bitmask()
        if culprit.is_error():
            return source, walks
        choices = [c for c in allowed(mask) if c < 128]
        if not culprit.try_consume_tokens([rng.choice(choices) if choices else END]) or culprit.is_stopped():
            culprit = root.deep_copy()
    raise AssertionError("the lexer bears everything")


def test_every_question_to_a_dead_lexer_is_answered(compiler, monkeypatch):
    spec = {"regex": "(.{1,40} .{1,40}x|ab+|forced text)\\n?"}
    texts = ["a", "ab", "abb", "abb", "abb", "forced", "abb"]
    _, (mask, known, new, ends, checked, forced, twin) = dead(compiler, monkeypatch, spec, *texts)
    assert ord("b") in allowed(mask.mask())
    known.accept([ord("b")])
    assert END in allowed(known.mask())
    new.accept(list(b"bbbb bx"))
    assert END in allowed(new.mask()) and new.said == list(b"abbbbbb bx")
    ends.accept([END])
    assert ends.finished()
    assert checked.mask() and checked.validate([ord("b"), ord("b"), 10, 97]) == 3
    assert allowed(forced.mask()) and forced.failure() is None
    fork = twin.fork()
    assert END in allowed(fork.mask()) and END in allowed(twin.mask())
    assert all(w.failure() is None for w in (mask, known, new, ends, checked, forced, twin, fork))


def test_masks_that_are_worked_out_together(compiler, monkeypatch):
    for name in ("FEWEST", "SMALL"):
        monkeypatch.setattr(mask_pool, name, 1)
    _, walks = dead(compiler, monkeypatch, {"regex": "(.{1,40} .{1,40}x|ab+)"}, *["ab"] * 5)
    mask_pool.MaskPool().fill(walks)
    for walk in walks:
        assert END in allowed(walk.mask()) and walk.failure() is None


def test_the_first_to_find_it_dead_goes_on_alone_and_others_share_a_new_one(compiler, monkeypatch):
    spec = {"regex": "(.{1,40} .{1,40}x|ab+)"}
    source, walks = dead(compiler, monkeypatch, spec, "ab", "ab", "ab")
    for walk in walks:
        assert END in allowed(walk.mask())
    assert walks[0].root is None
    assert walks[1].root is walks[2].root is source.root is not None
    late = compiler.constraint(spec)
    assert late.root is source.root and ord("a") in allowed(late.mask())


def test_one_that_no_lexer_bears_says_which_limit_and_harms_nobody(compiler, monkeypatch):
    spec = {"regex": "(?:x(.*a){9}.{90}(q|[a-m]+.{20}z){3}|safe [0-9]+)"}
    safe = compiler.constraint(spec)
    safe.accept(list(b"safe 1"))
    culprit = compiler.constraint(spec)
    source = next(iter(compiler._cache.values()))[0]
    monkeypatch.setattr(compiled_grammar, "STEP_FUEL", 3)
    source.root = None  # the next lexers have no fuel to speak of
    culprit = compiler.constraint(spec)
    culprit.accept([ord("x")])
    assert allowed(culprit.mask()) == []
    assert "too many expressions" in culprit.failure() and culprit.failure().startswith(OVER_LIMIT)
    assert "No token" not in culprit.failure()
    monkeypatch.undo()
    assert ord("2") in allowed(safe.mask()) and safe.failure() is None
    assert ord("s") in allowed(compiler.constraint(spec).mask())


AMBIGUOUS = {"grammar": 'root ::= s\ns ::= s s s | s s | "a"'}


def slow_clock(monkeypatch, step):
    """Every look at the clock finds it so much later."""
    seconds = itertools.count(0, step)
    monkeypatch.setattr(walking, "thread_time", lambda: next(seconds))


def test_a_request_whose_tokens_take_long_to_read_ends_and_its_grammar_is_refused(compiler, monkeypatch):
    constraint, other = compiler.constraint(AMBIGUOUS), compiler.constraint(AMBIGUOUS)
    constraint.accept([97, 97])
    assert 97 in allowed(constraint.mask())
    slow_clock(monkeypatch, 0.15)
    for _ in range(4):
        constraint.accept([97])
    assert allowed(constraint.mask()) == [] and constraint.failure() is not None
    assert constraint.failure().startswith(OVER_LIMIT) and "too long to read" in constraint.failure()
    assert constraint.fork().failure() == constraint.failure()
    monkeypatch.undo()
    other.accept([97])
    assert 97 in allowed(other.mask()) and other.failure() is None
    with pytest.raises(ParameterError, match="too long to read"):
        compiler.constraint(AMBIGUOUS)


def test_masks_take_of_the_same_time_as_tokens(compiler, monkeypatch):
    constraint = compiler.constraint({"grammar": AMBIGUOUS["grammar"] + "\n"})
    slow_clock(monkeypatch, 0.15)
    for _ in range(2):
        constraint.accept([97])
        constraint.mask()
    constraint.accept([97])
    assert allowed(constraint.mask()) == []


def test_all_outputs_of_a_request_share_its_time(compiler, monkeypatch):
    first = compiler.constraint({"grammar": AMBIGUOUS["grammar"] + "\n\n"})
    outputs = [first.fork() for _ in range(100)]
    slow_clock(monkeypatch, walking_time.EASY_S * 0.9)  # each of them is quick enough
    for _ in range(3):
        for output in outputs:
            output.accept([97])
    assert all(allowed(output.mask()) == [] for output in outputs)
    alone = compiler.constraint({"regex": "a*b"})
    for _ in range(300):
        alone.accept([97])
    assert 97 in allowed(alone.mask())


@pytest.mark.parametrize(("number", "seconds", "end"), [(64, 0.0049, True), (16, 0.0049, False), (200, 0.001, False)])
def test_many_requests_with_slow_grammars_end_and_nobody_else(number, seconds, end):
    """Each of them is quick enough alone, and together they keep everybody waiting."""
    crowd, rounds = walking_time.Crowd(), {}
    slow = [walking_time.WalkingTime(crowd) for _ in range(number)]
    usual = [walking_time.WalkingTime(crowd) for _ in range(64)]
    for _ in range(400):
        for times, took in ((slow, seconds), (usual, 0.0001)):
            for each in times:
                rounds[each] = each.add(took, 1, rounds.get(each, 0))
    assert {each.ended(walking_time.MOST_S) for each in slow} == {end}
    assert not any(each.ended(walking_time.AGAIN_S) for each in usual)


def test_reasoning_and_shelter_pass_the_reason_on(compiler, caplog):
    budget = Sheltered(compiler.constraint(TWO_WORDS, ReasoningSpan(close="</t>"), 5), 33)
    assert budget.failure() is None
    budget.inner.inner._break("too many states")
    assert "too many states" in budget.failure()

    class Wrong:
        def mask(self):
            raise RuntimeError("a mistake of ours")

        def failure(self):
            raise RuntimeError

    wrong = Sheltered(Wrong(), 2)
    assert wrong.mask() == b"\0\0" and wrong.failure().startswith(OUR_FAULT)
    (told,) = caplog.records  # once, with the place
    assert "a mistake of ours" in str(told.exc_info[1])


def test_a_grammar_that_dies_at_once_is_refused(compiler):
    for pattern in ("^(?:\\S+\\s+){0,99}\\S+$", "^(\\w+\\W+){0,300}\\w+$"):
        with pytest.raises(ParameterError, match=r"within a limit .*too many"):
            compiler.constraint({"json": {"type": "string", "pattern": pattern, "maxLength": 5000}})
    assert not compiler._cache


def test_a_token_that_is_not_allowed_is_no_dead_lexer(compiler):
    walk = compiler.constraint({"regex": "ab+c"})
    root = walk.root
    walk.accept([ord("a")])
    walk.accept([ord("x")])
    assert allowed(walk.mask()) == [] and walk.failure().startswith(OUR_FAULT)
    assert walk.compiled.root is root


def test_what_is_our_own_fault_is_never_worded_as_the_request_s(compiler, monkeypatch):
    class PanicException(BaseException):
        """As native libraries raise it."""

    for error in (RuntimeError, PanicException):
        monkeypatch.setattr(
            "tokenmill.structured.compile.Compiled", lambda *_, error=error: (_ for _ in ()).throw(error())
        )
        with pytest.raises(BusyError, match=OUR_FAULT):
            compiler.constraint({"choice": [error.__name__]})
    monkeypatch.undo()

    class Panics:
        def mask(self):
            raise PanicException

    walk = Sheltered(Panics(), 2)
    assert walk.mask() == b"\0\0" and walk.failure().startswith(OUR_FAULT) and walk.forced() == []
    with pytest.raises(KeyboardInterrupt):
        Sheltered(type("Stopped", (), {"mask": lambda self: (_ for _ in ()).throw(KeyboardInterrupt())})(), 2).mask()


def test_an_empty_mask_says_why(compiler):
    letters = Vocabulary.of(
        [bytes([i]) for i in range(97, 123)] + [b""], {26}, (26,), lambda text: [ord(c) - 97 for c in text]
    )
    small = Compiler(lambda: letters)
    with pytest.raises(ParameterError, match="no token"):
        small.constraint({"regex": "[a-z]é"})
    small.close()


def test_a_panic_of_the_engine_is_told_without_its_stack():
    class Panicked:
        def get_error(self):
            return "panic: assertion failed: it ends\n<backtrace>\n  0: <unknown>\n"

    assert compiled_grammar.reason(Panicked()) == "panic: assertion failed: it ends"
