"""The table of families, fourth part: dense ones and mixtures that came later. Owns: one row a family."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.models import own_layers, positions, rules
from tokenmill.models.common_keys import GATED, MOE, NO_BIAS, NO_MLP_BIAS
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
from tokenmill.models.table_mixtures import (
    COHERE,
    COHERE_KEYS,
    DEEPSEEK_KEYS,
    DEEPSEEK_MIX,
    DEEPSEEK_ROUTE,
    GRANITE,
    GRANITE_KEYS,
    SIGMOID,
)

_OWN = Attend(bias="attention_bias")
_HALVES = {"num_key_value_heads": None, "head_dim": None, "attention_bias": False}
_NO_ROPE: dict[str, tuple[object, ...]] = dict.fromkeys(
    ("rope_theta", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings"), ()
)
"""Rotation is said in rope_parameters alone."""
_EXPERTS = ("num_experts", "num_local_experts")
_QWEN_MIX = Mix(count=_EXPERTS, route=Route(normalise="norm_topk_prob"))
_SHARED = Shared("shared_experts", rules.product("moe_intermediate_size", "num_shared_experts"))
_SWA_KEYS = {**GRANITE_KEYS, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": 128,
             "layer_types": None, "layer_rope_theta": None}  # fmt: skip
_SWA = replace(GRANITE.attend, layer=rules.granite_swa, scores=Scores(
    rules.key("attention_multiplier", low=rules.LEAST_SCALE), sinks="sinks"))  # fmt: skip

ROWS: dict[str, Family] = {
    "CwmForCausalLM": Family(
        Fields("cwm", defaults={**GATED, **_HALVES, "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                                "max_position_embeddings": 131072, "sliding_window": 8192, "layer_types": None,
                                "rope_theta": 1e6},
               # Transformers makes products without biases whatever this says.
               only=NO_BIAS),
        Shape(attend=Attend(layer=rules.leading(4), rope=positions.default_rope({
            "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}))),
        "Code World Model",
    ),
    "IQuestCoderForCausalLM": Family(
        Fields("iquestcoder", defaults={**GATED, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": False,
                                        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "mlp_bias": False},
               only={"lm_head_bias": (False,), "clip_qkv": (), "use_sliding_window": (False,)},
               layers="full_attention"),
        Shape(attend=_OWN, feed=Feed(bias="mlp_bias")),
    ),
    "ExaoneForCausalLM": Family(
        Fields("exaone", needed=(*SIZES, "num_layers"),
               defaults={**GATED, **_HALVES, "num_key_value_heads": 8, "max_position_embeddings": 4096,
                         "rms_norm_eps": None, "layer_norm_epsilon": None, "hidden_act": None,
                         "activation_function": None, "mlp_bias": False, "rope_theta": 500000.0},
               only={"lm_head_bias": (False,)}, layers="full_attention"),
        Shape(
            attend=Attend("attn.attention", out="out_proj", bias="attention_bias"),
            norms=Norms(before=("ln_1", "ln_2"), last="ln_f"),
            feed=Feed(names=("c_fc_0", "c_fc_1", "c_proj"), bias="mlp_bias"),
            outside=Outside("transformer", "wte", "h"),
            nested=rules.exaone,
            names={"num_layers": "num_hidden_layers"},
        ),
        "EXAONE 3.0 and 3.5; Llama under other names",
    ),
    "HyperCLOVAXForCausalLM": Family(
        Fields("hyperclovax", defaults={**GRANITE_KEYS, "attention_multiplier": None, "mlp_bias": False,
                                        "use_post_norm": True}, only={"lm_head_bias": (False,)},
               layers="full_attention"),
        Shape(
            attend=replace(_OWN, scores=Scores(rules.key_or_root("attention_multiplier"))),
            norms=Norms(after=("post_norm1", "post_norm2"), after_if="use_post_norm"),
            feed=Feed(bias="mlp_bias"),
            outside=Outside(scale=rules.key("embedding_multiplier"), logits=rules.key("logits_scaling")),
            residual="residual_multiplier",
        ),
        "HyperCLOVA X SEED Think",
    ),
    "GraniteSWAForCausalLM": Family(
        Fields("granite_swa", defaults={**_SWA_KEYS, "num_key_value_heads": 4, "mlp_bias": False,
                                        "max_position_embeddings": 8192}, only={"lm_head_bias": (False,)}),
        replace(GRANITE, attend=_SWA, feed=Feed(bias="mlp_bias")),
        "windows with sinks, each layer its own base of rotation",
    ),
    "GraniteMoeSWAForCausalLM": Family(
        Fields("granitemoe_swa", needed=(*SIZES, "num_local_experts"),
               defaults={**_SWA_KEYS, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_experts_per_tok": 2,
                         "shared_intermediate_size": 0}, only=NO_MLP_BIAS, ignored=MOE),
        replace(GRANITE, attend=_SWA, mix=Mix(
            at=("block_sparse_moe",), router="router", count=("num_local_experts",), inner="intermediate_size",
            route=Route("topk_softmax"),
            shared=Shared("shared_mlp", rules.value("shared_intermediate_size", 0), ("input_linear", "output_linear"),
                          outside=True))),
        "the same with experts",
    ),
    "NanoChatForCausalLM": Family(
        Fields("nanochat", defaults={**GATED, **_HALVES, "hidden_act": "relu2", "max_position_embeddings": 2048,
                                     "final_logit_softcapping": 15.0}, only=NO_MLP_BIAS, layers="full_attention"),
        Shape(
            attend=replace(_OWN, norms=HeadNorms(kind="bare_rms", rotated=True), backwards=True),
            norms=Norms("bare_rms"),
            feed=Feed(names=("fc1", "fc2"), gated=False),
            outside=Outside(norm="norm", softcap="final_logit_softcapping"),
        ),
        "norms without weights, also on the embeddings; heads rotate backwards",
    ),
    "SolarOpenForCausalLM": Family(
        Fields("solar_open", needed=(*(name for name in SIZES if name != "intermediate_size"), "moe_intermediate_size",
                                     "n_routed_experts"),
               defaults={**GATED, **DEEPSEEK_KEYS, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
                         "max_position_embeddings": 131072, "attention_bias": False, "num_experts_per_tok": 8,
                         "rope_theta": 1e6},
               only={**NO_MLP_BIAS, **SIGMOID, "use_qk_norm": (False,), "first_k_dense_replace": (0,),
                     "num_nextn_predict_layers": (0,)},
               ignored=(*MOE, "intermediate_size"), layers="full_attention"),
        Shape(attend=replace(_OWN, out_bias=False), mix=replace(DEEPSEEK_MIX, dense=rules.never)),
        "Solar Open",
    ),
    "MellumForCausalLM": Family(
        Fields("mellum", needed=(*SIZES, "moe_intermediate_size", "num_experts", "num_local_experts"),
               defaults={**GATED, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 131072,
                         "attention_bias": False, "sliding_window": 1024, "num_experts_per_tok": 8,
                         "norm_topk_prob": True, "layer_types": None, "mlp_layer_types": None,
                         "num_nextn_predict_layers": None, "num_mtp_layers": None},
               only={**NO_MLP_BIAS, **_NO_ROPE, "use_sliding_window": ()},
               ignored=(*MOE, "mtp_layer_types", "mtp_mlp_layer_types")),
        Shape(
            attend=replace(_OWN, norms=HeadNorms(), layer=rules.leading(1), rope=positions.layered_rope(
                full_attention={"rope_type": "default", "rope_theta": 500000.0},
                sliding_attention={"rope_type": "default", "rope_theta": 10000.0})),
            mix=replace(_QWEN_MIX, dense=rules.listed(lambda c: 0)),
            outside=Outside(drafts=Drafts(r"^mtp\.")),
        ),
        "Mellum 2; without its layers for drafts",
    ),
    "ExaoneMoeForCausalLM": Family(
        Fields("exaone_moe", needed=(*SIZES, "moe_intermediate_size", "num_experts", "num_local_experts"),
               defaults={**GATED, "num_key_value_heads": 32, "head_dim": None, "max_position_embeddings": 2048,
                         "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4,
                         "layer_types": None, "mlp_layer_types": None, "first_k_dense_replace": 1,
                         "num_experts_per_tok": 8, "num_shared_experts": 1, "norm_topk_prob": True,
                         "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1},
               only={**NO_BIAS, **SIGMOID},
               ignored=(*MOE, "cache_implementation", "num_nextn_predict_layers", "is_moe_layer", "moe_router_dtype")),
        Shape(
            attend=Attend(norms=HeadNorms(), layer=rules.exaone4),
            mix=Mix(count=_EXPERTS, dense=rules.listed(rules.value("first_k_dense_replace", 1)),
                    route=replace(DEEPSEEK_ROUTE, bias="e_score_correction_bias"), shared=_SHARED),
            outside=Outside(drafts=Drafts(r"^mtp")),
        ),
        "K-EXAONE; without its layers for drafts",
    ),
    "SarvamMoEForCausalLM": Family(
        Fields("sarvam_moe", needed=(*SIZES, "moe_intermediate_size", "n_routed_experts", "num_experts"),
               defaults={**GATED, **DEEPSEEK_KEYS, "n_shared_experts": None, "num_shared_experts": None,
                         "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 131072,
                         "attention_bias": None, "use_qkv_bias": None, "num_experts_per_tok": 6,
                         "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "use_qk_norm": True,
                         "rope_theta": 8000000.0},
               only={**NO_MLP_BIAS, **SIGMOID, "num_nextn_predict_layers": (0,), "num_mtp_layers": (0,),
                     "score_function": ("sigmoid",), "moe_router_enable_expert_bias": (True,), "use_bias": (False,),
                     "use_rmsnorm": (True,)},
               ignored=MOE, layers="full_attention"),
        Shape(
            attend=Attend("attention", ("query_key_value",), "dense", "attention_bias", False,
                          HeadNorms(names=("query_layernorm", "key_layernorm"), present="use_qk_norm"),
                          positions.partial_rope),
            mix=replace(DEEPSEEK_MIX, route=replace(DEEPSEEK_ROUTE, bias="gate.expert_bias")),
            outside=Outside(embed="word_embeddings"),
            nested=rules.sarvam,
        ),
        "GLM-4.5's mixture under other names",
    ),
    "FlexOlmoForCausalLM": Family(
        Fields("flex_olmo", needed=(*SIZES, "num_experts", "num_local_experts"),
               defaults={**GATED, **_HALVES, "max_position_embeddings": 4096, "num_experts_per_tok": 5,
                         "norm_topk_prob": False, "rope_theta": 500000.0},
               only=NO_MLP_BIAS, ignored=MOE, layers="full_attention"),
        Shape(
            attend=replace(_OWN, norms=HeadNorms("row")),
            norms=Norms(before=(), after=("post_attention_layernorm", "post_feedforward_layernorm")),
            mix=replace(_QWEN_MIX, inner="intermediate_size"),
        ),
    ),
    "HYV3ForCausalLM": Family(
        Fields("hy_v3", needed=(*SIZES, "moe_intermediate_size", "num_experts", "num_local_experts"),
               defaults={**GATED, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
                         "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False, "num_experts_per_tok": 8,
                         "num_shared_experts": 1, "router_scaling_factor": 2.826, "mlp_layer_types": None,
                         "num_nextn_predict_layers": None, "rope_theta": 11158840.0},
               only={"lm_head_bias": (False,), "qk_norm": (True,), "route_norm": (True,),
                     "moe_router_use_sigmoid": (True,), "moe_router_enable_expert_bias": (True,)},
               ignored=(*MOE, "enable_moe_fp32_combine", "enable_lm_head_fp32", "enable_attention_fp32_softmax"),
               layers="full_attention"),
        Shape(
            attend=replace(_OWN, norms=HeadNorms()),
            feed=Feed(bias="mlp_bias"),
            mix=Mix(router="router.gate", count=_EXPERTS, dense=rules.glm_dense,
                    route=Route("sigmoid_topk", scale="router_scaling_factor", bias="expert_bias", wide=True),
                    shared=replace(_SHARED, at="shared_mlp")),
            outside=Outside(drafts=Drafts(later="num_nextn_predict_layers")),
        ),
        "Hy3; without its layers for drafts",
    ),
    "Cohere2MoeForCausalLM": Family(
        Fields("cohere2_moe",
               defaults={**COHERE_KEYS, "head_dim": 128, "sliding_window": 4096, "layer_types": None,
                         "sliding_window_pattern": 4, "num_experts": 8, "num_experts_per_tok": 2,
                         "num_shared_experts": 0, "shared_expert_combination_strategy": "average",
                         "expert_selection_fn": "softmax", "mlp_layer_types": None, "norm_topk_prob": True,
                         "prefix_dense_sliding_window_pattern": 1, "prefix_dense_intermediate_size": None,
                         "rms_norm_eps": None, "first_k_dense_replace": 0, "num_local_experts": None},
               # Transformers' class holds rope_scaling apart, and never looks at it.
               only={**NO_MLP_BIAS, "use_qk_norm": (False,), "rope_scaling": ()},
               ignored=(*MOE, "_sliding_window_pattern", "use_parallel_block", "use_gated_activation",
                        "use_parallel_embedding", "use_embedding_sharing", "cache_implementation")),
        replace(
            COHERE,
            attend=replace(COHERE.attend, norms=None, layer=rules.cohere2_moe),
            norms=replace(COHERE.norms, rms_if="rms_norm_eps"),
            feed=Feed(inner=rules.key_or_intermediate("prefix_dense_intermediate_size")),
            mix=Mix(count=_EXPERTS, inner="intermediate_size", dense=rules.listed_or_first,
                    route=Route(score="expert_selection_fn", normalise="norm_topk_prob", eps=0.0),
                    shared=Shared("shared_experts", rules.product("intermediate_size", "num_shared_experts"),
                                  mean="shared_expert_combination_strategy")),
        ),
        "Command A's mixtures; layers that see everything do not rotate, but for dense ones in front",
    ),
    "Kolibri1ForCausalLM": Family(
        Fields("kolibri1", needed=(*(name for name in SIZES if name != "intermediate_size"), "moe_intermediate_size",
                                   "num_experts", "num_local_experts", "shared_expert_intermediate_size"),
               defaults={**GATED, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 262144,
                         "sliding_window": 513, "num_experts_per_tok": 6, "norm_topk_prob": False,
                         "layer_types": None},
               only={**NO_BIAS, "use_sliding_window": (True,), "decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
               ignored=(*MOE, "intermediate_size", "max_window_layers")),
        Shape(
            attend=Attend(norms=HeadNorms(), layer=rules.typed(5, rotates_all=False)),
            norms=Norms(after=("post_attn_norm", "post_ffn_norm")),
            mix=Mix(count=_EXPERTS, route=Route("topk_sigmoid", "norm_topk_prob", bias="moe.router.expert_bias",
                                                outside=True, wide=True, eps=0.0),
                    shared=Shared("shared_experts", rules.value("shared_expert_intermediate_size"))),
        ),
        "layers that see everything do not rotate; experts are chosen by logits",
    ),
    "LagunaForCausalLM": Family(
        Fields("laguna", needed=(*SIZES, "moe_intermediate_size", "num_experts", "num_local_experts",
                                 "shared_expert_intermediate_size"),
               defaults={**GATED, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
                         "attention_bias": False, "sliding_window": 512, "num_experts_per_tok": 8,
                         "layer_types": None, "mlp_layer_types": None, "num_attention_heads_per_layer": None,
                         "gating": True, "moe_routed_scaling_factor": 1.0},
               only={**NO_MLP_BIAS, **_NO_ROPE, "moe_apply_router_weight_on_input": (False,),
                     "moe_router_logit_softcapping": (0.0,), "norm_topk_prob": (True,), "qkv_bias": (False,),
                     "decoder_sparse_step": (1,), "swa_attention_sink_enabled": (False,)},
               # Transformers reads mlp_layer_types and gating alone.
               ignored=(*MOE, "mlp_only_layers", "gating_types")),
        Shape(
            attend=replace(_OWN, norms=HeadNorms(), layer=rules.leading(1), rope=positions.layered_rope(
                part=1.0,
                full_attention={"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
                sliding_attention={"rope_type": "default", "rope_theta": 10000.0}),
                extra=Extra(heads=own_layers.listed_heads,
                            gate=Gate(("g_proj",), by_head=own_layers.gated_by_head, act="softplus"))),
            mix=Mix(count=_EXPERTS, dense=rules.glm_dense,
                    route=Route("sigmoid_topk", scale="moe_routed_scaling_factor",
                                bias="experts.e_score_correction_bias", eps=0.0),
                    shared=Shared("shared_expert", rules.value("shared_expert_intermediate_size"))),
        ),
        "layers differ in their query heads, and a softplus gates them",
    ),
    "MiMoV2FlashForCausalLM": Family(
        Fields("mimo_v2_flash", needed=(*SIZES, "moe_intermediate_size", "n_routed_experts", "num_local_experts"),
               defaults={**GATED, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "rms_norm_eps": 1e-5,
                         "max_position_embeddings": 131072, "attention_bias": False, "sliding_window": 129,
                         "num_experts_per_tok": 8, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1,
                         "topk_group": 1, "layer_types": None, "mlp_layer_types": None,
                         "attention_value_scale": 0.707, **dict.fromkeys((
                             "sliding_window_size", "hybrid_layer_pattern", "moe_layer_freq", "swa_rope_theta",
                             "layernorm_epsilon", "swa_num_attention_heads", "swa_num_key_value_heads",
                             "swa_head_dim", "swa_v_head_dim"))},
               only={**NO_MLP_BIAS, **SIGMOID, "rope_scaling": (), "original_max_position_embeddings": (),
                     "add_swa_attention_sink_bias": (True,), "add_full_attention_sink_bias": (False,),
                     "n_shared_experts": ()},
               ignored=(*MOE, "attention_chunk_size")),
        Shape(
            attend=Attend(bias="attention_bias", out_bias=False, layer=own_layers.mimo_layers,
                          rope=positions.layered_rope(part=0.334, full_attention={"rope_theta": 5e6},
                                                      sliding_attention={"rope_theta": 1e4}),
                          scores=Scores(sinks="attention_sink_bias", local_sinks=True),
                          extra=Extra(heads=own_layers.mimo_heads, values="attention_value_scale")),
            mix=Mix(count=("n_routed_experts", "num_local_experts"), dense=rules.glm_dense, route=DEEPSEEK_ROUTE),
            outside=Outside(drafts=Drafts(r"^model\.mtp\.")),
            nested=own_layers.mimo_names,
        ),
        "values narrower than keys; layers with windows have sinks and twice the keys; without its layers for drafts",
    ),
    "AfmoeForCausalLM": Family(
        Fields("afmoe", needed=(*SIZES, "moe_intermediate_size", "num_experts", "num_local_experts"),
               defaults={**GATED, "num_key_value_heads": None, "head_dim": 128, "max_position_embeddings": 16384,
                         "rms_norm_eps": 1e-5, "attention_bias": False, "num_dense_layers": 1,
                         "num_experts_per_tok": 6, "num_shared_experts": 2, "route_scale": 1.0,
                         "global_attn_every_n_layers": 4, "sliding_window": 1024, "layer_types": None,
                         "mup_enabled": False},
               only={**NO_MLP_BIAS, "score_func": ("sigmoid",), "route_norm": (True,), "n_group": (1,),
                     "topk_group": (1,), "num_expert_groups": (1,), "num_limited_groups": (1,)},
               ignored=(*MOE, "load_balance_coeff", "use_grouped_mm")),
        Shape(
            attend=replace(_OWN, norms=HeadNorms(), extra=Extra(gate=Gate(("gate_proj",))), layer=rules.typed(
                4, "global_attn_every_n_layers", rotates_all=False)),
            norms=Norms(before=("input_layernorm", "pre_mlp_layernorm"),
                        after=("post_attention_layernorm", "post_mlp_layernorm")),
            mix=Mix(router="router.gate", count=_EXPERTS,
                    dense=lambda c, index: index < c.get("num_dense_layers", int, 1, low=0),
                    route=Route("sigmoid_topk", scale="route_scale", bias="expert_bias"), shared=_SHARED),
            outside=Outside(scale=rules.root_if("mup_enabled")),
        ),
        "Arcee Trinity: gated attention, layers that see everything do not rotate",
    ),
}  # fmt: skip
