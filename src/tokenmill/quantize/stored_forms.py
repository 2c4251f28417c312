"""What files hold in place of a weight. Owns: the tensors of each form, and the numbers that they mean.

Forms: `compressed-tensors` (integers of 2 to 8 bits, float8, NVFP4, MXFP4), `gptq`, `awq`, `bitsandbytes`, `bitnet`.
Must not know: methods, layers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.kernels import fp8
from tokenmill.kernels.grid import FP4
from tokenmill.quant import bits as packed
from tokenmill.quant.sparse import pack_mask
from tokenmill.quantize.codes import Codes

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The quantiles of a normal distribution, scaled to one (Dettmers et al., 2023)."""
_FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
"""The 4 bit floats of bitsandbytes from 0 to 1, in the order of its codes. Codes from 8 on are the negative ones."""
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
_NF4_BLOCK, _NESTED_BLOCK = 64, 256


@dataclass(frozen=True, slots=True)
class Held:
    """A weight as files hold it: tensors by the rest of their name, and the dense numbers that they mean."""

    tensors: dict[str, Tensor]
    dense: Tensor


def compressed(codes: Codes) -> Held:
    """compressed-tensors, packed integers."""
    bits = codes.spec.bits
    tensors = {
        "weight_packed": packed.pack(codes.codes, bits),
        "weight_scale": codes.scales.half(),
        "weight_shape": torch.tensor(codes.codes.shape, dtype=torch.int64),
    }
    if not codes.spec.symmetric:
        tensors["weight_zero_point"] = packed.pack(codes.zeros.T, bits).T.contiguous()
    return Held(tensors, codes.dense())


def gptq(codes: Codes) -> Held:
    """GPTQ's first version. It stores zero points minus one, so 0 cannot be stored (Spec.lowest)."""
    bits, group = codes.spec.bits, codes.spec.group
    zeros = codes.zeros.to(torch.int16)
    assert int(zeros.min()) > 0, "this form has no zero points of 0"
    columns = codes.codes.shape[1]
    tensors = {
        "qweight": packed.pack(codes.codes, bits).T.contiguous(),
        "qzeros": packed.pack((zeros - 1).T, bits),
        "scales": codes.scales.half().T.contiguous(),
        "g_idx": (torch.arange(columns) // group).to(torch.int32),
    }
    return Held(tensors, codes.dense())


def awq(codes: Codes) -> Held:
    """AutoAWQ's version gemm."""
    order = torch.tensor(_AWQ_ORDER, device=codes.codes.device)

    def together(columns: Tensor) -> Tensor:
        return packed.pack(columns.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    tensors = {
        "qweight": together(codes.codes.T),
        "qzeros": together(codes.zeros.T),
        "scales": codes.scales.half().T.contiguous(),
    }
    return Held(tensors, codes.dense())


def eight_rows(weight: Tensor) -> Held:
    """compressed-tensors, int8 with a scale per row (W8A8)."""
    scale = (weight.abs().amax(1, keepdim=True) / 127.0).clamp(min=1e-6).half()
    q = (weight / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return Held({"weight": q, "weight_scale": scale}, q.float() * scale.float())


def bitsandbytes_eight(weight: Tensor) -> Held:
    """LLM.int8(): int8 with the largest magnitude of each row."""
    largest = weight.abs().amax(1).clamp(min=1e-6)
    q = (weight * (127.0 / largest[:, None])).round().clamp(-127, 127).to(torch.int8)
    tensors = {"weight": q, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Held(tensors, q.float() * largest[:, None] / 127.0)


def nf4(weight: Tensor, double: bool = True) -> Held:
    """bitsandbytes' NF4. double: scales are rounded, too."""
    return _blocks_of_64(weight, NF4, "nf4", double)


def fp4(weight: Tensor, double: bool = True) -> Held:
    """bitsandbytes' FP4. double: scales are rounded, too."""
    return _blocks_of_64(weight, (*_FP4, *(-x for x in _FP4)), "fp4", double)


def _blocks_of_64(weight: Tensor, entries: tuple[float, ...], kind: str, double: bool) -> Held:
    """The nearest entries of a table in blocks of 64, with their scales, which may be rounded."""
    table16 = torch.tensor(entries, device=weight.device)
    blocks = weight.reshape(-1, _NF4_BLOCK)
    scales = blocks.abs().amax(1)
    state = {"quant_type": kind, "blocksize": _NF4_BLOCK, "dtype": "bfloat16", "shape": list(weight.shape)}
    kept, beside = scales, {"weight.absmax": scales}
    if double:
        kept, beside, more = _doubled(scales)
        state |= more
    levels, order = table16.sort(stable=True)
    borders = (levels[1:] + levels[:-1]) / 2
    codes = order[torch.bucketize((blocks / kept.clamp(min=1e-12)[:, None]).contiguous(), borders)].to(torch.uint8)
    tensors = {
        "weight": (codes.view(-1, 2)[:, :1] << 4 | codes.view(-1, 2)[:, 1:]),
        "weight.quant_map": table16,
        **beside,
        f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return Held(tensors, (table16[codes.int()] * kept[:, None]).view_as(weight))


def _doubled(scales: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, object]]:
    """Scales as 8 bit numbers in blocks of 256: their values, tensors, and the entries of the stored state."""
    offset = float(scales.mean())
    table = torch.linspace(-1.0, 1.0, 256).to(scales.device)  # the host's: devices differ in the last bit
    nested = torch.nn.functional.pad(scales - offset, (0, -len(scales) % _NESTED_BLOCK)).view(-1, _NESTED_BLOCK)
    wide = nested.abs().amax(1).clamp(min=1e-12)
    entries = ((nested / wide[:, None] + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8).flatten()[: len(scales)]
    kept = table[entries.int()] * wide.repeat_interleave(_NESTED_BLOCK)[: len(scales)] + offset
    state = {"nested_blocksize": _NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    beside = {"weight.absmax": entries, "weight.nested_absmax": wide, "weight.nested_quant_map": table}
    return kept, beside, state


def ternary(weight: Tensor) -> Held:
    """BitNet's -1, 0 and 1 times the mean magnitude (Ma et al., 2024)."""
    scale = weight.abs().mean().clamp(min=1e-6).half().float()
    q = (weight / scale).round().clamp(-1, 1)
    quarters = (q + 1).to(torch.uint8).chunk(4)
    raw = quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
    return Held({"weight": raw, "weight_scale": scale.view(1)}, q * scale)


def float8(weight: Tensor) -> Held:
    """compressed-tensors, float8 with a scale per row."""
    data, scales = fp8.round_rows(weight)
    return Held({"weight": data, "weight_scale": scales}, fp8.widen(data, scales))


def float8_tensor(weight: Tensor) -> Held:
    """float8 with one scale for the whole matrix."""
    scale = weight.abs().amax().clamp(min=1e-12) / fp8.LARGEST
    data = (weight / scale).clamp(-fp8.LARGEST, fp8.LARGEST).to(fp8.FP8)
    return Held({"weight": data, "weight_scale": scale.view(1)}, data.float() * scale)


def float8_blocks(weight: Tensor) -> Held:
    """float8 with a scale per block of 128 x 128."""
    rows, columns = weight.shape
    size = fp8.BLOCK
    filled = torch.nn.functional.pad(weight, (0, -columns % size, 0, -rows % size))
    blocks = filled.unflatten(0, (-1, size)).unflatten(2, (-1, size))
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / fp8.LARGEST
    spread = scales.repeat_interleave(size, 0)[:rows].repeat_interleave(size, 1)[:, :columns]
    data = (weight / spread).clamp(-fp8.LARGEST, fp8.LARGEST).to(fp8.FP8)
    return Held({"weight": data, "weight_scale": scales}, data.float() * spread)


def mxfp4(weight: Tensor) -> Held:
    """Four bit floats with a power of two per 32 columns: the better of two powers."""
    parts = weight.unflatten(1, (-1, 32))
    top = parts.abs().amax(-1).clamp(min=2.0**-100)
    floor = (top / 4.0).log2().floor()  # the standard's scale: the largest magnitude has the top exponent
    best = _better(parts, torch.exp2(floor), torch.exp2(floor + 1))
    codes, values = _fours(parts / best[..., None])
    power = (best.log2().round() + 127).clamp(0, 254).to(torch.uint8)
    return Held(
        {"weight_packed": _pairs(codes.flatten(1)), "weight_scale": power}, (values * best[..., None]).flatten(1)
    )


def nvfp4(weight: Tensor, largest: float | None = None) -> Held:
    """Four bit floats with a float8 per 16 columns and one float32 for the whole matrix. largest: the largest magnitude
    of this matrix and of all that are multiplied with it as one, if there are some."""
    parts = weight.unflatten(1, (-1, 16))
    top = parts.abs().amax(-1)
    most = weight.abs().max() if largest is None else torch.tensor(largest, device=weight.device)
    whole = (fp8.LARGEST * 6.0) / most.clamp(min=1e-12)
    full = (top * whole / 6.0).clamp(2.0**-9, fp8.LARGEST).to(fp8.FP8)
    finer = (top * whole / 6.0 * 0.875).clamp(2.0**-9, fp8.LARGEST).to(fp8.FP8)
    kept = _better(parts, full.float() / whole, finer.float() / whole)
    scale = (kept * whole).to(fp8.FP8)
    step = scale.float() / whole
    codes, values = _fours(parts / step[..., None])
    tensors = {"weight_packed": _pairs(codes.flatten(1)), "weight_scale": scale, "weight_global_scale": whole.view(1)}
    return Held(tensors, (values * step[..., None]).flatten(1))


def plain(weight: Tensor, kind: torch.dtype) -> Held:
    """The matrix as it was, with its zeros. Any reader takes it."""
    values = weight.to(kind)
    return Held({"weight": values}, values.float())


def bitmask(weight: Tensor, kind: torch.dtype) -> Held:
    """The matrix without its zeros: the other numbers, row by row, and one bit for every place."""
    values = weight.to(kind)
    kept = values != 0
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), kept.sum(1).cumsum(0)[:-1].cpu()))
    return Held({**_masked(values, kept), "compressed": values[kept], "row_offsets": starts}, values.float())


def bitmask_of_pairs(weight: Tensor, kind: torch.dtype) -> Held:
    """The two largest of every four numbers [out, in / 2] (also if one of them is zero), and their places."""
    values = weight.to(kind)
    fours = values.abs().unflatten(1, (-1, 4))
    kept = torch.zeros_like(fours, dtype=torch.bool).scatter_(2, fours.topk(2, 2).indices, True).flatten(1)
    return Held({**_masked(values, kept), "compressed": values[kept].view(len(values), -1)}, values.float())


def _masked(values: Tensor, kept: Tensor) -> dict[str, Tensor]:
    return {"bitmask": pack_mask(kept.cpu()), "shape": torch.tensor(values.shape, dtype=torch.int64)}


def _better(parts: Tensor, one: Tensor, other: Tensor) -> Tensor:
    lost = [(_fours(parts / s[..., None])[1] * s[..., None] - parts).square().sum(-1) for s in (one, other)]
    return torch.where(lost[1] < lost[0], other, one)


def _fours(x: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest four bit floats: codes and values."""
    levels = torch.tensor(FP4[:8], device=x.device)
    at = torch.bucketize(x.abs().contiguous(), (levels[1:] + levels[:-1]) / 2)
    return (at + 8 * (x < 0)).to(torch.uint8), levels[at] * x.sign()


def _pairs(codes: Tensor) -> Tensor:
    return codes[:, 0::2] | codes[:, 1::2] << 4
