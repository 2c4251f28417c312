"""From a request's `structured_outputs` to a Constraint. Owns: which kinds there are, the cache of compiled grammars,
and the budgets of compiling and of walking.

What is not enforced is refused, never ignored. `prepare` compiles, which may take tenths of a second, in one thread of
its own; after it `constraint` only looks up and copies. Must not know: schemas' meaning, requests' other fields.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from tokenmill.core.errors import ParameterError
from tokenmill.structured import grammar
from tokenmill.structured.constraint import GrammarConstraint
from tokenmill.structured.limits import MAX_SPEC_BYTES, refuse
from tokenmill.structured.vocabulary import Vocabulary

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
SWITCHES = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "disable_fallback")
CACHE_BYTES = 128 << 20
GRAMMAR_BYTES = 160 << 10
"""What a compiled grammar with some use takes at least, measured; generous."""
TEXT_FACTOR = 24
"""Bytes of a compiled grammar per byte of its text, measured; generous."""
MAX_GRAMMAR_BYTES = 1 << 20
PROBE_STEPS = 3


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
        self.bytes = 0

    def prepare(self, spec: Any) -> Future[None]:
        """Compile in the background; the future raises what is wrong with `spec`."""
        with self._lock:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "tokenmill-grammar")
        return self._worker.submit(self._prepare, spec)

    def _prepare(self, spec: Any) -> None:
        self._ready(spec)

    def constraint(self, spec: Any) -> GrammarConstraint:
        """The constraint at its start, compiled now if it is not known."""
        return self._ready(spec).fork()

    def _ready(self, spec: Any) -> GrammarConstraint:
        key = _key(spec)
        found = self._find(key)
        if found is None:
            with self._building:  # several requests with one new schema compile it once
                found = self._find(key)
                if found is None:
                    found = self._build(spec, key)
        return found

    def _find(self, key: bytes) -> GrammarConstraint | None:
        with self._lock:
            entry = self._cache.get(key)
            if entry is None:
                return None
            self._cache.move_to_end(key)
            return entry[0]

    def _build(self, spec: dict[str, Any], key: bytes) -> GrammarConstraint:
        text = to_grammar(spec)
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        made = GrammarConstraint(compile_grammar(text, self._vocabulary), self._vocabulary)
        _probe(made.fork())
        size = GRAMMAR_BYTES + TEXT_FACTOR * len(text)
        with self._lock:
            self._cache[key] = made, size
            self.bytes += size
            while self.bytes > CACHE_BYTES and len(self._cache) > 1:
                self.bytes -= self._cache.popitem(last=False)[1][1]
        return made


def to_grammar(spec: Any) -> str:
    """The grammar engine's text for {"json": ...}, {"regex": ...}, ...; refuses all that it does not enforce."""
    if not isinstance(spec, dict):
        refuse("it must be an object, such as {'json': schema}.")
    given = {k: v for k, v in spec.items() if v is not None and v is not False and not k.startswith("_")}
    unknown = sorted(set(given) - {*KINDS, *SWITCHES})
    kinds = [k for k in KINDS if k in given]
    if unknown or len(kinds) != 1:
        what = f"{', '.join(map(repr, unknown))} is unknown" if unknown else f"{len(kinds)} kinds were given"
        refuse(f"{what}; give one of {', '.join(KINDS)}.")
    for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
        if given.get(name, True) is not True:
            refuse(f"{name} must be true or false.")
    kind = kinds[0]
    switches = [s for s in SWITCHES[:3] if s in given]
    if switches and kind not in ("json", "json_object", "structural_tag"):
        refuse(f"{switches[0]} applies to JSON only, not to {kind}.")
    style = grammar.json_style(
        "disable_any_whitespace" in given, given.get("whitespace_pattern"), "disable_additional_properties" in given
    )
    value = given[kind]
    if kind == "json":
        return grammar.from_schema(plain_schema(value), style)
    if kind == "json_object":
        return grammar.from_schema({"type": "object"}, style)
    if kind == "structural_tag":
        return grammar.from_tags(value, style)
    return {"regex": grammar.from_regex, "choice": grammar.from_choice, "grammar": grammar.from_grammar}[kind](value)


def plain_schema(value: Any) -> Any:
    """A schema as JSON text or data; pydantic models give theirs."""
    made = getattr(value, "model_json_schema", None)
    return made() if made is not None else value


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
