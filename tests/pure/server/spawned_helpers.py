"""What processes of test_server_ends.py run. They import this file alone."""

from __future__ import annotations

import signal
from typing import Any


def never(*_: Any) -> Any:
    """An engine that loads for ever, and a count that never comes."""
    signal.pause()


def broken(answer: Any, *_: Any) -> None:
    """A count that fails."""
    answer.send("ValueError: broken")
