"""Twins. Owns: the second half of a pair of cases, kept until the next draw of its skill. Knows no task.

What a pair differs in is what decides its answers: the same order is refused without its tool and called with it.
"""

from __future__ import annotations

import random
from weakref import WeakKeyDictionary

from render import Case

_KEPT: WeakKeyDictionary[random.Random, dict[str, list[Case]]] = WeakKeyDictionary()


def keep(rng: random.Random, skill: str, case: Case) -> None:
    """Hold the other half of a pair back."""
    _KEPT.setdefault(rng, {}).setdefault(skill, []).append(case)


def kept(rng: random.Random, skill: str) -> Case | None:
    """The half that waits, if one does; it is given once."""
    waiting = _KEPT.get(rng, {}).get(skill)
    return waiting.pop() if waiting else None
