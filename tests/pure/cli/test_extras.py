"""The commands that findings and errors show for optional packages."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tokenmill.core.extras import pip_install


def test_the_command_reaches_this_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`python` alone is another one where the environment is not activated: it knows nothing of this package."""
    python = Path(sys.executable)
    monkeypatch.setenv("PATH", str(python.parent))
    assert pip_install("chat") == f"{python.name} -m pip install 'tokenmill[chat]'"
    other = tmp_path / python.name
    other.symlink_to(os.path.realpath(python))  # the same binary is another environment's
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pip_install("chat") == f"{python} -m pip install 'tokenmill[chat]'"
