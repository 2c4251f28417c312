"""Trial walks of a new grammar. Owns: refusing a grammar that cannot be walked within the limits, before it is used.

They also warm up the first masks. Must not know: schemas, caches.
"""

from __future__ import annotations

import math
import random
import time

from tokenmill.core.errors import BusyError
from tokenmill.structured.compiled_grammar import Compiled
from tokenmill.structured.constraint import REFUSED, GrammarConstraint
from tokenmill.structured.limits import refuse
from tokenmill.structured.sheltered import FAILED

WALKS = (3, 12, 12)
"""Steps of each walk. The first walk takes the lowest allowed tokens, the others random ones."""
HEAVY_S, LONG_WALK, LONG_S = 0.02, 128, 0.15
"""If the walks take HEAVY_S, one more walk of LONG_WALK steps follows, which ends after LONG_S at the latest."""


def try_out(made: Compiled) -> None:
    """Walk a few times from the start."""
    begun = time.thread_time()
    for i, steps in enumerate(WALKS):
        _walk(GrammarConstraint(made), steps, random.Random(i) if i else None)
    if (now := time.thread_time()) - begun > HEAVY_S:
        _walk(GrammarConstraint(made), LONG_WALK, random.Random(0), now + LONG_S)


def _walk(constraint: GrammarConstraint, steps: int, chance: random.Random | None, until: float = math.inf) -> None:
    for _ in range(steps):
        if constraint.finished() or time.thread_time() > until:
            return
        mask = int.from_bytes(constraint.mask(), "little")
        if not mask:
            if constraint.why == REFUSED:
                raise BusyError(FAILED)
            refuse(f"the grammar engine cannot walk its grammar within a limit ({constraint.why}). Simplify it.")
        low = 0 if chance is None else chance.randrange(mask.bit_length())
        high = mask >> low
        constraint.accept([low + (high & -high).bit_length() - 1])
