"""Rows of mixtures of experts, and what a dense family shares with one of them. Owns: one row a family."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.layers.experts import load_joined, load_stacked, load_transposed
from tokenmill.models import positions, rules
from tokenmill.models.common_keys import GATED, MOE, NO_BIAS, NO_MLP_BIAS, without
from tokenmill.models.family_row import (
    SIZES,
    Attend,
    Drafts,
    Extra,
    Family,
    Feed,
    Fields,
    HeadNorms,
    Mix,
    Norms,
    Outside,
    Route,
    Scores,
    Shape,
    Shared,
)

GRANITE_KEYS = {
    **GATED, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048, "attention_bias": False,
    "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0,
}  # fmt: skip
GRANITE = Shape(
    attend=Attend(bias="attention_bias", scores=Scores(rules.key("attention_multiplier", low=rules.LEAST_SCALE))),
    outside=Outside(scale=rules.key("embedding_multiplier"), logits=rules.inverse("logits_scaling")),
    residual="residual_multiplier",
)
_GRANITE_MIX = Mix(
    at=("block_sparse_moe",),
    router="router.layer",
    experts="",
    names=("input_linear.weight", "output_linear.weight", ""),
    count=("num_local_experts", "num_experts"),
    inner="intermediate_size",
    route=Route("topk_softmax"),
    load=load_joined,
)
_MIXTRAL = Mix(
    at=("block_sparse_moe", "mlp"),
    names=("w1", "w3", "w2"),
    count=("num_local_experts", "num_experts"),
    inner="intermediate_size",
)
_QWEN_KEYS = {**GATED, "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
              "decoder_sparse_step": 1, "norm_topk_prob": False, "mlp_only_layers": None}  # fmt: skip
_QWEN_MIX = Mix(dense=rules.sparse_step, route=Route(normalise="norm_topk_prob"))
DEEPSEEK_ROUTE = Route("sigmoid_topk", "norm_topk_prob", "routed_scaling_factor", "gate.e_score_correction_bias",
                       grouped=True, wide=True)  # fmt: skip
DEEPSEEK_MIX = Mix(
    count=("n_routed_experts", "num_local_experts"),
    dense=rules.first_dense,
    route=DEEPSEEK_ROUTE,
    shared=Shared("shared_experts", rules.product("moe_intermediate_size", "n_shared_experts")),
)
DEEPSEEK_KEYS = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
                  "routed_scaling_factor": 1.0, "num_local_experts": None}  # fmt: skip
SIGMOID: dict[str, tuple[object, ...]] = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}

COHERE = Shape(
    attend=Attend(bias="attention_bias", pairs=True,
                  norms=HeadNorms("own", kind="scale", present="use_qk_norm")),
    norms=Norms("scale", "layer_norm_eps", before=("input_layernorm",)),
    outside=Outside(logits=rules.key("logit_scale", 0.0625)),
    parallel=True,
)  # fmt: skip
COHERE_KEYS = {**without(GATED, "rms_norm_eps"), "num_key_value_heads": None, "head_dim": None,
                "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True, "attention_bias": False,
                "max_position_embeddings": 8192}  # fmt: skip

ROWS: dict[str, Family] = {
    "Qwen2MoeForCausalLM": Family(
        Fields(
            "qwen2_moe",
            needed=(*SIZES, "moe_intermediate_size", "num_experts", "shared_expert_intermediate_size"),
            defaults={**_QWEN_KEYS, "num_key_value_heads": 16, "head_dim": None, "max_window_layers": 28,
                      "layer_types": None, "num_experts_per_tok": 4, "qkv_bias": True},
            only=NO_MLP_BIAS,
            ignored=(*MOE, "attention_bias"),
        ),
        Shape(
            attend=Attend(bias="qkv_bias", out_bias=False, layer=rules.qwen2_moe),
            mix=replace(_QWEN_MIX, shared=Shared("shared_expert", rules.value("shared_expert_intermediate_size"),
                                                 gate="shared_expert_gate")),
        ),
        "Qwen1.5-MoE and Qwen2-MoE",
    ),
    "Qwen3MoeForCausalLM": Family(
        Fields(
            "qwen3_moe",
            needed=(*SIZES, "moe_intermediate_size", "num_experts", "num_local_experts"),
            defaults={**_QWEN_KEYS, "num_key_value_heads": 4, "head_dim": None, "attention_bias": False,
                      "num_experts_per_tok": 8},
            only={**NO_MLP_BIAS, "use_qk_norm": (True,), "shared_expert_intermediate_size": (0,)},
            # Transformers windows every layer of this family or none, whatever max_window_layers says.
            ignored=(*MOE, "max_window_layers"),
            layers="full_attention",
        ),
        Shape(attend=Attend(bias="attention_bias", norms=HeadNorms(), layer=rules.qwen_all), mix=_QWEN_MIX),
    ),
    "MixtralForCausalLM": Family(
        Fields(
            "mixtral",
            needed=(*SIZES, "num_local_experts", "num_experts"),
            defaults={**GATED, "num_key_value_heads": 8, "head_dim": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
                      "max_position_embeddings": 131072, "sliding_window": None, "num_experts_per_tok": 2},
            only=NO_BIAS,
            ignored=MOE,
            layers="sliding_attention",
        ),
        Shape(attend=Attend(layer=rules.windowed), mix=_MIXTRAL),
    ),
    "PhimoeForCausalLM": Family(
        Fields(
            "phimoe",
            needed=(*SIZES, "num_local_experts"),
            defaults={**GATED, "num_key_value_heads": 8, "head_dim": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
                      "max_position_embeddings": 131072, "sliding_window": None, "num_experts_per_tok": 2,
                      "attention_bias": False, "lm_head_bias": False, "router_jitter_noise": 0.01},
            only={"mlp_bias": (False,), "num_experts_per_tok": (2,)},
            ignored=("output_router_logits", "router_aux_loss_coef", "input_jitter_noise"),
            layers="sliding_attention",
        ),
        Shape(
            attend=Attend(bias="attention_bias", layer=rules.windowed, rope=positions.phimoe_rope),
            norms=Norms("layer", "rms_norm_eps"),
            mix=replace(_MIXTRAL, at=("block_sparse_moe", "mlp"), route=Route(order="sparsemixer")),
            outside=Outside(head_bias="lm_head_bias"),
        ),
        "Phi-3.5-MoE",
    ),
    "OlmoeForCausalLM": Family(
        Fields(
            "olmoe",
            needed=(*SIZES, "num_experts"),
            defaults={**GATED, "num_key_value_heads": None, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
                      "attention_bias": False, "clip_qkv": None, "num_experts_per_tok": 8, "norm_topk_prob": False,
                      "num_local_experts": None},
            only={**NO_MLP_BIAS, "head_dim": ()},
            ignored=MOE,
            layers="full_attention",
        ),
        Shape(
            attend=Attend(bias="attention_bias", norms=HeadNorms("row"), extra=Extra(clip="clip_qkv")),
            mix=replace(_QWEN_MIX, inner="intermediate_size", dense=rules.never),
        ),
    ),
    "GraniteMoeForCausalLM": Family(
        Fields(
            "granitemoe",
            needed=(*SIZES, "num_local_experts"),
            defaults={**GRANITE_KEYS, "num_experts_per_tok": 2},
            only=NO_MLP_BIAS,
            ignored=MOE,
            layers="full_attention",
        ),
        replace(GRANITE, mix=_GRANITE_MIX),
    ),
    "GraniteMoeSharedForCausalLM": Family(
        Fields(
            "granitemoeshared",
            needed=(*SIZES, "num_local_experts"),
            defaults={**GRANITE_KEYS, "num_experts_per_tok": 2, "shared_intermediate_size": 0},
            only=NO_MLP_BIAS,
            ignored=MOE,
            layers="full_attention",
        ),
        replace(GRANITE, mix=replace(_GRANITE_MIX, shared=Shared(
            "shared_mlp", rules.value("shared_intermediate_size", 0), ("input_linear", "output_linear"),
            outside=True))),
    ),
    "Glm4MoeForCausalLM": Family(
        Fields(
            "glm4_moe",
            needed=(*SIZES, "moe_intermediate_size", "n_routed_experts"),
            defaults={**GATED, **DEEPSEEK_KEYS, "num_key_value_heads": 8, "head_dim": None, "rms_norm_eps": 1e-5,
                      "max_position_embeddings": 131072, "attention_bias": False, "num_experts_per_tok": 8,
                      "first_k_dense_replace": 1, "use_qk_norm": False, "partial_rotary_factor": 0.5,
                      "num_nextn_predict_layers": None, "num_mtp_layers": None},
            only={**NO_MLP_BIAS, **SIGMOID},
            ignored=MOE,
            layers="full_attention",
        ),
        Shape(
            attend=Attend(bias="attention_bias", out_bias=False, rope=positions.partial_rope,
                          norms=HeadNorms(present="use_qk_norm")),
            mix=DEEPSEEK_MIX,
            outside=Outside(drafts=Drafts(later="num_nextn_predict_layers")),
        ),
        "GLM-4.5 to 4.7; without their layers for drafts",
    ),
    "Dots1ForCausalLM": Family(
        Fields(
            "dots1",
            needed=(*SIZES, "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
            defaults={**GATED, **DEEPSEEK_KEYS, "num_key_value_heads": 32, "head_dim": None,
                      "max_position_embeddings": 2048, "attention_bias": False, "n_shared_experts": None,
                      "norm_topk_prob": False, "first_k_dense_replace": 0, "sliding_window": 4096,
                      "max_window_layers": 62, "layer_types": None},
            only={**NO_MLP_BIAS, **SIGMOID, "scoring_func": ("sigmoid", "noaux_tc"), "moe_layer_freq": (1,)},
            ignored=MOE,
        ),
        Shape(attend=Attend(bias="attention_bias", norms=HeadNorms(), layer=rules.upper_windows), mix=DEEPSEEK_MIX),
    ),
    "MiniMaxM2ForCausalLM": Family(
        Fields(
            "minimax_m2",
            needed=(*SIZES, "num_local_experts"),
            defaults={**GATED, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608,
                      "rope_theta": 5000000.0, "num_experts_per_tok": 8, "rotary_dim": None, "num_experts": None},
            only={**NO_BIAS, "scoring_func": ("sigmoid",), "use_routing_bias": (True,), "use_qk_norm": (True,),
                  "qk_norm_type": ("per_layer",), "shared_intermediate_size": (0,), "sliding_window": ()},
            ignored=(*MOE, "mtp_transformer_layers", "num_mtp_modules", "use_mtp", "attn_type_list",
                     "layernorm_full_attention_alpha", "layernorm_full_attention_beta",
                     "layernorm_linear_attention_alpha", "layernorm_linear_attention_beta",
                     "layernorm_mlp_alpha", "layernorm_mlp_beta"),
            layers="full_attention",
        ),
        Shape(
            attend=Attend(norms=HeadNorms("row"), rope=positions.minimax_rope),
            mix=replace(_MIXTRAL, route=Route("sigmoid_topk", bias="e_score_correction_bias", eps=0.0)),
            outside=Outside(drafts=Drafts(r"^model\.mtp\.")),
        ),
        "without its layers for drafts",
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        Fields(
            "ernie4_5_moe",
            needed=(*SIZES, "moe_intermediate_size", "moe_num_experts"),
            defaults={**GATED, "num_key_value_heads": 4, "head_dim": None, "max_position_embeddings": 131072,
                      "rms_norm_eps": 1e-5, "use_bias": False, "tie_word_embeddings": True, "rope_theta": 500000.0,
                      "moe_k": 6, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
                      "moe_layer_interval": 1, "num_experts": None, "num_experts_per_tok": None,
                      "moe_norm_min": 1e-12},
            only={"moe_use_aux_free": (True,), "moe_gate": ("topk",), "use_rmsnorm": (True,),
                  "compression_ratio": (1.0,)},
            ignored=(*MOE, "moe_capacity", "num_nextn_predict_layers", "max_sequence_length",
                     "use_flash_attention",
                     "fuse_rms_norm", "rope_3d", "freq_allocation", "moe_multimodal_dispatch_use_allgather"),
            layers="full_attention",
        ),
        Shape(
            attend=Attend(bias="use_bias", pairs=True),
            feed=Feed(bias="use_bias"),
            mix=Mix(
                count=("moe_num_experts", "num_experts"),
                top_k=("moe_k", "num_experts_per_tok"),
                dense=rules.ernie,
                route=Route(bias="moe_statics.e_score_correction_bias", wide=True, eps=0.0, floor="moe_norm_min"),
                shared=Shared("shared_experts", rules.product("moe_intermediate_size", "moe_num_shared_experts")),
            ),
            outside=Outside(head_bias="use_bias", drafts=Drafts(r"^model\.mtp_")),
        ),
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        Fields(
            "hunyuan_v1_moe",
            needed=(*SIZES, "num_experts"),
            defaults={**GATED, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048,
                      "rms_norm_eps": 1e-5, "attention_bias": False, "moe_topk": 1, "num_experts_per_tok": None,
                      "num_local_experts": None},
            only={**NO_MLP_BIAS, "use_qk_norm": (True,), "use_cla": (False,), "use_rotary_pos_emb": (True,),
                  "use_mixed_mlp_moe": (True,), "norm_topk_prob": (True,), "moe_layer_num_skipped": (0,)},
            ignored=(*MOE, "attention_head_dim", "cla_share_factor", "norm_type", "dense_list", "org_vocab_size",
                     "moe_intermediate_size", "num_shared_expert", "capacity_factor", "moe_drop_tokens",
                     "moe_random_routing_dropped_token", "group_limited_greedy"),
            layers="full_attention",
        ),
        Shape(
            attend=Attend(bias="attention_bias", rope=positions.hunyuan_rope, norms=HeadNorms(
                names=("query_layernorm", "key_layernorm"), rotated=True)),
            mix=Mix(
                router="gate.wg",
                count=("num_experts", "num_local_experts"),
                top_k=("moe_topk", "num_experts_per_tok"),
                inner="intermediate_size",
                route=Route(wide=True),
                shared=Shared("shared_mlp", rules.intermediate),
            ),
        ),
        "heads are normed after their rotation",
    ),
    "Llama4ForCausalLM": Family(
        Fields(
            "llama4_text",
            needed=(*SIZES, "num_local_experts"),
            defaults={**GATED, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
                      "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "intermediate_size_mlp": 16384,
                      "num_experts_per_tok": 1, "moe_layers": None, "interleave_moe_layer_step": 1,
                      "use_qk_norm": True, "no_rope_layers": None, "no_rope_layer_interval": 4,
                      "attention_chunk_size": 8192, "layer_types": None, "attn_temperature_tuning": True,
                      "floor_scale": 8192, "attn_scale": 0.1, "attention_bias": False},
            only=NO_MLP_BIAS,
            ignored=(*MOE, "for_llm_compressor"),
        ),
        Shape(
            attend=Attend(bias="attention_bias", pairs=True, layer=rules.llama4, norms=HeadNorms(
                kind="bare_rms", present="use_qk_norm", rotated=True), extra=Extra(temper=positions.llama4_temper)),
            feed=Feed("feed_forward", inner=rules.value("intermediate_size_mlp")),
            mix=Mix(
                at=("feed_forward",),
                router="router",
                names=("gate_up_proj", "down_proj", ""),
                count=("num_local_experts",),
                inner="intermediate_size",
                dense=rules.llama4_dense,
                route=Route("topk_sigmoid", normalise=False, inputs=True),
                shared=Shared("shared_expert", rules.intermediate),
                load=load_transposed,
            ),
        ),
        "the text model; layers that rotate see their chunk of 8192 positions",
    ),
    "DbrxForCausalLM": Family(
        Fields(
            "dbrx",
            needed=("vocab_size", "d_model", "n_heads", "n_layers", "hidden_size", "num_attention_heads",
                    "num_hidden_layers", "attn_config", "ffn_config"),
            defaults={**dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta")), "max_seq_len": 2048,
                      "tie_word_embeddings": False},
            ignored=("output_router_logits", "router_aux_loss_coef", "num_key_value_heads"),
            layers="full_attention",
        ),
        Shape(
            attend=Attend("norm_attn_norm.attn", ("Wqkv",), "out_proj", rope=positions.dbrx_rope,
                          extra=Extra(clip="attn_config.clip_qkv")),
            norms=Norms("scale", 1e-5, before=("norm_attn_norm.norm_1", "norm_attn_norm.norm_2"), last="norm_f"),
            feed=Feed(act="ffn_config.ffn_act_fn.name"),
            mix=Mix(
                at=("ffn",),
                router="router.layer",
                experts="experts.mlp",
                names=("w1", "v1", "w2"),
                count=("ffn_config.moe_num_experts",),
                top_k=("ffn_config.moe_top_k",),
                inner="ffn_config.ffn_hidden_size",
                route=Route(normalise="ffn_config.moe_normalize"),
                load=load_stacked,
            ),
            outside=Outside("transformer", "wte", "blocks"),
            nested=rules.dbrx,
            names={"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers",
                   "max_seq_len": "max_position_embeddings"},
        ),
        "the base of its rotation lies in `attn_config`, where Transformers 5 does not look",
    ),
    "AriaTextForCausalLM": Family(
        Fields("aria_text",
               defaults={**GATED, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048,
                         "attention_bias": False, "moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 2},
               only={**NO_MLP_BIAS, "hidden_act": ("silu",)},
               ignored=MOE, layers="full_attention"),
        Shape(
            attend=Attend(bias="attention_bias"),
            mix=Mix(router="router", names=("fc1.weight", "fc2.weight", ""), count=("moe_num_experts",),
                    top_k=("moe_topk",), inner="intermediate_size", route=Route("topk_softmax"), load=load_transposed,
                    shared=Shared("shared_experts", rules.product("intermediate_size", "moe_num_shared_experts"))),
        ),
        "Aria's text part",
    ),
}  # fmt: skip
