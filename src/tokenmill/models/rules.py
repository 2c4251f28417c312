"""What differs from layer to layer or from config to config, as small functions. Owns: windows, layers without
rotation, scales, sizes, which layers are mixtures (`models/positions.py` has rope settings).

Every rule is a function of the config; rows of the table name them. Must not know: tensors, families.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.models.config import ModelConfig


@dataclass(frozen=True)
class Kind:
    """One layer's attention: its window (0: none; below 0: the size of chunks), whether it rotates, and what
    `layer_types` calls it."""

    window: int = 0
    rotates: bool = True
    name: str = "full_attention"
    theta: float = 0.0
    """The base of its rotation (0: the config's)."""


LayerRule = Callable[[ModelConfig, int], Kind]
Number = Callable[[ModelConfig, int], float]
"""(config, layer or 0) -> a factor."""
Dense = Callable[[ModelConfig, int], bool]
"""(config, layer) -> is this layer without a mixture?"""


@dataclass(frozen=True)
class Positions:
    """A table of positions: learned (a name), or made of sines. `shift` rows come before the first position."""

    name: str = ""
    count: str = "max_position_embeddings"
    shift: int = 0


# ------------------------------------------------------------------ windows, and layers that do not rotate


def everywhere(c: ModelConfig, index: int) -> Kind:
    """Every layer has full attention."""
    return Kind()


def windowed(c: ModelConfig, index: int) -> Kind:
    """Every layer has the window of the config."""
    return Kind(c.get("sliding_window", int, 0))


def layer_kind(c: ModelConfig, index: int, default: str) -> str:
    """ "full_attention" or "sliding_attention", from `layer_types` where the config has it."""
    if not c.has("layer_types"):
        return default
    kinds = c.need("layer_types", list)
    if len(kinds) != c.need("num_hidden_layers", int):
        raise c.refuse("layer_types", "has not one entry for each of num_hidden_layers.")
    if kinds[index] not in ("full_attention", "sliding_attention"):
        raise c.refuse("layer_types", f"says nothing usable about layer {index}.")
    return str(kinds[index])


def always(name: str) -> LayerRule:
    """Every layer has the window under this config key."""
    return lambda c, index: Kind(c.need(name, int))


def typed(pattern: int, key: str = "", *, rotates_all: bool = True) -> LayerRule:
    """Every `pattern`-th layer (or config key `key`) has full attention, and the others have the window, unless
    `layer_types` says otherwise. rotates_all False: layers with full attention do not rotate."""

    def rule(c: ModelConfig, index: int) -> Kind:
        every = c.get(key, int, pattern) if key and not c.has("layer_types") else pattern
        name = layer_kind(c, index, "sliding_attention" if (index + 1) % every else "full_attention")
        if name == "full_attention":
            return Kind(rotates=rotates_all)
        return Kind(c.need("sliding_window", int), True, name)

    return rule


def leading(pattern: int) -> LayerRule:
    """The first layer and every `pattern`-th layer after it have full attention, and the others have the window, unless
    `layer_types` says otherwise (pattern 1: all have full attention)."""

    def rule(c: ModelConfig, index: int) -> Kind:
        name = layer_kind(c, index, "sliding_attention" if index % pattern else "full_attention")
        return Kind() if name == "full_attention" else Kind(c.need("sliding_window", int), True, name)

    return rule


def granite_swa(c: ModelConfig, index: int) -> Kind:
    """Windows, and each layer's own base (`layer_rope_theta`); layers whose base is 0 do not rotate."""
    kind, layers = leading(4)(c, index), c.need("num_hidden_layers", int)
    bases = c.get("layer_rope_theta", list, [])
    if not bases:
        return kind
    if len(bases) != layers:
        raise c.refuse("layer_rope_theta", "has not one entry for each of num_hidden_layers.")
    base = ModelConfig({"layer_rope_theta": bases[index]}).need("layer_rope_theta", float, low=0.0, high=1e12)
    return Kind(kind.window, base > 0, kind.name, base)


def qwen(c: ModelConfig, index: int) -> Kind:
    """Windows only if `use_sliding_window` is on, and from layer `max_window_layers` on."""
    window = _switched_window(c)
    return _listed_or(c, index, window, index >= c.get("max_window_layers", int, 28, low=0))


def _switched_window(c: ModelConfig) -> int:
    return c.get("sliding_window", int, 0) if c.get("use_sliding_window", bool, False) else 0


def _listed_or(c: ModelConfig, index: int, window: int, local: bool) -> Kind:
    """What `layer_types` says of a layer. Without it the layer has the window, if there is one, where `local` says."""
    name = layer_kind(c, index, "sliding_attention" if window and local else "full_attention")
    if name == "sliding_attention" and not window:
        raise c.refuse("layer_types", f"gives layer {index} a window, but use_sliding_window or sliding_window is off.")
    return Kind(window, True, name) if name == "sliding_attention" else Kind()


def qwen_all(c: ModelConfig, index: int) -> Kind:
    """All layers have the window, or none, by `use_sliding_window`."""
    return Kind(_switched_window(c))


def qwen2_moe(c: ModelConfig, index: int) -> Kind:
    """Every second layer below `max_window_layers` has the window, if `use_sliding_window` is on."""
    local = index % 2 == 0 and index < c.get("max_window_layers", int, 28, low=0)
    return _listed_or(c, index, _switched_window(c), local)


def upper_windows(c: ModelConfig, index: int) -> Kind:
    """Layers from `max_window_layers` on have the window."""
    upper = index >= c.get("max_window_layers", int, 62, low=0)
    return _listed_or(c, index, c.get("sliding_window", int, 0), upper)


def smollm3(c: ModelConfig, index: int) -> Kind:
    """Every fourth layer does not rotate (`no_rope_layers` holds a 0 for it). The layers that rotate may have the
    window."""
    every = c.get("no_rope_layer_interval", int, 4)
    flags = c.get("no_rope_layers", list, [])
    layers = c.need("num_hidden_layers", int)
    if flags and (len(flags) != layers or any(flag not in (0, 1) for flag in flags)):
        raise c.refuse("no_rope_layers", "must hold a 0 or 1 for each of num_hidden_layers.")
    rotates = bool(flags[index]) if flags else bool((index + 1) % every)
    return replace(_listed_or(c, index, _switched_window(c), not rotates), rotates=rotates)


def exaone4(c: ModelConfig, index: int) -> Kind:
    """Without a window all layers rotate. With one, only the layers that have it rotate."""
    if not c.has("sliding_window"):
        if "sliding_attention" in c.get("layer_types", list, []):
            raise c.refuse("layer_types", "gives layers a window, but sliding_window is off.")
        return Kind()
    return typed(4, "sliding_window_pattern", rotates_all=False)(c, index)


def gpt_neo(c: ModelConfig, index: int) -> Kind:
    """Global and local layers, as `attention_types` lists them."""
    groups, count = c.get("attention_types", list, [[["global", "local"], 12]]), c.need("num_hidden_layers", int)
    try:
        kinds = [kind for pattern, times in groups for kind in pattern * min(times, count + 1)]
    except (TypeError, ValueError, OverflowError):
        raise c.refuse("attention_types", "must hold lists of kinds, each with a count.") from None
    if len(kinds) != count or not all(kind in ("global", "local") for kind in kinds):
        raise c.refuse("attention_types", "must name 'global' or 'local' for each layer.")
    if c.get("attention_layers", list, kinds) != kinds:
        raise c.refuse("attention_layers", "contradicts 'attention_types'.")
    return Kind(c.get("window_size", int, 256) if kinds[index] == "local" else 0)


# ------------------------------------------------------------------ factors

LEAST_SCALE = 1e-9
"""The least scale of scores: kernels expect a positive one."""


def key(name: str, default: float = 1.0, low: float | None = None) -> Number:
    """The value of one config key. low: the least value that is usable."""
    return lambda c, index: c.get(name, float, default, low=low)


def inverse(name: str) -> Number:
    """1 / the value of one key."""
    return lambda c, index: 1.0 / c.get(name, float, 1.0, low=1e-9)


def key_or_root(name: str) -> Number:
    """The value of one config key, or the inverse root of the head size."""

    def factor(c: ModelConfig, index: int) -> float:
        dim = c.get("head_dim", int, 0) or c.need("hidden_size", int) // c.need("num_attention_heads", int)
        return c.get(name, float, dim**-0.5, low=LEAST_SCALE)

    return factor


def root_if(name: str) -> Number:
    """The root of the hidden size if this key is on."""
    return lambda c, index: math.sqrt(c.need("hidden_size", int)) if c.get(name, bool, False) else 1.0


def inverse_root(name: str, default: float) -> Number:
    """1 / the root of the value of one key."""
    return lambda c, index: c.get(name, float, default, low=1e-6) ** -0.5


def root_of_hidden(c: ModelConfig, index: int) -> float:
    """The root of the hidden size."""
    return math.sqrt(c.need("hidden_size", int))


def rounded_root_of_hidden(c: ModelConfig, index: int) -> float:
    """The root of the hidden size as a bfloat16, whatever the compute dtype."""
    bits = int.from_bytes(struct.pack(">f", math.sqrt(c.need("hidden_size", int))), "big")
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack(">f", bits.to_bytes(4, "big"))[0])


def root_if_scaled(c: ModelConfig, index: int) -> float:
    """The root of the hidden size if `scale_embedding` is on."""
    return math.sqrt(c.need("hidden_size", int)) if c.get("scale_embedding", bool, True) else 1.0


def one(c: ModelConfig, index: int) -> float:
    """1: scores are not scaled."""
    return 1.0


# ------------------------------------------------------------------ sizes


def intermediate(c: ModelConfig) -> int:
    """`intermediate_size`."""
    return c.need("intermediate_size", int)


def half(name: str) -> Callable[[ModelConfig], int]:
    """Half the value of one key."""
    return lambda c: max(1, c.need(name, int) // 2)


def four_times(name: str) -> Callable[[ModelConfig], int]:
    """The value of a key, or four times the hidden size."""
    return lambda c: c.get(name, int, 4 * c.need("hidden_size", int))


def product(*names: str, low: int = 0) -> Callable[[ModelConfig], int]:
    """The product of these keys, of which each is at least `low` (0: there is none)."""
    return lambda c: math.prod(c.get(name, int, 0, low=low) for name in names)


# ------------------------------------------------------------------ which layers are mixtures


def never(c: ModelConfig, index: int) -> bool:
    """Every layer is a mixture."""
    return False


def sparse_step(c: ModelConfig, index: int) -> bool:
    """Layers in `mlp_only_layers`, and all but every `decoder_sparse_step`-th."""
    plain = c.get("mlp_only_layers", list, [])
    return index in plain or (index + 1) % c.get("decoder_sparse_step", int, 1) != 0


def first_dense(c: ModelConfig, index: int) -> bool:
    """The first `first_k_dense_replace` layers."""
    return index < c.get("first_k_dense_replace", int, 0, low=0)


def ernie(c: ModelConfig, index: int) -> bool:
    """Mixtures lie between two layers, at an interval."""
    start, stop = c.get("moe_layer_start_index", int, 1, low=0), c.get("moe_layer_end_index", int, -1, low=-1)
    stop = c.need("num_hidden_layers", int) - 1 if stop == -1 else stop
    return bool((index + 1) % c.get("moe_layer_interval", int, 1)) or not start <= index <= stop


# ------------------------------------------------------------------ what a few families say in their own way


def ministral(c: ModelConfig, index: int) -> Kind:
    """`layer_types` names the layers with the window. Without it all layers have the window."""
    return _listed_or(c, index, c.get("sliding_window", int, 0), True)


def dbrx(c: ModelConfig) -> dict[str, Any]:
    """The sizes that DBRX keeps in objects for attention and experts."""
    attention, experts = c.sub("attn_config"), c.sub("ffn_config")
    act = ModelConfig(experts.get("ffn_act_fn", dict, {"name": "silu"}), "ffn_config.ffn_act_fn")
    if set(act.data) - {"name"}:
        raise experts.refuse("ffn_act_fn", "is not supported (only a name).")
    norm = experts.data.get("moe_normalize_expert_weights", 1.0)
    if norm not in (None, 1.0):
        raise experts.refuse("moe_normalize_expert_weights", "is not supported (only 1 or null).")
    known = {"clip_qkv", "kv_n_heads", "rope_theta"}, {
        "ffn_act_fn", "ffn_hidden_size", "moe_num_experts", "moe_top_k", "moe_normalize_expert_weights", "hidden_size",
    }  # fmt: skip
    for part, names in zip((attention, experts), known, strict=True):
        for name, value in part.data.items():
            if name not in names and value and _OTHER.search(name):
                raise part.refuse(name, "is not supported.")
    return {
        "num_key_value_heads": attention.get("kv_n_heads", int, 1),
        "attn_config.clip_qkv": attention.data.get("clip_qkv"),
        "attn_config.rope_theta": attention.get("rope_theta", float, 10000.0, low=1.0),
        "ffn_config.ffn_act_fn.name": act.get("name", str, "silu"),
        "ffn_config.moe_num_experts": experts.get("moe_num_experts", int, 4),
        "ffn_config.moe_top_k": experts.get("moe_top_k", int, 1),
        "ffn_config.ffn_hidden_size": experts.get("ffn_hidden_size", int, 3584),
        "ffn_config.moe_normalize": norm == 1.0,
    }


_OTHER = re.compile("clip|scale|rope|norm|bias|window|alibi")


def mpt(c: ModelConfig) -> dict[str, Any]:
    """The settings that MPT keeps in an object for attention."""
    attention = c.sub("attn_config")
    only = {"alibi": (True,), "alibi_bias_max": (8,), "qk_ln": (False,), "prefix_lm": (False,), "rope": (False,),
            "attn_type": ("multihead_attention",), "qk_gn": (False,), "sliding_window_size": (-1,)}  # fmt: skip
    for name, value in attention.data.items():
        if name in only and value is not None and value not in only[name]:
            raise attention.refuse(name, f"is not supported (only {only[name][0]}).")
    return {f"attn_config.{name}": attention.data.get(name) for name in ("clip_qkv", "softmax_scale")}


def mpt_scale(c: ModelConfig, index: int) -> float:
    """`softmax_scale`, or the inverse root of the head size."""
    root = (c.need("hidden_size", int) / c.need("num_attention_heads", int)) ** -0.5
    return c.get("attn_config.softmax_scale", float, root, low=1e-9)


def bigcode(c: ModelConfig) -> dict[str, Any]:
    """One key head with `multi_query`, else one for each query head."""
    many = c.first(("n_head", "num_attention_heads"), int)
    return {"num_key_value_heads": 1 if c.get("multi_query", bool, True) else many}


def bigcode_scale(c: ModelConfig, index: int) -> float:
    """1 if `scale_attn_weights` is off."""
    root = (c.need("hidden_size", int) / c.need("num_attention_heads", int)) ** -0.5
    return root if c.get("scale_attn_weights", bool, True) else 1.0


def value(name: str, default: int | None = None) -> Callable[[ModelConfig], int]:
    """A size that is one key."""
    return lambda c: c.need(name, int) if default is None else c.get(name, int, default, low=0)


def listed(count: Callable[[ModelConfig], int]) -> Dense:
    """`mlp_layer_types` names dense and sparse layers. Without it the first layers are dense, as many as this function
    says. Layers behind the model's, which draft later tokens, are sparse."""

    def dense(c: ModelConfig, index: int) -> bool:
        kinds, layers = c.get("mlp_layer_types", list, []), c.need("num_hidden_layers", int)
        if kinds and (len(kinds) != layers or not set(map(str, kinds)) <= {"dense", "sparse"}):
            raise c.refuse("mlp_layer_types", "must name 'dense' or 'sparse' for each of num_hidden_layers.")
        return index < layers and (str(kinds[index]) == "dense" if kinds else index < count(c))

    return dense


glm_dense = listed(lambda c: 1)
"""Without a list only the first layer is dense."""


def llama4(c: ModelConfig, index: int) -> Kind:
    """Every fourth layer does not rotate (`no_rope_layers` holds a 0 for it) and has full attention. The others attend
    within their chunk, unless `layer_types` says otherwise."""
    flags, layers = c.get("no_rope_layers", list, []), c.need("num_hidden_layers", int)
    if flags and (len(flags) != layers or any(flag not in (0, 1) for flag in flags)):
        raise c.refuse("no_rope_layers", "must hold a 0 or 1 for each of num_hidden_layers.")
    rotates = bool(flags[index]) if flags else (index + 1) % c.get("no_rope_layer_interval", int, 4) != 0
    kinds = c.get("layer_types", list, [])
    if kinds and (len(kinds) != layers or not set(map(str, kinds)) <= {"chunked_attention", "full_attention"}):
        raise c.refuse("layer_types", "must name 'chunked_attention' or 'full_attention' for each of the layers.")
    chunked = kinds[index] == "chunked_attention" if kinds else rotates
    return Kind(-c.need("attention_chunk_size", int) if chunked else 0, rotates)


def llama4_dense(c: ModelConfig, index: int) -> bool:
    """`moe_layers` lists the mixtures. Without it every `interleave_moe_layer_step`-th layer is one."""
    if c.has("moe_layers"):
        return index not in c.need("moe_layers", list)
    return (index + 1) % c.get("interleave_moe_layer_step", int, 1) != 0


def cohere2_moe(c: ModelConfig, index: int) -> Kind:
    """Dense layers at the front have a pattern of their own, and all of them rotate if that is 1. Otherwise layers with
    full attention do not rotate."""
    front, pattern = c.get("first_k_dense_replace", int, 0, low=0), c.get("sliding_window_pattern", int, 4)
    ahead = c.get("prefix_dense_sliding_window_pattern", int, 1)
    every, place = (ahead, index) if index < front else (pattern, index - front)
    name = layer_kind(c, index, "sliding_attention" if (place + 1) % every else "full_attention")
    if name == "sliding_attention":
        return Kind(c.need("sliding_window", int), True, name)
    return Kind(0, ahead == 1 and listed_or_first(c, index), name)


listed_or_first = listed(lambda c: c.get("first_k_dense_replace", int, 0, low=0))
"""`mlp_layer_types`, or the number of first layers that are dense."""


def key_or_intermediate(name: str) -> Callable[[ModelConfig], int]:
    """The value of one key, or `intermediate_size`."""
    return lambda c: c.get(name, int, c.need("intermediate_size", int))


def exaone(c: ModelConfig) -> dict[str, Any]:
    """Two keys, each of which has an older name."""
    return {
        "rms_norm_eps": c.first(("layer_norm_epsilon", "rms_norm_eps"), float, 1e-5),
        "hidden_act": c.first(("activation_function", "hidden_act"), str, "silu"),
    }


def sarvam(c: ModelConfig) -> dict[str, Any]:
    """Keys to which its first files gave other names."""
    return {
        "n_routed_experts": c.first(("n_routed_experts", "num_experts", "num_local_experts"), int, 128),
        "n_shared_experts": c.first(("n_shared_experts", "num_shared_experts"), int, 1),
        "attention_bias": c.first(("attention_bias", "use_qkv_bias"), bool, False),
    }


def check_latent_sizes(c: ModelConfig, nope: int, rotated: int) -> None:
    """Other names of sizes must agree with them. Where the rotated size has another one, Transformers rotates by that;
    in the other families files have leftovers under it."""
    heads = c.need("num_attention_heads", int)
    if c.get("num_key_value_heads", int, heads) != heads:
        raise c.refuse("num_key_value_heads", f"is not supported (only num_attention_heads = {heads}).")
    names = {"qk_head_dim": nope + rotated, "q_head_dim": nope + rotated}
    if c.architecture in (
        "DeepseekV3ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "YoutuForCausalLM",
        "AXK1ForCausalLM",
        "LongcatFlashForCausalLM",
    ):
        names["head_dim"] = rotated
    for name, size in names.items():
        if c.has(name) and c.data[name] != size:
            parts = "'qk_rope_head_dim'" if name == "head_dim" else "'qk_nope_head_dim' and 'qk_rope_head_dim' together"
            raise c.refuse(name, f"contradicts {parts} = {size}.")
