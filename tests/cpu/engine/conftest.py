"""Models that engine tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kept_helpers import kept_helpers

from tokenmill.testing.tiny import make_tiny

__all__ = ["kept_helpers"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 with tokenizer and chat template."""
    return make_tiny(tmp_path_factory.mktemp("tiny"), hidden=32, heads=4, kv_heads=2)


@pytest.fixture
def opened(tiny):
    """A function that opens engines and closes them afterwards: opened(folder=tiny, **options)."""
    from tests.cpu.engine.engines import open_llm

    llms = []

    def make(folder=tiny, **options):
        llms.append(open_llm(folder, **options))
        return llms[-1]

    yield make
    for llm in llms:
        llm.close()
