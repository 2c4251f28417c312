"""Experts that a base stores in one tensor, for merging. Owns: which tensors these are, the name and shape of each
expert's matrix in them, and adding to it there.

Names are those that an engine gives such experts (layers/experts.py). Must not know: adapters' files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tokenmill.compute.model import Checkpoint
from tokenmill.lora.peft import LowRank

_PAIRS = (
    ("experts.gate_up_proj", "experts.down_proj"),
    ("experts.up_proj", "experts.down_proj"),
    ("input_linear.weight", "output_linear.weight"),
)
"""How the names of two stacks of one mixture end. The last: Granite's, which its class calls as the first."""
_FLIPPED = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")
"""Classes that hold [experts, in, out] and do not say so: PEFT takes it for [experts, out, in]."""


@dataclass(frozen=True, slots=True)
class Stacked:
    """One expert's matrix [out, in] in the tensor `name`. turned: that is [experts, in, out]; flipped: see
    lora/weight.py: Source."""

    name: str
    expert: int
    shape: tuple[int, int]
    turned: bool = False
    flipped: bool = False


def find_stacked(checkpoint: Checkpoint, architecture: str) -> dict[str, Stacked]:
    """Every expert that lies in a tensor with others, by the path of its matrix."""
    found: dict[str, Stacked] = {}
    stored = set(checkpoint.names())
    for ends in _PAIRS:
        for first in stored:
            stem = first.removesuffix(ends[0])
            if stem == first or stem + ends[1] not in stored:
                continue
            shapes = [tuple(checkpoint.shape(stem + end) or ()) for end in ends]
            if any(len(shape) != 3 for shape in shapes):
                continue
            turned = _fit(shapes[0][:0:-1], shapes[1][:0:-1]) and not _fit(shapes[0][1:], shapes[1][1:])
            kinds = ("up_proj" if ends[0].endswith(".up_proj") else "gate_up_proj", "down_proj")
            for end, kind, (count, *sizes) in zip(ends, kinds, shapes, strict=True):
                rows, columns = sizes[::-1] if turned else sizes
                for expert in range(count):
                    each = Stacked(stem + end, expert, (rows, columns), turned, turned and architecture in _FLIPPED)
                    found[f"{stem}experts.{expert}.{kind}"] = each
    return found


def _fit(first: tuple[int, ...], last: tuple[int, ...]) -> bool:
    """Are these [out, in] of a mixture's two matrices?"""
    return first[1] == last[0] and first[0] in (last[1], 2 * last[1])


def add_to_experts(weight: Tensor, experts: Mapping[Stacked, LowRank]) -> Tensor:
    """The tensor, with what each of these experts gets."""
    made = weight.clone()
    for each, low in experts.items():
        wide = low.scale * (low.up.float() @ low.down.float())
        made[each.expert] = (made[each.expert].float() + (wide.t() if each.turned else wide)).to(weight.dtype)
    return made
