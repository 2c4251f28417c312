"""How a process ends once its work is done. Owns: losing nothing, and not waiting for the interpreter's own shutdown.

A normal exit destroys torch's modules one by one, which takes more than a second; the system frees memory at once.
Must not know: what the work was.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """End this process. First wait for its non-daemon threads (pools that were not closed are told to end), then run
    the registered exit functions, then flush what was printed."""
    threading._shutdown()  # type: ignore[attr-defined]  # the interpreter's own first deed
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    os._exit(status)
