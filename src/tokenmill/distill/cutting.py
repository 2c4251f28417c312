"""A draft model cut out of its teacher. Owns: which teachers can be cut, the shape of what is cut, and its tensors.

A few of the teacher's own layers between its own embeddings and its own head say much of what it says before they have
learnt anything. Must not know: training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tokenmill.compute.model import Checkpoint

FAMILIES = ("llama", "mistral", "qwen3")
"""Whose layers are what students.py computes."""
NAMES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip
TURNED = ("self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True, slots=True)
class CutShape:
    """Of a decoder whose layers are alike. heads: for queries, for keys, numbers in each; turned: norms of queries and
    keys; family: its model_type."""

    family: str
    hidden: int
    inner: int
    heads: tuple[int, int, int]
    theta: float
    eps: float
    turned: bool = False
    tied: bool = True


def shape_of(raw: dict[str, Any]) -> CutShape | None:
    """Of a teacher's layers; None: they are not of the plain kind."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    plain = raw.get("model_type") in FAMILIES and rope.get("rope_type", rope.get("type", "default")) == "default"
    if not plain or raw.get("attention_bias") or raw.get("mlp_bias") or raw.get("hidden_act", "silu") != "silu":
        return None
    if raw.get("sliding_window") and raw.get("use_sliding_window", True):
        return None
    try:
        count, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        return CutShape(
            family=raw["model_type"],
            hidden=hidden,
            inner=int(raw["intermediate_size"]),
            heads=(count, int(raw.get("num_key_value_heads") or count), int(raw.get("head_dim") or hidden // count)),
            theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
            eps=float(raw.get("rms_norm_eps", 1e-6)),
            turned=raw["model_type"] == "qwen3",
            tied=bool(raw.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError):
        return None


def picked(count: int, layers: int) -> list[int]:
    """Of so many layers the first one, the last one, and others between them at equal distances."""
    if layers >= count:
        return list(range(count))
    return [round(n * (count - 1) / max(1, layers - 1)) for n in range(layers)] if layers > 1 else [count - 1]


def layer_tensors(checkpoint: Checkpoint, n: int, shape: CutShape) -> dict[str, Tensor] | None:
    """A layer's tensors in float32 by the last part of their names; None: they are not stored as plain numbers."""
    names = [*NAMES, *(TURNED if shape.turned else ())]
    if not all(checkpoint.has(f"model.layers.{n}.{name}.weight") for name in names):
        return None
    found = {name: checkpoint.tensor(f"model.layers.{n}.{name}.weight") for name in names}
    if not all(value.is_floating_point() and value.element_size() > 1 for value in found.values()):
        return None
    return {f"{name.rpartition('.')[2]}.weight": value.float() for name, value in found.items()}


def last_norm(checkpoint: Checkpoint) -> Tensor:
    """What the head reads through."""
    return checkpoint.tensor("model.norm.weight").float()
