"""Every block type decodes to the very bits that the format's own library gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from tokenmill.checkpoint.gguf_blocks import decode
from tokenmill.checkpoint.gguf_file import TYPES, TensorInfo

OTHERS = ("F32", "F16", "BF16", "Q1_0")
"""Not quantised, or of a size that the library knows and numbers that it does not."""
QUANTISED = sorted(t.name for t in TYPES.values() if t.name not in OTHERS)


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


def test_signs() -> None:
    """A bit a number, the lowest bit of a byte first, and one scale for 128."""
    block = next(t for t in TYPES.values() if t.name == "Q1_0")
    assert (block.elements, block.size) == GGML_QUANT_SIZES[GGMLQuantizationType.Q1_0]
    rng = np.random.default_rng(7)
    scales, signs = rng.normal(size=(6, 1)).astype(np.float16), rng.integers(0, 2, (6, 128), dtype=np.uint8)
    raw = np.concatenate([scales.view(np.uint8), np.packbits(signs, axis=-1, bitorder="little")], axis=-1)
    values = decode(TensorInfo("t", block, (3, 256), 0, raw.nbytes), memoryview(bytearray(raw.tobytes())))
    wanted = scales.astype(np.float32) * (signs.astype(np.float32) * 2 - 1)
    assert np.array_equal(values.numpy(), wanted.reshape(3, 256))
