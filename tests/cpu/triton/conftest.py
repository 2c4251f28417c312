"""Triton's interpreter for this folder: set before any kernel module is imported."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "kernels"))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random weights every time: what is compared within a tolerance holds or does not."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With a GPU the same kernels run there (tests/gpu); one process cannot have both."""
    if torch.cuda.is_available():
        for item in items:
            if "cpu/triton" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="a GPU is here: tests/gpu runs these kernels on it"))


def _repair_interpreter() -> None:
    """Triton 3.6's interpreter makes loop bounds with int(array), which numpy 2.4 refuses for arrays of shape [1]."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patched


if not torch.cuda.is_available():
    _repair_interpreter()
