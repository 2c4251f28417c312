"""Families that Transformers computes around our attention; what cannot be so is refused.

TOKENMILL_FAMILIES=1 tries every causal type of the installed Transformers: none is wrong in silence.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from parity import DictCheckpoint, make, ours, theirs
from test_families import BASE, prompt

from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import ModelError, UserError
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.models.registry import build_elsewhere, is_elsewhere

SMALL = {**BASE, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CASES = {
    "llama": hf.LlamaConfig(**SMALL),
    "gemma2": hf.Gemma2Config(**SMALL, head_dim=8, sliding_window=20, attn_logit_softcapping=3.0,
                              final_logit_softcapping=2.0),
    "laguna": hf.LagunaConfig(**SMALL, head_dim=8, sliding_window=20, num_experts=4, num_experts_per_tok=2,
                              moe_intermediate_size=16, shared_expert_intermediate_size=16,
                              layer_types=["full_attention", "sliding_attention"]),
}  # fmt: skip


def build(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    return build_elsewhere(
        config, DictCheckpoint(tensors), dtype=torch.float32, device="cpu", kernels=ReferenceKernels()
    )


@torch.inference_mode()
def verdict(config: Any, folder: Path) -> str:
    """equal, refused (why), or WRONG."""
    _, said, tensors = make(config, folder)
    # As saved: a few types say that they tie what they do not tie while they are made.
    reference = hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    try:
        model = build(said, tensors)
    except ModelError as error:
        return f"refused: {error}"
    prompts = {"a": prompt(70), "b": prompt(9, 2)}
    steps = [[("a", 7), ("b", 3)], [("b", 1), ("a", 40)], [("a", 1), ("b", 5)], [("a", 22)]]
    found = ours(model, prompts, steps)
    away = max(float((found[key] - theirs(reference, prompts[key])).abs().max()) for key in prompts)
    return "equal" if away <= 1e-4 * max(1.0, float(found["a"].abs().max())) else f"WRONG by {away:.2g}"


@pytest.mark.parametrize("name", CASES)
def test_says_what_transformers_says(name, tmp_path):
    assert verdict(CASES[name], tmp_path) == "equal"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (hf.MambaConfig(vocab_size=67, hidden_size=32, num_hidden_layers=1), "takes no positions"),
        (hf.Qwen3NextConfig(**{**SMALL, "layer_types": ["linear_attention", "full_attention"]}, head_dim=8,
                            linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8,
                            linear_value_head_dim=8, num_experts=2, moe_intermediate_size=8,
                            num_experts_per_tok=1, shared_expert_intermediate_size=8), "layers of other kinds"),
    ],
    ids=["mamba", "qwen3_next"],
)  # fmt: skip
def test_states_and_masks_of_their_own_are_refused(config, why, tmp_path):
    assert why in verdict(config, tmp_path)


def test_through_the_engine(tmp_path):
    """A family that is not written here is found by itself and said; a shared beginning changes no token."""
    model, _, _ = make(CASES["laguna"], tmp_path)
    stem, params = prompt(40), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=128, device="cpu") as llm:
        assert any("Transformers computes laguna" in reason for reason in llm.built.facts.reasons)
        for more in (prompt(3, 5), prompt(6, 6)):
            asked = stem + more
            found = llm.generate([{"prompt_token_ids": asked}], params, use_tqdm=False)[0].outputs[0].token_ids
            said = list(asked)
            with torch.no_grad():
                for _ in range(12):
                    said.append(int(model(torch.tensor([said]), use_cache=False).logits[0, -1].argmax()))
            assert list(found) == said[len(asked) :]


def test_who_computes():
    known = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert not is_elsewhere(known, "auto") and is_elsewhere(known, "transformers")
    assert is_elsewhere({"architectures": ["LagunaForCausalLM"], "model_type": "laguna"}, "auto")
    assert not is_elsewhere({"architectures": ["LagunaForCausalLM"], "model_type": "laguna"}, "tokenmill")
    assert not is_elsewhere({"architectures": ["Nobody"], "model_type": "nobody"}, "auto")
    with pytest.raises(UserError, match="no causal model of type 'nobody'"):
        is_elsewhere({"model_type": "nobody"}, "transformers")


@pytest.mark.skipif(os.environ.get("TOKENMILL_FAMILIES") != "1", reason="minutes: TOKENMILL_FAMILIES=1")
def test_no_causal_type_is_wrong_in_silence(tmp_path):
    """Tiny models of every type; with TOKENMILL_SWEEP=FOLDER the list is left there."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = {}
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        folder = tmp_path / kind
        folder.mkdir()
        try:
            config = tiny(kind)
            with torch.device("meta"):
                size = sum(p.numel() for p in hf.AutoModelForCausalLM.from_config(config).parameters())
            found[kind] = verdict(config, folder) if size < 4e6 else f"no tiny model: {size} numbers"
        except Exception as error:
            found[kind] = f"no tiny model: {type(error).__name__}: {str(error)[:100]}".split("\n")[0]
        shutil.rmtree(folder)
        if where := os.environ.get("TOKENMILL_SWEEP"):
            with Path(where, "foreign.txt").open("a") as file:
                file.write(f"{kind}: {found[kind]}\n")
    assert not [kind for kind, said in found.items() if said.startswith("WRONG")]


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
    "index_head_dim": 8, "index_n_heads": 2, "index_topk": 8,
    "vocab_size_per_layer_input": 67, "laurel_rank": 4, "d_ff": 48, "d_kv": 8, "kv_channels": 8,
}  # fmt: skip
"""Sizes under every name that configs have for them."""


def tiny(kind: str) -> Any:
    """A config of this type, small wherever a size has a usual name."""
    made = hf.AutoConfig.for_model(kind)
    text = made.get_text_config()
    known = {name: value for name, value in TINY.items() if name in text.to_dict()}
    if "kv_lora_rank" in known:  # keys of latent attention are made of two parts
        known.pop("head_dim", None)
        known["num_key_value_heads"] = 4
    lists = {name: value[:2] for name, value in text.to_dict().items()
             if isinstance(value, list) and name in ("layer_types", "mlp_layer_types", "no_rope_layers")}  # fmt: skip
    return hf.AutoConfig.for_model(text.model_type, **{**known, **lists})
