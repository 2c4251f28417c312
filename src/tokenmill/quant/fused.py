"""Matrices that engines multiply as one. Owns: which belong together, by their names.

Other engines join them while they load. They need the same bits for all of them, and for NVFP4 the same scale of the
whole matrix. Must not know: methods, files.
"""

from __future__ import annotations

from collections.abc import Iterable

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"))


def joined(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """For each weight: all weights that are multiplied with it as one, itself included, in a fixed order."""
    every, found = set(names), {}
    for name in sorted(every):
        stem, _, last = name.removesuffix(".weight").rpartition(".")
        group = next((group for group in _TOGETHER if last in group), (last,))
        full = (f"{stem}.{part}.weight" if stem else f"{part}.weight" for part in group)
        found[name] = tuple(each for each in full if each in every) or (name,)
    return found
