"""The tiny model that tests of quantising share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.testing.tiny import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nothing changes it: what is made of it has a folder of its own."""
    return make_tiny(tmp_path_factory.mktemp("tiny"), hidden=64)
