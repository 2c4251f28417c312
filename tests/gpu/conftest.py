"""Tests on an NVIDIA GPU, with fresh random inputs each time; without one they are skipped, and say so."""

from __future__ import annotations

import pathlib

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(pathlib.Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here: Triton kernels ran in the interpreter"))


@pytest.fixture(autouse=True)
def fresh_inputs() -> None:
    """Other numbers each time; the seed is shown when a test fails."""
    seed = torch.seed() % 2**32
    print("seed", seed)
    torch.manual_seed(seed)
