"""From a request's `structured_outputs` to a Constraint. Owns: the cache of compiled grammars and of refusals, and the
budgets of compiling and of walking.

`prepare` lowers in a process of its own and compiles in one thread (the engine's library releases the interpreter's
lock meanwhile). Afterwards, `constraint` only looks up and copies. Must not know: schemas' meaning, requests' other
fields.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import itertools
import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from tokenmill.core.constraint import Constraint
from tokenmill.core.errors import BusyError, ParameterError, UserError
from tokenmill.core.request import ReasoningSpan
from tokenmill.structured.check import Checker
from tokenmill.structured.compiled_grammar import Compiled
from tokenmill.structured.constraint import SLOW, GrammarConstraint
from tokenmill.structured.helper import LoweringProcess
from tokenmill.structured.limits import MAX_SPEC_BYTES, PARAM, refuse
from tokenmill.structured.lowering import plain_schema
from tokenmill.structured.sheltered import FAILED
from tokenmill.structured.thinking import Border, ThinkingBudget
from tokenmill.structured.trial import try_out
from tokenmill.structured.vocabulary import Vocabulary

log = logging.getLogger("tokenmill.structured")
CACHE_BYTES = 192 << 20
GRAMMAR_BYTES = 256 << 10
"""What a compiled grammar takes in use besides the cost of its text: its sequences add states to the lexer that they
share (measured: 200 KB after a hundred tokens)."""
TEXT_FACTOR = 112
"""Bytes of a compiled JSON grammar per byte of its text, measured on schemas of 1 to 9 KB; regexes and choices take a
tenth."""
NICE = 10
OVERTAKEN_BYTES = 1024
"""Structures that wait are compiled in the order of their time plus a second for each so many bytes: small ones take a
hundredth of the work of large ones, and need not wait for them."""
MOST_REFUSALS = 1024
REFUSED_S = 600.0
"""Refusals are told again without work, but not for good: some depend on how long the work took."""


class Compiler:
    """Compiled grammars over one vocabulary; safe to use from several threads."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], check: float = 0.0) -> None:
        """vocabulary: called once, for the first grammar. check: the share of answers to check once more."""
        self._check, self._made = check, 0
        self._make_vocabulary = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._cache: OrderedDict[bytes, tuple[Compiled, int]] = OrderedDict()
        self._refusals: OrderedDict[bytes, tuple[ParameterError, float]] = OrderedDict()
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._waiting: list[tuple[float, int, Future[None], Any, ReasoningSpan | None]] = []
        self._numbers = itertools.count()
        self._helper = LoweringProcess()
        self.bytes = 0

    def prepare(self, spec: Any, reasoning: ReasoningSpan | None = None) -> Future[None]:
        """Lower in the helper process and compile in a thread. The future raises what is wrong with `spec`."""
        done: Future[None] = Future()
        try:
            written = _written(spec, reasoning)
            found = self._find(_hashed(written))
            if found is not None and found.root is not None:  # it does not wait behind others that compile
                done.set_result(None)
                return done
        except ParameterError as error:
            done.set_exception(error)
            return done
        turn = time.monotonic() + len(written) / OVERTAKEN_BYTES
        with self._lock:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "tokenmill-grammar", _let_others_go_first)
            heapq.heappush(self._waiting, (turn, next(self._numbers), done, spec, reasoning))
        self._worker.submit(self._prepare_next)
        return done

    def _prepare_next(self) -> None:
        with self._lock:
            _, _, done, spec, reasoning = heapq.heappop(self._waiting)
        if not done.set_running_or_notify_cancel():
            return
        try:
            if spec is not None:
                self._ready(spec, reasoning)
        except BaseException as error:  # whoever waits raises it
            done.set_exception(error)
        else:
            done.set_result(None)

    def constraint(self, spec: Any, reasoning: ReasoningSpan | None = None, budget: int | None = None) -> Constraint:
        """The constraint at its start, compiled now if it is not cached. `spec` may be None if there is a budget."""
        inner = None if spec is None else self._begun(self._ready(spec, reasoning))
        if reasoning is not None and budget is not None and budget >= 0:
            return ThinkingBudget(self._border(reasoning), budget, self.vocabulary, inner)
        assert inner is not None, "nothing to hold a sequence to"
        return inner

    def _begun(self, compiled: Compiled) -> GrammarConstraint:
        made = GrammarConstraint(compiled)
        before, self._made = int(self._made * self._check), self._made + 1
        if int(self._made * self._check) > before and (checker := Checker.of(compiled.text)) is not None:
            made.check = partial(_report, checker)
        return made

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
            for _, _, done, _, _ in self._waiting:
                done.cancel()
        self._helper.close()

    def _border(self, reasoning: ReasoningSpan) -> Border:
        number = reasoning.tokens.get(reasoning.close)
        closing = (number,) if number is not None else tuple(self.vocabulary.encode(reasoning.close))
        return Border(reasoning.open.encode(), reasoning.close.encode(), closing)

    def _ready(self, spec: Any, reasoning: ReasoningSpan | None) -> Compiled:
        key = _hashed(_written(spec, reasoning))
        found = self._find(key)
        if found is None:
            with self._building:  # several requests with one new schema compile it once
                found = self._find(key)
                if found is None:
                    found = self._made_or_refused(spec, reasoning, key)
        found.share()  # replaces a dead lexer here, and not in the engine's thread
        return found

    def _made_or_refused(self, spec: Any, reasoning: ReasoningSpan | None, key: bytes) -> Compiled:
        try:
            return self._built(self._helper.lower(spec, _plain(reasoning)), key)
        except ParameterError as error:
            with self._lock:
                self._note_refusal(key, error)
            raise

    def _note_refusal(self, key: bytes, error: ParameterError) -> None:
        self._refusals[key] = ParameterError(str(error), param=error.param), time.monotonic() + REFUSED_S
        while len(self._refusals) > MOST_REFUSALS:
            self._refusals.popitem(last=False)

    def _find(self, key: bytes) -> Compiled | None:
        """What is known of this structure: its grammar, nothing, or, as an error, that it was refused."""
        with self._lock:
            if (entry := self._cache.get(key)) is not None and entry[0].slow:
                self.bytes -= self._cache.pop(key)[1]
                self._note_refusal(key, ParameterError(f"{PARAM}: {SLOW}. Simplify it.", param=PARAM))
            refused = self._refusals.get(key)
            if refused is not None and refused[1] > time.monotonic():
                raise ParameterError(str(refused[0]), param=refused[0].param)
            self._refusals.pop(key, None)
            if entry is None:
                return None
            self._cache.move_to_end(key)
            return entry[0]

    def _built(self, text: str, key: bytes) -> Compiled:
        """Compile a new grammar. An error that only our own code can have caused does not blame the request."""
        try:
            return self._build(text, key)
        except UserError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            log.exception("a grammar could not be compiled")
            raise BusyError(FAILED) from None

    def _build(self, text: str, key: bytes) -> Compiled:
        made = Compiled(text, self.vocabulary)
        try_out(made)
        size = GRAMMAR_BYTES + TEXT_FACTOR * len(text)
        with self._lock:
            self._cache[key] = made, size
            self.bytes += size
            while self.bytes > CACHE_BYTES and len(self._cache) > 1:
                self.bytes -= self._cache.popitem(last=False)[1][1]
        return made


def _report(checker: Checker, answer: bytes) -> None:
    misfit = checker.misfit(answer)
    if misfit is not None:
        log.error("a finished answer does not fit its schema: %s", misfit)


def _let_others_go_first() -> None:
    """Lower the priority of this thread, so that the engine's does not wait for it."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _plain(reasoning: ReasoningSpan | None) -> Any:
    return None if reasoning is None else msgspec.to_builtins(reasoning)


def _hashed(written: bytes) -> bytes:
    return hashlib.sha256(written).digest()


def _written(spec: Any, reasoning: ReasoningSpan | None) -> bytes:
    try:
        text = json.dumps(
            [spec, _plain(reasoning)],
            ensure_ascii=False,
            default=lambda value: plain_schema(value) if hasattr(value, "model_json_schema") else 1 / 0,
        )
    except (TypeError, ValueError, RecursionError, ArithmeticError) as error:
        raise ParameterError(
            "structured_outputs: it is not plain JSON data, or nested too deeply.", param="structured_outputs"
        ) from error
    if len(text) > 2 * MAX_SPEC_BYTES:
        refuse(f"it is larger than {MAX_SPEC_BYTES >> 10} KiB.")
    try:
        return text.encode()
    except UnicodeEncodeError:
        refuse("it holds half of a surrogate pair, which is not a character.")
