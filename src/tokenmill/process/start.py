"""Starting a worker: a process that runs a function of this package. Owns: how it is started, and its socket.

The main script is not run again, so it needs no `__main__` guard. A fork, which starts at once with everything
imported, is used if no other thread could hold a lock that the worker needs. Must not know: what workers do.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping

from tokenmill.core.config import calm_threads, environment_with
from tokenmill.process.parent import end_with, starts_last
from tokenmill.process.pipe import Pipe

_WAITING = {"tokenmill-parent", "tokenmill-beat"}
_RUN = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from {module} import run_worker; run_worker()"


def start_process(
    module: str, name: str, files: Iterable[int] = (), environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Pipe]:
    """Start `module`.run_worker(), which finds its end by `own_end`; it inherits `files` and has `environment`, too."""
    calm_threads()
    ours, theirs = socket.socketpair()
    facts = {"socket": theirs.fileno(), "parent": os.getpid(), "lasting": starts_last(), "name": name}
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN.format(module=module), json.dumps(sys.path), json.dumps(facts)],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *files),
            env=environment_with(environment or {}),
            process_group=0,  # Ctrl-C is the parent's to handle; it may want to go on
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, Pipe(ours, greedy=True)


def own_end() -> Pipe:
    """By a worker, first of all: it ends with its parent, and this is its end of the socket."""
    facts = json.loads(sys.argv[2])
    end_with(facts["parent"], facts["lasting"])
    return Pipe(socket.socket(fileno=facts["socket"]))


class Forked:
    """A fork of this process, as much of it as of subprocess.Popen as its callers need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """How it has ended; None: it has not."""
        return self._ask(os.WNOHANG)

    def wait(self) -> int | None:
        """How it ends."""
        return self._ask(0)

    def kill(self) -> None:
        """End it."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _ask(self, how: int) -> int | None:
        if self.returncode is None:
            try:
                done, status = os.waitpid(self.pid, how)
            except ChildProcessError:  # somebody else has waited for it
                self.returncode = -1
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode


def may_fork() -> bool:
    """Could no other thread hold what a fork needs? Those of ours that only wait do not; one that imports does."""
    others = {thread.name for thread in threading.enumerate() if thread is not threading.current_thread()}
    return hasattr(os, "fork") and others <= _WAITING


def fork_process(main: Callable[[Pipe], None]) -> tuple[Forked, Pipe]:
    """Run this in a fork, which leads a group of its own and ends with this process; nothing of ours is cleaned up in
    it. Only where `may_fork`."""
    ours, theirs = socket.socketpair()
    parent, lasting = os.getpid(), starts_last()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads that libraries have, and a fork does not need
        pid = os.fork()
    if not pid:
        try:
            gc.freeze()
            os.setpgid(0, 0)
            ours.close()
            end_with(parent, lasting)
            main(Pipe(theirs))
        finally:
            os._exit(1)
    theirs.close()
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # whoever comes first
    return Forked(pid), Pipe(ours, greedy=True)
