"""Starting a worker: a process that runs a function of this package. Owns: how it is started, and its socket.

The main script is not run again, so it needs no `__main__` guard. A fork, which starts at once with everything
imported, is used if no other thread could hold a lock that the worker needs. Must not know: what workers do.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
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
PYTHON = (sys.executable, "-P")
"""A Python that imports nothing from the folder in which it is started: there may be a types.py of somebody's own."""
_RUN = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from {start} import begin; begin({module!r})"


def start_process(
    module: str, name: str, files: Iterable[int] = (), environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Pipe]:
    """Start `module`.run_worker(), which gets its end of the pipe by `own_end`. It inherits `files`, and `environment`
    is added to its variables."""
    calm_threads()
    ours, theirs = socket.socketpair()
    facts = {"socket": theirs.fileno(), "parent": os.getpid(), "lasting": starts_last(), "name": name}
    try:
        process = subprocess.Popen(
            [*PYTHON, "-c", _RUN.format(start=__name__, module=module), json.dumps(sys.path), json.dumps(facts)],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *files),
            env=environment_with(environment or {}),
            process_group=0,  # only the parent handles Ctrl-C; it may want to continue
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, Pipe(ours, greedy=True)


def begin(module: str) -> None:
    """What a worker's process runs. It ends with its parent from here on, also while it imports for seconds."""
    facts = json.loads(sys.argv[2])
    end_with(facts["parent"], facts["lasting"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    importlib.import_module(module).run_worker()


def own_end() -> Pipe:
    """A worker's end of the socket."""
    return Pipe(socket.socket(fileno=json.loads(sys.argv[2])["socket"]))


class Forked:
    """A fork of this process, with the part of subprocess.Popen's interface that its callers need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status; None: it still runs."""
        return self._ask(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait for its end; -> its exit status."""
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
            except ChildProcessError:  # other code has waited for it
                self.returncode = -1
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode


def may_fork() -> bool:
    """Is it certain that no other thread holds a lock that a fork needs? Our threads that only wait hold none."""
    others = {thread.name for thread in threading.enumerate() if thread is not threading.current_thread()}
    return hasattr(os, "fork") and others <= _WAITING


def fork_process(main: Callable[[Pipe], None]) -> tuple[Forked, Pipe]:
    """Run `main` in a fork, which has a process group of its own and ends with this process. The fork runs none of this
    process's clean-up. Call it only if `may_fork`."""
    ours, theirs = socket.socketpair()
    parent, lasting = os.getpid(), starts_last()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about threads of libraries, which the fork does not need
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
        os.setpgid(pid, pid)  # parent and child both do this; the first one wins
    return Forked(pid), Pipe(ours, greedy=True)
