"""Text parts of models that also see or hear: against Transformers in float32, under the names that files have."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tests.cpu.models.families_helpers import prompt
from tests.cpu.models.family_cases import ALL
from tests.cpu.models.parity import load, ours, theirs
from tests.cpu.models.text_part_cases import CASES, make
from torch import Tensor

from tokenmill.core.errors import ModelError, ParameterError
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.layers.rope import rope_settings
from tokenmill.measure.counting import count_model
from tokenmill.models.config_fields import FIELDS, complete
from tokenmill.models.family_of import SAME
from tokenmill.models.multimodal import OUTERS, TEXTS
from tokenmill.models.overriding import overridden
from tokenmill.models.registry import check_keys
from tokenmill.models.text_part import text_part

FULL = os.environ.get("TOKENMILL_FAMILIES") == "1"
USUAL = ("qwen2.5-vl", "qwen3-vl-moe", "qwen3.5", "gemma3", "gemma4", "ministral3", "llava", "idefics2",
         "granite-speech")  # fmt: skip


@pytest.mark.parametrize("name", CASES if FULL else USUAL)
def test_like_transformers(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference, config, tensors = make(name, tmp_path)
    with caplog.at_level(logging.WARNING, "tokenmill.models"):
        model = load(config, tensors)
    assert "Text only: " in caplog.text and "not known here" not in caplog.text, caplog.text
    tokens = prompt(70)
    expected = theirs(reference, tokens)
    found = ours(model, {"a": tokens}, [[("a", 30)], [("a", 40)]], ReferenceKernels())["a"]
    assert expected.std() > 0.03
    assert (found - expected).abs().max() <= 1e-4


def test_a_text_part_may_lie_in_a_file_of_its_own(tmp_path: Path) -> None:
    """With the type of the whole, and settings of positions in three parts."""
    _, config, tensors = make("qwen3.5", tmp_path)
    inner = {**config["text_config"], "architectures": ["Qwen3_5ForCausalLM"]}
    alone = {name.replace("model.language_model.", "model."): value for name, value in tensors.items()}
    alone = {name: value for name, value in alone.items() if "visual" not in name}
    assert "mrope_section" in inner["rope_parameters"]
    wanted = logits(config, tensors)
    for kind in ("qwen3_5_text", "qwen3_5"):
        assert torch.equal(logits({**inner, "model_type": kind}, alone), wanted)


HUB = {
    "model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.", "model.multi_modal_projector.": "multi_modal_projector.",
}  # fmt: skip


def renamed(tensors: dict[str, Tensor], table: dict[str, str]) -> dict[str, Tensor]:
    """The tensors under other prefixes (ours -> another one)."""
    found = {}
    for name, value in tensors.items():
        old, new = next(((old, new) for old, new in table.items() if name.startswith(old)), ("", ""))
        found[new + name.removeprefix(old)] = value
    return found


def logits(config: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    return ours(load(config, tensors), {"a": prompt(20)}, [[("a", 20)]])["a"]


def test_prefixes_of_published_files(tmp_path: Path) -> None:
    _, config, tensors = make("llava", tmp_path)
    newer = renamed(tensors, {old: new for new, old in HUB.items()})
    inner = renamed(newer, HUB)
    assert any(name.startswith("language_model.model.layers.0") for name in inner)
    assert any(name.startswith("model.language_model.layers.0") for name in newer)
    assert torch.equal(logits(config, inner), logits(config, newer))
    twice = {**inner, "model.language_model.norm.weight": inner["language_model.model.norm.weight"]}
    with pytest.raises(ModelError, match=r"both are 'model\.norm\.weight' of the text part"):
        load(config, twice)
    with pytest.raises(ModelError, match=r"does not use: language_model\.other\.weight"):
        load(config, {**inner, "language_model.other.weight": torch.ones(2)})


@pytest.mark.parametrize("inner", [20, 16, 32], ids=["neither square", "gate_up square", "down square"])
def test_experts_of_published_qwen3_vl_lie_the_other_way(inner: int, tmp_path: Path) -> None:
    _, config, tensors = make("qwen3-vl-moe", tmp_path, moe_intermediate_size=inner)
    turned = {k: v.transpose(1, 2).contiguous() if ".experts." in k else v for k, v in tensors.items()}
    assert sum(".experts.gate_up_proj" in name for name in tensors) == 2
    assert torch.equal(logits(config, tensors), logits(config, turned))
    down = next(name for name in tensors if name.endswith("experts.down_proj"))
    with pytest.raises(ModelError, match=r"no tensor 'model\.layers\.\d\.mlp\.experts\.down_proj'"):
        load(config, {name: value for name, value in tensors.items() if name != down})


def test_flat_configs_of_older_files(tmp_path: Path) -> None:
    _, config, tensors = make("qwen2.5-vl", tmp_path)
    inner = {k: v for k, v in config["text_config"].items() if k not in ("model_type", "rope_parameters", "dtype")}
    flat = {**{k: v for k, v in config.items() if k != "text_config"}, **inner, "rope_theta": 1e4,
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "torch_dtype": "float32"}  # fmt: skip
    older = renamed(tensors, {"model.language_model.": "model.", "model.visual.": "visual."})
    assert any(name.startswith("model.layers.0") for name in older)
    assert torch.equal(logits(config, tensors), logits(flat, older))


def test_phi_4_as_its_files_are(tmp_path: Path) -> None:
    """Matrices lie below what adapts them to pictures and sound, which text does not pass through."""
    _, config, tensors = make("phi4", tmp_path)
    named = {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        adapted = name.startswith("model.layers.") and module.endswith("_proj")
        named[f"{module}.base_layer.weight" if adapted else name] = value
        for part in ("vision", "speech") if adapted else ():
            named[f"{module}.lora_A.{part}.weight"] = torch.ones(2, value.shape[1])
            named[f"{module}.lora_B.{part}.weight"] = torch.ones(value.shape[0], 2)
    said = {key: value for key, value in config.items() if key not in ("vision_config", "audio_config")}
    lora = {"dp": 0.01, "layer": "((layers.*self_attn.(qkv|o)_proj))", "lora_alpha": 512, "r": 256}
    said |= {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm", "auto_map": {}, "audio_processor": {},
             "embd_layer": {"embedding_cls": "image_audio"}, "img_processor": None, "speech_lora": lora,
             "vision_lora": lora, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
             "attention_bias": False}  # fmt: skip
    assert len(named) > len(tensors) + 10
    assert torch.equal(logits(said, named), logits(config, tensors))


def int8_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits from 0 on, and a scale for each row."""
    scales = matrix.abs().amax(1, keepdim=True) / 255
    return (matrix.abs() / scales).round().to(torch.uint8), scales


def test_the_tensors_say_whether_the_head_is_the_embedding(tmp_path: Path) -> None:
    _, config, tensors = make("mistral3", tmp_path)
    silent = {k: v for k, v in config.items() if k != "tie_word_embeddings"}
    silent["text_config"] = {k: v for k, v in config["text_config"].items() if k != "tie_word_embeddings"}
    assert torch.equal(logits(config, tensors), logits(silent, tensors))
    head = next(name for name in tensors if name.endswith("lm_head.weight"))
    tied = {k: v for k, v in tensors.items() if k != head}
    embedding = next(v for k, v in tensors.items() if k.endswith("embed_tokens.weight"))
    assert torch.equal(logits(silent, tied), logits(config, {**tied, head: embedding}))
    with pytest.raises(ModelError, match=r"'tie_word_embeddings'.* no tensor 'lm_head\.weight'"):
        load(config, tied)
    rows = int8_rows(tensors[head])  # a head in another form is a head, too
    narrow = {**tied, f"{head.removesuffix('weight')}W_q": rows[0], f"{head.removesuffix('weight')}scale": rows[1],
              f"{head.removesuffix('weight')}zero": torch.zeros_like(rows[1])}  # fmt: skip
    wide = logits(config, {**tensors, head: rows[0] * rows[1]})
    assert torch.allclose(logits(silent, narrow), wide, atol=0.05)


def test_a_key_that_this_class_does_not_read_may_be_null(tmp_path: Path) -> None:
    reference, config, tensors = make("qwen3-vl-moe", tmp_path)
    config["text_config"]["norm_topk_prob"] = None
    assert (logits(config, tensors) - theirs(reference, prompt(20))).abs().max() <= 1e-4


def test_gemma3n_as_its_files_are(tmp_path: Path) -> None:
    """Its eyes need a library that tests lack; the text part lies as below."""
    reference, own, tensors = ALL["gemma3n-0"].make(tmp_path)
    apart = dict.fromkeys(("vision_tower.timm_model.conv_stem.conv.weight", "audio_tower.conformer.0.norm.weight",
                           "embed_vision.embedding.weight", "embed_audio.embedding.weight"), torch.ones(2))  # fmt: skip
    stored = {**apart, **{name.removeprefix("model."): value for name, value in tensors.items()}}
    stored = {"model." + (name if name in apart else f"language_model.{name}"): value for name, value in stored.items()}
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": own,
              "audio_config": {}, "vision_config": {}, "audio_soft_tokens_per_image": 188,
              "vision_soft_tokens_per_image": 256}  # fmt: skip
    found = logits(config, stored)
    assert (found - theirs(reference, prompt(20))).abs().max() <= 1e-4


def test_layers_for_drafts_in_exaone_4_5_are_passed_over(tmp_path: Path) -> None:
    _, config, tensors = make("exaone4.5", tmp_path)
    more = {**tensors, "mtp.layers.0.input_layernorm.weight": torch.ones(32)}
    assert torch.equal(logits(config, tensors), logits(config, more))


def test_kimi_as_its_files_are(tmp_path: Path) -> None:
    """Transformers saves it under other names. Its text part names the type of an older model."""
    reference, own, tensors = ALL["deepseek_v3-0"].make(tmp_path)
    stored = {f"language_model.{name}": value for name, value in tensors.items()}
    stored |= dict.fromkeys(("vision_tower.patch_embed.proj.weight", "mm_projector.pre_norm.weight"), torch.ones(2))
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "auto_map": {"x": "y.Z"},
              "ignore_index": -100, "media_placeholder_token_id": 60, "tie_word_embeddings": False, "vision_config": {},
              "use_unified_vision_chunk": True, "video_placeholder": "<|kimi_k25_video_placeholder|>",
              "text_config": {**own, "model_type": "kimi_k2", "auto_map": {"x": "y.Z"}}}  # fmt: skip
    assert (logits(config, stored) - theirs(reference, prompt(20))).abs().max() <= 1e-4


def test_factors_on_logits_count_where_transformers_leaves_them_out(tmp_path: Path) -> None:
    """As they do in version 4 and in training."""
    for name, key, factor in (("cohere2-vision", "logit_scale", 0.25), ("granite-speech", "logits_scaling", 4.0)):
        reference, config, tensors = make(name, tmp_path / name, **{key: factor})
        expected = theirs(reference, prompt(20))
        assert (logits(config, tensors) - 0.25 * expected).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", TEXTS)
def test_absent_keys_mean_what_transformers_takes_them_for(kind: str) -> None:
    outer = next(name for name, one in OUTERS.items() if one.text == kind or kind not in
                 {two.text for two in OUTERS.values()})  # fmt: skip
    same_defaults({"architectures": [outer], "text_config": {"model_type": kind}}, kind,
                  hf.CONFIG_MAPPING[SAME.get(kind, kind)]().to_dict())  # fmt: skip


OWN = {name: f"{name.removesuffix('ForConditionalGeneration')}Config" for name in OUTERS}


@pytest.mark.parametrize("outer", [name for name, kind in OWN.items() if hasattr(hf, kind) and not OUTERS[name].within])
def test_an_architecture_has_its_own_idea_of_absent_keys(outer: str) -> None:
    inner = getattr(hf, OWN[outer])(text_config={"model_type": OUTERS[outer].text}).text_config
    same_defaults({"architectures": [outer], "text_config": {}}, OUTERS[outer].text, inner.to_dict())


def same_defaults(config: dict[str, Any], kind: str, wanted: dict[str, Any]) -> None:
    """What this config's text part has for absent keys is what Transformers' class has."""
    said = text_part(config)
    found = complete(said, TEXTS[kind].architecture)
    wanted["partial_rotary_factor"] = (wanted.get("rope_parameters") or {}).get("partial_rotary_factor")
    wanted["rope_theta"] = (wanted.get("rope_parameters") or {}).get("rope_theta")
    assert said["model_type"] == FIELDS[TEXTS[kind].architecture].model_type
    for key, value in found.items():
        if key in ("tie_word_embeddings", "rope_parameters", "model_type", "head_dim", "layer_types", "architectures"):
            continue  # the tensors say it; computed from other keys
        if value is not None and wanted.get(key) is not None:
            said_once = isinstance(wanted[key], list) and not isinstance(value, list)
            assert ([value] * len(wanted[key]) if said_once else value) == wanted[key], key


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"text_config": None}, "needs an object 'text_config'"),
        ({"text_config": {"model_type": "mpt"}}, "of the kind 'mpt', which is not supported here. Known: .*llama"),
        ({"text_config": {"model_type": "llama", "logit_scale": 3.0}}, "'logit_scale' = 3.0 changes what a model"),
        ({"model_type": "llama"}, "'LlavaForConditionalGeneration' and model_type 'llama' contradict"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'rope_scaling' = .* lies beside 'text_config'"),
        ({"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": None,
          "text_config": {"model_type": "qwen3_vl_text", "sliding_window": 9}}, "sliding_window' = 9 is not read in"),
        ({"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": None,
          "text_config": {"model_type": "qwen3_vl_moe_text", "norm_topk_prob": False}}, "'text_config.norm_topk_prob'"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": None,
          "text_config": {"head_dim": 8, "hidden_size": 32, "num_attention_heads": 2}}, "'text_config.head_dim' = 8"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": None,
          "text_config": {"head_dim": {"full_attention": 8}, "hidden_size": 32, "num_attention_heads": 2}},
         "'text_config.head_dim' = {'full_attention': 8}"),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": None,
          "text_config": {"final_logit_softcapping": 30.0}}, "'text_config.final_logit_softcapping' = 30.0"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava",
              "text_config": {"model_type": "llama"}, "vision_config": {}}  # fmt: skip
    check_keys(config)
    with pytest.raises(ModelError, match=says):
        check_keys({**config, **change})


def test_overrides_reach_the_text_part() -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"hidden_size": 8, "vocab_size": 5}}
    beside = overridden(config, {"max_position_embeddings": 99, "text_config": {"vocab_size": 6}})
    assert beside["text_config"] == {"hidden_size": 8, "vocab_size": 6, "max_position_embeddings": 99}
    assert text_part(beside)["max_position_embeddings"] == 99
    assert overridden({"a": 1}, {"a": 2, "text_config": {}}) == {"a": 2, "text_config": {}}
    within = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "thinker_config": {"text_config": {"a": 1}}}
    assert overridden(within, {"max_position_embeddings": 99})["text_config"] == {"a": 1, "max_position_embeddings": 99}


_NEW = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}}
_OLD = {"rope_theta": 1e6, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("file", [_NEW, _OLD], ids=["new spelling", "old spelling"])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rope_theta": 5e6}, (None, 5e6, 0.5)),
        ({"rope_scaling": _YARN}, ("yarn", 1e6, 0.5)),
        ({"rope_parameters": _YARN}, ("yarn", 1e6, 0.5)),
        ({"rope_scaling": {**_YARN, "rope_theta": 7.0}}, ("yarn", 7.0, 0.5)),
        ({"rope_parameters": _YARN, "partial_rotary_factor": 0.25, "rope_theta": 9.0}, ("yarn", 9.0, 0.25)),
        ({"rope_scaling": None}, ("default", 1e6, 0.5)),
        ({"rope_parameters": {}}, ("default", 1e6, 0.5)),
    ],
)
def test_what_overrides_say_of_rotation_counts_in_every_spelling(
    file: dict[str, Any], given: dict[str, Any], says: tuple[Any, ...]
) -> None:
    """And the base that they do not give stays."""
    rope = rope_settings(overridden(file, given), 16)
    kind = says[0] or ("default" if file is _NEW else "linear")
    assert (rope.kind, rope.theta, rope.dim / 16) == (kind, *says[1:])


def test_overrides_count_under_the_other_name_and_for_each_kind_of_layer() -> None:
    assert overridden({"dtype": "bfloat16"}, {"torch_dtype": "float32"}) == {"torch_dtype": "float32"}
    nested = {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}
    for key in ("rope_theta", "rope_local_base_freq"):
        with pytest.raises(ParameterError, match=f"--hf-overrides: '{key}' has no effect here"):
            overridden(nested, {key: 5e6})
    assert overridden(nested, {"rope_scaling": _YARN})["rope_parameters"] == nested["rope_parameters"]


@pytest.mark.parametrize(
    ("file", "given"),
    [
        ({"layer_types": ["full_attention"] * 4}, {"full_attention_interval": 2}),
        ({"layer_types": ["full_attention"] * 4, "max_window_layers": 4}, {"max_window_layers": 2}),
        ({"no_rope_layers": [1, 1, 1, 0]}, {"no_rope_layer_interval": 2}),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*M*"}, {"num_hidden_layers": 2}),
    ],
)
def test_overrides_of_rules_beside_lists_of_layers_are_refused(file: dict[str, Any], given: dict[str, Any]) -> None:
    key = next(iter(given))
    with pytest.raises(ParameterError, match=f"--hf-overrides: '{key}' has no effect here"):
        overridden(file, given)
    assert overridden(file, {key: file.get(key)})[key] == file.get(key)
    lists = {name: None for name in file if name != "model_type"}
    assert overridden(file, {**lists, **given})[key] == given[key]


def test_overrides_of_rotation_count_under_the_names_of_gpt_neox() -> None:
    file = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}
    found = overridden(file, {"rotary_pct": 0.5, "rotary_emb_base": 5e5})["rope_parameters"]
    assert (found["partial_rotary_factor"], found["rope_theta"]) == (0.5, 5e5)


PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                        "sliding_window": 1024}},
    "qwen2.5-vl-7b": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "hidden_act": "silu",
        "hidden_size": 3584, "image_token_id": 151655, "intermediate_size": 18944, "max_position_embeddings": 128000,
        "max_window_layers": 28, "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "video_token_id": 151656,
        "vision_config": {"depth": 32}, "vision_token_id": 151654, "vocab_size": 152064},
    "llama-4-scout": {
        "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
        "image_token_index": 200092, "model_type": "llama4", "tie_word_embeddings": False, "vision_config": {},
        "text_config": {"_attn_implementation_autoset": True, "attention_bias": False, "attention_chunk_size": 8192,
                        "attn_temperature_tuning": 4, "floor_scale": 8192, "for_llm_compressor": False,
                        "head_dim": 128, "hidden_size": 5120, "interleave_moe_layer_step": 1,
                        "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760,
                        "model_type": "llama4_text", "no_rope_layers": [], "num_local_experts": 16,
                        "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
                        "use_qk_norm": True, "vocab_size": 202048}},
    "llava-1.5-7b": {
        "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100, "image_seq_length": 576,
        "image_token_index": 32000, "model_type": "llava", "pad_token_id": 32001, "projector_hidden_act": "gelu",
        "tie_word_embeddings": False, "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
        "vocab_size": 32064, "vision_config": {"projection_dim": 768},
        "text_config": {"_name_or_path": "x", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096,
                        "model_type": "llama", "rms_norm_eps": 1e-05, "torch_dtype": "float16", "vocab_size": 32064}},
    "smolvlm": {
        "architectures": ["Idefics3ForConditionalGeneration"], "image_token_id": 49190, "model_type": "idefics3",
        "scale_factor": 4, "tie_word_embeddings": False, "vision_config": {"hidden_size": 768}, "vocab_size": 49280,
        "text_config": {"_flash_attn_2_enabled": True, "architectures": ["VLlama3ForCausalLM"], "head_dim": 64,
                        "hidden_size": 960, "intermediate_size": 2560, "is_llama_config": True, "model_type": "llama",
                        "num_attention_heads": 15, "num_hidden_layers": 32, "num_key_value_heads": 5,
                        "pixel_shuffle_factor": 4, "qk_layer_norms": False, "rms_norm_eps": 1e-05,
                        "rope_interleaved": False, "rope_theta": 100000, "vocab_size": 49280}},
    "glm-ocr": {
        "architectures": ["GlmOcrForConditionalGeneration"], "image_token_id": 59280, "model_type": "glm_ocr",
        "vision_config": {}, "text_config": {
            "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16", "eos_token_id": [59246, 59253],
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 1536, "intermediate_size": 4608,
            "max_position_embeddings": 131072, "model_type": "glm_ocr_text", "num_attention_heads": 16,
            "num_hidden_layers": 16, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05,
            "rope_parameters": {"mrope_section": [16, 24, 24], "partial_rotary_factor": 1.0, "rope_theta": 10000,
                                "rope_type": "default"},
            "tie_word_embeddings": False, "vocab_size": 59392}},
    "qwen3-omni-30b": {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"], "code2wav_config": {}, "enable_audio_output": True,
        "model_type": "qwen3_omni_moe", "talker_config": {}, "thinker_config": {
            "audio_config": {}, "audio_token_id": 151675, "model_type": "qwen3_omni_moe_thinker", "vision_config": {},
            "position_id_per_seconds": 13, "text_config": {
                "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 768,
                "max_position_embeddings": 65536, "mlp_only_layers": [], "model_type": "qwen3_omni_moe_text",
                "num_attention_heads": 32, "num_experts": 128, "num_hidden_layers": 48, "rope_theta": 1000000,
                "rope_scaling": {"interleaved": True, "mrope_interleaved": True, "mrope_section": [24, 20, 20],
                                 "rope_type": "default", "type": "default"},
                "shared_expert_intermediate_size": 0, "sliding_window": None, "tie_word_embeddings": False,
                "use_qk_norm": True, "use_sliding_window": False, "vocab_size": 152064}}},
    "aya-vision-8b": {
        "adapter_layer_norm_eps": 1e-06, "architectures": ["AyaVisionForConditionalGeneration"],
        "downsample_factor": 2, "model_type": "aya_vision", "vision_config": {}, "text_config": {
            "cache_implementation": "hybrid", "head_dim": 128, "hidden_size": 4096, "layer_switch": 4,
            "logit_scale": 0.25, "model_type": "cohere2", "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first", "rope_theta": 50000,
            "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "sliding_window_pattern": 4,
            "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True}},
    "granite-speech-3.3-8b": {
        "architectures": ["GraniteSpeechForConditionalGeneration"], "audio_token_index": 49159, "downsample_rate": 5,
        "encoder_config": {"context_size": 200}, "has_lora_adapter": True, "initializer_range": 0.02,
        "model_type": "granite_speech", "projector_config": {}, "tie_word_embeddings": False, "window_size": 15,
        "text_config": {"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "hidden_size": 4096,
                        "logits_scaling": 16.0, "model_type": "granite", "num_key_value_heads": 8,
                        "residual_multiplier": 0.22, "rope_scaling": None, "rope_theta": 10000000.0}},
    "mistral-small-3.1": {
        "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
        "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
        "torch_dtype": "bfloat16", "vision_config": {}, "vision_feature_layer": -1,
        "text_config": {"attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
                        "intermediate_size": 32768, "max_position_embeddings": 131072, "model_type": "mistral",
                        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
                        "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None,
                        "vocab_size": 131072}},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_as_they_are(name: str) -> None:
    known = {"is_llama_config", "pixel_shuffle_factor", "rope_interleaved", "qk_layer_norms", "ignore_index"}
    assert set(check_keys(PUBLISHED[name])) <= known
    if name != "smolvlm" and not FULL:
        return
    sheet = count_model(PUBLISHED[name], dtype=torch.bfloat16, max_positions=4096)
    assert sheet.spec.hidden_size == text_part(PUBLISHED[name])["hidden_size"]
