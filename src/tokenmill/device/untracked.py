"""Work that torch keeps no history of. Owns: entering its inference mode once, however deep calls lie in each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def untracked(work: Callable[P, T]) -> Callable[P, T]:
    """As torch.inference_mode(), which takes microseconds of every step, but free for whoever is in it already."""

    @wraps(work)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return work(*args, **kwargs)
        with torch.inference_mode():
            return work(*args, **kwargs)

    return call
