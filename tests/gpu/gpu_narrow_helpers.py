"""What test_gpu_narrow.py and other tests share."""

from __future__ import annotations

import torch
from tests.gpu.gpu_helpers import rand

from tokenmill.compute.matrix import StoredMatrix
from tokenmill.kernels.grid import FP4

FP8 = torch.float8_e4m3fn


NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
TABLES = {"fp4": FP4, "nf4": NF4}


def coded(kind, rows, columns, bias=None):
    """Every code in every place of a word, as a file would have it; fp4/32 with powers of two as scales."""
    name, _, group = kind.partition("/")
    shape = rows, columns // int(group)
    picked = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(shape, device="cuda") + 0.5) * columns**-0.5
    scales = scales.log2().round().exp2() if kind == "fp4/32" else scales
    table, ones = torch.tensor(TABLES[name]), torch.ones(rows, device="cuda")
    parts = ("codes", picked), ("table", table), ("scales", scales), ("factors", ones)

    def dense():
        return (table.cuda()[picked.int()].view(*shape, -1) * scales[..., None]).view(rows, columns)

    return StoredMatrix("table", (rows, columns), parts, dense, bias)


def matrix(kind, rows, columns, bias=False):
    from tokenmill.kernels.triton.quantised.narrow import pack4, pack8

    name, _, group = kind.partition("/")
    b = rand(rows) if bias else None
    if name in TABLES:
        from tokenmill.kernels.triton import TritonKernels

        return TritonKernels().pack(coded(kind, rows, columns, b))
    if name == "fp8":
        data = rand(rows, columns, scale=columns**-0.5 * 64).to(FP8)
        if group == "blocks":
            scales = torch.rand(-(-rows // 128), -(-columns // 128), device="cuda") + 0.5
            return pack8(data, scales / 64, b, blocks=True)
        return pack8(data, (torch.rand(rows, 1, device="cuda") + 0.5) / 64, b)
    groups = columns // int(group) if group else 1
    scales = (torch.rand(rows, groups, device="cuda") + 0.5) * columns**-0.5
    if name == "int8":
        q = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, device="cuda")
        return pack8(q, scales / 64, b)
    q = torch.randint(-8, 8, (rows, columns), dtype=torch.int8, device="cuda")
    zeros = torch.randint(-8, 9, (rows, groups), dtype=torch.int8, device="cuda") if name == "int4z" else None
    return pack4(q, scales / 4, zeros, b)
