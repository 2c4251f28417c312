"""The tiny model that these tests share with the engine's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "engine"), str(HERE.parents[1] / "pure" / "structured")]

from tokenmill.testing.tiny import make_tiny  # noqa: E402


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Qwen3 whose tokens are mostly single bytes."""
    return make_tiny(tmp_path_factory.mktemp("tiny"), hidden=32, heads=4, kv_heads=2, layers=1)
