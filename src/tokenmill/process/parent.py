"""A child that does not outlive its parent. Owns: how it learns that the parent is gone.

Where the system can kill children together with their parent, even stopped ones and those that hang in native code end.
On other systems a thread waits for the parent's end. Must not know: what the child does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

LOOK_S = 1.0
"""How often a child checks for its parent if no event tells it."""
_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2): sent when the thread ends that started this process."""


def starts_last() -> bool:
    """Does this thread live as long as its process, or as what it works for (our own threads do)? The system signals
    the end of the thread that started a child, so only children of such a thread may rely on it."""
    thread = threading.current_thread()
    return thread is threading.main_thread() or thread.name.startswith("tokenmill-")


def die_with(parent: int) -> None:
    """From here on the system kills this process, even if it is stopped, when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before this call
            os._exit(1)


def end_with(parent: int, lasting: bool) -> None:
    """From here on this process, started by `parent`, ends when the parent does. lasting: as in `end_with_parent`."""
    if lasting:
        die_with(parent)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, name="tokenmill-parent", daemon=True).start()


def end_with_parent(lasting: bool) -> None:
    """From here on this process, started by multiprocessing, ends when its parent does. lasting: `starts_last` of the
    thread that started it."""
    import multiprocessing  # helpers do without it

    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if lasting and parent.pid is not None:
        die_with(parent.pid)

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="tokenmill-parent", daemon=True).start()
