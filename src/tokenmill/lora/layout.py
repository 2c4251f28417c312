"""Where a file's weights differ from the class's in more than names, and rows that its reader undoes. Owns: giving an
adapter the layout of its base.

In GGUF files Qwen3.5's converter puts the value heads of recurrent layers in another order, in rows and in columns;
Falcon-H1's multiplies the model's multipliers into its weights. Sarvam's folders hold q, k and v as one matrix, which
their class divides. LongCat's class has matrices for experts that compute nothing. Must not know: the model, but for
its config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.lora.peft import Adapter, LowRank, stem
from tokenmill.models.config import ModelConfig
from tokenmill.models.qwen3_next import read_delta

_TILED = ("qwen35", "qwen35moe")
_MULTIPLIED = "falcon-h1"
_JOINED = "sarvam_moe"
_IDLE = "longcat_flash"
_HEADS = ("num_attention_heads", "num_key_value_heads")
_QKV = ("q_proj", "k_proj", "v_proj")


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
    if config.get("model_type") == _JOINED:
        _join(adapter, config)
    if config.get("model_type") == _IDLE:
        _drop_idle(adapter, config)
    return adapter


def _drop_idle(adapter: Adapter, config: Mapping[str, Any]) -> None:
    """Of stacked experts, only those that multiply: the class has a first matrix for each of the others, too."""
    said = ModelConfig(config)
    hidden, count, idle = (said.get(key, int, 0) for key in ("hidden_size", "n_routed_experts", "zero_expert_num"))
    for module, low in adapter.stacked.items():
        assert adapter.config is not None
        rank = adapter.config.rank_of(f"{stem(module)}.gate_up_proj")
        first = low.down.shape[1] == hidden and low.up.shape[0] != hidden
        if first and low.down.shape[0] == rank * (count + idle):
            low.down = low.down[: rank * count]
            low.up = low.up.view(-1, rank, count + idle)[:, :, :count].reshape(-1, rank * count)


def _join(adapter: Adapter, config: Mapping[str, Any]) -> None:
    """q, k and v of the class become parts of one matrix; its rank is the sum of theirs."""
    said = ModelConfig(config)
    queries, keys = (said.get(key, int, 4) * said.get("head_dim", int, 64) for key in _HEADS)
    names = {**adapter.linear, **adapter.whole}
    for layer in sorted({name.rpartition(".")[0] for name in names if name.rpartition(".")[0].endswith(".self_attn")}):
        new = f"{layer.removesuffix('self_attn')}attention"
        both: tuple[dict[str, Any], ...] = adapter.linear, adapter.whole
        for held in both:
            if f"{layer}.o_proj" in held:
                held[f"{new}.dense"] = held.pop(f"{layer}.o_proj")
        lows = [adapter.linear.pop(f"{layer}.{name}", None) for name in _QKV]
        if any(low is not None for low in lows):
            adapter.linear[f"{new}.query_key_value"] = _joined(adapter, layer, lows, (queries, keys, keys))
        wholes = [adapter.whole.pop(f"{layer}.{name}", {}) for name in _QKV]
        if len({frozenset((end, each[end].shape[1:]) for end in each) for each in wholes}) > 1:
            raise ModelError(
                f"{adapter.where}: {layer}: q, k and v are one matrix of the base, and the file holds a weight or bias "
                "of some of them, or of other widths: train it of all three (target_modules, modules_to_save)."
            )
        if ends := set(wholes[0]):
            adapter.whole[f"{new}.query_key_value"] = {end: torch.cat([each[end] for each in wholes]) for end in ends}


def _joined(adapter: Adapter, layer: str, lows: Sequence[LowRank | None], heights: Sequence[int]) -> LowRank:
    """One adapter of the matrices one below the other."""
    given = [low for low in lows if low is not None]
    rows = [height if low is None else len(low.up) for low, height in zip(lows, heights, strict=True)]
    starts = [sum(rows[:at]) for at, low in enumerate(lows) if low is not None]
    up, at = torch.zeros(sum(rows), sum(low.rank for low in given)), 0
    bias = torch.zeros(sum(rows)) if any(low.bias is not None for low in given) else None
    for start, low in zip(starts, given, strict=True):
        up[start : start + len(low.up), at : at + low.rank] = low.up.float() * low.scale
        at += low.rank
        if bias is not None and low.bias is not None:
            bias[start : start + len(low.up)] = low.bias.float() * low.scale
    magnitudes = [low.magnitude for low in lows if low is not None and low.magnitude is not None]
    if magnitudes and len(magnitudes) < len(lows):
        raise ModelError(
            f"{adapter.where}: {layer}: q, k and v are one matrix of the base, where DoRA needs all three in "
            "target_modules."
        )
    if len({low.down.shape[1] for low in given}) > 1:
        raise ModelError(f"{adapter.where}: {layer}: q, k and v have different numbers of columns.")
    return LowRank(torch.cat([low.down for low in given]), up, 1.0, torch.cat(magnitudes) if magnitudes else None, bias)


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
