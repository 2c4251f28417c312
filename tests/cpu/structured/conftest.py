"""The tiny model that these tests share with the engine's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.testing.tiny import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Qwen3 whose tokens are mostly single bytes."""
    return make_tiny(tmp_path_factory.mktemp("tiny"), hidden=32, heads=4, kv_heads=2, layers=1)
