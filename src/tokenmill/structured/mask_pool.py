"""Masks of many sequences at once. Owns: the threads that compute them, and one buffer per call.

The masks of a step are independent, and the grammar engine computes them without the interpreter's lock, so they share
the cores; on a GPU the forward pass runs meanwhile. `fill` skips sequences with forced text or an error; their `mask`
computes its own. Must not know: grammars, requests, steps.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from llguidance import LLExecutor

from tokenmill.core.constraint import Constraint
from tokenmill.core.cores import usable_cores
from tokenmill.structured.constraint import GrammarConstraint
from tokenmill.structured.sheltered import Sheltered
from tokenmill.structured.thinking import ThinkingBudget

FEWEST = 8
"""Fewer masks than this are computed faster one after the other than in threads."""
SMALL = 24_000
"""Masks of fewer tokens take a few microseconds: waking threads takes longer."""
MOST_THREADS = 4
"""More threads take longer to wake than they help: most masks take some ten microseconds."""


class MaskPool:
    """Threads for masks, started when they are first needed."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None
        self._starting = threading.Lock()

    def fill(self, constraints: Sequence[Constraint]) -> None:
        """Compute the next masks of these constraints together; their `mask` returns them."""
        grammars = (g for c in constraints if (g := _grammar(c)) is not None)
        first = next(grammars, None)
        if first is None or len(constraints) < FEWEST or first.vocabulary.size < SMALL:
            return
        wanted = [g for g in (first, *grammars) if _wants(g)]
        if len(wanted) < FEWEST:
            return
        size = -(-wanted[0].vocabulary.trie.vocab_size // 32) * 4
        buffer = bytearray(size * len(wanted))
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        pairs = [(g.matcher, i) for i, g in enumerate(wanted)]
        self._threads().unsafe_compute_mask_ptr(pairs, address, size, len(wanted))
        found = memoryview(buffer)
        for i, grammar in enumerate(wanted):
            grammar.give_mask(bytes(found[i * size : i * size + grammar.vocabulary.mask_bytes]))

    def _threads(self) -> LLExecutor:
        with self._starting:
            if self._executor is None:
                self._executor = LLExecutor(min(MOST_THREADS, usable_cores()))
            return self._executor


def _wants(grammar: GrammarConstraint) -> bool:
    try:
        return grammar.wants_mask()
    except Exception:  # `mask` will raise it again, and there it ends one sequence only
        return False


def _grammar(constraint: Constraint) -> GrammarConstraint | None:
    """The grammar whose mask a constraint would give next; None: it needs none, or looking it up failed."""
    if isinstance(constraint, Sheltered):
        if constraint.broken:
            return None
        return _grammar(constraint.inner)
    if isinstance(constraint, ThinkingBudget):
        return None if constraint.pending or constraint.inner is None else _grammar(constraint.inner)
    return constraint if isinstance(constraint, GrammarConstraint) else None
