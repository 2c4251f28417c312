"""Tiny configs of every causal type of Transformers, for the sweep of test_foreign.py.

Sizes have a usual name in most of them; the others are made by hand, or are the first case of the family's own tests.
"""

from __future__ import annotations

from typing import Any

import transformers as hf
from tests.cpu.models.families_helpers import BASE
from tests.cpu.models.family_cases import FAMILIES

SMALL = {**BASE, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TINY = {
    **SMALL, "head_dim": 8, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "d_model": 32, "n_layers": 2,
    "n_heads": 4, "ffn_dim": 48, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "kv_lora_rank": 16, "q_lora_rank": 20,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "sliding_window": 20, "word_embed_proj_dim": 32,
    "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "mamba_n_heads": 8, "mamba_d_state": 8,
    "ffn_hidden_size": 48, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
    "encoder_layers": 1, "rotary_dim": 4, "max_seq_len": 128, "moe_num_experts": 4, "n_shared_experts": 1,
    "shared_intermediate_size": 16, "intermediate_size_mlp": 20, "num_layers": 2, "num_heads": 4,
    "attention_heads": 4, "moe_topk": 2, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8,
    "moe_k": 2, "num_experts_per_token": 2, "top_k_experts": 2, "index_head_dim": 8,
    "index_n_heads": 2, "index_topk": 8,
    "vocab_size_per_layer_input": 67, "laurel_rank": 4, "d_ff": 48, "d_kv": 8, "kv_channels": 8,
}  # fmt: skip
"""Sizes under every name that configs have for them."""


OWN = {cases[0].config.model_type: cases[0].config for cases in FAMILIES.values()}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
_PLAIN = {**BASE, "num_key_value_heads": 4}
_SIGHT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
          "image_size": 16, "patch_size": 8}  # fmt: skip
_BLOCK = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1,
          "intermediate_size": 48, "head_dim": 8}  # fmt: skip
_INKLING = {**SMALL, "num_hidden_layers": 4, "head_dim": 8, "swa_head_dim": 8, "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2, "d_rel": 4, "rel_extent": 32, "unpadded_vocab_size": 67,
            "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window_size": 20,
            "layer_types": ["hybrid_sliding", "hybrid"] * 2}  # fmt: skip
HAND: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 64, "vocab_size": 260, "patcher_config": {**_BLOCK, "vocab_size": 260},
            "encoder_config": {**_BLOCK, "hidden_size_global": 64, "vocab_size": 260},
            "decoder_config": {**_BLOCK, "hidden_size_global": 64, "vocab_size": 260},
            "global_config": {**_BLOCK, "hidden_size": 64, "head_dim": 16}},
    "cohere_compass_text": {**SMALL, "head_dim": 8, "logit_scale": 1.0, "sliding_window": 20,
                            "layer_types": ["sliding_attention", "full_attention"],
                            "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "emu3": {"text_config": SMALL, "vq_config": {"base_channels": 32, "codebook_size": 64, "hidden_size": 32}},
    "gemma4_assistant": {"backbone_hidden_size": 32, "text_config": {
        **SMALL, "model_type": "gemma4_text", "head_dim": 8, "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 2}},
    "git": {**_PLAIN, "vision_config": _SIGHT},
    "inkling2_text": _INKLING,
    "inkling2_loop_text": {**_INKLING, "loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_num_passes": 2,
                           "n_layers_per_attn_res_block": 1,
                           "loop_gate_rank": 4},
    "longcat_flash": {**{key: value for key, value in SMALL.items() if key != "num_hidden_layers"}, "num_layers": 2,
                      "num_key_value_heads": 4, "head_dim": 8, "ffn_hidden_size": 48, "q_lora_rank": 20,
                      "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
                      "moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 16},
    "mllama": {"text_config": {**SMALL, "num_hidden_layers": 2, "cross_attention_layers": [1]},
               "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                                 "num_global_layers": 1, "attention_heads": 4, "image_size": 16, "patch_size": 8,
                                 "vision_output_dim": 64, "intermediate_layers_indices": [0]}},
    "musicgen": {"text_encoder": {"model_type": "t5", "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 1,
                                  "num_heads": 4, "vocab_size": 67},
                 "audio_encoder": {"model_type": "encodec", "hidden_size": 32, "num_filters": 4, "codebook_size": 64},
                 "decoder": {**_PLAIN, "ffn_dim": 48, "num_codebooks": 2}},
    "olmo_hybrid": {**_PLAIN, "pad_token_id": 0, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
                    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                    "layer_types": ["linear_attention", "full_attention"]},
    "phi4_multimodal": {**SMALL, "head_dim": 8, "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0},
                        "vision_config": {**_SIGHT, "crop_size": 16, "image_token_id": 60},
                        "audio_config": {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 1,
                                         "num_attention_heads": 4, "ext_pw_out_channel": 32, "audio_token_id": 61,
                                         "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32}},
    "reformer": {"is_decoder": True, "vocab_size": 67, "hidden_size": 32, "num_attention_heads": 4,
                 "attention_head_size": 8, "feed_forward_size": 48, "attn_layers": ["local", "lsh"],
                 "axial_pos_embds": False, "max_position_embeddings": 128},
    "roc_bert": {**_PLAIN, "is_decoder": True, "pronunciation_embed_dim": 8, "pronunciation_vocab_size": 67,
                 "shape_embed_dim": 8, "shape_vocab_size": 67},
    "xlm": {"vocab_size": 67, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 128,
            "causal": True},
    "xmod": {**_PLAIN, "is_decoder": True, "languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {**_PLAIN, "num_hidden_layers": 4, "attention_head_dim": 16, "n_mamba_heads": 2, "mamba_d_state": 8,
              "mamba_dt_rank": 4, "use_mamba_kernels": False,
              "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {**_PLAIN, "num_hidden_layers": 4, "n_mamba_heads": 4, "mamba_d_state": 8, "adapter_rank": 4,
               "attention_head_dim": 16, "use_mamba_kernels": False,
               "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {**BASE, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "router_hidden_size": 16,
             "layer_types": ["hybrid", "hybrid"]},
}  # fmt: skip
"""Types whose sizes have names of their own, or lie in parts."""
HAND["musicgen_melody"] = {**HAND["musicgen"], "chroma_length": 4, "num_chroma": 4}


def tiny(kind: str) -> Any:
    """A config of this type, small wherever a size has a usual name."""
    if kind in HAND or kind in OWN:
        return hf.AutoConfig.for_model(kind, **HAND[kind]) if kind in HAND else OWN[kind]
    made = hf.AutoConfig.for_model(kind)
    text = made.get_text_config()
    known = {name: value for name, value in TINY.items() if name in text.to_dict()}
    if "kv_lora_rank" in known:  # keys of latent attention are made of two parts
        known.pop("head_dim", None)
        known["num_key_value_heads"] = 4
    lists = {name: value[:2] for name, value in text.to_dict().items()
             if isinstance(value, list) and name in ("layer_types", "mlp_layer_types", "no_rope_layers")}  # fmt: skip
    return hf.AutoConfig.for_model(text.model_type, **{**known, **lists})
