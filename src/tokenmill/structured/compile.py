"""From a request's `structured_outputs` to a Constraint. Owns: the cache of compiled grammars, and the budgets of
compiling and of walking.

`prepare` lowers in a process of its own and compiles in one thread (the engine's library lets go of the interpreter
meanwhile); after it `constraint` only looks up and copies. Must not know: schemas' meaning, requests' other fields.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits

from tokenmill.core.errors import ParameterError
from tokenmill.core.protocols import Constraint
from tokenmill.core.request import ReasoningSpan
from tokenmill.structured.constraint import GrammarConstraint
from tokenmill.structured.helper import LoweringProcess
from tokenmill.structured.limits import MAX_SPEC_BYTES, refuse
from tokenmill.structured.lowering import lower_spec, plain_schema
from tokenmill.structured.thinking import Border, ThinkingBudget
from tokenmill.structured.vocabulary import Vocabulary

CACHE_BYTES = 192 << 20
GRAMMAR_BYTES = 256 << 10
"""What a compiled grammar takes beside what its text does, with use: its sequences share the states of its lexer, which
they find as they go (measured: 200 KB after a hundred tokens)."""
TEXT_FACTOR = 112
"""Bytes of a compiled JSON grammar per byte of its text, measured on schemas of 1 to 9 KB; regexes and choices take a
tenth."""
MAX_GRAMMAR_BYTES = 1 << 20
PROBE_STEPS = 3
NICE = 10
Lower = Callable[[Any, "dict[str, Any] | None"], str]


class Compiler:
    """Compiled grammars over one vocabulary; safe to use from several threads."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """vocabulary: called once, when the first grammar is compiled."""
        self._make_vocabulary = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._cache: OrderedDict[bytes, tuple[GrammarConstraint, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._helper = LoweringProcess()
        self.bytes = 0

    def prepare(self, spec: Any, reasoning: ReasoningSpan | None = None) -> Future[None]:
        """Lower in a process of its own and compile in a thread; the future raises what is wrong with `spec`."""
        with self._lock:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "tokenmill-grammar", _let_others_go_first)
        return self._worker.submit(self._prepare, spec, reasoning)

    def _prepare(self, spec: Any, reasoning: ReasoningSpan | None) -> None:
        if spec is not None:
            self._ready(spec, reasoning, self._helper.lower)

    def constraint(self, spec: Any, reasoning: ReasoningSpan | None = None, budget: int | None = None) -> Constraint:
        """The constraint at its start, compiled now if it is not known. `spec` may be None where there is a budget."""
        inner = None if spec is None else self._ready(spec, reasoning, lower_spec).fork()
        if reasoning is not None and budget is not None and budget >= 0:
            return ThinkingBudget(self._border(reasoning), budget, self.vocabulary, inner)
        assert inner is not None, "nothing to hold a sequence to"
        return inner

    @property
    def vocabulary(self) -> Vocabulary:
        """The token table, made when it is first needed."""
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        return self._vocabulary

    def close(self) -> None:
        """End the helper."""
        if self._worker is not None:
            self._worker.shutdown(wait=False, cancel_futures=True)
        self._helper.close()

    def _border(self, reasoning: ReasoningSpan) -> Border:
        number = reasoning.tokens.get(reasoning.close)
        closing = (number,) if number is not None else tuple(self.vocabulary.encode(reasoning.close))
        return Border(reasoning.open.encode(), reasoning.close.encode(), closing)

    def _ready(self, spec: Any, reasoning: ReasoningSpan | None, lower: Lower) -> GrammarConstraint:
        plain = None if reasoning is None else msgspec.to_builtins(reasoning)
        key = _key([spec, plain] if plain else spec)
        found = self._find(key)
        if found is None:
            with self._building:  # several requests with one new schema compile it once
                found = self._find(key)
                if found is None:
                    found = self._build(lower(spec, plain), key)
        return found

    def _find(self, key: bytes) -> GrammarConstraint | None:
        with self._lock:
            entry = self._cache.get(key)
            if entry is None:
                return None
            self._cache.move_to_end(key)
            return entry[0]

    def _build(self, text: str, key: bytes) -> GrammarConstraint:
        made = GrammarConstraint(compile_grammar(text, self.vocabulary), self.vocabulary)
        _probe(made.fork())
        size = GRAMMAR_BYTES + TEXT_FACTOR * len(text)
        with self._lock:
            self._cache[key] = made, size
            self.bytes += size
            while self.bytes > CACHE_BYTES and len(self._cache) > 1:
                self.bytes -= self._cache.popitem(last=False)[1][1]
        return made


def _let_others_go_first() -> None:
    """This thread only: the engine's must not wait for it."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def compile_grammar(text: str, vocabulary: Vocabulary) -> LLMatcher:
    """A matcher at its start, within the budgets."""
    if len(text) > MAX_GRAMMAR_BYTES:
        refuse("the grammar is too large once it is written out. Simplify it.")
    matcher = LLMatcher(vocabulary.trie, text, log_level=0, limits=limits())
    if matcher.is_error():
        refuse(f"the grammar engine refuses it: {_reason(matcher.get_error())}")
    return matcher


def _probe(constraint: GrammarConstraint) -> None:
    """Walk a little, so that what cannot be walked within the budget is refused and the first mask is warm."""
    for _ in range(PROBE_STEPS):
        if constraint.finished():
            return
        mask = int.from_bytes(constraint.mask(), "little")
        if not mask:
            refuse("each token of this grammar would take more work than the budget allows. Simplify it.")
        constraint.accept([(mask & -mask).bit_length() - 1])


def limits() -> LLParserLimits:
    """Budgets of compiling (fuel) and of each mask, in the engine's units: about 14,000 a millisecond."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        max_items_in_row=5000,  # an object with 1000 optional properties has 4000
        step_max_items=50_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _reason(error: str) -> str:
    return error.split("<state>")[0].strip().replace("\n", " ")[:300]


def _key(spec: Any) -> bytes:
    try:
        text = json.dumps(
            spec, default=lambda value: plain_schema(value) if hasattr(value, "model_json_schema") else 1 / 0
        )
    except (TypeError, ValueError, RecursionError, ArithmeticError) as error:
        raise ParameterError(
            "structured_outputs: it is not plain JSON data, or nested too deeply.", param="structured_outputs"
        ) from error
    if len(text) > 2 * MAX_SPEC_BYTES:
        refuse(f"it is larger than {MAX_SPEC_BYTES >> 10} KiB.")
    return hashlib.sha256(text.encode()).digest()
