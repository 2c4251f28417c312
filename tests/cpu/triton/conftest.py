"""Triton's interpreter for this folder: set before any kernel module is imported. Without Triton the folder is left
out, and the report's head says so."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from tests.cpu.triton.quick_interpreter import quicken

HAS_TRITON = find_spec("triton") is not None
if not HAS_TRITON:
    collect_ignore_glob = ["test_*.py"]
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_report_header() -> str | None:
    """What of this folder is not run."""
    return None if HAS_TRITON else "Triton is not installed: tests/cpu/triton is left out"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With a GPU the same kernels run there (tests/gpu); one process cannot have both."""
    if torch.cuda.is_available():
        for item in items:
            if "cpu/triton" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="a GPU is here: tests/gpu runs these kernels on it"))


def _repair_interpreter() -> None:
    """Triton 3.6's interpreter makes loop bounds with int(array), which numpy 2.4 refuses for arrays of shape [1]."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patched


def _round_as_gpus_do() -> None:
    """Triton 3.6's interpreter loses what rounding carries into an odd exponent (127.9 becomes 64 in float8), and cuts
    bfloat16 off. GPUs round to the nearest, and float8 ends at its largest number."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    types = {
        "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
        "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2,
    }  # fmt: skip

    def convert(numbers: np.ndarray[Any, Any], source: Any, target: Any, rounding_mode: object) -> object:
        found = torch.from_numpy(np.ascontiguousarray(numbers)).view(types[source.name]).float()
        if target.primitive_bitwidth == 8:
            most = torch.finfo(types[target.name]).max
            found = found.clamp(-most, most)
        whole = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}[target.primitive_bitwidth]
        return found.to(types[target.name]).view(whole).numpy().reshape(numbers.shape)

    interpreter._convert_float = convert


if HAS_TRITON and not torch.cuda.is_available():
    _repair_interpreter()
    _round_as_gpus_do()
    quicken()
