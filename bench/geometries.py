"""Shapes of models that people run, as their public configs give them. Owns: the list; no weights, no names of files.

Each line is one published geometry: what the kernels see of it (sizes, heads, vocabulary, what attention does). Used to
compile and try kernels on more than the shapes that somebody tuned.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

Config = dict[str, Any]
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "phi3": "Phi3ForCausalLM",
    "gpt2": "GPT2LMHeadModel", "opt": "OPTForCausalLM", "bloom": "BloomForCausalLM", "falcon": "FalconForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM", "deepseek_v2": "DeepseekV2ForCausalLM", "gpt_oss": "GptOssForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM", "qwen3_next": "Qwen3NextForCausalLM",
}  # fmt: skip


def _config(family: str, **values: Any) -> Config:
    common: Config = {"torch_dtype": "bfloat16"}
    if "n_positions" not in values:
        common["max_position_embeddings"] = 32768
    return {"architectures": [_ARCHITECTURES[family]], "model_type": family, **common, **values}


def _plain(
    family: str, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], vocab: int, **more: Any
) -> Config:
    """heads: (query heads, key heads, numbers in a head)."""
    return _config(
        family, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads[0],
        num_key_value_heads=heads[1], head_dim=heads[2], vocab_size=vocab,
        **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, **more},
    )  # fmt: skip


def _gemma(family: str, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], window: int) -> Config:
    vocab = 256000 if family == "gemma2" else 262144
    return _config(
        family, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads[0],
        num_key_value_heads=heads[1], head_dim=heads[2], vocab_size=vocab, sliding_window=window,
        query_pre_attn_scalar=heads[2], rms_norm_eps=1e-6, hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    )  # fmt: skip


TIED = {"tie_word_embeddings": True}
GEOMETRIES: dict[str, Config] = {
    "llama-2-7b": _plain("llama", 4096, 11008, 32, (32, 32, 128), 32000),
    "llama-2-13b": _plain("llama", 5120, 13824, 40, (40, 40, 128), 32000),
    "llama-3-8b": _plain("llama", 4096, 14336, 32, (32, 8, 128), 128256),
    "llama-3-70b": _plain("llama", 8192, 28672, 80, (64, 8, 128), 128256),
    "llama-3.1-405b": _plain("llama", 16384, 53248, 126, (128, 8, 128), 128256),
    "llama-3.2-1b": _plain("llama", 2048, 8192, 16, (32, 8, 64), 128256, **TIED),
    "llama-3.2-3b": _plain("llama", 3072, 8192, 28, (24, 8, 128), 128256, **TIED),
    "tinyllama-1.1b": _plain("llama", 2048, 5632, 22, (32, 4, 64), 32000),
    "smollm-135m": _plain("llama", 576, 1536, 30, (9, 3, 64), 49152, **TIED),
    "smollm-360m": _plain("llama", 960, 2560, 32, (15, 5, 64), 49152, **TIED),
    "open-llama-3b": _plain("llama", 3200, 8640, 26, (32, 32, 100), 32000),
    "yi-6b": _plain("llama", 4096, 11008, 32, (32, 4, 128), 64000),
    "yi-34b": _plain("llama", 7168, 20480, 60, (56, 8, 128), 64000),
    "mistral-7b": _plain("mistral", 4096, 14336, 32, (32, 8, 128), 32768, sliding_window=None),
    "mistral-7b-v0.1": _plain("mistral", 4096, 14336, 32, (32, 8, 128), 32000, sliding_window=4096),
    "mistral-nemo-12b": _plain("mistral", 5120, 14336, 40, (32, 8, 128), 131072, sliding_window=None),
    "mistral-small-24b": _plain("mistral", 5120, 32768, 40, (32, 8, 128), 131072, sliding_window=None),
    "qwen2.5-0.5b": _plain("qwen2", 896, 4864, 24, (14, 2, 64), 151936, **TIED),
    "qwen2.5-1.5b": _plain("qwen2", 1536, 8960, 28, (12, 2, 128), 151936, **TIED),
    "qwen2.5-3b": _plain("qwen2", 2048, 11008, 36, (16, 2, 128), 151936, **TIED),
    "qwen2.5-7b": _plain("qwen2", 3584, 18944, 28, (28, 4, 128), 152064),
    "qwen2.5-14b": _plain("qwen2", 5120, 13824, 48, (40, 8, 128), 152064),
    "qwen2.5-72b": _plain("qwen2", 8192, 29568, 80, (64, 8, 128), 152064),
    "qwen3-0.6b": _plain("qwen3", 1024, 3072, 28, (16, 8, 128), 151936, **TIED),
    "qwen3-4b": _plain("qwen3", 2560, 9728, 36, (32, 8, 128), 151936, **TIED),
    "qwen3-8b": _plain("qwen3", 4096, 12288, 36, (32, 8, 128), 151936),
    "qwen3-14b": _plain("qwen3", 5120, 17408, 40, (40, 8, 128), 151936),
    "qwen3-32b": _plain("qwen3", 5120, 25600, 64, (64, 8, 128), 151936),
    "qwen3-30b-a3b": _plain(
        "qwen3_moe", 2048, 6144, 48, (32, 4, 128), 151936, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "qwen3-235b-a22b": _plain(
        "qwen3_moe", 4096, 12288, 94, (64, 4, 128), 151936, moe_intermediate_size=1536, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "mixtral-8x7b": _plain(
        "mixtral", 4096, 14336, 32, (32, 8, 128), 32000, num_local_experts=8, num_experts_per_tok=2,
        sliding_window=None,
    ),
    "mixtral-8x22b": _plain(
        "mixtral", 6144, 16384, 56, (48, 8, 128), 32768, num_local_experts=8, num_experts_per_tok=2,
        sliding_window=None,
    ),
    "gemma-2-2b": _gemma("gemma2", 2304, 9216, 26, (8, 4, 256), 4096),
    "gemma-2-9b": _gemma("gemma2", 3584, 14336, 42, (16, 8, 256), 4096),
    "gemma-2-27b": _gemma("gemma2", 4608, 36864, 46, (32, 16, 128), 4096),
    "gemma-3-1b": _gemma("gemma3_text", 1152, 6912, 26, (4, 1, 256), 512),
    "gemma-3-4b": _gemma("gemma3_text", 2560, 10240, 34, (8, 4, 256), 1024),
    "gemma-3-12b": _gemma("gemma3_text", 3840, 15360, 48, (16, 8, 256), 1024),
    "gemma-3-27b": _gemma("gemma3_text", 5376, 21504, 62, (32, 16, 128), 1024),
    "phi-3-mini": _plain(
        "phi3", 3072, 8192, 32, (32, 32, 96), 32064, sliding_window=2047, original_max_position_embeddings=4096,
        max_position_embeddings=4096,
    ),
    "phi-4": _plain("phi3", 5120, 17920, 40, (40, 10, 128), 100352, sliding_window=None),
    "gpt-2": _config(
        "gpt2", n_embd=768, n_layer=12, n_head=12, n_positions=1024, vocab_size=50257, activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
    ),
    "gpt-2-xl": _config(
        "gpt2", n_embd=1600, n_layer=48, n_head=25, n_positions=1024, vocab_size=50257,
        activation_function="gelu_new", layer_norm_epsilon=1e-5,
    ),
    "opt-1.3b": _config(
        "opt", hidden_size=2048, ffn_dim=8192, num_hidden_layers=24, num_attention_heads=32, vocab_size=50272,
        max_position_embeddings=2048, word_embed_proj_dim=2048, do_layer_norm_before=True, activation_function="relu",
    ),
    "opt-2.7b": _config(
        "opt", hidden_size=2560, ffn_dim=10240, num_hidden_layers=32, num_attention_heads=32, vocab_size=50272,
        max_position_embeddings=2048, word_embed_proj_dim=2560, do_layer_norm_before=True, activation_function="relu",
    ),
    "bloom-560m": _config("bloom", hidden_size=1024, n_layer=24, n_head=16, vocab_size=250880),
    "bloom-7b1": _config("bloom", hidden_size=4096, n_layer=30, n_head=32, vocab_size=250880),
    "falcon-7b": _config(
        "falcon", hidden_size=4544, num_hidden_layers=32, num_attention_heads=71, multi_query=True, parallel_attn=True,
        new_decoder_architecture=False, bias=False, alibi=False, vocab_size=65024,
    ),
    "falcon-40b": _config(
        "falcon", hidden_size=8192, num_hidden_layers=60, num_attention_heads=128, num_kv_heads=8, parallel_attn=True,
        new_decoder_architecture=True, bias=False, alibi=False, vocab_size=65024,
    ),
    "pythia-1b": _config(
        "gpt_neox", hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=8,
        rotary_pct=0.25, vocab_size=50304, hidden_act="gelu", max_position_embeddings=2048,
    ),
    "pythia-2.8b": _config(
        "gpt_neox", hidden_size=2560, intermediate_size=10240, num_hidden_layers=32, num_attention_heads=32,
        rotary_pct=0.25, vocab_size=50304, hidden_act="gelu", max_position_embeddings=2048,
    ),
    "gpt-neox-20b": _config(
        "gpt_neox", hidden_size=6144, intermediate_size=24576, num_hidden_layers=44, num_attention_heads=64,
        rotary_pct=0.25, vocab_size=50432, hidden_act="gelu_fast", max_position_embeddings=2048,
    ),
    "deepseek-v2-lite": _config(
        "deepseek_v2", hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=27,
        num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
        first_k_dense_replace=1, norm_topk_prob=False, topk_method="greedy", scoring_func="softmax",
        routed_scaling_factor=1.0, hidden_act="silu", vocab_size=102400, rms_norm_eps=1e-6,
    ),
    "gpt-oss-20b": _config(
        "gpt_oss", hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
        vocab_size=201088, rms_norm_eps=1e-5, rope_theta=150000.0, hidden_act="silu", attention_bias=True,
        tie_word_embeddings=False,
    ),
    "qwen3.6-35b-a3b": _config(
        "qwen3_5_moe_text", hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2,
        head_dim=256, vocab_size=248320, full_attention_interval=4, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, num_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512, hidden_act="silu",
        rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    ),
}  # fmt: skip


Product = tuple[int, int, bool, str | None, bool]
"""Rows of a weight, columns, norm before, activation, residual."""


def products(name: str) -> dict[str, Product]:
    """Those of a layer of a dense model with gates, and of its head."""
    c = GEOMETRIES[name]
    hidden, inner, queries = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"] * c["head_dim"]
    return {
        "qkv": (queries + 2 * c["num_key_value_heads"] * c["head_dim"], hidden, True, None, False),
        "o": (hidden, queries, False, None, True),
        "gate_up": (2 * inner, hidden, True, "silu_mul", False),
        "down": (hidden, inner, False, None, True),
        "head": (c["vocab_size"], hidden, False, None, False),
    }


PRODUCTS_8B = products("llama-3-8b")
FAMILIES: dict[str, Config] = {
    name: {}
    for name in (
        "afmoe", "apertus", "arcee", "aria_text", "axk1", "bailing_hybrid", "bamba", "biogpt", "bitnet", "codegen",
        "cohere", "cohere2", "cohere2_moe", "cwm", "dbrx", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4",
        "exaone_moe",
        "falcon_h1", "falcon_mamba", "flex_olmo", "gemma", "gemma4_text", "glm", "glm4", "glm4_moe_lite",
        "gpt_bigcode", "gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid",
        "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3",
        "iquestcoder", "jais2", "jamba", "kimi_linear", "kolibri1", "laguna", "lfm2", "lfm2_moe", "lfm3",
        "llama4_text", "longcat_flash", "mamba", "mamba2", "mellum", "mimo_v2_flash", "minicpm3", "minimax",
        "minimax_m2", "ministral", "ministral3", "mpt", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2",
        "olmo3", "olmo_hybrid", "olmoe", "persimmon", "phi", "phimoe", "qwen2_moe", "qwen3_5_text", "qwen3_next",
        "recurrent_gemma", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "xglm",
        "youtu",
    )
} | {
    # Less than the longest context here.
    **{name: {"index_topk": 512} for name in ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4")},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    "gemma3n_text": {"num_kv_shared_layers": 1, "intermediate_size": 16384, "activation_sparsity_pattern": None,
                     "layer_types": ["sliding_attention", "full_attention"] * 2},
    "zamba2": {"n_mamba_heads": 80, "num_mem_blocks": 2, "use_shared_attention_adapter": True, "use_mem_rope": True,
               "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention"]},
    "glm4_moe": {"head_dim": 128}, "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
}  # fmt: skip
"""Model types that no geometry above is of -> what is said beside the numbers of Transformers' config class."""
_HYBRID = (
    "bailing_hybrid",
    "bamba",
    "jamba",
    "falcon_h1",
    "granitemoehybrid",
    "kimi_linear",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_next",
    "qwen3_5_text",
    "lfm2",
    "lfm3",
)


_MAMBA = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}


def _kinds(pattern: str) -> list[str]:
    return [_MAMBA[letter] for letter in pattern]


def _every(full: Collection[int], layers: int, other: str = "linear_attention") -> list[str]:
    return ["full_attention" if index in full else other for index in range(layers)]


PUBLISHED: dict[str, tuple[str, Config]] = {
    "falcon-h1-7b": ("falcon_h1", {
        "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 44, "num_attention_heads": 12,
        "num_key_value_heads": 2, "head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128,
        "mamba_d_state": 256, "vocab_size": 130048, "max_position_embeddings": 262144, "mamba_rms_norm": False,
        "attention_out_multiplier": 0.9375, "key_multiplier": 0.39, "mlp_multipliers": [0.88, 0.58],
        "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.35, 0.25, 0.17, 0.5, 0.35], "ssm_out_multiplier": 0.23,
        "embedding_multiplier": 5.656854249492381, "lm_head_multiplier": 0.0195,
    }),
    "nemotron-h-8b": ("nemotron_h", {
        "layer_types": _kinds("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"), "hidden_size": 4096,
        "intermediate_size": 21504, "max_position_embeddings": 8192,
    }),
    "nemotron-3-nano": ("nemotron_h", {
        "layer_types": _kinds("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"), "hidden_size": 2688,
        "intermediate_size": 1856, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        "n_routed_experts": 128, "num_experts_per_tok": 6, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "mamba_num_heads": 64, "num_key_value_heads": 2, "max_position_embeddings": 262144,
    }),
    "granite-4-h-small": ("granitemoehybrid", {
        "hidden_size": 4096, "intermediate_size": 768, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "layer_types": _every((5, 15, 25, 35), 40), "mamba_d_state": 128, "num_local_experts": 72,
        "num_experts_per_tok": 10, "shared_intermediate_size": 1536, "vocab_size": 100352,
        "max_position_embeddings": 131072, "position_embedding_type": "nope", "embedding_multiplier": 12.0,
        "logits_scaling": 16.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125,
        "tie_word_embeddings": True,
    }),
    "kimi-linear-48b-a3b": ("kimi_linear", {
        "layer_types": _every(range(3, 27, 4), 27),
    }),
    "olmo-hybrid-7b": ("olmo_hybrid", {}),
    "lfm2-8b-a1b": ("lfm2_moe", {
        "num_hidden_layers": 24, "layer_types": _every((2, 6, 10, 14, 18, 21), 24, "conv"),
    }),
    "glm-4.5-air": ("glm4_moe", {"head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "glm-4.7-flash": ("glm4_moe_lite", {}),
    "ernie-4.5-21b-a3b": ("ernie4_5_moe", {}),
}  # fmt: skip
"""Hybrids and mixtures: model type, and what is said beside the numbers of Transformers' config class."""


def published_config(name: str, layers: int = 0) -> Config:
    """One of PUBLISHED, with its first layers only (0: all of them)."""
    from transformers import AutoConfig

    from tokenmill.models.config_fields import FIELDS

    kind, said = PUBLISHED[name]
    if layers and "layer_types" in said:
        said = {**said, "layer_types": said["layer_types"][:layers]}
    if layers and kind != "nemotron_h":  # which counts what layer_types names
        said = {**said, "num_hidden_layers": layers}
    config = AutoConfig.for_model(kind, bos_token_id=1, eos_token_id=2, pad_token_id=0, **said)
    architecture = next(a for a, row in FIELDS.items() if row.model_type == kind)
    return {**config.to_dict(), "architectures": [architecture], "dtype": "bfloat16", "torch_dtype": "bfloat16"}


def family_config(name: str) -> Config:
    """The published numbers that Transformers gives the model type, with a few layers of each kind."""
    from transformers import AutoConfig

    from tokenmill.models.config_fields import FIELDS

    layers = 8 if name.startswith(_HYBRID) else 4
    fewer: Config = {}
    for count in ("num_hidden_layers", "n_layer", "n_layers"):
        if (
            isinstance(value := getattr(AutoConfig.for_model(name), count, None), int)
            and "num_layers" not in FAMILIES[name]
        ):
            fewer[count] = min(value, layers)
    config = AutoConfig.for_model(name, **FAMILIES[name], **fewer).to_dict()
    architecture = next(a for a, row in FIELDS.items() if row.model_type == name)
    return {**config, "architectures": [architecture], "dtype": "bfloat16", "torch_dtype": "bfloat16"}


def few_layers(config: Config, layers: int) -> Config:
    """The same with fewer layers, where the config counts them under one of its names (0: all of them)."""
    if not layers:
        return config
    name = "n_layer" if "n_layer" in config else "num_hidden_layers"
    layers = max(layers, config.get("full_attention_interval", 1))
    return config | {name: min(layers, config[name])}
