"""Products of 2:4 matrices on sparse tensor cores. Owns: what is asked of cuSPARSELt, through torch.

A call outside of a recording takes the host half a millisecond, which few rows do not last. A thread's first call makes
the library's handle, so one is made before anything is recorded (`ready`). Must not know: what is done with a product.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

from tokenmill.kernels.triton.common import INTERPRETED, capability

_ALIGNED = 16
"""Rows of activations are filled up to a multiple of so many."""
_WIDE = ((0, 20), (1024, 17))
FASTEST = {torch.bfloat16: _WIDE, torch.float16: _WIDE, torch.float8_e4m3fn: ((0, 12), (512, 6))}
"""From how many rows which algorithm was the fastest on an H200, in version 0.8 of the library."""
_MEASURED = 800, 900
_ITS_CORES = 9, 0
"""The compute capability of the GPU that this was measured on: others have other algorithms, and fewer."""
_thread = threading.local()


def is_usable(dtype: torch.dtype) -> bool:
    """Is the library there, does it take this type on this GPU, and does it keep numbers in the order that is hoped
    for?"""
    return not INTERPRETED and _works(torch.cuda.current_device(), dtype)


@functools.cache
def _works(device: int, dtype: torch.dtype) -> bool:
    if not torch.backends.cusparselt.is_available():
        return False
    made = torch.Generator(device=f"cuda:{device}").manual_seed(1)
    kept = torch.randn(64, 64, device=made.device, generator=made).to(dtype)
    first = torch.randint(0, 3, (64, 32), device=made.device, generator=made)
    x = torch.randn(FASTEST[dtype][-1][0], 128, device=made.device, generator=made).to(dtype)
    dense = torch.zeros(64, 32, 4, device=made.device)
    dense.scatter_(2, torch.stack((first, torch.full_like(first, 3)), dim=2), kept.float().view(64, 32, 2))
    try:
        stored = compress(kept, (first | (3 << 2)).to(torch.uint8), (64, 128))
        some, every = multiply(x[:32], stored, 64), multiply(x, stored, 64)  # by different algorithms
    except RuntimeError:
        return False
    exact = x.float() @ dense.flatten(1).t()
    near = functools.partial(torch.allclose, atol=0.5, rtol=0.02)
    return near(every.float(), exact) and near(some.float(), exact[:32])


def compress(kept: Tensor, code: Tensor, shape: tuple[int, int]) -> Tensor:
    """The library's form of a matrix [N, K] with these numbers [N, K / 2], and the places of each two [N, K / 4], as
    layout.py has them. It may choose other places for zeros among them, so it is shown a matrix that has none of these,
    and is given the numbers afterwards."""
    marked = torch.zeros(*shape, dtype=kept.dtype, device=kept.device)
    bits = marked.view(torch.uint8) if kept.element_size() == 1 else marked
    one = torch.ones((), dtype=kept.dtype, device=kept.device).view(bits.dtype)
    for some, places in zip(bits.split(4096), code.split(4096), strict=True):
        at = torch.stack((places & 3, places >> 2), dim=2).long()
        some.unflatten(1, (-1, 4)).scatter_(2, at, one.expand(at.shape))
    stored: Tensor = torch._cslt_compress(marked)
    stored.view(-1)[: kept.numel()].copy_(kept.view(-1))
    return stored


def ready(dtype: torch.dtype) -> None:
    """Make this thread's handle, if there is none yet."""
    if not getattr(_thread, "ready", False) and not torch.cuda.is_current_stream_capturing():
        _works.__wrapped__(torch.cuda.current_device(), dtype)
        _thread.ready = True


def multiply(x: Tensor, stored: Tensor, columns: int) -> Tensor:
    """x [M, K] of the matrix's type times its transpose -> [M, N = columns], float8 to bfloat16."""
    rows = x.shape[0]
    if rows % _ALIGNED:
        more = torch.zeros(_ALIGNED - rows % _ALIGNED, x.shape[1], dtype=torch.uint8, device=x.device)
        bits = torch.uint8 if x.element_size() == 1 else x.dtype
        x = torch.cat((x.view(bits), more.to(bits))).view(x.dtype)
    way = _way(x.dtype, rows, torch.backends.cusparselt.version() or 0, capability())
    narrow = torch.bfloat16 if x.element_size() == 1 else None
    found: Tensor = torch._cslt_sparse_mm(stored, x.t(), out_dtype=narrow, alg_id=way, transpose_result=True)
    return found.view(-1, columns)[:rows]


def _way(dtype: torch.dtype, rows: int, version: int, cores: tuple[int, int]) -> int:
    """The number of the algorithm; 0, the library's own choice, where nothing was measured."""
    if cores != _ITS_CORES or not _MEASURED[0] <= version < _MEASURED[1]:
        return 0
    return [way for least, way in FASTEST[dtype] if rows >= least][-1]
