"""More bits where they matter. Owns: dividing a budget of bits by each weight's loss. Must not know: files, methods."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

LEAST, MOST = 2, 8


def share_bits(lost: Mapping[tuple[str, int], float], sizes: Mapping[str, int], mean: float) -> dict[str, int]:
    """Choose bits for each weight, `mean` on average over all numbers. lost[name, bits]: the loss of rounding a weight
    to that many bits.

    All weights start with the largest whole number of bits that all can have. The next bit goes where it saves most per
    number, as long as it fits. (No weight gets fewer bits: later layers make the loss of two bits larger than the
    layer's own outputs show.)"""
    least = max(LEAST, int(mean))
    bits = dict.fromkeys(sizes, least)
    room = (mean - least) * sum(sizes.values())
    gains: list[tuple[float, str]] = []

    def offer(name: str) -> None:
        at = bits[name]
        if at < MOST:
            heapq.heappush(gains, (-(lost[name, at] - lost[name, at + 1]) / sizes[name], name))

    for name in sorted(sizes):
        offer(name)
    while gains:
        _, name = heapq.heappop(gains)
        if sizes[name] <= room:
            room -= sizes[name]
            bits[name] += 1
            offer(name)
    return bits
