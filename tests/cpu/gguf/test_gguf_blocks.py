"""Every block type decodes to the very bits that the format's own library gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from tokenmill.checkpoint.gguf_blocks import decode
from tokenmill.checkpoint.gguf_file import TYPES, TensorInfo

QUANTISED = sorted(t.name for t in TYPES.values() if t.name not in ("F32", "F16", "BF16"))


@pytest.mark.parametrize("name", QUANTISED)
def test_bits_equal_the_library(name: str) -> None:
    block = next(t for t in TYPES.values() if t.name == name)
    rng = np.random.default_rng(7)
    rows, blocks = 5, 2048 // block.elements
    raw = rng.integers(0, 256, (rows * blocks, block.size), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales may be infinite
        want = quants.dequantize(raw, GGMLQuantizationType[name]).reshape(rows, -1)
    info = TensorInfo("t", block, want.shape, 0, raw.nbytes)
    with np.errstate(all="ignore"):
        got = decode(info, memoryview(bytearray(raw.tobytes()))).numpy()
    finite = np.isfinite(want)
    assert finite.mean() > 0.5
    assert np.array_equal(got[finite], want[finite]) and np.array_equal(np.isfinite(got), finite)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_types(name: str) -> None:
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
    values = torch.randn(3, 8).to(dtype)
    raw = bytearray(values.view(torch.uint8).numpy().tobytes())
    block = next(t for t in TYPES.values() if t.name == name)
    assert torch.equal(decode(TensorInfo("t", block, (3, 8), 0, len(raw)), memoryview(raw)), values)
