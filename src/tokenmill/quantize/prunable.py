"""Where channels, heads and layers lie in a model's tensors. Owns: names of tensors, which part of each stays after
pruning, and the entries in config.json. A layer that is built differently is refused by name.

A channel is a row of the matrices that feed the MLP's last matrix, and a column of that one. A group of heads is a key
head with the query heads that read it. Must not know: how the parts that stay are chosen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError
from tokenmill.models.config import ModelConfig

_LAYER = re.compile(r"^(?P<stem>(?:\w+\.)*?(?:layers|layer|h|blocks))\.(?P<index>\d+)\.(?P<rest>.+)$")
_FORMS = {"mlp.down_proj": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"), "mlp.fc2": ("mlp.fc1",)}
"""The MLP's last matrix -> the matrices that may feed it."""
OUT = "self_attn.o_proj"
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_KINDS = ("weight", "bias")
HEADED = frozenset(
    {
        "apertus",
        "arcee",
        "cwm",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "exaone_moe",
        "falcon_h1",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "granite",
        "granitemoe",
        "granitemoeshared",
        "hy_v3",
        "hyperclovax",
        "jais2",
        "llama",
        "llama4_text",
        "mellum",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "nanochat",
        "nemotron",
        "olmo",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "solar_open",
        "starcoder2",
        "vaultgemma",
    }
)
"""Families whose config.json states the size of a head apart from the hidden size and the number of heads, for our
reader and for Transformers'."""


@dataclass(frozen=True, slots=True)
class KeptPart:
    """The part of a tensor that stays: the places `index` [n] along `dim`."""

    dim: int
    index: Tensor

    def of(self, tensor: Tensor) -> Tensor:
        """Cut this part out of a tensor."""
        return tensor.index_select(self.dim, self.index.to(tensor.device)).contiguous()


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """In every layer: query heads, key heads, numbers in a head."""

    queries: int
    keys: int
    dim: int

    @property
    def width(self) -> int:
        """The numbers of all query heads in a group."""
        return self.queries // self.keys * self.dim


def layer_of(name: str) -> tuple[str, int, str] | None:
    """(the text before the layer's number, the number, the rest), if a tensor belongs to a layer."""
    found = _LAYER.match(name)
    return None if found is None else (found["stem"], int(found["index"]), found["rest"])


def renumbered(name: str, kept: list[int], count: int) -> str | None:
    """The tensor's new name if only the layers `kept` of `count` stay. None: its layer is removed. Layers after the
    last one (which draft tokens) move up with it."""
    found = layer_of(name)
    if found is None:
        return name
    stem, index, rest = found
    if index < count and index not in kept:
        return None
    number = kept.index(index) if index < count else index - count + len(kept)
    return f"{stem}.{number}.{rest}"


def in_layer(ckpt: Checkpoint, index: int) -> dict[str, str]:
    """The tensors of a layer: name after the layer's number -> whole name."""
    found = ((name, layer_of(name)) for name in ckpt.names())
    return {at[2]: name for name, at in found if at is not None and at[1] == index}


def mlp_end(names: Mapping[str, str], index: int) -> str:
    """The name of the MLP's last matrix within the layer."""
    inside = {rest.rpartition(".")[0] for rest in names if rest.startswith("mlp.")}
    for end, before in _FORMS.items():
        if end in inside and inside <= {end, *before} and inside & set(before):
            return end
    found_names = ", ".join(sorted(inside)[:4]) or "no mlp"
    raise ModelError(f"Layer {index} has {found_names}: channels are taken out of an MLP with down_proj or fc2 alone.")


def channels(ckpt: Checkpoint, names: Mapping[str, str], end: str, kept: Tensor) -> dict[str, KeptPart]:
    """The parts of a layer's MLP that stay with the channels `kept`."""
    shape = ckpt.shape(names[f"{end}.weight"])
    assert shape is not None
    found = {names[f"{end}.weight"]: KeptPart(1, kept)}
    for rest in names:
        base, _, kind = rest.rpartition(".")
        if base not in _FORMS[end]:
            continue
        rows = (ckpt.shape(names[rest]) or (0,))[0]
        if kind not in _KINDS or rows not in (shape[1], 2 * shape[1]):
            raise ModelError(f"{names[rest]}: channels cannot be told apart in it.")
        found[names[rest]] = KeptPart(0, kept if rows == shape[1] else torch.cat([kept, kept + shape[1]]))
    return found


def heads_of(config: Mapping[str, Any]) -> HeadCounts:
    """The heads that config.json describes. A family whose config could not describe fewer is refused."""
    c, kind = ModelConfig(config), str(config.get("model_type"))
    if kind not in HEADED:
        raise ModelError(f"{kind}: heads cannot be taken out, because its config.json cannot describe fewer heads.")
    queries = c.need("num_attention_heads", int)
    keys = c.get("num_key_value_heads", int, 0, low=0) or queries
    return HeadCounts(queries, keys, c.get("head_dim", int, 0, low=0) or c.need("hidden_size", int) // queries)


def heads(ckpt: Checkpoint, names: Mapping[str, str], have: HeadCounts, kept: Tensor) -> dict[str, KeptPart]:
    """The parts of a layer's attention that stay with the input columns `kept` of its last matrix. `kept` holds whole
    groups of heads."""
    first = kept.view(-1, have.width)[:, 0] // have.width * have.dim
    keys = (first[:, None] + torch.arange(have.dim, device=kept.device)).flatten()
    query, key = (have.queries * have.dim, kept), (have.keys * have.dim, keys)
    forms = {"self_attn.q_proj": [query], "self_attn.k_proj": [key], "self_attn.v_proj": [key],
             "self_attn.qkv_proj": [query, key, key]}  # fmt: skip
    found = {}
    for rest, name in names.items():
        base, _, kind = rest.rpartition(".")
        shape = ckpt.shape(name) or (0,)
        if base in _HEAD_NORMS and shape != (have.dim,):
            raise ModelError(f"{name} is a norm over all heads: none can be taken out.")
        if not base.startswith("self_attn.") or base in (*_HEAD_NORMS, OUT):
            continue
        form = forms.get(base, [])
        if kind not in _KINDS or not form or shape[0] != sum(rows for rows, _ in form):
            raise ModelError(f"{name}: heads cannot be told apart in it.")
        starts = [sum(rows for rows, _ in form[:n]) for n in range(len(form))]
        found[name] = KeptPart(0, torch.cat([index + start for (_, index), start in zip(form, starts, strict=True)]))
    if f"{OUT}.weight" not in names:
        raise ModelError("A layer without self_attn.o_proj: heads cannot be taken out.")
    found[names[f"{OUT}.weight"]] = KeptPart(1, kept)
    return found


def config_without(
    config: Mapping[str, Any], kept: list[int], count: int, inner: int | None, left: HeadCounts | None
) -> dict[str, Any]:
    """The config.json of the pruned model. Lists with one entry per layer lose the entries of removed layers."""
    made = dict(config)
    if inner is not None:
        made["intermediate_size"] = inner
    if left is not None:
        made |= {"num_attention_heads": left.queries, "num_key_value_heads": left.keys, "head_dim": left.dim}
    if len(kept) < count:
        for name, value in config.items():
            if isinstance(value, int) and name in LAYER_COUNTS:
                made[name] = len(kept)
            if isinstance(value, list) and len(value) == count and ("layer" in name or "block" in name):
                made[name] = [value[n] for n in kept]
    return made


LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def every(values: Iterable[int], what: str) -> int:
    """The one size that all layers have."""
    found = sorted(set(values))
    if len(found) != 1:
        raise ModelError(f"Layers have {', '.join(map(str, found))} {what}: config.json cannot say what would be left.")
    return found[0]
