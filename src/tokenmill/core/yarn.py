"""By how much YaRN lets attention grow. Knows nothing of configs or files."""

from __future__ import annotations

import math


def yarn_gain(factor: float, mscale: float = 1.0) -> float:
    """What queries and keys are multiplied with, for a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
