"""Models that also see or hear, as a table. Owns: which architectures have a text part, of which kind it is, and what
an absent key of its config means. The numbers are those of Transformers' config classes.

Must not know: how configs are read (`models/text_part.py`), how families are built, tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Text:
    """A kind of text part: the architecture that computes it, and its config class's defaults for absent keys."""

    architecture: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that the family reads and this class does not, with the values that have no effect."""


def _sizes(vocab: int, hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, **more}  # fmt: skip


_NO_HEAD_DIM: dict[str, tuple[Any, ...]] = {"head_dim": ()}
_QWEN2_VL = Text("Qwen2ForCausalLM", _sizes(
    152064, 8192, 29568, 80, 64, num_key_value_heads=8, rms_norm_eps=1e-5, max_window_layers=80, rope_theta=1e6,
    max_position_embeddings=32768), _NO_HEAD_DIM)  # fmt: skip
_DEEPSEEK3 = Text("DeepseekV3ForCausalLM", _sizes(129280, 7168, 18432, 61, 128, moe_intermediate_size=2048))
_GEMMA3 = _sizes(262208, 2304, 9216, 26, 8, max_position_embeddings=131072)
_GEMMA4 = _sizes(262144, 2304, 9216, 30, 8)

TEXTS: dict[str, Text] = {
    "llama": Text("LlamaForCausalLM", _sizes(32000, 4096, 11008, 32, 32)),
    "mistral": Text("MistralForCausalLM", _sizes(32000, 4096, 14336, 32, 32)),
    "mistral4": Text("Mistral4ForCausalLM", _sizes(
        131072, 4096, 12288, 36, 32, moe_intermediate_size=2048, n_routed_experts=128)),
    "ministral3": Text("Ministral3ForCausalLM", _sizes(131072, 4096, 14336, 34, 32)),
    "qwen2": Text("Qwen2ForCausalLM", _sizes(151936, 4096, 22016, 32, 32)),
    "qwen3": Text("Qwen3ForCausalLM", _sizes(151936, 4096, 22016, 32, 32)),
    "qwen3_moe": Text("Qwen3MoeForCausalLM", _sizes(
        151936, 2048, 6144, 24, 32, moe_intermediate_size=768, num_experts=128)),
    "aria_text": Text("AriaTextForCausalLM", _sizes(32000, 4096, 4096, 32, 32)),
    "phi4_multimodal": Text("Phi3ForCausalLM", _sizes(
        200064, 3072, 8192, 32, 32, num_key_value_heads=8, max_position_embeddings=131072)),
    "gpt_oss": Text("GptOssForCausalLM", _sizes(201088, 2880, 2880, 36, 64, num_local_experts=128)),
    "lfm2": Text("Lfm2ForCausalLM", _sizes(65536, 2560, 12288, 32, 32)),
    # Around these two, Transformers 5 leaves the factor on logits out; version 4 and vLLM do not.
    "cohere2": Text("Cohere2ForCausalLM", _sizes(256000, 8192, 22528, 40, 64)),
    "granite": Text("GraniteForCausalLM", _sizes(32000, 4096, 11008, 32, 32)),
    "exaone4": Text("Exaone4ForCausalLM", _sizes(102400, 4096, 16384, 32, 32)),
    "hyperclovax": Text("HyperCLOVAXForCausalLM", _sizes(32000, 4096, 11008, 32, 32)),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), _DEEPSEEK3),
    # Among the classes with pictures, Gemma 3's do not soft-cap logits.
    "gemma3_text": Text("Gemma3ForCausalLM", _GEMMA3, {"final_logit_softcapping": ()}),
    "gemma3n_text": Text("Gemma3nForCausalLM", _sizes(262400, 2048, 16384, 35, 8)),
    "gemma4_text": Text("Gemma4ForCausalLM", _GEMMA4),
    # Gemma 4 12B: without embeddings of each layer's own and without experts.
    "gemma4_unified_text": Text("Gemma4ForCausalLM", {
        **_GEMMA4, "max_position_embeddings": 262144, "sliding_window": 1024, "hidden_size_per_layer_input": 0},
        {"hidden_size_per_layer_input": (0,), "enable_moe_block": (False,)}),
    "llama4_text": Text("Llama4ForCausalLM", _sizes(202048, 5120, 8192, 48, 40, num_local_experts=16)),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_5_omni_text": Text("Qwen2ForCausalLM", _sizes(
        152064, 3584, 18944, 28, 28, num_key_value_heads=4, rope_theta=1e6), _NO_HEAD_DIM),
    "qwen3_omni_moe_text": Text("Qwen3MoeForCausalLM", _sizes(
        3584, 2048, 18944, 28, 28, num_key_value_heads=4, head_dim=None, moe_intermediate_size=768, num_experts=128,
        norm_topk_prob=True, rope_theta=1e6, max_position_embeddings=32768),
        {"sliding_window": (), "use_sliding_window": (False,)}),
    "qwen3_vl_text": Text("Qwen3ForCausalLM", _sizes(
        151936, 4096, 22016, 32, 32, rope_theta=500000.0, max_position_embeddings=128000),
        {"sliding_window": (), "use_sliding_window": (False,)}),
    "qwen3_vl_moe_text": Text("Qwen3MoeForCausalLM", _sizes(
        151936, 2048, 5632, 24, 16, num_key_value_heads=16, moe_intermediate_size=1408, num_experts=60,
        num_experts_per_tok=4, norm_topk_prob=True, rope_theta=500000.0, max_position_embeddings=128000),
        {"norm_topk_prob": (True,), "sliding_window": (), "use_sliding_window": (False,)}),
    "qwen3_5_text": Text("Qwen3_5ForCausalLM", _sizes(248320, 4096, 12288, 32, 16)),
    "qwen3_5_moe_text": Text("Qwen3_5MoeForCausalLM", _sizes(248320, 2048, 5632, 40, 16)),
    "glm4v_text": Text("Glm4ForCausalLM", _sizes(
        151552, 4096, 13696, 40, 32, head_dim=None, rms_norm_eps=1e-5, partial_rotary_factor=None,
        max_position_embeddings=32768), {"attention_bias": (True,), **_NO_HEAD_DIM}),
    "glm_ocr_text": Text("Glm4ForCausalLM", _sizes(
        59392, 1024, 4096, 16, 16, num_key_value_heads=8, head_dim=None, rms_norm_eps=1e-5, partial_rotary_factor=None,
        max_position_embeddings=131072, attention_bias=False), {"attention_bias": (False,)}),
    "glm4v_moe_text": Text("Glm4MoeForCausalLM", _sizes(
        151424, 4096, 10944, 46, 96, moe_intermediate_size=1408, n_routed_experts=128, attention_bias=True,
        max_position_embeddings=65536, n_group=1, topk_group=1), {"use_qk_norm": (False,)}),
    "hy_v4_vl_text": Text("HYV4ForCausalLM", _sizes(
        120832, 6144, 18432, 78, 64, moe_intermediate_size=2048, n_routed_experts=256, q_lora_rank=2048,
        index_n_heads=32)),
}  # fmt: skip
"""`model_type` of a text part -> what it is. Numbers are those of Transformers' config classes."""

_IMAGE = ("image_token_id", "image_token_index", "image_seq_length", "projector_hidden_act", "vision_feature_layer",
          "vision_feature_select_strategy", "multimodal_projector_bias", "image_grid_pinpoints")  # fmt: skip


@dataclass(frozen=True)
class Outer:
    """An architecture around a text part: the kind of text part if the file names none, and the architecture's own
    keys."""

    model_type: str
    text: str
    own: tuple[str, ...] = ()
    within: str = ""
    """The key of the object that holds the text part's config, if it is one of several parts with words."""
    flat: bool = False
    """Older files have the text part's keys beside the architecture's own."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """What it takes for keys that its text part lacks, where this differs from the kind's defaults."""


OUTERS: dict[str, Outer] = {
    "Qwen2VLForConditionalGeneration": Outer("qwen2_vl", "qwen2_vl_text", flat=True),
    "Qwen2_5_VLForConditionalGeneration": Outer("qwen2_5_vl", "qwen2_5_vl_text", flat=True),
    # The published file names a class of its own code.
    **dict.fromkeys(("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel"),
                    Outer("qwen2_5_omni", "qwen2_5_omni_text", within="thinker_config")),
    "Qwen3OmniMoeForConditionalGeneration": Outer("qwen3_omni_moe", "qwen3_omni_moe_text", within="thinker_config"),
    "Qwen3VLForConditionalGeneration": Outer("qwen3_vl", "qwen3_vl_text"),
    "Qwen3VLMoeForConditionalGeneration": Outer("qwen3_vl_moe", "qwen3_vl_moe_text"),
    "Qwen3_5ForConditionalGeneration": Outer("qwen3_5", "qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": Outer("qwen3_5_moe", "qwen3_5_moe_text"),
    # The published file names a class of its own code. What adapts it to pictures and sound is left out.
    "Phi4MultimodalForCausalLM": Outer("phi4_multimodal", "phi4_multimodal", flat=True),
    "Phi4MMForCausalLM": Outer("phi4mm", "phi4_multimodal", (
        "audio_processor", "embd_layer", "img_processor", "speech_lora", "vision_lora"), flat=True),
    "Gemma3ForConditionalGeneration": Outer("gemma3", "gemma3_text", ("mm_tokens_per_image",)),
    "Gemma3nForConditionalGeneration": Outer("gemma3n", "gemma3n_text", (
        "audio_soft_tokens_per_image", "vision_soft_tokens_per_image")),
    "Gemma4ForConditionalGeneration": Outer("gemma4", "gemma4_text", ("vision_soft_tokens_per_image",)),
    "Gemma4UnifiedForConditionalGeneration": Outer("gemma4_unified", "gemma4_unified_text"),
    "Mistral3ForConditionalGeneration": Outer("mistral3", "mistral", (*_IMAGE, "spatial_merge_size")),
    "HYV4VLForConditionalGeneration": Outer("hy_v4_vl", "hy_v4_vl_text"),
    "Llama4ForConditionalGeneration": Outer("llama4", "llama4_text"),
    "Glm4vForConditionalGeneration": Outer("glm4v", "glm4v_text"),
    "Glm4vMoeForConditionalGeneration": Outer("glm4v_moe", "glm4v_moe_text"),
    "Glm46VForConditionalGeneration": Outer("glm46v", "glm4v_text"),
    "GlmOcrForConditionalGeneration": Outer("glm_ocr", "glm_ocr_text"),
    "LlavaForConditionalGeneration": Outer("llava", "llama", _IMAGE),
    "LlavaNextForConditionalGeneration": Outer("llava_next", "llama", _IMAGE),
    "LlavaOnevisionForConditionalGeneration": Outer("llava_onevision", "qwen2", (*_IMAGE, "vision_aspect_ratio")),
    "Idefics3ForConditionalGeneration": Outer("idefics3", "llama", ("scale_factor",)),
    "SmolVLMForConditionalGeneration": Outer("smolvlm", "llama", ("scale_factor",)),
    "InternVLForConditionalGeneration": Outer("internvl", "qwen2", (*_IMAGE, "downsample_ratio")),
    "Lfm2VlForConditionalGeneration": Outer("lfm2_vl", "lfm2", (
        *_IMAGE, "projector_hidden_size", "projector_bias", "projector_use_layernorm", "downsample_factor")),
    "LlavaNextVideoForConditionalGeneration": Outer("llava_next_video", "llama", _IMAGE),
    "VideoLlavaForConditionalGeneration": Outer("video_llava", "llama", _IMAGE),
    "VipLlavaForConditionalGeneration": Outer("vipllava", "llama", _IMAGE),
    "Idefics2ForConditionalGeneration": Outer("idefics2", "mistral"),
    "AriaForConditionalGeneration": Outer("aria", "aria_text", (*_IMAGE, "projector_patch_to_query_dict")),
    "AyaVisionForConditionalGeneration": Outer("aya_vision", "cohere2", ("adapter_layer_norm_eps",)),
    "Cohere2VisionForConditionalGeneration": Outer("cohere2_vision", "cohere2"),
    "DeepseekVLForConditionalGeneration": Outer("deepseek_vl", "llama"),
    "Exaone4_5_ForConditionalGeneration": Outer("exaone4_5", "exaone4"),
    "FastVlmForConditionalGeneration": Outer("fast_vlm", "qwen2", _IMAGE),
    "GotOcr2ForConditionalGeneration": Outer("got_ocr2", "qwen2", _IMAGE),
    "HyperCLOVAXVisionV2ForConditionalGeneration": Outer("hyperclovax_vision_v2", "hyperclovax"),
    **dict.fromkeys(("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
                    Outer("kimi_k25", "deepseek_v3")),
    "LightOnOcrForConditionalGeneration": Outer("lighton_ocr", "qwen3"),
    "MiniCPMV4_6ForConditionalGeneration": Outer("minicpmv4_6", "qwen3_5_text"),
    "Ovis2ForConditionalGeneration": Outer("ovis2", "qwen2"),
    "PerceptionLMForConditionalGeneration": Outer("perception_lm", "llama"),
    "VideoLlama3ForConditionalGeneration": Outer("video_llama_3", "qwen2"),
    "GlmAsrForConditionalGeneration": Outer("glmasr", "llama", absent=_sizes(
        59264, 2048, 6144, 28, 16, num_key_value_heads=4, max_position_embeddings=8192, rms_norm_eps=1e-5)),
    # What it was trained with for sound alone lies in a file of its own.
    "GraniteSpeechForConditionalGeneration": Outer("granite_speech", "granite", ("window_size",)),
    "Qwen2AudioForConditionalGeneration": Outer("qwen2_audio", "qwen2"),
    "Qwen3ASRForConditionalGeneration": Outer("qwen3_asr", "qwen3"),
    "VoxtralForConditionalGeneration": Outer("voxtral", "llama", absent=_sizes(
        131072, 3072, 8192, 30, 32, num_key_value_heads=8, head_dim=128, max_position_embeddings=131072,
        rms_norm_eps=1e-5, rope_theta=1e8)),
}  # fmt: skip
