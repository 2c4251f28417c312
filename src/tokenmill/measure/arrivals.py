"""When requests come. Owns: arrival processes, drawn from a seed. Must not know: requests, servers."""

from __future__ import annotations

import math
import random

from tokenmill.core.errors import ParameterError

PATTERNS = ("constant", "poisson", "bursty")
BURSTINESS = 0.25
"""The shape of the gamma distribution of bursty gaps. Their squared coefficient of variation is 1 / shape."""


def arrival_times(pattern: str, rate: float, count: int, *, seed: int = 0, shape: float = BURSTINESS) -> list[float]:
    """Seconds at which `count` requests come, `rate` per second on average; the first comes at 0.

    constant: equal gaps. poisson: exponential gaps (many independent users). bursty: gamma gaps, long pauses between
    crowds; the smaller `shape`, the burstier (1 is Poisson). An infinite rate: all at once.
    """
    if rate <= 0 or shape <= 0:
        raise ParameterError(f"The rate and the shape of arrivals must be positive, got {rate} and {shape}.")
    if math.isinf(rate):
        return [0.0] * count
    source = random.Random(seed)
    match pattern:
        case "constant":
            gaps = [1.0 / rate] * (count - 1)
        case "poisson":
            gaps = [source.expovariate(rate) for _ in range(count - 1)]
        case "bursty":
            gaps = [source.gammavariate(shape, 1.0 / (rate * shape)) for _ in range(count - 1)]
        case _:
            raise ParameterError(f"Unknown arrivals {pattern!r}; known: {', '.join(PATTERNS)}.")
    times, now = [0.0][:count], 0.0
    for gap in gaps:
        now += gap
        times.append(now)
    return times
