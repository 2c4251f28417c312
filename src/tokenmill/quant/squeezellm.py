"""Weights with a table of numbers for each row, as SqueezeLLM stores them. Owns: the layout.

    NAME.qweight int32 [in * bits / 32, out], NAME.lookup_table [out, 2^bits], bits 3 or 4
    NAME.rows int32 [out + 1], NAME.cols int32 [n], NAME.vals [n]: numbers added to row r in columns
    cols[rows[r]:rows[r + 1]]; files may have none
No kernel multiplies a table per row: they are rounded anew to 8 bits. Must not know: models, devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError, shown
from tokenmill.quant import bits as packed
from tokenmill.quant.base import known
from tokenmill.quant.grid import Unrounded

METHOD = "squeezellm"
_GROUP = 32


def check(config: Mapping[str, Any]) -> None:
    """Refuse a quantization_config of this method that cannot be read here."""
    bits = config.get("wbits", config.get("bits", 4))
    if bits not in (3, 4):
        raise ModelError(f"This checkpoint is quantised with '{METHOD}' in {shown(bits)} bits, which is not supported.")


def stored(ckpt: Checkpoint, name: str) -> bool:
    """Does the checkpoint hold such a weight under `name`?"""
    full = f"{name}.lookup_table"
    return ckpt.has(full) and ckpt.shape(full) is not None


def load(ckpt: Checkpoint, name: str, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None) -> Unrounded:
    """Read the weight [out, in] under `name`."""
    rows, columns = shape
    table = ckpt.tensor(f"{name}.lookup_table")
    bits = {8: 3, 16: 4}.get(table.shape[1], 0) if table.ndim == 2 and table.shape[0] == rows else 0
    if not bits or not table.is_floating_point():
        raise ModelError(f"'{name}.lookup_table' has shape {list(table.shape)}, which does not fit {list(shape)}.")
    words = ckpt.tensor(f"{name}.qweight")
    if words.dtype != torch.int32 or columns * bits % 32 or tuple(words.shape) != (columns * bits // 32, rows):
        raise ModelError(f"'{name}.qweight' has shape {list(words.shape)} of {words.dtype}: it does not fit.")
    codes = packed.unpack(words.T.contiguous(), bits, columns)
    dense = table.float().gather(1, codes.long())
    if ckpt.has(f"{name}.rows"):
        dense = dense + _sparse(ckpt, name, shape).to(dense.device)
    elif ckpt.has(f"{name}.cols") or ckpt.has(f"{name}.vals"):
        raise ModelError(f"'{name}.rows' is missing: it says where the outliers are.")
    return Unrounded(dense.to(dtype), bias, 8, _GROUP, form="SqueezeLLM")


def _sparse(ckpt: Checkpoint, name: str, shape: tuple[int, int]) -> Tensor:
    """The outliers as a dense matrix."""
    starts = ckpt.tensor(f"{name}.rows", (shape[0] + 1,))
    at, values = ckpt.tensor(f"{name}.cols"), ckpt.tensor(f"{name}.vals")
    whole = (torch.int32, torch.int64)
    if starts.dtype not in whole or at.dtype not in whole or at.shape != values.shape or at.ndim != 1:
        raise ModelError(f"'{name}' has outliers of the wrong shape or type.")
    added = torch.zeros(shape, device=values.device)
    if not known(starts) or not known(at):
        return added
    counts = starts.long().diff()
    if int(starts[0]) != 0 or int(starts[-1]) != len(at) or bool((counts < 0).any()):
        raise ModelError(f"'{name}.rows' does not divide {len(at)} outliers among {shape[0]} rows.")
    if len(at) and (int(at.min()) < 0 or int(at.max()) >= shape[1]):
        raise ModelError(f"'{name}.cols' names columns that are not there.")
    row = torch.arange(shape[0], device=at.device).repeat_interleave(counts)
    return added.index_put_((row, at.long()), values.float(), accumulate=True)
