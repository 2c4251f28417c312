"""Rows of families from before root-mean-square norms were usual, and of their likes. Owns: one row a family."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.checkpoint.renamed import RenamedCheckpoint
from tokenmill.layers.attention import codegen_order, per_head_order, per_head_order_if_many
from tokenmill.layers.block import Block
from tokenmill.layers.build import Build
from tokenmill.models import positions, rules
from tokenmill.models.common import read_heads
from tokenmill.models.common_keys import GATED, GPT_NEEDED, without
from tokenmill.models.config import ModelConfig
from tokenmill.models.family_row import (
    Attend,
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
from tokenmill.models.parts import make_attention
from tokenmill.models.rules import Positions

_GPT_NAMES = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
              "n_positions": "max_position_embeddings"}  # fmt: skip
_GPT_KEYS = {"n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
_LN = ("ln_1", "ln_2")
_BART_NORMS = Norms("layer", 1e-5, before=("self_attn_layer_norm", "final_layer_norm"), last="layer_norm")
_GPTJ = Shape(
    attend=Attend("attn", out="out_proj", rope=positions.rotary_dim, pairs=True),
    norms=Norms("layer", "layer_norm_epsilon", before=("ln_1",), last="ln_f"),
    feed=Feed(names=("fc_in", "fc_out"), gated=False, bias=True, act="activation_function",
              inner=rules.four_times("n_inner")),
    outside=Outside("transformer", "wte", "h", head_bias=True),
    parallel=True,
    names=_GPT_NAMES,
)  # fmt: skip
_JAPANESE = Attend("attention", ("query_key_value",), "dense", rope=positions.neox_rope,
                   extra=Extra(fused=per_head_order))  # fmt: skip
_NEOX_NORMS = Norms("layer", "layer_norm_eps", last="final_layer_norm")


def last_biased(c: ModelConfig, at: Build, index: int) -> Block | None:
    """The last layer's attention, whose result has a bias that is not called after its matrix."""
    if index != c.need("num_hidden_layers", int) - 1:
        return None
    stored, usual = (at.path(f"attention.dense{end}") for end in ("_bias", ".bias"))
    at.book.used.add(stored)
    names = {usual if name == stored else name: name for name in at.checkpoint.names()}
    named = replace(at, checkpoint=RenamedCheckpoint(at.checkpoint, names))
    return make_attention(c, named, named, replace(_JAPANESE, out_bias=True), _NEOX_NORMS, read_heads(c), index)


ROWS: dict[str, Family] = {
    "GPTNeoXForCausalLM": Family(
        Fields(
            "gpt_neox",
            defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048,
                      "rotary_pct": 0.25, "rotary_emb_base": 10000.0, "use_parallel_residual": True,
                      "attention_bias": True, "tie_word_embeddings": False, "rope_parameters": None,
                      "rope_scaling": None, "original_max_position_embeddings": None},
            only={"head_dim": ()},
            # Transformers reads these two under the names of their own that this family has.
            ignored=("rope_theta", "partial_rotary_factor"),
            layers="full_attention",
        ),
        Shape(
            attend=Attend("attention", ("query_key_value",), "dense", "attention_bias", rope=positions.neox_rope,
                          extra=Extra(fused=per_head_order)),
            norms=Norms("layer", "layer_norm_eps", last="final_layer_norm"),
            feed=Feed(names=("dense_h_to_4h", "dense_4h_to_h"), gated=False, bias=True),
            outside=Outside("gpt_neox", "embed_in", head="embed_out"),
            parallel="use_parallel_residual",
        ),
        "GPT-NeoX and Pythia",
    ),
    "GPTNeoXJapaneseForCausalLM": Family(
        Fields(
            "gpt_neox_japanese",
            needed=("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
            defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048,
                      "rotary_pct": 1.0, "rotary_emb_base": 10000.0, "intermediate_multiple_size": 4,
                      "tie_word_embeddings": True, "rope_parameters": None, "rope_scaling": None,
                      "original_max_position_embeddings": None},
            only={"head_dim": ()},
            ignored=("rope_theta", "partial_rotary_factor"),
            layers="full_attention",
        ),
        Shape(
            attend=_JAPANESE,
            norms=_NEOX_NORMS,
            feed=Feed(names=("dense_h_to_4h", "dense_4h_to_h"), gated=False,
                      inner=rules.product("hidden_size", "intermediate_multiple_size", low=1)),
            outside=Outside("gpt_neox_japanese", "embed_in", head="embed_out"),
            mixer=last_biased,
        ),
        "GPT-NeoX Japanese",
    ),
    "PersimmonForCausalLM": Family(
        Fields("persimmon", defaults={**without(GATED, "rms_norm_eps"), "hidden_act": "relu2", "layer_norm_eps": 1e-5,
                                      "max_position_embeddings": 16384, "qk_layernorm": True,
                                      "partial_rotary_factor": 0.5}, only={"head_dim": ()}, layers="full_attention"),
        Shape(
            attend=Attend("self_attn", ("query_key_value",), "dense", True, rope=positions.partial_rope,
                          norms=HeadNorms(names=("q_layernorm", "k_layernorm"), kind="layer", present="qk_layernorm"),
                          extra=Extra(fused=per_head_order)),
            norms=Norms("layer", "layer_norm_eps", last="final_layernorm"),
            feed=Feed(names=("dense_h_to_4h", "dense_4h_to_h"), gated=False, bias=True),
        ),
    ),
    "BloomForCausalLM": Family(
        Fields(
            "bloom",
            needed=("vocab_size", "hidden_size", "n_embed", "n_layer", "n_head", "num_hidden_layers",
                    "num_attention_heads"),
            defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
            only={"apply_residual_connection_post_layernorm": (False,), "slow_but_exact": (False,)},
            ignored=("attention_softmax_in_fp32", "offset_alibi", "masked_softmax_fusion",
                     "n_inner", "bias_dropout_fusion", "skip_bias_add", "skip_bias_add_qkv"),
            layers="full_attention",
        ),
        Shape(
            attend=Attend("self_attention", ("query_key_value",), "dense", True, rope=None,
                          scores=Scores(alibi=True), extra=Extra(fused=per_head_order)),
            norms=Norms("layer", "layer_norm_epsilon", last="ln_f"),
            feed=Feed(names=("dense_h_to_4h", "dense_4h_to_h"), gated=False, bias=True, fixed="gelu_tanh",
                      inner=rules.four_times("ffn_hidden_size")),
            outside=Outside("transformer", "word_embeddings", "h", norm="word_embeddings_layernorm"),
            names={"n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
        ),
    ),
    "GPTJForCausalLM": Family(
        Fields(
            "gptj",
            needed=(*GPT_NEEDED, "rotary_dim"),
            defaults={**_GPT_KEYS, "tie_word_embeddings": False},
            only={"rotary": (True,), "scale_attn_weights": (True,)},
            layers="full_attention",
        ),
        _GPTJ,
    ),
    "CodeGenForCausalLM": Family(
        Fields(
            "codegen",
            needed=(*GPT_NEEDED, "rotary_dim"),
            defaults={**_GPT_KEYS, "tie_word_embeddings": False},
            only={"scale_attn_weights": (True,)},
            ignored=("n_ctx",),
            layers="full_attention",
        ),
        Shape(
            attend=Attend("attn", ("qkv_proj",), "out_proj", rope=positions.rotary_dim, pairs=True,
                          extra=Extra(fused=codegen_order)),
            norms=_GPTJ.norms, feed=_GPTJ.feed, outside=_GPTJ.outside, parallel=True, names=_GPT_NAMES,
        ),
    ),
    "GPTBigCodeForCausalLM": Family(
        Fields(
            "gpt_bigcode",
            needed=GPT_NEEDED,
            defaults={**_GPT_KEYS, "activation_function": "gelu_pytorch_tanh", "multi_query": True,
                      "scale_attn_weights": True, "tie_word_embeddings": True},
            only={"validate_runner_input": (True, False)},
            ignored=("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "n_ctx",
                     "num_key_value_heads", "inference_runner", "max_sequence_length", "max_batch_size",
                     "pad_key_length", "pre_allocate_kv_cache", "runner_max_sequence_length"),
            layers="full_attention",
        ),
        Shape(
            attend=Attend("attn", ("c_attn",), "c_proj", True, rope=None, scores=Scores(rules.bigcode_scale),
                          extra=Extra(fused=per_head_order_if_many)),
            norms=Norms("layer", "layer_norm_epsilon", before=_LN, last="ln_f"),
            feed=Feed(names=("c_fc", "c_proj"), gated=False, bias=True, act="activation_function",
                      inner=rules.four_times("n_inner")),
            outside=Outside("transformer", "wte", "h", positions=Positions("wpe")),
            nested=rules.bigcode,
            names=_GPT_NAMES,
        ),
        "StarCoder and SantaCoder",
    ),
    "GPTNeoForCausalLM": Family(
        Fields(
            "gpt_neo",
            needed=("vocab_size", "hidden_size", "num_layers", "num_heads", "num_hidden_layers",
                    "num_attention_heads", "max_position_embeddings"),
            defaults={"attention_types": None, "intermediate_size": None, "window_size": 256,
                      "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
            ignored=("attention_layers",),
            layers="full_attention",
        ),
        Shape(
            attend=Attend("attn.attention", out="out_proj", out_bias=True, rope=None, layer=rules.gpt_neo,
                          scores=Scores(rules.one)),
            norms=Norms("layer", "layer_norm_epsilon", before=_LN, last="ln_f"),
            feed=Feed(names=("c_fc", "c_proj"), gated=False, bias=True, act="activation_function",
                      inner=rules.four_times("intermediate_size")),
            outside=Outside("transformer", "wte", "h", positions=Positions("wpe")),
            names={"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"},
        ),
    ),
    "MptForCausalLM": Family(
        Fields(
            "mpt",
            needed=("vocab_size", "d_model", "n_heads", "n_layers", "hidden_size", "num_attention_heads",
                    "num_hidden_layers", "attn_config"),
            defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "max_seq_len": 2048},
            only={"expansion_ratio": (4,), "no_bias": (True,), "logit_scale": (), "embedding_fraction": (1.0,),
                  "fc_type": ("torch",), "ffn_config": ({},), "norm_type": ("low_precision_layernorm",)},
            ignored=("learned_pos_emb", "verbose", "init_device", "init_config", "architectures"),
            layers="full_attention",
        ),
        Shape(
            attend=Attend("attn", ("Wqkv",), "out_proj", rope=None,
                          scores=Scores(rules.mpt_scale, alibi=True), extra=Extra(clip="attn_config.clip_qkv")),
            norms=Norms("scale", "layer_norm_epsilon", before=("norm_1", "norm_2"), last="norm_f"),
            feed=Feed("ffn", ("up_proj", "down_proj"), gated=False, fixed="gelu",
                      inner=rules.four_times("ffn_hidden_size")),
            outside=Outside("transformer", "wte", "blocks"),
            nested=rules.mpt,
            names={"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers",
                   "max_seq_len": "max_position_embeddings"},
        ),
    ),
    "XGLMForCausalLM": Family(
        Fields(
            "xglm",
            needed=("vocab_size", "d_model", "ffn_dim", "num_layers", "attention_heads", "hidden_size",
                    "num_hidden_layers", "num_attention_heads"),
            defaults={"activation_function": "gelu", "scale_embedding": True, "tie_word_embeddings": True,
                      "max_position_embeddings": 2048},
            # Transformers sets the row of this number in the table of positions to zero; the first two are not used.
            only={"pad_token_id": (0, 1)},
            layers="full_attention",
        ),
        Shape(
            attend=Attend(out="out_proj", bias=True, rope=None),
            norms=_BART_NORMS,
            feed=Feed("", ("fc1", "fc2"), gated=False, bias=True, act="activation_function",
                      inner=rules.value("ffn_dim")),
            outside=Outside(scale=rules.root_if_scaled, positions=Positions(shift=2)),
            names={"d_model": "hidden_size", "num_layers": "num_hidden_layers",
                   "attention_heads": "num_attention_heads"},
        ),
    ),
    "BioGptForCausalLM": Family(
        Fields(
            "biogpt",
            defaults={"hidden_act": "gelu", "scale_embedding": True, "tie_word_embeddings": True,
                      "max_position_embeddings": 1024},
            # Transformers norms with 1e-5 whatever this says.
            ignored=("layer_norm_eps",),
            layers="full_attention",
        ),
        Shape(
            attend=Attend(out="out_proj", bias=True, rope=None),
            norms=_BART_NORMS,
            feed=Feed("", ("fc1", "fc2"), gated=False, bias=True),
            outside=Outside("biogpt", head="output_projection", scale=rules.root_if_scaled,
                            positions=Positions("embed_positions", shift=2)),
        ),
    ),
}  # fmt: skip
