"""Products of parameters, thinned: `make test` takes every value of every parameter, `make test-nightly` every product.

For parameters that do not meet in the code; of those that do, a test names the pairs itself.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any

WHOLE = os.environ.get("TOKENMILL_FAMILIES") == "1"


def covering(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows for parametrize: each value at least once, neighbours of one axis with different values of the others."""
    values = [list(axis) for axis in axes]
    if WHOLE:
        return list(itertools.product(*values))
    return [tuple(each[i % len(each)] for each in values) for i in range(max(map(len, values)))]
