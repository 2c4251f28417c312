"""GGUF keys that would change what a model computes, and that the reader of its architecture did not ask for.

Owns: these keys, with the values that ask for nothing. Sizes are not among them: tensors have them as well. Must not
know: what a key becomes in a config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tokenmill.checkpoint.gguf_meta import Meta, shown

_OFF: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.shared_kv_layers",
                     "attention.temperature_scale", "attn_logit_softcapping", "final_logit_softcapping",
                     "router_logit_softcapping", "swiglu_clamp_exp", "swiglu_clamp_shexp", "moe_latent_size"), (0,)),
    **dict.fromkeys(("attention.output_scale", "embedding_scale", "residual_scale", "logit_scale",
                     "expert_weights_scale", "expert_group_count", "expert_group_used_count", "expert_group_scale",
                     "interleave_moe_layer_step", "moe_every_n_layers", "full_attention_interval"), (0, 1)),
    "expert_gating_func": (0, 1),
    "ssm.dt_b_c_rms": (False,),
}  # fmt: skip
"""Keys of all architectures -> values that change nothing."""
_BUILT_IN = {
    ("gpt-oss", "expert_gating_func"): (0, 3),
    **{(arch, "expert_gating_func"): (0, 2) for arch in ("lfm2moe", "llama4", "nemotron_h_moe")},
    ("gemma3n", "attention.scale"): (1,),
    ("gemma4", "attention.scale"): (1,),
}
"""What an architecture does whatever its files say."""
_BESIDE = ("attention.scale", "attention.sliding_window", "rope.dimension_count", "rope.freq_base_swa")
_NEVER_ROTATE = ("bloom", "gpt2", "jamba", "mamba", "mamba2", "mpt", "nemotron_h", "nemotron_h_moe", "starcoder")


def check_unread(meta: Meta, config: Mapping[str, Any]) -> None:
    """Refuse, by the name of its key, what a file asks for and what is not built for its architecture here."""
    asked = frozenset(meta.metadata.asked)
    for key, value in meta.metadata.items():
        name = key.removeprefix(f"{meta.arch}.")
        if name == key or key in asked or value is None:
            continue
        listed = value if isinstance(value, list) else [value]
        off = _BUILT_IN.get((str(meta.arch), name)) or _OFF.get(name, ())
        if not (all(one in off for one in listed) if off else _means_nothing(meta, name, value, config)):
            raise meta.fail(f"{key} = {shown(value)} changes what a model computes, and {meta.arch} is not built with "
                            "it here")  # fmt: skip


def _means_nothing(meta: Meta, name: str, value: Any, config: Mapping[str, Any]) -> bool:
    """The same for keys whose neutral value is a matter of other keys."""
    if name == "expert_weights_norm":
        return value is bool(config.get("norm_topk_prob", True))
    if name == "rope.dimension_sections":  # the fourth part of a position is zero in text, so these pairs stand still
        return not (isinstance(value, list) and any(value[3:]))
    if name not in _BESIDE:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if name == "attention.sliding_window":
        return value == 0 or value >= meta.whole("context_length", 1 << 26)
    if name == "rope.freq_base_swa":
        return value == meta.value("rope.freq_base") or not meta.value("attention.sliding_window")
    even = meta.whole("embedding_length") // max(1, *meta.each("attention.head_count", meta.whole("block_count")))
    head = meta.whole("attention.key_length_mla", meta.whole("attention.key_length", max(even, 1)))
    if name == "attention.scale":
        return value == 0 or abs(value * math.sqrt(head) - 1.0) < 1e-3
    return value == head or meta.arch in _NEVER_ROTATE
