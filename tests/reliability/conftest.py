"""Long runs, outside `make test`: TOKENMILL_RELIABILITY=1 switches them on, TOKENMILL_RELIABILITY_SECONDS shortens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cpu.server.conftest import launch, tiny

__all__ = ["launch", "tiny"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TOKENMILL_RELIABILITY") != "1":
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="long: set TOKENMILL_RELIABILITY=1"))


@pytest.fixture
def seconds() -> float:
    """How long a sustained part lasts."""
    return float(os.environ.get("TOKENMILL_RELIABILITY_SECONDS", "600"))
