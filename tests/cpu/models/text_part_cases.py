"""Tiny models that also see: configs of their text parts, with what real checkpoints switch on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file
from tests.cpu.models.families_helpers import DELTA, HYBRID
from tests.cpu.models.family_cases import BASE, GROUPED, INDEX, LATENT, LLAMA3, MINISTRAL3, YARN
from torch import Tensor

MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
WOVEN = {**MROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
QWEN_EYE = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "patch_size": 2,
            "out_hidden_size": 32, "spatial_merge_size": 1, "temporal_patch_size": 1}  # fmt: skip
QWEN3_EYE = {**QWEN_EYE, "deepstack_visual_indexes": [0], "num_position_embeddings": 4}
CLIP = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 4, "patch_size": 2, "projection_dim": 8}  # fmt: skip
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
PIXTRAL = {**CLIP, "model_type": "pixtral", "head_dim": 8}
SMALL_EYE = {k: v for k, v in CLIP.items() if k not in ("model_type", "projection_dim")}
EAR = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_mel_bins": 8}
COHERE = {**BASE, "model_type": "cohere2", "num_hidden_layers": 4, "sliding_window": 20, "logit_scale": 1.0}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
GEMMA = {**BASE, "num_hidden_layers": 3, "head_dim": 8, "sliding_window": 20}
GEMMA4 = {**GEMMA, "pad_token_id": 0, "global_head_dim": 16, "hidden_size_per_layer_input": 8,
          "vocab_size_per_layer_input": 67,
          "layer_types": ["sliding_attention", "full_attention", "full_attention"]}  # fmt: skip
IDS = {"image_token_id": 1000, "video_token_id": 1001, "vision_start_token_id": 1002, "vision_end_token_id": 1003}
IMAGE = {"image_token_index": 1000}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None, dict[str, Any]]] = {
    "qwen2-vl": ("Qwen2VL", {**BASE, "rope_parameters": MROPE}, {"depth": 1, "embed_dim": 16, "num_heads": 2,
        "hidden_size": 32, "patch_size": 2, "mlp_ratio": 1, "spatial_merge_size": 1}, IDS),
    "qwen2.5-vl": ("Qwen2_5_VL", {**BASE, "rope_parameters": MROPE, "use_sliding_window": True, "sliding_window": 20,
        "max_window_layers": 1}, QWEN_EYE, {**IDS, "tie_word_embeddings": True}),
    "qwen3-vl": ("Qwen3VL", {**BASE, "head_dim": 16, "rope_parameters": {**WOVEN, "mrope_section": [4, 2, 2]}},
        QWEN3_EYE, IDS),
    "qwen3-vl-moe": ("Qwen3VLMoe", {**BASE, **EXPERTS, "head_dim": 8, "norm_topk_prob": True,
        "rope_parameters": {**YARN, **{k: WOVEN[k] for k in ("mrope_section", "mrope_interleaved")}}}, QWEN3_EYE, IDS),
    "qwen3.5": ("Qwen3_5", {**HYBRID, **DELTA, "rope_parameters": {**WOVEN, "partial_rotary_factor": 0.5}},
        {k: v for k, v in QWEN3_EYE.items() if "deepstack" not in k}, IDS),
    "qwen3.5-moe": ("Qwen3_5Moe", {**HYBRID, **DELTA, **EXPERTS, "shared_expert_intermediate_size": 24,
        "rope_parameters": {**WOVEN, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}},
        {k: v for k, v in QWEN3_EYE.items() if "deepstack" not in k}, IDS),
    "gemma3": ("Gemma3", {**GEMMA, "query_pre_attn_scalar": 16}, SIGLIP, {"mm_tokens_per_image": 4, **IMAGE}),
    "gemma4": ("Gemma4", GEMMA4, {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 2,
        "position_embedding_size": 16}, {"image_token_id": 1000, "video_token_id": 1001, "audio_token_id": 1002}),
    "gemma4-12b": ("Gemma4Unified", {**{k: v for k, v in GEMMA4.items() if "per_layer" not in k},
        "attention_k_eq_v": True, "num_global_key_value_heads": 1}, {
            "patch_size": 2, "pooling_kernel_size": 1, "mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 32},
        {}),
    "aria": ("Aria", {**BASE, "moe_num_experts": 4, "moe_num_shared_experts": 1}, {
        **SMALL_EYE, "model_type": "idefics3_vision"}, {"image_token_index": 1000}),
    "phi4": ("Phi4Multimodal", {**BASE, "pad_token_id": 0, "original_max_position_embeddings": 64, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.1, 1.3],
        "long_factor": [1.5, 2.5, 6.0]}}, {**SMALL_EYE, "crop_size": 4}, {
            "tie_word_embeddings": True, "audio_config": {
                "hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2, "input_size": 8,
                "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 8}}),
    "mistral3": ("Mistral3", {**BASE, "model_type": "mistral", "head_dim": 16, "sliding_window": None}, PIXTRAL,
        {**IMAGE, "tie_word_embeddings": False}),
    "ministral3": ("Mistral3", {**BASE, "model_type": "ministral3", "head_dim": 8, "rope_parameters": MINISTRAL3},
        PIXTRAL, {**IMAGE, "tie_word_embeddings": False}),
    "mistral4": ("Mistral3", {**BASE, **LATENT, **GROUPED, "model_type": "mistral4", "rope_parameters": {
        **MINISTRAL3, "partial_rotary_factor": 6 / 14}}, PIXTRAL, {**IMAGE, "tie_word_embeddings": False}),
    "hy4": ("HYV4VL", {**{k: v for k, v in {**BASE, **LATENT, **GROUPED, **INDEX}.items()
                          if k != "first_k_dense_replace"}, "rms_norm_eps": 0.1, "hc_mult": 2,
        "rope_parameters": {**MROPE, "mrope_section": [1, 1, 1]}},
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "out_hidden_size": 32, "patch_size": 2, "spatial_merge_size": 1, "max_image_size": 8},
        {"image_token_id": 1000, "video_token_id": 1001}),
    "llama4": ("Llama4", {**BASE, "num_hidden_layers": 4, "head_dim": 8, "num_local_experts": 4,
        "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2, "attn_scale": 0.2, "floor_scale": 16,
        "attention_chunk_size": 128}, {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 4, "patch_size": 2, "vision_output_dim": 32, "projector_input_dim": 16,
        "projector_output_dim": 16, "pixel_shuffle_ratio": 1.0}, IMAGE),
    "glm4v": ("Glm4v", {**BASE, "rope_parameters": {**MROPE, "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.5}}, {**QWEN_EYE, "image_size": 4}, IDS),
    "glm-ocr": ("GlmOcr", {**BASE, "head_dim": 16, "rope_parameters": {**MROPE, "mrope_section": [2, 3, 3]}},
        {**QWEN_EYE, "image_size": 4}, IDS),
    "glm4v-moe": ("Glm4vMoe", {**BASE, "moe_intermediate_size": 20, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.3,
        "rope_parameters": {**MROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}},
        {**QWEN_EYE, "image_size": 4}, IDS),
    "llava": ("Llava", {**BASE, "model_type": "llama", "rope_parameters": LLAMA3}, CLIP, IMAGE),
    "llava-next-mistral": ("LlavaNext", {**BASE, "model_type": "mistral", "sliding_window": 24}, CLIP,
        {**IMAGE, "image_grid_pinpoints": [[4, 8]]}),
    "llava-onevision": ("LlavaOnevision", {**BASE, "model_type": "qwen2"}, SIGLIP, {
        **IMAGE, "image_grid_pinpoints": [[4, 8]]}),
    "idefics3": ("Idefics3", {**BASE, "model_type": "llama"}, {k: v for k, v in CLIP.items() if k != "model_type"},
        {"image_token_id": 1000}),
    "smolvlm": ("SmolVLM", {**BASE, "model_type": "llama", "rope_parameters": {"rope_type": "default",
        "rope_theta": 1e5}}, {k: v for k, v in CLIP.items() if k != "model_type"},
        {"image_token_id": 1000, "tie_word_embeddings": True}),
    "internvl": ("InternVL", {**BASE, "model_type": "qwen3", "head_dim": 16}, {"hidden_size": 16,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": [4, 4],
        "patch_size": [2, 2]}, {"image_token_id": 1000, "tie_word_embeddings": False}),
    "lfm2-vl": ("Lfm2Vl", {**BASE, "model_type": "lfm2", "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"]}, {**CLIP, "model_type": "siglip2_vision_model",
        "num_patches": 4}, {"image_token_id": 1000}),
    "cohere2-vision": ("Cohere2Vision", COHERE, SIGLIP, {"alignment_intermediate_size": 16}),
    "aya-vision": ("AyaVision", COHERE, SIGLIP, {}),
    "exaone4.5": ("Exaone4_5_", {**BASE, "model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": 20},
        {k: v for k, v in QWEN_EYE.items() if k != "intermediate_size"}, IDS),
    "hyperclovax-vision": ("HyperCLOVAXVisionV2", {**BASE, "model_type": "hyperclovax", "logits_scaling": 0.5},
        QWEN_EYE, {}),
    "minicpm-v-4.6": ("MiniCPMV4_6", {**HYBRID, **DELTA, "model_type": "qwen3_5_text", "rope_parameters": {
        **WOVEN, "partial_rotary_factor": 0.5}}, SMALL_EYE, {}),
    "idefics2": ("Idefics2", {**BASE, "model_type": "mistral", "sliding_window": None}, SMALL_EYE, {
        "perceiver_config": {"hidden_size": 32, "resampler_n_latents": 2, "resampler_depth": 1, "resampler_n_heads": 2,
        "num_key_value_heads": 2, "resampler_head_dim": 8}}),
    "llava-next-video": ("LlavaNextVideo", {**BASE, "model_type": "llama"}, CLIP, {
        **IMAGE, "image_grid_pinpoints": [[4, 8]]}),
    "video-llava": ("VideoLlava", {**BASE, "model_type": "llama"}, CLIP, IMAGE),
    "vip-llava": ("VipLlava", {**BASE, "model_type": "llama"}, CLIP, {**IMAGE, "vision_feature_layers": [0]}),
    "deepseek-vl": ("DeepseekVL", {**BASE, "model_type": "llama"}, SIGLIP, {}),
    "lighton-ocr": ("LightOnOcr", {**BASE, "model_type": "qwen3", "head_dim": 16}, PIXTRAL, {}),
    "video-llama3": ("VideoLlama3", {**BASE, "model_type": "qwen2"}, SMALL_EYE, {}),
    "granite-speech": ("GraniteSpeech", {**BASE, "model_type": "granite", "attention_multiplier": 0.3}, None, {
        "encoder_config": {"hidden_dim": 16, "num_layers": 1, "num_heads": 2, "dim_head": 8, "feedforward_mult": 1},
        "projector_config": {"model_type": "blip_2_qformer", "hidden_size": 16, "num_hidden_layers": 1,
                             "num_attention_heads": 2, "intermediate_size": 16, "encoder_hidden_size": 16}}),
    "voxtral": ("Voxtral", {**BASE, "model_type": "llama"}, None, {"audio_config": EAR}),
    "qwen2-audio": ("Qwen2Audio", {**BASE, "model_type": "qwen2"}, None, {"audio_config": {
        **EAR, "encoder_layers": 1, "d_model": 16, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}}),
    "qwen3-asr": ("Qwen3ASR", {**BASE, "model_type": "qwen3", "head_dim": 16}, None, {"audio_config": {
        **EAR, "encoder_layers": 1, "d_model": 16, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}}),
    "qwen2.5-omni": ("Qwen2_5OmniThinker", {**BASE, "rope_parameters": MROPE, "use_sliding_window": True,
        "sliding_window": 20, "max_window_layers": 1},
        {k: v for k, v in QWEN_EYE.items() if k != "temporal_patch_size"},
        {"audio_config": {**EAR, "encoder_layers": 1, "d_model": 16, "encoder_attention_heads": 2,
                          "encoder_ffn_dim": 16, "output_dim": 32}}),
    "qwen3-omni": ("Qwen3OmniMoeThinker", {**BASE, **EXPERTS, "head_dim": 16, "norm_topk_prob": True,
        "rope_parameters": {**WOVEN, "mrope_section": [4, 2, 2], "interleaved": True}}, QWEN3_EYE,
        {"audio_config": {**EAR, "encoder_layers": 1, "d_model": 16, "encoder_attention_heads": 2,
                          "encoder_ffn_dim": 16, "output_dim": 32, "downsample_hidden_size": 8}}),
    "glm-asr": ("GlmAsr", {**BASE, "model_type": "llama"}, None, {"audio_config": EAR}),
}  # fmt: skip


@dataclass
class Seeing:
    """A case for the tests of whole engines."""

    name: str
    longest: int | None = None

    def make(self, folder: Path) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
        """Transformers' model, config.json and tensors."""
        return make(self.name, folder)


def make(name: str, folder: Path, **more: Any) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    """A random model that sees, saved and read back: (model, config.json, tensors). more: other values of its text
    part."""
    kind, text, vision, outside = CASES[name]
    sees = {} if vision is None else {"vision_config": vision}
    flat = kind == "Phi4Multimodal"
    words = {**text, **more} if flat else {"text_config": {**text, **more}}
    config = getattr(hf, f"{kind}Config")(**words, **sees, **outside)
    torch.manual_seed(0)
    task = "CausalLM" if flat else "ConditionalGeneration"
    model = getattr(hf, f"{kind}For{task}")._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(parameter + 0.3 * noise if "norm" in key or parameter.ndim == 1 else noise * 0.15)
    model.save_pretrained(folder)
    tensors = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    reference = model.language_model if kind == "Llama4" else model  # its outer class fails without pictures
    said = json.loads((folder / "config.json").read_text())
    if kind.endswith("Thinker"):  # as files have it, beside the part that speaks
        outer = kind.removesuffix("Thinker")
        said = {"architectures": [f"{outer}ForConditionalGeneration"], "thinker_config": said, "talker_config": {},
                "model_type": said["model_type"].removesuffix("_thinker")}  # fmt: skip
        tensors = {f"thinker.{key}": value for key, value in tensors.items()} | {"talker.head.weight": torch.ones(2)}
        (folder / "config.json").write_text(json.dumps(said))
    return reference, said, tensors
