"""GGUF tensor names of families whose layers are not Llama's: mixtures with shared experts, latent attention, recurrent
layers. Owns: one table per architecture, and how the converter's changes are undone there.

Names and changes are those of the format's own converter. Must not know: metadata other than the config made from it,
tensor data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tokenmill.checkpoint.gguf_file import TensorInfo
from tokenmill.checkpoint.gguf_source import Joined, Places, TensorSource, numbered, stacked

Change = Callable[[TensorInfo, Mapping[str, Any]], dict[str, Any]]
"""(tensor, config) -> fields of its Source."""


def _flat(info: TensorInfo, config: Mapping[str, Any]) -> dict[str, Any]:
    size = 1
    for dim in info.shape:
        size *= dim
    return {"lifted": (size,)}


def _rate(info: TensorInfo, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_flat(info, config), "negated_exp": True}


def _matrix_rate(info: TensorInfo, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"negated_exp": True}


def _taps(info: TensorInfo, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"lifted": (info.shape[0], 1, info.shape[-1])}


def _one_row(info: TensorInfo, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"lifted": (1, info.shape[-1])}


def _less(info: TensorInfo, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"less": 1.0}


def _queries(info: TensorInfo, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"heads": config["num_attention_heads"]}


def _keys(info: TensorInfo, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"heads": config["num_key_value_heads"]}


Part = str | tuple[str, Change]
"""Our name within the layer; with it may come the function that undoes a change of the converter."""


@dataclass(frozen=True)
class Names:
    """The names of one architecture: its parts, the stacks of experts (stored name -> name of one expert's matrix),
    where the experts lie, and what comes before a layer's number."""

    parts: Mapping[str, Part]
    stacks: Mapping[str, str] = field(default_factory=dict)
    experts: str = "mlp.experts"
    top: Mapping[str, Part] = field(default_factory=dict)
    body: str = "model.layers"
    lists: Mapping[str, str] = field(default_factory=dict)
    """Tensors outside of the layers that hold several matrices: stored name -> the names that are numbered."""
    several: Mapping[str, Callable[[str, TensorInfo, Mapping[str, Any]], Places]] = field(default_factory=dict)
    """Tensors of a layer that hold several of our tensors: (layer, tensor, config) -> where its parts go."""


def attention(at: str = "self_attn", out: str = "o_proj", *, woven: bool = False) -> dict[str, Part]:
    """Four matrices. woven: the converter interleaves the rows of queries and keys."""
    found: dict[str, Part] = {}
    for kind in ("weight", "bias"):
        found[f"attn_q.{kind}"] = (f"{at}.q_proj.{kind}", _queries) if woven else f"{at}.q_proj.{kind}"
        found[f"attn_k.{kind}"] = (f"{at}.k_proj.{kind}", _keys) if woven else f"{at}.k_proj.{kind}"
        found[f"attn_v.{kind}"] = f"{at}.v_proj.{kind}"
        found[f"attn_output.{kind}"] = f"{at}.{out}.{kind}"
    return found


def both(pairs: Mapping[str, str]) -> dict[str, Part]:
    """Weights and biases of these modules."""
    return {f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in pairs.items() for kind in ("weight", "bias")}


def feed(at: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> dict[str, Part]:
    """A gated feed-forward part, with or without biases."""
    return both({"ffn_gate": f"{at}.{gate}", "ffn_up": f"{at}.{up}", "ffn_down": f"{at}.{down}"})


def _space(at: str) -> dict[str, Part]:
    """Mamba-2."""
    return {
        **both({"ssm_in": f"{at}.in_proj", "ssm_out": f"{at}.out_proj"}),
        "ssm_conv1d.weight": (f"{at}.conv1d.weight", _taps), "ssm_conv1d.bias": f"{at}.conv1d.bias",
        "ssm_dt.bias": f"{at}.dt_bias", "ssm_a": (f"{at}.A_log", _rate), "ssm_d": (f"{at}.D", _flat),
        "ssm_norm.weight": (f"{at}.norm.weight", _flat),
    }  # fmt: skip


def _scan(at: str) -> dict[str, Part]:
    """Mamba-1."""
    return {
        **both({"ssm_in": f"{at}.in_proj", "ssm_out": f"{at}.out_proj", "ssm_dt": f"{at}.dt_proj"}),
        "ssm_conv1d.weight": (f"{at}.conv1d.weight", _taps), "ssm_conv1d.bias": f"{at}.conv1d.bias",
        "ssm_x.weight": f"{at}.x_proj.weight", "ssm_a": (f"{at}.A_log", _matrix_rate), "ssm_d": f"{at}.D",
        **{f"ssm_{one}_norm.weight": f"{at}.{one}_layernorm.weight" for one in ("dt", "b", "c")},
    }  # fmt: skip


def _shared(at: str) -> dict[str, Part]:
    return {f"ffn_{one}_shexp.weight": f"{at}.{one}_proj.weight" for one in ("gate", "up", "down")}


_STACKS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_PLAIN_STACKS = {"ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_W = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
_BEFORE: dict[str, Part] = {"attn_norm.weight": "input_layernorm.weight"}
_HEAD_NORMS: dict[str, Part] = {"attn_q_norm.weight": "self_attn.q_norm.weight",
                                "attn_k_norm.weight": "self_attn.k_norm.weight"}  # fmt: skip
_TOP: dict[str, Part] = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
                         "output.weight": "lm_head.weight"}  # fmt: skip
_FINAL: dict[str, Part] = {**_TOP, "output_norm.weight": "model.final_layernorm.weight"}
_BACKBONE: dict[str, Part] = {"token_embd.weight": "backbone.embeddings.weight", "output.weight": "lm_head.weight",
                              "output_norm.weight": "backbone.norm_f.weight"}  # fmt: skip
_EMBEDDING_NORM: dict[str, Part] = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight",
                                    "token_embd_norm.weight": "model.embedding_norm.weight"}  # fmt: skip
_ALONE: dict[str, Part] = {"attn_norm.weight": "norm.weight"}
_BIASED_ROUTER: dict[str, Part] = {"ffn_gate_inp.weight": "mlp.gate.weight",
                                   "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}  # fmt: skip
_CONVOLUTION: dict[str, Part] = {
    **attention(out="out_proj"), "attn_norm.weight": "operator_norm.weight", "ffn_norm.weight": "ffn_norm.weight",
    "attn_q_norm.weight": "self_attn.q_layernorm.weight", "attn_k_norm.weight": "self_attn.k_layernorm.weight",
    "shortconv.conv.weight": ("conv.conv.weight", _taps), "shortconv.conv.bias": "conv.conv.bias",
    **both({"shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj"}),
    **feed("feed_forward", "w1", "w3", "w2"),
}  # fmt: skip

LAYERS: dict[str, Names] = {
    "glm4moe": Names({
        **attention(), **_BEFORE, **_HEAD_NORMS, **feed("mlp"), **_BIASED_ROUTER, **_shared("mlp.shared_experts"),
        "post_attention_norm.weight": "post_attention_layernorm.weight",
    }, _STACKS, top=_TOP),
    "deepseek2": Names({
        **_BEFORE, **feed("mlp"), **_BIASED_ROUTER, **_shared("mlp.shared_experts"),
        "ffn_norm.weight": "post_attention_layernorm.weight", "attn_output.weight": "self_attn.o_proj.weight",
        "attn_q.weight": "self_attn.q_proj.weight", "attn_q_a.weight": "self_attn.q_a_proj.weight",
        "attn_q_b.weight": "self_attn.q_b_proj.weight", "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
        "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
        "attn_kv_b.weight": "self_attn.kv_b_proj.weight",
    }, {**_STACKS, "ffn_gate_up_exps": "gate_proj|up_proj"}, top=_TOP),
    "qwen2moe": Names({
        **attention(), **_BEFORE, **_shared("mlp.shared_expert"), "ffn_gate_inp.weight": "mlp.gate.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "ffn_gate_inp_shexp.weight": ("mlp.shared_expert_gate.weight", _one_row),
    }, _STACKS, top=_TOP),
    "qwen3next": Names({
        **attention(), **{name: (ours, _less) for name, ours in _HEAD_NORMS.items() if isinstance(ours, str)},
        **feed("mlp"), **_shared("mlp.shared_expert"), "attn_norm.weight": ("input_layernorm.weight", _less),
        "post_attention_norm.weight": ("post_attention_layernorm.weight", _less),
        "ffn_gate_inp.weight": "mlp.gate.weight",
        "ffn_gate_inp_shexp.weight": ("mlp.shared_expert_gate.weight", _one_row),
        "attn_qkv.weight": "linear_attn.in_proj_qkv.weight", "attn_gate.weight": "linear_attn.in_proj_z.weight",
        "ssm_in.weight": "linear_attn.in_proj_qkvz.weight", "ssm_out.weight": "linear_attn.out_proj.weight",
        "ssm_norm.weight": "linear_attn.norm.weight", "ssm_a": ("linear_attn.A_log", _rate),
        "ssm_dt.bias": "linear_attn.dt_bias", "ssm_conv1d.weight": ("linear_attn.conv1d.weight", _taps),
    }, _STACKS, top={**_TOP, "output_norm.weight": ("model.norm.weight", _less)}),
    "gemma4": Names({
        **attention(), **_BEFORE, **_HEAD_NORMS, **feed("mlp"),
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
        "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
        "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
        "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
        "inp_gate.weight": "per_layer_input_gate.weight", "proj.weight": "per_layer_projection.weight",
        "post_norm.weight": "post_per_layer_input_norm.weight", "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.weight": "router.proj.weight", "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    }, {**_STACKS, "ffn_gate_up_exps": "gate_proj|up_proj"}, "experts", {
        **_TOP, "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
        "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
        "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    }),
    "granitehybrid": Names({
        **attention(woven=True), **_BEFORE, **_space("mamba"), **feed("shared_mlp", down="output_linear"),
        **_shared("shared_mlp"), "ffn_down_shexp.weight": "shared_mlp.output_linear.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "ffn_gate_inp.weight": "block_sparse_moe.router.layer.weight",
    }, _STACKS, "block_sparse_moe", _TOP),
    "lfm2": Names(_CONVOLUTION, top=_EMBEDDING_NORM),
    "lfm2moe": Names({**_CONVOLUTION, "ffn_gate_inp.weight": "feed_forward.gate.weight",
                      "exp_probs_b.bias": "feed_forward.expert_bias"}, _W, "feed_forward.experts", _EMBEDDING_NORM),
    "falcon-h1": Names({
        **attention(), **_BEFORE, **_space("mamba"), **feed("feed_forward"),
        "ffn_norm.weight": "pre_ff_layernorm.weight", "ffn_norm": "pre_ff_layernorm.weight",  # The converter's order.
    }, top=_FINAL),
    "nemotron_h": Names({
        **attention("mixer", woven=True), **_ALONE, **_space("mixer"),
        **both({"ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj"}),
    }, top=_BACKBONE, body="backbone.layers"),
    "nemotron_h_moe": Names({
        **attention("mixer", woven=True), **_ALONE, **_space("mixer"),
        "ffn_gate_inp.weight": "mixer.gate.weight", "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        "ffn_up_shexp.weight": "mixer.shared_experts.up_proj.weight",
        "ffn_down_shexp.weight": "mixer.shared_experts.down_proj.weight",
    }, _PLAIN_STACKS, "mixer.experts", _BACKBONE, "backbone.layers"),
    "mamba": Names({**_ALONE, **_scan("mixer")}, top=_BACKBONE, body="backbone.layers"),
    "mamba2": Names({**_ALONE, **_space("mixer")}, top=_BACKBONE, body="backbone.layers"),
    "jamba": Names({
        **attention(), **_BEFORE, **_scan("mamba"), **feed("feed_forward"),
        "ffn_norm.weight": "pre_ff_layernorm.weight", "ffn_gate_inp.weight": "feed_forward.router.weight",
    }, _STACKS, "feed_forward.experts", _FINAL),
}  # fmt: skip
_AFTER_ATTENTION: dict[str, Part] = {"ffn_norm.weight": "post_attention_layernorm.weight"}
LAYERS |= {
    "olmoe": Names({**attention(), **_BEFORE, **_HEAD_NORMS, **_AFTER_ATTENTION,
                    "ffn_gate_inp.weight": "mlp.gate.weight"}, _STACKS, top=_TOP),
    "dots1": Names({**attention(), **_BEFORE, **_HEAD_NORMS, **_AFTER_ATTENTION, **feed("mlp"), **_BIASED_ROUTER,
                    **_shared("mlp.shared_experts")}, _STACKS, top=_TOP),
    "ernie4_5-moe": Names({
        **attention(), **_BEFORE, **_AFTER_ATTENTION, **feed("mlp"), **_shared("mlp.shared_experts"),
        "ffn_gate_inp.weight": "mlp.gate.weight",
        "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
    }, _STACKS, top=_TOP),
    "hunyuan-moe": Names({
        **attention(), **_BEFORE, **_AFTER_ATTENTION, **_shared("mlp.shared_mlp"),
        "ffn_gate_inp.weight": "mlp.gate.wg.weight", "attn_q_norm.weight": "self_attn.query_layernorm.weight",
        "attn_k_norm.weight": "self_attn.key_layernorm.weight",
    }, _STACKS, top=_TOP),
    "mimo2": Names({
        **attention(), **_BEFORE, **_AFTER_ATTENTION, **feed("mlp"), **_BIASED_ROUTER,
        "attn_sinks.weight": "self_attn.attention_sink_bias",
    }, _STACKS, top=_TOP),
    "minimax-m2": Names({
        **attention(), **_BEFORE, **_HEAD_NORMS, **_AFTER_ATTENTION,
        "ffn_gate_inp.weight": "block_sparse_moe.gate.weight",
        "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
    }, _W, "block_sparse_moe.experts", _TOP),
    "afmoe": Names({
        **attention(), **_BEFORE, **_HEAD_NORMS, **feed("mlp"), **_shared("mlp.shared_experts"),
        "attn_gate.weight": "self_attn.gate_proj.weight", "ffn_norm.weight": "pre_mlp_layernorm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "post_ffw_norm.weight": "post_mlp_layernorm.weight", "ffn_gate_inp.weight": "mlp.router.gate.weight",
        "exp_probs_b.bias": "mlp.expert_bias",
    }, _STACKS, top=_TOP),
    "granitemoe": Names({
        **attention(woven=True), **_BEFORE, **_AFTER_ATTENTION, **_shared("shared_mlp"),
        "ffn_down_shexp.weight": "shared_mlp.output_linear.weight",
        "ffn_gate_inp.weight": "block_sparse_moe.router.layer.weight",
    }, _STACKS, "block_sparse_moe", _TOP),
    "llama4": Names({
        **attention(), **_BEFORE, **_AFTER_ATTENTION, **feed("feed_forward"), **_shared("feed_forward.shared_expert"),
        "ffn_gate_inp.weight": "feed_forward.router.weight",
    }, {**_STACKS, "ffn_gate_up_exps": "gate_proj|up_proj"}, "feed_forward.experts", _TOP),
    "gemma3n": Names({
        **{name: part for name, part in LAYERS["gemma4"].parts.items() if "ffw_norm_" not in name and "exps" not in name
           and "gate_inp" not in name and "scale" not in name},
        **{f"altup_{theirs}.weight": f"altup.{ours}" for theirs, ours in {
            "correct_coef": "correction_coefs.weight", "correct_scale": "correct_output_scale",
            "predict_coef": "prediction_coefs.weight", "router": "modality_router.weight",
            "router_norm": "router_norm.weight"}.items()},
        "laurel_l.weight": "laurel.linear_left.weight", "laurel_r.weight": "laurel.linear_right.weight",
        "laurel_post_norm.weight": "laurel.post_laurel_norm.weight",
    }, top=LAYERS["gemma4"].top, lists={"altup_proj.weight": "model.altup_projections",
                                        "altup_unembd_proj.weight": "model.altup_unembed_projections"}),
}  # fmt: skip
_LATENT = LAYERS["deepseek2"].parts
LAYERS |= {
    "mistral4": LAYERS["deepseek2"],
    **dict.fromkeys(("deepseek32", "glm-dsa"), replace(LAYERS["deepseek2"], parts={
        **_LATENT, "indexer.attn_q_b.weight": "self_attn.indexer.wq_b.weight",
        "indexer.attn_k.weight": "self_attn.indexer.wk.weight",
        "indexer.proj.weight": "self_attn.indexer.weights_proj.weight",
        **{f"indexer.k_norm.{end}": f"self_attn.indexer.k_norm.{end}" for end in ("weight", "bias")}})),
    "bitnet": Names({
        **attention(), **_BEFORE, **_AFTER_ATTENTION, **feed("mlp"), "ffn_sub_norm.weight": "mlp.ffn_sub_norm.weight",
        "attn_sub_norm.weight": "self_attn.attn_sub_norm.weight",
    }, top=_TOP),
    "exaone-moe": Names({
        **attention(), **_BEFORE, **_HEAD_NORMS, **_AFTER_ATTENTION, **feed("mlp"), **_shared("mlp.shared_experts"),
        "ffn_gate_inp.weight": "mlp.gate.weight", "exp_probs_b.bias": "mlp.e_score_correction_bias",
    }, _STACKS, top=_TOP),
    "minicpm3": Names({name: part for name, part in _LATENT.items() if "exp" not in name and "inp" not in name},
                      top=_TOP),
}  # fmt: skip
_NAME = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(.+)")


def places(names: Names, name: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Places:
    """Where a stored tensor goes. A tensor that means nothing here keeps its own name."""
    info = tensors[name]
    if name in names.top:
        return [_place("", names.top[name], info, config)]
    if name in names.lists:
        return numbered(names.lists[name], info)
    match = _NAME.fullmatch(name)
    if match is None:
        return [(name, TensorSource(info))]
    if int(match[1]) >= config["num_hidden_layers"]:
        return []  # Layers that draft later tokens.
    at, part = f"{names.body}.{match[1]}.", match[2]
    base, _, kind = part.rpartition(".")
    if part == "attn_v_b.weight":
        return []  # it is read with the keys
    if part == "attn_k_b.weight" and (values := tensors.get(f"blk.{match[1]}.attn_v_b.weight")) is not None:
        return [(f"{at}self_attn.kv_b_proj.weight", Joined.of(info, values))]
    if part in names.several:
        return names.several[part](at, info, config)
    if part == "ssm_ba.weight":
        name = f"{at}linear_attn.in_proj_"
        together = f"blk.{match[1]}.ssm_in.weight" in tensors
        return [(f"{name}ba.weight", TensorSource(info))] if together else _beta_and_alpha(name, info, config)
    if base in names.stacks and kind == "weight":
        return stacked(f"{at}{names.experts}", names.stacks[base], info)
    if part in names.parts:
        return [_place(at, names.parts[part], info, config)]
    return [(name, TensorSource(info))]


def _place(at: str, part: Part, info: TensorInfo, config: Mapping[str, Any]) -> tuple[str, TensorSource]:
    if isinstance(part, str):
        return at + part, TensorSource(info)
    return at + part[0], TensorSource(info, **part[1](info, config))


def _beta_and_alpha(at: str, info: TensorInfo, config: Mapping[str, Any]) -> Places:
    """Two matrices whose rows the file holds in one, key head by key head."""
    keys = config["linear_num_key_heads"]
    share = info.shape[0] // keys // 2
    rows = [range(head * 2 * share, head * 2 * share + share) for head in range(keys)]
    first = tuple(row for part in rows for row in part)
    return [(f"{at}b.weight", TensorSource(info, rows=first)),
            (f"{at}a.weight", TensorSource(info, rows=tuple(row + share for row in first)))]  # fmt: skip
