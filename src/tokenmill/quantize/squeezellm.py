"""SqueezeLLM: each row's numbers are rounded to a table of its own, found by weighted k-means; the largest outliers are
stored apart.

Owns: the method (Kim et al., 2023; a column's weight is its inputs' energy), and the tensors that hold its result:

    NAME.qweight int32 [in * bits / 32, out], NAME.lookup_table float16 [out, 2^bits]
    NAME.rows int32 [out + 1], NAME.cols int32, NAME.vals float32: what is added, row by row
Must not know: layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.quant import bits as packed
from tokenmill.quantize.inputs import Inputs
from tokenmill.quantize.stored_forms import Held

OUTLIERS = 0.005
"""The part of all numbers that is stored apart."""
_ROUNDS = 20


def squeezellm(weight: Tensor, bits: int, inputs: Inputs | None) -> Held:
    """weight [out, in] float32 -> a table of 2^bits entries per row, and the outliers."""
    energy = torch.ones(weight.shape[1]) if inputs is None or not inputs.count else inputs.hessian.diagonal().cpu()
    device, weight = weight.device, weight.cpu()
    apart = _apart(weight, energy)
    inner = torch.where(apart, 0.0, weight)
    weights = torch.where(apart, 0.0, energy.clamp(min=1e-9).expand_as(weight))
    table = k_means(inner, weights, 1 << bits).half().float()
    codes = _assigned(inner, table)
    near = table.gather(1, codes)
    rest = torch.where(apart, weight - near, 0.0)  # added to the table's number, whatever that is
    row, column = rest.nonzero(as_tuple=True)
    ends = torch.bincount(row, minlength=len(weight)).cumsum(0)
    tensors = {
        "qweight": packed.pack(codes.to(torch.uint8), bits).T.contiguous(),
        "lookup_table": table.half(),
        "rows": torch.nn.functional.pad(ends, (1, 0)).int(),
        "cols": column.int(),
        "vals": rest[row, column],
    }
    return Held(tensors, (near + rest).to(device))


def k_means(values: Tensor, weights: Tensor, count: int) -> Tensor:
    """values and weights [rows, n] -> [rows, count] ascending centres with the least weighted squared error."""
    ordered, order = values.sort(1)
    share = weights.gather(1, order).cumsum(1)
    share = share / share[:, -1:].clamp(min=1e-30)
    wanted = ((torch.arange(count) + 0.5) / count).expand(len(values), -1).contiguous()
    start = torch.searchsorted(share.contiguous(), wanted).clamp(max=values.shape[1] - 1)
    by_share = ordered.gather(1, start)
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    evenly = low + (high - low) * torch.linspace(0.0, 1.0, count)
    centres = ((by_share + evenly) / 2).sort(1).values
    for _ in range(_ROUNDS):
        codes = _assigned(values, centres)
        sums, total = (torch.zeros_like(centres).scatter_add_(1, codes, t) for t in (values * weights, weights))
        centres = torch.where(total > 0, sums / total.clamp(min=1e-30), centres).sort(1).values
    return centres


def _assigned(values: Tensor, centres: Tensor) -> Tensor:
    """The index of the nearest ascending centre."""
    borders = (centres[:, 1:] + centres[:, :-1]) / 2
    return torch.searchsorted(borders.contiguous(), values.contiguous())


def _apart(weight: Tensor, energy: Tensor) -> Tensor:
    """Outliers: half of them the largest numbers, half of them those whose rounding would cost most."""
    count = max(1, round(OUTLIERS * weight.numel() / 2))
    apart = torch.zeros(weight.numel(), dtype=torch.bool)
    for score in (weight.abs(), weight.square() * energy):
        apart[score.flatten().topk(count).indices] = True
    return apart.view_as(weight)
