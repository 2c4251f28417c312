"""The table of families: dense ones with rotary positions. Owns: one row a family.

A row holds the config keys (numbers are those of Transformers' config classes) and the switches of its layers
(`models/family_row.py`). Mixtures and older families have files of their own beside this one; TABLE joins them.
"""

from __future__ import annotations

from dataclasses import replace

from tokenmill.models import positions, rules, table_mixtures, table_older, table_recent, table_states
from tokenmill.models.common_keys import GATED, NO_BIAS, NO_MLP_BIAS, without
from tokenmill.models.family_row import (
    Attend,
    Drafts,
    Extra,
    Family,
    Feed,
    Fields,
    HeadNorms,
    Norms,
    Outside,
    Scores,
    Shape,
)
from tokenmill.models.table_mixtures import COHERE, COHERE_KEYS, GRANITE, GRANITE_KEYS

_QWEN = {**GATED, "num_key_value_heads": 32, "max_position_embeddings": 32768, "use_sliding_window": False,
         "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}  # fmt: skip
_GEMMA = {
    **without(GATED, "hidden_act"), "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "num_key_value_heads": 4, "head_dim": 256, "attention_bias": False, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "layer_types": None, "attn_logit_softcapping": None, "final_logit_softcapping": None,
}  # fmt: skip
_NOT_GEMMA = {**NO_MLP_BIAS, "use_bidirectional_attention": (False,)}
_OWN = Attend(bias="attention_bias")
_PLAIN = Feed(names=("up_proj", "down_proj"), gated=False, bias="mlp_bias")
_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
_AROUND = Norms(
    offset=1.0,
    before=("input_layernorm", "pre_feedforward_layernorm"),
    after=_AFTER,
)
_GEMMA_SHAPE = Shape(
    attend=Attend(bias="attention_bias", rope=positions.whole_rope, layer=rules.typed(2), scores=Scores(
        rules.inverse_root("query_pre_attn_scalar", 256.0), "attn_logit_softcapping")),
    norms=_AROUND,
    feed=Feed(act="hidden_activation"),
    outside=Outside(scale=rules.root_of_hidden, rounded=True, softcap="final_logit_softcapping"),
)  # fmt: skip
_OLMO2 = Shape(
    attend=Attend(bias="attention_bias", norms=HeadNorms("row")),
    norms=Norms(before=(), after=_AFTER),
)
_GLM = Attend(bias="attention_bias", out_bias=False, rope=positions.partial_rope, pairs=True)
_GLM_KEYS = {**GATED, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
             "rms_norm_eps": 1.5625e-07, "attention_bias": True, "partial_rotary_factor": 0.5}  # fmt: skip
_FUSED = Feed(names=("gate_up_proj", "down_proj"))
_LAYERED = without(GATED, "rms_norm_eps")

_DENSE: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        Fields(
            "llama",
            defaults={**GATED, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048,
                      "attention_bias": False, "mlp_bias": False},
            only={"lm_head_bias": (False,)},
            layers="full_attention",
        ),
        Shape(attend=_OWN, feed=Feed(bias="mlp_bias")),
        "Llama 1 to 3.3, Yi, and whatever else says LlamaForCausalLM",
    ),
    "MistralForCausalLM": Family(
        Fields(
            "mistral",
            defaults={**GATED, "num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072,
                      "sliding_window": 4096},
            only=NO_BIAS,
            layers="sliding_attention",
        ),
        Shape(attend=Attend(layer=rules.windowed)),
    ),
    "MinistralForCausalLM": Family(
        Fields(
            "ministral",
            defaults={**GATED, "num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072,
                      "sliding_window": 4096, "layer_types": None},
            only=NO_BIAS,
        ),
        Shape(attend=Attend(layer=rules.ministral)),
    ),
    "Ministral3ForCausalLM": Family(
        Fields(
            "ministral3",
            defaults={**GATED, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
                      "rms_norm_eps": 1e-5, "sliding_window": None},
            only={**NO_BIAS, "original_max_position_embeddings": ()},
            layers="sliding_attention",
        ),
        Shape(attend=Attend(layer=rules.windowed, rope=positions.tempered_rope,
                            extra=Extra(temper=positions.span_temper))),
        "queries are scaled by their position",
    ),
    "Qwen2ForCausalLM": Family(
        Fields(
            "qwen2",
            defaults={**_QWEN, "head_dim": None},
            only={**NO_MLP_BIAS, "use_mrope": (False,)},
            ignored=("attention_bias",),
        ),
        Shape(attend=Attend(bias=True, out_bias=False, layer=rules.qwen)),
        "Qwen2 and Qwen2.5",
    ),
    "MiMoForCausalLM": Family(
        Fields(
            "mimo",
            defaults={**_QWEN, "head_dim": None, "attention_bias": True},
            only={**NO_MLP_BIAS, "attention_bias": (True,), "use_mrope": (False,)},
            ignored=("num_nextn_predict_layers",),
        ),
        Shape(attend=Attend(bias=True, out_bias=False, layer=rules.qwen),
              outside=Outside(drafts=Drafts(r"^model\.mtp_layers\."))),
        "without its layers for drafts; compared with Qwen2, since Transformers does not have it",
    ),
    "Qwen3ForCausalLM": Family(
        Fields("qwen3", defaults={**_QWEN, "head_dim": 128, "attention_bias": False}, only=NO_MLP_BIAS),
        Shape(attend=Attend(bias="attention_bias", norms=HeadNorms(), layer=rules.qwen)),
    ),
    "Phi3ForCausalLM": Family(
        Fields(
            "phi3",
            defaults={**GATED, "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-5,
                      "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
                      "sliding_window": None},
            only={**NO_BIAS, "full_attn_mod": (1,), "interpolate_factor": (1,)},
            layers="sliding_attention",
        ),
        Shape(attend=Attend(qkv=("qkv_proj",), rope=positions.phi3_rope, layer=rules.windowed), feed=_FUSED),
        "Phi-3, Phi-3.5 and Phi-4",
    ),
    "PhiForCausalLM": Family(
        Fields(
            "phi",
            defaults={**_LAYERED, "num_key_value_heads": None, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5,
                      "max_position_embeddings": 2048, "qk_layernorm": False, "partial_rotary_factor": 0.5},
            only={"head_dim": ()},
            layers="full_attention",
        ),
        Shape(
            attend=Attend(out="dense", bias=True, rope=positions.partial_rope, norms=HeadNorms(
                names=("q_layernorm", "k_layernorm"), kind="layer", present="qk_layernorm")),
            norms=Norms("layer", "layer_norm_eps", before=("input_layernorm",), last="final_layernorm"),
            feed=Feed(names=("fc1", "fc2"), gated=False, bias=True),
            outside=Outside(head_bias=True),
            parallel=True,
        ),
        "Phi-1 to Phi-2",
    ),
    "GemmaForCausalLM": Family(
        Fields(
            "gemma",
            defaults={**GATED, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 16, "head_dim": 256,
                      "max_position_embeddings": 8192, "tie_word_embeddings": True, "attention_bias": False},
            only={**_NOT_GEMMA, "hidden_act": ("gelu", "gelu_pytorch_tanh")},
            # Transformers reads hidden_act only, and takes "gelu" for the tanh form of it.
            ignored=("hidden_activation",),
            layers="full_attention",
        ),
        Shape(attend=_OWN, norms=Norms(offset=1.0), feed=Feed(fixed="gelu_tanh"),
              outside=Outside(scale=rules.root_of_hidden, rounded=True)),
    ),
    "Gemma2ForCausalLM": Family(
        Fields(
            "gemma2",
            defaults={**_GEMMA, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
                      "final_logit_softcapping": 30.0},
            only={**_NOT_GEMMA, "sliding_window_pattern": (2,)},
            ignored=("hidden_act", "sliding_window_size", "cache_implementation"),
        ),
        _GEMMA_SHAPE,
    ),
    "Gemma3ForCausalLM": Family(
        Fields(
            "gemma3_text",
            defaults={**_GEMMA, "max_position_embeddings": 131072, "sliding_window_pattern": 6,
                      "rope_local_base_freq": None},
            only={**_NOT_GEMMA, "attn_logit_softcapping": ()},
            ignored=("hidden_act", "_sliding_window_pattern", "cache_implementation"),
        ),
        replace(_GEMMA_SHAPE, attend=replace(
            _GEMMA_SHAPE.attend, rope=positions.gemma3_rope, layer=rules.typed(6, "sliding_window_pattern"),
            norms=HeadNorms())),
        "the text model",
    ),
    "VaultGemmaForCausalLM": Family(
        Fields("vaultgemma", defaults={**_GEMMA, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
                                       "final_logit_softcapping": 30.0}, only=_NOT_GEMMA),
        replace(_GEMMA_SHAPE, norms=replace(_AROUND, after=())),
    ),
    "OlmoForCausalLM": Family(
        Fields(
            "olmo",
            defaults={**_LAYERED, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048,
                      "attention_bias": False, "clip_qkv": None},
            only=NO_MLP_BIAS,
            ignored=("layer_norm_eps", "rms_norm_eps"),
            layers="full_attention",
        ),
        Shape(attend=replace(_OWN, extra=Extra(clip="clip_qkv")), norms=Norms("bare", 1e-5)),
    ),
    "Olmo2ForCausalLM": Family(
        Fields(
            "olmo2",
            defaults={**GATED, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048,
                      "attention_bias": False, "rms_norm_eps": 1e-5},
            only=NO_MLP_BIAS,
            layers="full_attention",
        ),
        _OLMO2,
    ),
    "Olmo3ForCausalLM": Family(
        Fields(
            "olmo3",
            defaults={**GATED, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048,
                      "attention_bias": False, "rms_norm_eps": 1e-5, "sliding_window": 4096, "layer_types": None,
                      "rope_theta": 500000.0},
            only={**NO_MLP_BIAS, "original_max_position_embeddings": ()},
        ),
        replace(_OLMO2, attend=replace(_OLMO2.attend, rope=positions.typed_rope, layer=rules.typed(4))),
    ),
    "GraniteForCausalLM": Family(
        Fields(
            "granite",
            defaults={**GRANITE_KEYS, "mlp_bias": False},
            only={"lm_head_bias": (False,)},
            layers="full_attention",
        ),
        replace(GRANITE, feed=Feed(bias="mlp_bias")),
    ),
    "CohereForCausalLM": Family(
        Fields("cohere", defaults={**COHERE_KEYS, "use_qk_norm": False, "rope_theta": 500000.0}, only=NO_MLP_BIAS,
               ignored=("model_max_length",), layers="full_attention"),
        COHERE,
        "Command R",
    ),
    "Cohere2ForCausalLM": Family(
        Fields("cohere2", defaults={**COHERE_KEYS, "sliding_window": 4096, "layer_types": None,
                                    "sliding_window_pattern": 4},
               only={**NO_MLP_BIAS, "use_qk_norm": (False,)},
               ignored=("_sliding_window_pattern", "cache_implementation", "layer_switch",
                        "order_of_interleaved_layers",
                        "position_embedding_type", "rotary_pct", "use_embedding_sharing", "use_gated_activation",
                        "use_parallel_block", "use_parallel_embedding")),
        replace(COHERE, attend=replace(COHERE.attend, norms=None, layer=rules.typed(
            4, "sliding_window_pattern", rotates_all=False))),
        "Command R7B and Command A; layers that see everything do not rotate",
    ),
    "Starcoder2ForCausalLM": Family(
        Fields(
            "starcoder2",
            defaults={**_LAYERED, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 2, "head_dim": None,
                      "max_position_embeddings": 4096, "norm_epsilon": 1e-5, "sliding_window": None,
                      "use_bias": True, "tie_word_embeddings": True},
            ignored=("activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon",
                     "scale_attention_softmax_in_fp32"),
            only={"mlp_type": ("default",), "norm_type": ("layer_norm",), "lm_head_bias": (False,),
                  "scale_attn_weights": (True,)},
            layers="sliding_attention",
        ),
        Shape(
            attend=Attend(bias="use_bias", layer=rules.windowed),
            norms=Norms("layer", "norm_epsilon"),
            feed=Feed(names=("c_fc", "c_proj"), gated=False, bias="use_bias"),
        ),
    ),
    "StableLmForCausalLM": Family(
        Fields(
            "stablelm",
            defaults={**_LAYERED, "num_key_value_heads": 32, "max_position_embeddings": 4096, "layer_norm_eps": 1e-5,
                      "use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False,
                      "partial_rotary_factor": 0.25},
            only={**NO_MLP_BIAS, "head_dim": (), "rope_pct": (0.25,), "rotary_scaling_factor": (1.0,)},
            layers="full_attention",
        ),
        Shape(
            attend=Attend(bias="use_qkv_bias", out_bias=False, rope=positions.partial_rope, norms=HeadNorms(
                "own", ("q_layernorm", "k_layernorm"), "scale", "qk_layernorm")),
            norms=Norms("layer", "layer_norm_eps", one_if_parallel=True),
            parallel="use_parallel_residual",
        ),
    ),
    "SmolLM3ForCausalLM": Family(
        Fields(
            "smollm3",
            defaults={**GATED, "num_key_value_heads": 4, "head_dim": None, "max_position_embeddings": 32768,
                      "use_sliding_window": False, "sliding_window": None, "no_rope_layers": None,
                      "no_rope_layer_interval": 4, "layer_types": None, "attention_bias": False, "mlp_bias": False,
                      "tie_word_embeddings": True, "rope_theta": 2000000.0},
            ignored=("max_window_layers",),
        ),
        Shape(attend=replace(_OWN, layer=rules.smollm3), feed=Feed(bias="mlp_bias")),
        "some layers do not rotate",
    ),
    "Exaone4ForCausalLM": Family(
        Fields(
            "exaone4",
            defaults={**GATED, "num_key_value_heads": 32, "head_dim": None, "max_position_embeddings": 2048,
                      "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
            only=NO_BIAS,
            ignored=("cache_implementation",),
        ),
        Shape(attend=Attend(norms=HeadNorms(), layer=rules.exaone4), norms=Norms(before=(), after=_AFTER),
              outside=Outside(drafts=Drafts(r"^mtp"))),
        "layers that see everything do not rotate; without its layers for drafts",
    ),
    "GlmForCausalLM": Family(
        Fields("glm", defaults=_GLM_KEYS, only=NO_MLP_BIAS, layers="full_attention"),
        Shape(attend=_GLM, feed=_FUSED),
    ),
    "Glm4ForCausalLM": Family(
        Fields("glm4", defaults={**_GLM_KEYS, "num_nextn_predict_layers": None}, only=NO_MLP_BIAS,
               layers="full_attention"),
        Shape(attend=_GLM, feed=_FUSED, norms=Norms(after=("post_self_attn_layernorm", "post_mlp_layernorm")),
              outside=Outside(drafts=Drafts(later="num_nextn_predict_layers"))),
    ),
    "Ernie4_5ForCausalLM": Family(
        Fields(
            "ernie4_5",
            defaults={**GATED, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
                      "rms_norm_eps": 1e-5, "use_bias": False, "tie_word_embeddings": True, "rope_theta": 500000.0},
            only={"use_rmsnorm": (True,), "compression_ratio": (1.0,)},
            ignored=("use_flash_attention",),
            layers="full_attention",
        ),
        Shape(attend=Attend(bias="use_bias", pairs=True), feed=Feed(bias="use_bias")),
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        Fields(
            "hunyuan_v1_dense",
            defaults={**GATED, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048,
                      "rms_norm_eps": 1e-5, "attention_bias": False},
            only={**NO_MLP_BIAS, "use_qk_norm": (True,), "use_cla": (False,), "use_rotary_pos_emb": (True,)},
            ignored=("attention_head_dim", "cla_share_factor", "norm_type", "dense_list", "org_vocab_size"),
            layers="full_attention",
        ),
        Shape(attend=replace(_OWN, rope=positions.hunyuan_rope, norms=HeadNorms(
            names=("query_layernorm", "key_layernorm"), rotated=True))),
        "heads are normed after their rotation",
    ),
    "SeedOssForCausalLM": Family(
        Fields(
            "seed_oss",
            defaults={**GATED, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288,
                      "attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
            only={"lm_head_bias": (False,)},
            layers="full_attention",
        ),
        Shape(attend=replace(_OWN, out_bias="attention_out_bias"), feed=Feed(bias="mlp_bias")),
    ),
    "ApertusForCausalLM": Family(
        Fields(
            "apertus",
            defaults={**GATED, "num_key_value_heads": None, "head_dim": None, "hidden_act": "xielu",
                      "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "attention_bias": False,
                      "rope_theta": 12000000.0},
            only={**NO_MLP_BIAS, "qk_norm": (True,), "post_norm": (False,), "mlp_bias": (False,)},
            layers="full_attention",
        ),
        Shape(
            attend=replace(_OWN, norms=HeadNorms(), rope=positions.default_rope({
                "rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})),
            norms=Norms(before=("attention_layernorm", "feedforward_layernorm")),
            feed=replace(_PLAIN, bias=False, learned=True),
        ),
        "the activation has two learned numbers a layer",
    ),
    "ArceeForCausalLM": Family(
        Fields(
            "arcee",
            defaults={**GATED, "hidden_act": "relu2", "num_key_value_heads": None, "head_dim": None,
                      "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "attention_bias": False,
                      "mlp_bias": False},
            only={"lm_head_bias": (False,)},
            layers="full_attention",
        ),
        Shape(attend=_OWN, feed=_PLAIN),
    ),
    "NemotronForCausalLM": Family(
        Fields(
            "nemotron",
            defaults={**_LAYERED, "hidden_act": "relu2", "num_key_value_heads": None, "head_dim": None,
                      "max_position_embeddings": 4096, "norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False,
                      "partial_rotary_factor": 0.5},
            only={"lm_head_bias": (False,)},
            layers="full_attention",
        ),
        Shape(attend=replace(_OWN, rope=positions.partial_rope), norms=Norms("layer", "norm_eps", 1.0), feed=_PLAIN),
        "Nemotron-4 and Minitron",
    ),
    "HeliumForCausalLM": Family(
        Fields(
            "helium",
            defaults={**GATED, "num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096,
                      "rms_norm_eps": 1e-8, "attention_bias": False, "mlp_bias": False, "rope_theta": 100000.0},
            layers="full_attention",
        ),
        Shape(attend=replace(_OWN, out_bias=False, pairs=True), feed=Feed(bias="mlp_bias")),
    ),
    "Jais2ForCausalLM": Family(
        Fields(
            "jais2",
            defaults={**_LAYERED, "hidden_act": "relu2", "num_key_value_heads": None, "head_dim": None,
                      "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "attention_bias": True,
                      "mlp_bias": True},
            only={"lm_head_bias": (False,)},
            layers="full_attention",
        ),
        Shape(attend=_OWN, norms=Norms("layer", "layer_norm_eps"), feed=_PLAIN),
    ),
    "InternLM3ForCausalLM": Family(
        Fields(
            "internlm3",
            defaults={**GATED, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32768,
                      "rms_norm_eps": 1e-5, "attention_bias": None, "qkv_bias": None, "mlp_bias": None, "bias": None},
            layers="full_attention",
        ),
        Shape(attend=_OWN, feed=Feed(bias="mlp_bias"), names={"qkv_bias": "attention_bias", "bias": "mlp_bias"}),
    ),
    "BitNetForCausalLM": Family(
        Fields(
            "bitnet",
            defaults={**GATED, "hidden_act": "relu2", "num_key_value_heads": 5, "head_dim": None,
                      "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "attention_bias": False,
                      "rope_theta": 500000.0},
            only=NO_MLP_BIAS,
            layers="full_attention",
        ),
        Shape(attend=replace(_OWN, extra=Extra(within="attn_sub_norm")), feed=Feed(within="ffn_sub_norm")),
        "unpacked weights",
    ),
}  # fmt: skip

TABLE: dict[str, Family] = {
    **_DENSE,
    **table_recent.ROWS,
    **table_mixtures.ROWS,
    **table_states.ROWS,
    **table_older.ROWS,
}
"""Every family that one row describes, by what `architectures` in config.json says."""
