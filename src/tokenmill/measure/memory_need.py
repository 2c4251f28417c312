"""How much memory one model will take, as numbers that can be sent. Must not know: how they are found
(memory_needs.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Need:
    """The bytes of a model in all, of the K/V cache of one of its engines, and of what it does not report itself after
    its load (its processes, the room for a step). 0: not known. `fixed`: its options set the size of the cache."""

    whole: int = 0
    kv: int = 0
    beside: int = 0
    fixed: bool = False
