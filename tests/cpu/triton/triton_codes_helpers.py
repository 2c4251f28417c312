"""What test_triton_codes.py and other tests share."""

from __future__ import annotations

import math

import torch

from tokenmill.compute.matrix import StoredMatrix
from tokenmill.kernels.grid import FP4

NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
BNB_FP4 = (0.0, 0.0052083, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25)
TABLES = {"fp4": FP4, "nf4": NF4, "bnb": (*BNB_FP4, *(-entry for entry in BNB_FP4)), "few": (-3.0, 0.0, 1.0, 5.0)}


def stored(kind: str, rows: int, columns: int, *, bias: bool = False, scale: float = 1.0) -> StoredMatrix:
    """fp4/32: powers of two as scales; others: any numbers around `scale`."""
    name, _, group = kind.partition("/")
    table = torch.tensor(TABLES[name])
    picked = torch.randint(0, len(table), (rows, columns), dtype=torch.uint8)
    shape = rows, columns // int(group) if group else 1
    scales = torch.rand(shape) + 0.5
    scales = scales.log2().round().exp2() * 2.0 ** round(math.log2(scale)) if kind == "fp4/32" else scales * scale
    parts = ("codes", picked), ("table", table), ("scales", scales), ("factors", torch.ones(rows))

    def dense() -> torch.Tensor:
        return (table[picked.int()].view(*shape, -1) * scales[..., None]).view(rows, columns)

    return StoredMatrix("table", (rows, columns), parts, dense, torch.randn(rows) if bias else None)
