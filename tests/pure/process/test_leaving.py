"""A process that leaves loses nothing that was printed or registered, and takes nothing apart."""

from __future__ import annotations

import subprocess
import sys

from tokenmill.server.engines import child

LEAVING = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from tokenmill.process.leaving import leave

class Heavy:
    def __del__(self):
        print("taken apart")

def work():
    done.wait()
    print("thread")

kept = Heavy()
done = threading.Event()
pool = ThreadPoolExecutor(2)  # nobody closes it
pool.submit(print, "pooled")
thread = threading.Thread(target=work)
thread.start()
threading.Thread(target=threading.Event().wait, daemon=True).start()  # nobody waits for this one
atexit.register(print, "registered")
print("printed")
done.set()
leave(7)
"""


def test_what_is_to_be_done_is_done_and_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (7, "")
    assert sorted(done.stdout.split()) == ["pooled", "printed", "registered", "thread"]


def test_commands_and_engines_leave_so() -> None:
    script = "import sys; sys.argv = ['tokenmill', '--version']; from tokenmill.cli import main, verbs; "
    seen = "verbs.leave = lambda status: print('leaves with', status); main.main()"
    done = subprocess.run([sys.executable, "-c", script + seen], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "leaves with 0"
    assert child.leave.__module__ == "tokenmill.process.leaving"
