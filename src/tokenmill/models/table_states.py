"""The table of families, third part: layers with states, beside attention or instead of it."""

from __future__ import annotations

from typing import Any

from tokenmill.compute.forward import RouteSpec
from tokenmill.layers.block import Block
from tokenmill.layers.build import Build
from tokenmill.layers.experts import ExpertWeights, count_visited, down_share, expert_share, load_joined
from tokenmill.models import mixers, positions, rules
from tokenmill.models.common import read_heads
from tokenmill.models.common_keys import GATED, MOE, NO_BIAS, NO_MLP_BIAS, ROPE, without
from tokenmill.models.config import ModelConfig
from tokenmill.models.family_row import (
    SIZES,
    Attend,
    Drafts,
    Extra,
    Family,
    Feed,
    Fields,
    Gate,
    HeadNorms,
    Mix,
    Norms,
    Outside,
    Route,
    Scores,
    Shape,
    Shared,
)
from tokenmill.models.parts import make_attention, make_feed, make_mixture
from tokenmill.models.rules import Kind

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")
_SILU: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish")}
_TRAINING = ("time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "rescale_prenorm_residual",
             "residual_in_fp32", "chunk_size", "mamba_chunk_size", "num_logits_to_keep", "use_mamba_kernels",
             "use_mambapy", "use_associative_scan", "time_step_scale", "time_step_init_scheme")  # fmt: skip
_SPACE = {"mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
          "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "time_step_limit": None}  # fmt: skip
_ALONE = {"expand": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-5}
_NO_HEADS = ("num_attention_heads", "num_key_value_heads")  # where no layer has attention
_SCAN = {**_ALONE, "intermediate_size": None, "state_size": 16, "time_step_rank": "auto", "tie_word_embeddings": True}
_BACKBONE = Outside("backbone", "embeddings")
_NORM = Norms(eps="layer_norm_epsilon", before=("norm",), last="norm_f")
_NOT_ROTATED = Attend(rope=None)


def _granite_kind(c: ModelConfig, index: int) -> Kind:
    """Attention rotates only where the config says so."""
    return Kind(rotates=c.get("position_embedding_type", str, "") == "rope")


def _granite_names(c: ModelConfig) -> dict[str, Any]:
    """An older name of the kinds of layers, which wins over the usual one."""
    return {"layer_types": c.data["layers_block_type"]} if c.has("layers_block_type") else {}


def _granite_dense(c: ModelConfig, index: int) -> bool:
    return c.get("num_local_experts", int, 8, low=0) == 0


def _olmo_kind(c: ModelConfig, index: int) -> Kind:
    """Nothing rotates where the config has null for the base of angles, in the settings or (without one) beside."""
    said = c.data.get("rope_parameters")
    return Kind(rotates={**c.data, **(said if isinstance(said, dict) else {})}.get("rope_theta") is not None)


def _olmo_norms(at: Build, recurrent: bool) -> Norms:
    """Layers with a delta rule norm what they read, others what they add. Files may have older names."""
    names = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
    first, second = (old if at.has(f"{old}.weight") else new for new, old in names.items())
    return (
        Norms(before=(first, second)) if recurrent else Norms(before=(), after=(second, "post_feedforward_layernorm"))
    )


_JAMBA_COUNT = ("num_experts", "num_local_experts")


def _jamba_dense(c: ModelConfig, index: int) -> bool:
    period, offset = c.get("expert_layer_period", int, 2), c.get("expert_layer_offset", int, 1, low=0)
    return index % period != offset or c.first(_JAMBA_COUNT, int, 16) == 1


def _lfm2_inner(c: ModelConfig) -> int:
    """Two thirds of what the config says, times a factor, rounded up, unless it is taken as it is."""
    inner = c.need("intermediate_size", int)
    if not c.get("block_auto_adjust_ff_dim", bool, True):
        return inner
    inner, many = int(2 * inner / 3), c.get("block_multiple_of", int, 256)
    if c.has("block_ffn_dim_multiplier"):
        inner = int(c.need("block_ffn_dim_multiplier", float, low=1e-3) * inner)
        inner = -(-inner // many) * many
    if not inner:
        raise c.refuse("intermediate_size", "leaves no columns.")
    return inner


def _lfm2_names(c: ModelConfig) -> dict[str, Any]:
    """Older names, which win over the usual ones."""
    pairs = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    return {usual: c.data[own] for own, usual in pairs.items() if c.has(own)}


def _lfm3_kind(c: ModelConfig, index: int) -> Kind:
    """Some layers with attention have the window."""
    name = mixers.lfm3_kinds(c)[index]
    return Kind(c.need("sliding_window", int) if name == "sliding_attention" else 0, True, name)


def _lfm2_dense(c: ModelConfig, index: int) -> bool:
    return index < c.get("num_dense_layers", int, 2, low=0)


def _load_plain(b: Build, route: RouteSpec, hidden: int, inner: int, names: tuple[str, str, str]) -> ExpertWeights:
    """Experts of two matrices, stored one by one."""
    before = b.book.flops
    b, share, own = expert_share(b, inner, route.experts)
    ups, downs = [], []
    for index in own:
        at = b.at(str(index))
        ups.append(at.weight(names[0], (inner, hidden), share=(0, *share)))
        downs.append(at.weight(names[1], (hidden, inner), share=down_share(b, share)))
    b.book.flops = before + (b.book.flops - before) * route.experts / len(own)
    count_visited(b, before, route)
    return ups, downs


_NEMOTRON_NORMS = Norms(eps="layer_norm_epsilon", before=("norm",), last="norm_f")
_NEMOTRON_FEED = Feed("mixer", ("up_proj", "down_proj"), gated=False, bias="mlp_bias", act="mlp_hidden_act")
_NEMOTRON_MIX = Mix(
    at=("mixer",),
    names=("up_proj", "down_proj", ""),
    count=("n_routed_experts",),
    route=Route("sigmoid_topk", normalise="norm_topk_prob", scale="routed_scaling_factor", grouped=True, wide=True,
                bias="gate.e_score_correction_bias"),
    shared=Shared("shared_experts", rules.value("moe_shared_expert_intermediate_size"), ("up_proj", "down_proj"),
                  gated=False),
    load=_load_plain,
)  # fmt: skip


def _nemotron(c: ModelConfig, b: Build, at: Build, index: int) -> Block:
    """Mamba-2, attention, a mixture or a feed-forward layer."""
    kind = c.need("layers_block_type", list)[index]
    if kind == "linear_attention":
        return mixers.nemotron_space(c, at.at("mixer"))
    if kind == "full_attention":
        return make_attention(c, b, at, Attend("mixer", rope=None), _NEMOTRON_NORMS, read_heads(c), index)
    if kind == "moe":
        return make_mixture(c, b, at, _NEMOTRON_MIX, _NEMOTRON_FEED, index)
    return make_feed(c, at, _NEMOTRON_FEED, _NEMOTRON_NORMS)


ROWS: dict[str, Family] = {
    "MambaForCausalLM": Family(
        Fields("mamba", needed=_SIZES, only={**_SILU, "rms_norm": (True,)}, defaults=_SCAN, layers="linear_attention",
               ignored=(*_TRAINING, *_NO_HEADS, "d_model", "d_inner", "n_layer", "fused_add_norm",
                        "pad_vocab_size_multiple", "ssm_cfg")),
        Shape(single=mixers.alone(mixers.plain_scan), norms=_NORM, outside=_BACKBONE),
        "Mamba-1",
    ),
    "FalconMambaForCausalLM": Family(
        Fields("falcon_mamba", needed=_SIZES, only=_SILU, defaults={**_SCAN, "mixer_rms_eps": 1e-6},
               ignored=(*_TRAINING, *_NO_HEADS, "use_falcon_mambapy"), layers="linear_attention"),
        Shape(single=mixers.alone(mixers.plain_scan), norms=_NORM, outside=_BACKBONE),
        "Mamba-1 with norms of what a token is read and written with",
    ),
    "Mamba2ForCausalLM": Family(
        Fields("mamba2", needed=_SIZES, only={**_SILU, "rms_norm": (True,)},
               # The inner width is that of the heads, whatever its key says.
               ignored=(*_TRAINING, *_NO_HEADS, "norm_before_gate", "A_initializer_range", "use_triton_kernels",
                        "intermediate_size"),
               defaults={**_ALONE, "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8,
                         "time_step_limit": None, "tie_word_embeddings": False},
               layers="linear_attention"),
        Shape(single=mixers.alone(mixers.plain_space), norms=_NORM, outside=_BACKBONE),
        "Mamba-2; also Codestral Mamba",
    ),
    "BambaForCausalLM": Family(
        Fields("bamba",
               defaults={**GATED, **_SPACE, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "head_dim": None,
                         "max_position_embeddings": 262144, "attn_layer_indices": None, "attention_bias": False,
                         "mlp_bias": False, "partial_rotary_factor": 0.5},
               only={"lm_head_bias": (False,), **_SILU, "attn_rotary_emb": (64,), "partial_rotary_factor": (0.5,)},
               ignored=(*_TRAINING, "z_loss_coefficient", "layer_types", "layers_block_type", "num_experts")),
        Shape(
            mixer=mixers.indexed_space,
            attend=Attend(bias="attention_bias", rope=positions.partial_rope),
            norms=Norms(before=("input_layernorm", "pre_ff_layernorm"), last="final_layernorm"),
            feed=Feed("feed_forward", bias="mlp_bias"),
        ),
        "Mamba-2 and attention",
    ),
    "GraniteMoeHybridForCausalLM": Family(
        Fields("granitemoehybrid", needed=(*SIZES, "num_local_experts"),
               defaults={**GATED, **_SPACE, "num_key_value_heads": None, "head_dim": None, "attention_bias": False,
                         "max_position_embeddings": 2048, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
                         "residual_multiplier": 1.0, "attention_multiplier": 1.0, "num_experts_per_tok": 2,
                         "shared_intermediate_size": 1024, "position_embedding_type": None, "layer_types": None,
                         "layers_block_type": None},
               only={**NO_MLP_BIAS, **_SILU, "normalization_function": ("rmsnorm",)},
               ignored=(*MOE, *_TRAINING, "init_method")),
        Shape(
            mixer=mixers.typed_space(mixers.SpaceKeys()),
            attend=Attend(bias="attention_bias", layer=_granite_kind,
                          scores=Scores(rules.key("attention_multiplier", low=rules.LEAST_SCALE))),
            feed=Feed("shared_mlp", ("input_linear", "output_linear"), inner=rules.value("shared_intermediate_size")),
            mix=Mix(
                at=("block_sparse_moe",), router="router.layer", experts="",
                names=("input_linear.weight", "output_linear.weight", ""), count=("num_local_experts",),
                inner="intermediate_size", dense=_granite_dense, route=Route("topk_softmax"), load=load_joined,
                shared=Shared("shared_mlp", rules.value("shared_intermediate_size"), ("input_linear", "output_linear"),
                              outside=True),
            ),
            outside=Outside(scale=rules.key("embedding_multiplier"), logits=rules.inverse("logits_scaling")),
            residual="residual_multiplier",
            nested=_granite_names,
        ),
        "Granite 4: Mamba-2 and attention, with and without experts",
    ),
    "NemotronHForCausalLM": Family(
        Fields("nemotron_h", needed=("vocab_size", "hidden_size", "num_hidden_layers"),
               defaults={"intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 8,
                         "head_dim": 128, "max_position_embeddings": 4096, "mlp_hidden_act": "relu2",
                         "mlp_bias": False, "use_bias": False, "use_conv_bias": True, "conv_kernel": 4,
                         "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
                         "time_step_min": 0.001, "layer_norm_epsilon": 1e-5, "n_routed_experts": 8,
                         "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
                         "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
                         "routed_scaling_factor": 1.0, "num_local_experts": None, "layer_types": None,
                         "layers_block_type": None, "hybrid_override_pattern": None},
               only={"tie_word_embeddings": (False,),
                     "mamba_hidden_act": ("silu",), "attention_bias": (False,), "moe_latent_size": (),
                     "mamba_proj_bias": (False,), "sliding_window": ()},
               ignored=(*without(dict.fromkeys(_TRAINING), "time_step_min"), "time_step_limit", "expand",
                        "mamba_ssm_cache_dtype", "n_shared_experts", "moe_shared_expert_overlap",
                        "mtp_layers_block_type", "mtp_hybrid_override_pattern", "num_nextn_predict_layers",
                        "hidden_dropout", "rms_norm_eps", "rope_theta", "partial_rotary_factor", "attention_head_dim",
                        "num_query_groups", *MOE)),
        Shape(single=_nemotron, norms=_NEMOTRON_NORMS, nested=mixers.nemotron_kinds,
              outside=Outside("backbone", "embeddings", drafts=Drafts(r"^(backbone\.)?mtp\."))),
        "Nemotron-H and Nemotron 3: Mamba-2, attention without rotation, feed-forward layers, experts",
    ),
    "JambaForCausalLM": Family(
        Fields("jamba",
               defaults={**without(GATED, *ROPE), "num_key_value_heads": 8, "head_dim": None, "num_experts": 16,
                         "max_position_embeddings": 262144, "num_experts_per_tok": 2, "expert_layer_period": 2,
                         "expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4,
                         "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": "auto",
                         "mamba_conv_bias": True, "mamba_proj_bias": False, "num_local_experts": None},
               only={**NO_BIAS, **_SILU, "sliding_window": (), "mamba_inner_layernorms": (True,)},
               ignored=(*MOE, *_TRAINING, "layer_types", "layers_block_type", "rope_theta",
                        "calc_logits_for_entire_prompt")),
        Shape(
            mixer=mixers.jamba_scan,
            attend=_NOT_ROTATED,
            norms=Norms(before=("input_layernorm", "pre_ff_layernorm"), last="final_layernorm"),
            feed=Feed("feed_forward"),
            mix=Mix(at=("feed_forward",), router="router", count=_JAMBA_COUNT, inner="intermediate_size",
                    dense=_jamba_dense, route=Route(normalise=False)),
        ),
        "Mamba-1 and attention, experts",
    ),
    "RecurrentGemmaForCausalLM": Family(
        Fields("recurrent_gemma",
               defaults={**dict.fromkeys(ROPE), "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
                         "tie_word_embeddings": True, "lru_width": None, "attention_window_size": 2048,
                         "head_dim": None,
                         "conv1d_width": 4, "logits_soft_cap": 30.0, "num_key_value_heads": None,
                         "attention_bias": False, "partial_rotary_factor": 0.5, "block_types": None},
               # To Transformers "sliding_window" is another name of attention_window_size, and wins over it.
               only={"embeddings_scale_by_sqrt_dim": (True,), "sliding_window": (), **NO_MLP_BIAS},
               # Transformers reads kinds of layers under its own names.
               ignored=("w_init_variance_scale", "final_w_init_variance_scale", "layer_types",
                        "layers_block_type")),
        Shape(
            mixer=mixers.griffin,
            attend=Attend("temporal_block", bias="attention_bias", out_bias=True, rope=positions.griffin_rope,
                          layer=rules.always("attention_window_size")),
            norms=Norms(offset=1.0, before=("temporal_pre_norm", "channel_pre_norm"), last="final_norm"),
            feed=Feed("mlp_block", bias=True, act="hidden_activation", inner=rules.half("intermediate_size")),
            outside=Outside(scale=rules.rounded_root_of_hidden, softcap="logits_soft_cap"),
        ),
        "Griffin: gated linear recurrences and attention in a window",
    ),
    "OlmoHybridForCausalLM": Family(
        Fields("olmo_hybrid",
               defaults={**GATED, "rope_theta": 10000.0, "num_key_value_heads": None, "max_position_embeddings": 65536,
                         "attention_bias": False, "layer_types": None, "linear_num_key_heads": None,
                         "linear_num_value_heads": None, "linear_key_head_dim": None, "linear_value_head_dim": None,
                         "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True},
               only={**NO_MLP_BIAS, **_SILU},
               ignored=("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max",
                        "linear_dt_init_floor")),
        Shape(
            mixer=mixers.olmo_delta, layer_norms=_olmo_norms,
            attend=Attend(bias="attention_bias", norms=HeadNorms("row"), layer=_olmo_kind),
        ),
        "layers with a gated delta rule, every fourth one with attention",
    ),
    "Lfm2ForCausalLM": Family(
        Fields("lfm2",
               defaults={**dict.fromkeys(ROPE), "rope_theta": 1e6, "num_key_value_heads": 8, "head_dim": None,
                         "norm_eps": 1e-5, "max_position_embeddings": 128000, "tie_word_embeddings": True,
                         "conv_bias": False, "conv_L_cache": 3, "block_multiple_of": 256,
                         "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True, "full_attn_idxs": None,
                         "layer_types": None, "tie_embedding": None, "block_ff_dim": None},
               only={**NO_BIAS, "block_use_swiglu": (True,), "block_mlp_init_scale": (1.0,), "use_pos_enc": (True,),
                     "hidden_act": ("silu",)},
               ignored=("block_dim", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init", "conv_dim",
                        "conv_dim_out", "conv_use_xavier_init", "num_heads")),
        Shape(
            mixer=mixers.short_convolutions(mixers.lfm2_kinds),
            attend=Attend(out="out_proj", norms=HeadNorms(names=("q_layernorm", "k_layernorm"))),
            norms=Norms(eps="norm_eps", before=("operator_norm", "ffn_norm"), last="embedding_norm"),
            feed=Feed("feed_forward", ("w1", "w3", "w2"), fixed="silu", inner=_lfm2_inner),
            nested=_lfm2_names,
        ),
        "short convolutions and attention",
    ),
    "Lfm2MoeForCausalLM": Family(
        Fields("lfm2_moe", needed=(*SIZES, "num_experts"),
               defaults={**dict.fromkeys(ROPE), "rope_theta": 1e6, "num_key_value_heads": 8, "head_dim": None,
                         "norm_eps": 1e-5, "max_position_embeddings": 128000, "tie_word_embeddings": True,
                         "conv_bias": False, "conv_L_cache": 3, "moe_intermediate_size": 1792, "num_dense_layers": 2,
                         "num_experts_per_tok": 4, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
                         "layer_types": None, "tie_embedding": None},
               only={**NO_BIAS, "use_expert_bias": (True,), "use_pos_enc": (True,), "hidden_act": ("silu",)},
               ignored=(*MOE, "conv_dim", "conv_dim_out", "num_heads")),
        Shape(
            mixer=mixers.short_convolutions(mixers.lfm2_kinds),
            attend=Attend(out="out_proj", norms=HeadNorms(names=("q_layernorm", "k_layernorm"))),
            norms=Norms(eps="norm_eps", before=("operator_norm", "ffn_norm"), last="embedding_norm"),
            feed=Feed("feed_forward", ("w1", "w3", "w2"), fixed="silu"),
            mix=Mix(at=("feed_forward",), names=("w1", "w3", "w2"), count=("num_experts",), dense=_lfm2_dense,
                    route=Route("sigmoid_topk", normalise="norm_topk_prob", scale="routed_scaling_factor",
                                bias="expert_bias", eps=1e-6)),
            nested=_lfm2_names,
        ),
        "short convolutions and attention, experts",
    ),
    "Lfm3ForCausalLM": Family(
        Fields("lfm3",
               defaults={**dict.fromkeys(ROPE), "rope_theta": 1e6, "num_key_value_heads": 4, "head_dim": 128,
                         "norm_eps": 1e-5, "max_position_embeddings": 128000, "tie_word_embeddings": True,
                         "conv_bias": False,
                         "conv_L_cache": 7, "layer_types": None, "sliding_window": 256, "use_sandwich_norm": True,
                         "use_attention_gate": True, "attention_bias": False},
               only={**NO_MLP_BIAS, "hidden_act": ("silu",)}),
        Shape(
            mixer=mixers.short_convolutions(mixers.lfm3_kinds),
            attend=Attend(
                bias="attention_bias", norms=HeadNorms(), layer=_lfm3_kind,
                rope=positions.layered_rope(
                    sliding_attention={"rope_type": "default", "rope_theta": 10000.0},
                    full_attention={"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}),
                extra=Extra(gate=Gate(("gate_proj", "g_proj"), by_head=True, present="use_attention_gate"))),
            norms=Norms(eps="norm_eps", before=("operator_norm", "ffn_norm"), last="embedding_norm",
                        after=("post_operator_norm", "post_ffn_norm"), after_if="use_sandwich_norm"),
            feed=Feed("feed_forward", ("w1", "w3", "w2"), fixed="silu"),
        ),
        "short convolutions and attention in windows and without, gated head by head",
    ),
}  # fmt: skip
