"""Kernels stay inside the memory of their tensors, in engines that draft as they do on a GPU, too."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from tests.cpu.triton.bounds import Bounds
from triton.runtime.errors import InterpreterError

from tokenmill.testing.tiny import make_tiny

REPO = pathlib.Path(__file__).parents[3]


@triton.jit
def _copy_kernel(x_ptr, out_ptr, count, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < count), mask=i < count)


def test_what_lies_behind_a_tensor_is_seen() -> None:
    x = torch.arange(8.0)
    with Bounds().watching() as bounds:
        _copy_kernel[(1,)](x, torch.empty(8), 8, N=16)
        for given, out in ((x[:4].clone(), torch.empty(8)), (x, torch.empty(4))):
            with pytest.raises(InterpreterError, match="0 bytes behind"):
                _copy_kernel[(1,)](given, out, 8, N=16)
        assert torch.empty(4, dtype=torch.int32).min() == 2**31 - 1, "nor does a table begin with zeros"
    assert bounds.launches == {"_copy_kernel": 3}
    assert not torch.are_deterministic_algorithms_enabled()


@triton.jit
def _whole_kernel(x_ptr, out_ptr, other, OPERATION: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 4))
    found = x + other if OPERATION == "add" else x - other if OPERATION == "sub" else x * other
    tl.store(out_ptr + tl.arange(0, 4), found)


@pytest.mark.parametrize(
    ("dtype", "operation", "fits", "wraps"),
    [
        (torch.int32, "add", (2**31 - 1, 0), (2**31 - 1, 1)),
        (torch.int32, "sub", (1 - 2**31, 1), (-(2**31), 1)),
        (torch.int32, "mul", (2**15, 2**15), (2**16, 2**15)),
        (torch.uint32, "sub", (5, 5), (5, 6)),
        (torch.int64, "mul", (2**40, 2**20), None),
    ],
)
def test_integers_that_wrap_are_seen(dtype, operation, fits, wraps) -> None:
    """Only where accesses are watched: a wrapped index is an access at the wrong place."""
    out = torch.empty(4, dtype=dtype)
    with Bounds().watching():
        _whole_kernel[(1,)](torch.full((4,), fits[0], dtype=dtype), out, fits[1], operation)
        assert out[0] == {"add": fits[0] + fits[1], "sub": fits[0] - fits[1], "mul": fits[0] * fits[1]}[operation]
        if wraps:
            with pytest.raises(InterpreterError, match=f"overflow detected for operation {operation}"):
                _whole_kernel[(1,)](torch.full((4,), wraps[0], dtype=dtype), out, wraps[1], operation)


def watched(folder: pathlib.Path, model: pathlib.Path, method: str = "draft_model", **options: Any) -> dict[str, Any]:
    """What an engine says that is watched in a process of its own."""
    spoken = {"method": method, "model": str(model), "num_speculative_tokens": 3}
    run = subprocess.run(
        [sys.executable, "-m", "tests.cpu.triton.watched_engine", str(folder),
         json.dumps({"speculative_config": spoken, **options})],
        cwd=REPO, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_a_drafting_model_reads_nothing_beside_its_tables(tmp_path: pathlib.Path) -> None:
    """Prompts that are followed while loading, of more than a block; a row that ends where the longest may."""
    tiny = make_tiny(tmp_path / "tiny", hidden=16, heads=2, kv_heads=1, layers=1)
    found = watched(
        tiny, tiny, max_num_seqs=1, max_model_len=8, block_size=4, enforce_eager=True, rows=1, tokens=3, lengths=[5]
    )
    assert found["launches"]["_prefill_kernel"] > 3 and found["accepted"] == found["drafted"] > 0


SHORT = {"max_num_seqs": 7, "max_model_len": 24, "block_size": 8, "rows": 5, "tokens": 5, "lengths": [1, 19, 9]}
LONG: list[tuple[str, dict[str, Any]]] = [
    ("self", {}),
    ("self", {"deterministic": True, "max_num_batched_tokens": 8}),
    ("self", {"kv_cache_dtype": "int8"}),
    ("self", {"kv_cache_dtype": "int4"}),
    ("self", {"kv_cache_dtype": "int8", "kv_cache_group": 4}),
    ("other", {"enforce_eager": True, "num_gpu_blocks_override": 12}),
    ("medusa", {}),
    ("eagle3", {}),
    ("eagle", {"deterministic": True}),
]


@pytest.mark.skipif("TOKENMILL_RELIABILITY" not in os.environ, reason="minutes")
@pytest.mark.parametrize("name, options", LONG)
def test_every_drafter_in_its_bounds(name: str, options: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """More rows than a rung, in steps that are recorded."""
    from tests.cpu.engine.drafters import make_eagle, make_medusa

    target = make_tiny(tmp_path / "target", hidden=16, heads=2, kv_heads=1, layers=3)
    if name == "other":
        model = make_tiny(tmp_path / name, hidden=16, heads=1, kv_heads=1, layers=1, architecture="llama", seed=1)
    elif name == "medusa":
        model = make_medusa(tmp_path / name, hidden=16)
    elif name == "self":
        model = target
    else:
        model = make_eagle(tmp_path / name, words=100 if name == "eagle3" else 0, hidden=16, heads=2)
    method = name if name in ("medusa", "eagle", "eagle3") else "draft_model"
    found = watched(target, model, method, **SHORT, **options)
    assert found["drafted"] > 0 and found["tokens"][0] == found["tokens"][1]
