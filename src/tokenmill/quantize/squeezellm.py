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
_LEAST = 1e-10
"""A centre whose values have a smaller part of a row's weight stays: differences of running sums would be noise."""
_ROWS = 2048
"""Rows whose tables are searched at once: their running sums take several times the memory of their numbers."""


def squeezellm(weight: Tensor, bits: int, inputs: Inputs | None) -> Held:
    """weight [out, in] float32 -> a table of 2^bits entries per row, and the outliers."""
    known = inputs is not None and inputs.count
    energy = inputs.hessian.diagonal() if inputs is not None and known else torch.ones_like(weight[0])
    apart = _apart(weight, energy)
    inner = torch.where(apart, 0.0, weight)
    weights = torch.where(apart, 0.0, energy.clamp(min=1e-9))
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
    return Held(tensors, near + rest)


def k_means(values: Tensor, weights: Tensor, count: int) -> Tensor:
    """values and weights [rows, n] -> [rows, count] ascending centres with the least weighted squared error."""
    parts = zip(values.split(_ROWS), weights.split(_ROWS), strict=True)
    return torch.cat([_centres(*part, count) for part in parts])


def _centres(values: Tensor, weights: Tensor, count: int) -> Tensor:
    """`k_means` of some rows. A centre's values lie side by side in the sorted row, so differences of running sums say
    all of them, and a round reads two numbers for each centre instead of the whole row."""
    ordered, order = values.sort(1)
    mass = weights.gather(1, order).double()
    behind = [torch.nn.functional.pad(each.cumsum(1), (1, 0)) for each in (mass * ordered, mass)]
    places = (torch.arange(count, device=values.device) + 0.5) / count
    whole = behind[1][:, -1:].clamp(min=1e-30)
    start = torch.searchsorted(behind[1][:, 1:].contiguous(), whole * places).clamp(max=values.shape[1] - 1)
    low, high = ordered[:, :1], ordered[:, -1:]
    evenly = low + (high - low) * torch.linspace(0.0, 1.0, count).to(values.device)
    centres = ((ordered.gather(1, start) + evenly) / 2).sort(1).values
    for _ in range(_ROUNDS):
        ends = torch.searchsorted(ordered, (centres[:, 1:] + centres[:, :-1]) / 2, right=True)
        ends = torch.cat((torch.zeros_like(ends[:, :1]), ends, torch.full_like(ends[:, :1], values.shape[1])), 1)
        sums, total = (each.gather(1, ends).diff(dim=1) for each in behind)
        found = (sums / total.clamp(min=1e-30)).float()
        centres = torch.where(total > whole * _LEAST, found, centres).sort(1).values
    return centres


def _assigned(values: Tensor, centres: Tensor) -> Tensor:
    """The index of the nearest ascending centre."""
    borders = (centres[:, 1:] + centres[:, :-1]) / 2
    return torch.searchsorted(borders.contiguous(), values.contiguous())


def _apart(weight: Tensor, energy: Tensor) -> Tensor:
    """Outliers: half of them the largest numbers, half of them those whose rounding would cost most."""
    count = max(1, round(OUTLIERS * weight.numel() / 2))
    apart = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
    for score in (weight.abs(), weight.square() * energy):
        apart[score.flatten().topk(count).indices] = True
    return apart.view_as(weight)
