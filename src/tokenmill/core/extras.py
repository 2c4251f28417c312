"""Optional packages. Owns: the command that installs an extra. Must not know: what extras are for."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def pip_install(extra: str) -> str:
    """The command that installs an extra beside this Python, wherever it is typed: without a path only if the shell
    finds this Python by its name."""
    name = Path(sys.executable).name
    python = name if shutil.which(name) == sys.executable else shlex.quote(sys.executable)
    return f"{python} -m pip install 'tokenmill[{extra}]'"
