"""How much memory one model will take, as numbers that can be sent. Must not know: how they are found
(memory_needs.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of a model in all, of the K/V cache of one of its engines, and of what it does not report itself once it is
    loaded (its processes, the room for a step); 0: nobody knows. `fixed`: its options say how large that cache is."""

    whole: int = 0
    kv: int = 0
    beside: int = 0
    fixed: bool = False
