"""Integer weights as AutoAWQ and GPTQ tools store them. Owns: unpacking their 32 bit words.

    NAME.qweight int32, NAME.qzeros int32 [groups, out / n], NAME.scales float16 [groups, out], n = 32 / bits
    AWQ    qweight [in, out / n]: n columns of out in a word, in the order 0 2 4 6 1 3 5 7
    GPTQ   qweight [in / n, out]: n rows of in in a word, lowest first; qzeros hold the zero point less 1, but not in
           files of the second version (`checkpoint_format: gptq_v2`); NAME.g_idx [in] says each column's group
Must not know: models, devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.core.model import Checkpoint
from tokenmill.quant.grid import GridWeight

_INTERLEAVED = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of AWQ the columns 0 to 7 lie."""


def check(config: Mapping[str, Any]) -> None:
    """Refuse a quantization_config of these methods that cannot be read here."""
    method, bits = config.get("quant_method"), config.get("bits", config.get("w_bit"))
    if bits != 4 and not (method == "gptq" and bits == 8):
        raise ModelError(f"This checkpoint is quantised with '{method}' in {bits} bits, which is not supported.")
    if method == "awq" and str(config.get("version", "gemm")).lower() != "gemm":
        raise ModelError(f"This checkpoint is quantised with 'awq' in version {config['version']!r}; use 'gemm'.")
    if method == "gptq" and config.get("checkpoint_format") == "gptq_v2":
        raise ModelError("This checkpoint is quantised with 'gptq' in its second file version, which is not supported.")


def stored(ckpt: Checkpoint, name: str) -> bool:
    """Is there such a weight under `name`?"""
    return ckpt.has(f"{name}.qweight") and ckpt.shape(f"{name}.qweight") is not None


def load(ckpt: Checkpoint, name: str, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None) -> GridWeight:
    """The weight [out, in] under `name`, with its zero points."""
    rows, columns = shape
    words = ckpt.tensor(f"{name}.qweight")
    scales = ckpt.tensor(f"{name}.scales").T.contiguous().half()
    groups = scales.shape[1]
    if scales.shape[0] != rows or columns % groups or (columns // groups) % 32:
        raise ModelError(f"'{name}.scales' has shape {list(scales.T.shape)}, which does not fit {list(shape)}.")
    awq = words.shape == (columns, rows // 8)
    bits = 4 if awq else 32 * words.shape[0] // columns
    if not awq and (bits not in (4, 8) or words.shape[1] != rows):
        raise ModelError(f"'{name}.qweight' has shape {list(words.shape)}, which does not fit {list(shape)}.")
    zeros = _unpack(ckpt.tensor(f"{name}.qzeros", (groups, rows * bits // 32)), bits, awq=awq)
    if awq:
        q = _unpack(words, bits, awq=True).T
    else:
        q = _unpack(words.T.contiguous(), bits, awq=False)
        zeros = zeros + 1
        _check_order(ckpt, name, columns, groups)
    zeros = zeros.T.contiguous()
    half = 1 << (bits - 1)
    q, zeros = (q - half).to(torch.int8).contiguous(), zeros - half
    group = columns // groups
    if not zeros.any():
        return GridWeight(q, scales, bits=bits, group=group, dtype=dtype, bias=bias)
    if bits == 8:
        raise ModelError(f"'{name}' has 8 bit weights with zero points, which are not supported.")
    return GridWeight(q, scales, bits=4, group=group, dtype=dtype, bias=bias, zeros=zeros.to(torch.int8))


def _unpack(words: Tensor, bits: int, *, awq: bool) -> Tensor:
    """words [n, m] int32 -> [n, m * 32 / bits] int16, 0 .. 2^bits - 1."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    if awq:
        shifts = shifts[list(_INTERLEAVED)]
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.int16).flatten(1)


def _check_order(ckpt: Checkpoint, name: str, columns: int, groups: int) -> None:
    """Columns must lie in the order of their groups."""
    if ckpt.has(f"{name}.g_idx"):
        index = ckpt.tensor(f"{name}.g_idx", (columns,))
        if not torch.equal(index.long(), torch.arange(columns) // (columns // groups)):
            raise ModelError(
                f"'{name}' was quantised in another order of its columns (desc_act), which is not supported."
            )
