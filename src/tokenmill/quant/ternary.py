"""Weights of -1, 0 and 1 with one scale, as BitNet models store them. Owns: the layout.

    NAME.weight uint8 [out / 4, in]: bits 2i and 2i + 1 of row r hold row i * out / 4 + r, one more than its value
    NAME.weight_scale [1]: multiplies (`linear_class` autobitlinear), or divides (bitlinear)
They become integers of two bits. Must not know: models, devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError, shown
from tokenmill.quant.base import known
from tokenmill.quant.half_scales import Held, held

METHOD = "bitnet"
_GROUPS = (256, 128, 64, 32)


def check(config: Mapping[str, Any]) -> None:
    """Refuse a quantization_config of this method that cannot be read here."""
    if config.get("linear_class", "bitlinear") not in ("bitlinear", "autobitlinear"):
        raise ModelError(
            f"This checkpoint is quantised with '{METHOD}' for {shown(config['linear_class'])}: not supported."
        )
    if config.get("linear_class") == "autobitlinear" and config.get("quantization_mode") == "online":
        raise ModelError("This checkpoint must be rounded by 'bitnet' at every call (online), which is not supported.")
    if config.get("use_rms_norm"):
        raise ModelError("This checkpoint is quantised with 'bitnet' and norms every input, which is not supported.")


def divides(config: Mapping[str, Any]) -> bool:
    """Are weights divided by their scale?"""
    return config.get("linear_class", "bitlinear") == "bitlinear"


def stored(ckpt: Checkpoint, name: str) -> bool:
    """Does the checkpoint hold such a weight under `name`?"""
    if not ckpt.has(f"{name}.weight_scale") or not ckpt.has(f"{name}.weight"):
        return False
    scale = ckpt.shape(f"{name}.weight_scale")
    if scale is None or tuple(scale) not in ((), (1,)):
        return False
    return ckpt.tensor(f"{name}.weight").dtype == torch.uint8


def load(
    ckpt: Checkpoint, name: str, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None, *, divide: bool
) -> Held:
    """Read the weight [out, in] under `name`."""
    rows, columns = shape
    if rows % 4:
        raise ModelError(f"'{name}.weight' cannot hold {rows} rows in fours.")
    raw = ckpt.tensor(f"{name}.weight", (rows // 4, columns))
    codes = torch.cat([raw >> 2 * i & 3 for i in range(4)])
    if known(codes) and bool((codes == 3).any()):
        raise ModelError(f"'{name}.weight' has codes that are none of -1, 0 and 1: the file is damaged.")
    stored_scale = ckpt.tensor(f"{name}.weight_scale")
    factor = stored_scale.float().flatten()[0]
    scale = float(factor) if known(factor) else 1.0
    if not stored_scale.is_floating_point():
        raise ModelError(f"'{name}.weight_scale' must be a float, not {stored_scale.dtype}.")
    if not 0.0 < abs(scale) < float("inf"):
        raise ModelError(f"'{name}.weight_scale' must be a number other than 0.")
    group = next((g for g in _GROUPS if columns % g == 0), 32)
    scales = factor.new_tensor([1.0 / scale if divide else scale]).expand(rows, -(-columns // group))
    q = (codes.to(torch.int8) - 1).contiguous()
    return held(q, scales, bits=2, group=group, kind=(dtype, bias), what=f"{name}.weight_scale")
