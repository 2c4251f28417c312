"""CPU time that something takes, for promises made in it: other work on the machine does not count, and neither does
what the collector does here about things that other tests have left."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Spent:
    """`seconds`, once it is over."""

    seconds: float = 0.0


@contextlib.contextmanager
def cpu_time() -> Iterator[Spent]:
    """Of this process, of all its threads."""
    spent = Spent()
    gc.disable()
    began = time.process_time()
    try:
        yield spent
    finally:
        spent.seconds = time.process_time() - began
        gc.enable()
