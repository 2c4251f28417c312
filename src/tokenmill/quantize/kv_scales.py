"""Scales of K/V in float8, one for keys and one for values of each layer, for engines that read them from a checkpoint.
Owns: measuring them on a text, and their names in compressed-tensors files.

This engine does not use them: its stored K/V have scales of their own, token by token. Must not know: methods, command
lines.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import KVView
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import UserError
from tokenmill.quantize.inputs import Squares
from tokenmill.quantize.layer_stream import Stream
from tokenmill.quantize.watched_weights import InputRecord

SCHEME = {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "group_size": None, "dynamic": False,
    "block_structure": None, "actorder": None, "observer": "minmax", "observer_kwargs": {},
}  # fmt: skip
_KEYS = ("k_proj.weight", "qkv_proj.weight", "query_key_value.weight")
"""The matrices that make keys. Readers look for the scales beside these."""
_MOST = float(torch.finfo(torch.float8_e4m3fn).max)


def measure(config: dict[str, Any], ckpt: Checkpoint, device: str, tokens: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """tokens [N, L] -> for each layer with keys and values, by the name of the matrix that makes its keys: one scale
    for keys and one for values [1]. Divided by it, the largest number that occurred becomes float8's largest."""
    stream, found = Stream(config, ckpt, device, tokens), {}
    for index in range(stream.count):
        most = [torch.zeros(1), torch.zeros(1)]

        def note(views: list[KVView], most: list[Tensor] = most) -> None:
            for view in views:
                for place, numbers in enumerate((view.key, view.value)):
                    most[place] = torch.maximum(most[place], numbers.abs().max().float().cpu().reshape(1))

        seen = InputRecord(make=Squares)
        kinds = stream.watch(index, seen, note)
        if not kinds:
            continue
        names = [name for name in seen.built if name.endswith(_KEYS)]
        if "latent" in kinds or len(names) != 1:
            raise UserError("--kv-scales: files have no names for scales of this model's cache.")
        found[names[0]] = (most[0].clamp(min=1e-6) / _MOST, most[1].clamp(min=1e-6) / _MOST)
    return found


def tensors(name: str, scales: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The tensors to write for the layer whose keys `name` makes."""
    base = name.rsplit(".", 2)[0]
    return {f"{base}.k_scale": scales[0].clone(), f"{base}.v_scale": scales[1].clone()}
