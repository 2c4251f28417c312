"""Where a GGUF file's weights differ from the class's in more than names and rows that its reader undoes. Owns: giving
an adapter the layout of its base, whichever of the two comes from such a file.

Qwen3.5's converter puts the value heads of recurrent layers in another order, in rows and in columns; Falcon-H1's
multiplies the model's multipliers into its weights. Must not know: the model, but for its config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.lora.peft import Adapter, LowRank
from tokenmill.models.config import ModelConfig
from tokenmill.models.qwen3_next import read_delta

_TILED = ("qwen35", "qwen35moe")
_MULTIPLIED = "falcon-h1"


def arranged(adapter: Adapter, config: Mapping[str, Any]) -> Adapter:
    """The adapter, for a base of this config; refused where the base's numbers cannot be known."""
    if config.get("model_type") == "falcon_h1":
        has, wants = adapter.arch == _MULTIPLIED, bool(config.get("_multiplied"))
        if has != wants:
            raise ModelError(
                f"{adapter.where}: GGUF files of this family hold other numbers than its model folders (multiplied by "
                f"the model's multipliers): a base in {'a GGUF file' if wants else 'a folder'} takes "
                f"{'GGUF adapters' if wants else 'PEFT folders'} only."
            )
    has, wants = adapter.arch in _TILED, bool(config.get("_tiled_value_heads"))
    if has != wants:
        _reorder(adapter, config, back=has)
    return adapter


def _reorder(adapter: Adapter, config: Mapping[str, Any], *, back: bool) -> None:
    """Value heads that share a key head are neighbours in the class, and lie as many apart as there are key heads in
    files. back: from files to the class."""
    inner = config.get("text_config")
    said = read_delta(ModelConfig(inner if isinstance(inner, Mapping) else config))
    heads = torch.arange(said.value_heads).view(said.key_heads, -1).t().reshape(-1)
    heads = heads.argsort() if back else heads
    starts = {"in_proj_qkv": 2 * said.widths[0]}
    starts |= dict.fromkeys(("in_proj_z", "in_proj_b", "in_proj_a"), 0)
    for module, low in adapter.linear.items():
        layer, _, name = module.rpartition(".")
        if not layer.endswith("linear_attn"):
            continue
        if name == "out_proj":
            low.down = _turned(low.down.t(), 0, heads).t()
        elif name in starts:
            _turn_rows(low, starts[name], heads)
    for module, tensors in adapter.whole.items():
        layer, _, name = module.rpartition(".")
        if not layer.endswith("linear_attn"):
            continue
        for end, tensor in tensors.items():
            if name in starts:
                tensors[end] = _turned(tensor, starts[name], heads)
            elif name == "out_proj" and end == "weight":
                tensors[end] = _turned(tensor.t(), 0, heads).t()


def _turn_rows(low: LowRank, start: int, heads: Tensor) -> None:
    low.up = _turned(low.up, start, heads)
    low.magnitude = None if low.magnitude is None else _turned(low.magnitude, start, heads)
    low.bias = None if low.bias is None else _turned(low.bias, start, heads)


def _turned(rows: Tensor, start: int, heads: Tensor) -> Tensor:
    """These rows, with those from `start` on in another order of heads. Others than a model's are left to be refused
    for their shape."""
    width, rest = divmod(rows.shape[0] - start, len(heads))
    if rest or width < 1:
        return rows
    order = (heads[:, None] * width + torch.arange(width)).reshape(-1) + start
    return rows[torch.cat((torch.arange(start), order))]
