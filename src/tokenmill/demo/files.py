"""Where the demo model's files are."""

from __future__ import annotations

import pathlib


def demo_dir(part: str = "main") -> pathlib.Path:
    """The folder of one part of the demo family: main, draft, ..."""
    return pathlib.Path(__file__).parent / part
