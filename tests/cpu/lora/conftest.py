"""A model with its adapters that these tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.testing.tiny import make_tiny


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama whose parts are as wide as a tile and narrower."""
    return make_tiny(tmp_path_factory.mktemp("base"), hidden=128, heads=4, kv_heads=2, architecture="llama")


@pytest.fixture(scope="session")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Eight adapters of it: ranks 1 to 16, of few and of all matrices, one with DoRA."""
    from tests.cpu.lora.making import ALL, write_adapter

    root = tmp_path_factory.mktemp("adapters")
    ranks = (1, 4, 8, 16, 3, 2, 5, 16)
    some = {0: ("q_proj",), 1: ("q_proj", "v_proj")}
    return {
        f"a{i}": write_adapter(root / f"a{i}", base, rank=rank, modules=some.get(i, ALL), seed=i, dora=i == 7)
        for i, rank in enumerate(ranks)
    }
