"""Starting a worker: a process that runs a function of this package. Owns: how it is started, and its socket.

The main script is not run again, so that it needs no guard around what it does. Must not know: what workers do.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping

from tokenmill.core.config import calm_threads, environment_with
from tokenmill.process.parent import starts_last
from tokenmill.process.pipe import Pipe

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
    from tokenmill.process.parent import end_with

    facts = json.loads(sys.argv[2])
    end_with(facts["parent"], facts["lasting"])
    return Pipe(socket.socket(fileno=facts["socket"]))
