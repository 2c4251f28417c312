"""Work during which Python collects no garbage. Owns: which work is under way. Must not know: what the work is."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_at_work = 0
_was_on = True


@contextmanager
def no_collection() -> Iterator[None]:
    """Garbage collection is off until the last caller has left. If it was off before the first entered, it stays
    off."""
    global _at_work, _was_on
    with _lock:
        if not _at_work:
            _was_on = gc.isenabled()
            gc.disable()
        _at_work += 1
    try:
        yield
    finally:
        with _lock:
            _at_work -= 1
            if not _at_work and _was_on:
                gc.enable()
