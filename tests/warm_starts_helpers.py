"""Workers of engines that begin as forks of one process, which has imported what they need: for each, that is two to
three seconds of a core. They are told the same and run the same as others. A folder's conftest imports the fixture; a
file whose subject is how processes start has a fixture of that name of its own."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill.core.config import LINKS
from tokenmill.core.environment import PREFIX
from tokenmill.process import start

ADOPTS = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2): whose grandchildren lose their parent gets them."""
FREE = {"PYTEST_CURRENT_TEST", *LINKS}
"""Variables that nothing on a CPU reads while it is imported. Our own are read when they are needed, too."""
MOST = 64
"""Files that a worker inherits."""
_RUN = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from {0} import serve; serve(int(sys.argv[2]))"
_homes: list[Home] = []
"""The last two, each for an environment. Some tests change theirs for good."""
_asking = threading.Lock()


class Home:
    """The process whose forks are workers, and what it was told at its start."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.fixed = _fixed(environment)
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [*start.PYTHON, "-c", _RUN.format(__name__), json.dumps(sys.path), str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, process_group=0
            )

    def end(self) -> None:
        """It ends when nobody can ask it any more."""
        self.ours.close()
        self.process.wait()

    def fork(self, told: dict[str, Any]) -> int:
        """A worker that is a child of this process; -> its number."""
        libc = ctypes.CDLL(None)
        libc.prctl(ADOPTS, 1, 0, 0, 0)
        try:
            socket.send_fds(self.ours, [json.dumps(told).encode()], told["files"])
            return int(self.ours.recv(64))
        finally:
            libc.prctl(ADOPTS, 0, 0, 0, 0)


def _fixed(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in FREE and not name.startswith(PREFIX)}


class Adopted(subprocess.Popen):
    """A child that began as another process's fork."""

    def __init__(self, home: Home, args: list[str], **more: Any) -> None:
        self.home = home
        super().__init__(args, **more)

    def _execute_child(
        self, args: Any, executable: Any, before: Any, close: Any, files: Any, cwd: Any, env: Any, *_: Any
    ) -> None:
        told = {"args": args[args.index("-c") :], "environment": env, "folder": os.getcwd(), "parent": os.getpid()}
        self.pid = self.home.fork({**told, "files": [1, 2, *files]})
        self._child_created = True


def _started(args: list[str], **more: Any) -> subprocess.Popen[bytes]:
    with _asking:
        fixed = _fixed(more["env"])
        home = next((home for home in _homes if home.fixed == fixed), None)
        if home is None:
            home = Home(more["env"])
            while len(_homes) > 1:
                _homes.pop(0).end()
            _homes.append(home)
        return Adopted(home, args, **more)


@atexit.register
def _end_all() -> None:
    for home in _homes:
        home.end()


def serve(number: int) -> None:
    """What the process does whose forks are workers."""
    import tokenmill.engine.steps.worker
    import tokenmill.kernels.cpu
    import tokenmill.parallel.shared_memory  # noqa: F401

    asked = socket.socket(fileno=number)
    while True:
        message, files, *_ = socket.recv_fds(asked, 1 << 20, MOST)
        if not message:
            os._exit(0)
        read, write = os.pipe()
        middle = os.fork()
        if not middle:
            pid = os.fork()
            if not pid:
                _work(json.loads(message), files, (number, read, write))
            os.write(write, str(pid).encode())
            os._exit(0)
        pid = os.read(read, 64)
        os.waitpid(middle, 0)  # now the worker has another parent
        for file in (read, write, *files):
            os.close(file)
        asked.send(pid)


def _work(told: dict[str, Any], files: list[int], unknown: tuple[int, ...]) -> None:
    """What a started Python does."""
    above = max(told["files"]) + 1
    given = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in files]
    for file in (*unknown, *files):
        os.close(file)
    for file, number in zip(given, told["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environment"])
    os.setpgid(0, 0)
    until = time.monotonic() + 60
    while os.getppid() != told["parent"] and time.monotonic() < until:
        time.sleep(0.001)
    sys.argv[:] = [told["args"][0], *told["args"][2:]]
    try:
        exec(told["args"][1], {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@pytest.fixture(autouse=True)
def warm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forks of a process that has imported everything."""
    if sys.platform == "linux":
        monkeypatch.setattr(start, "subprocess", SimpleNamespace(Popen=_started, DEVNULL=subprocess.DEVNULL))
