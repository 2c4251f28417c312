"""Families that Transformers computes around our attention, or with its own caches; what cannot be so is refused.

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
from tests.cpu.models.families_helpers import prompt
from tests.cpu.models.foreign_configs import SMALL, tiny
from tests.cpu.models.parity import DictCheckpoint, chosen, make, ours, theirs

from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import ModelError, UserError
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.models.registry import build_elsewhere, is_elsewhere

CASES = {
    "llama": hf.LlamaConfig(**SMALL),
    "gemma2": hf.Gemma2Config(**SMALL, head_dim=8, sliding_window=20, attn_logit_softcapping=3.0,
                              final_logit_softcapping=2.0),
    "flint": hf.FlintConfig(**SMALL, head_dim=8, sliding_window=20, num_experts=4, num_experts_per_tok=2,
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
    try:
        model = build(said, tensors)
    except ModelError as error:
        return f"refused: {error}"
    # As saved: a few types say that they tie what they do not tie while they are made.
    reference = hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    prompts = {"a": prompt(70), "b": prompt(9, 2)}
    steps = [[("a", 7), ("b", 3)], [("b", 1), ("a", 40)], [("a", 1), ("b", 5)], [("a", 22)]]
    found = ours(model, prompts, steps)
    away = max(float((found[key] - theirs(reference, prompts[key])).abs().max()) for key in prompts)
    extras = model.spec.extras
    how = ", its own caches" if "own_caches" in extras else ""
    how = ", computed anew for each token" if extras.get("anew") else how
    return f"equal{how}" if away <= 1e-4 * max(1.0, float(found["a"].abs().max())) else f"WRONG by {away:.2g}"


@pytest.mark.parametrize("name", CASES)
def test_says_what_transformers_says(name, tmp_path):
    assert verdict(CASES[name], tmp_path) == "equal"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.5, 2.5, 6.0, 7.0]},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
    ids=["longrope", "dynamic"],
)
@torch.inference_mode()
def test_a_row_does_not_rotate_as_its_company_or_its_length_say(rope, tmp_path):
    """Frequencies are those of the longest run, before it is long and beside one that is."""
    rope = {**rope, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    config = hf.LlamaConfig(**{**SMALL, "max_position_embeddings": 40}, rope_parameters=rope)
    reference, said, tensors = make(config, tmp_path)
    options = {"dtype": torch.float32, "device": "cpu", "kernels": ReferenceKernels(), "max_positions": 70}
    model = build_elsewhere(said, DictCheckpoint(tensors), **options)
    prompts = {"a": prompt(70), "b": prompt(9, 2)}
    steps = [[("a", 7), ("b", 3)], [("b", 1), ("a", 40)], [("a", 1), ("b", 5)], [("a", 22)]]
    found = ours(model, prompts, steps)
    assert (found["a"] - theirs(reference, prompts["a"])).abs().max() <= 1e-4
    assert (found["b"] - ours(model, {"b": prompts["b"]}, [[("b", 9)]])["b"]).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", ["llama", "diffllama"])
def test_a_context_shorter_than_the_test_prompt_is_proven_too(kind, tmp_path):
    config = CASES["llama"] if kind == "llama" else tiny(kind)
    _, said, tensors = make(config, tmp_path)
    options = {"dtype": torch.float32, "device": "cpu", "kernels": ReferenceKernels()}
    assert build_elsewhere(said, DictCheckpoint(tensors), max_positions=16, **options).spec.max_positions == 16


PHIMOE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "short_mscale": 1.2,
          "long_mscale": 1.3, "original_max_position_embeddings": 40, "rope_theta": 1e4}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (hf.PhimoeConfig(**{**SMALL, "max_position_embeddings": 128}, num_local_experts=2, rope_parameters=PHIMOE),
         "its rotation changes with the length of a run"),
        (hf.BertConfig(**SMALL), "attention looks ahead"),
    ],
    ids=["phimoe", "bert"],
)  # fmt: skip
def test_what_a_sequence_does_not_decide_by_itself_is_refused(config, why, tmp_path):
    assert why in verdict(config, tmp_path)


@pytest.mark.parametrize("kind", ["bert", "ernie", "roformer", "big_bird"])
def test_what_looks_ahead_is_refused_in_16_bits_too(kind, tmp_path):
    """Tiny ones change little with what comes later: less than rounding does."""
    _, said, tensors = make(tiny(kind), tmp_path)
    with pytest.raises(ModelError, match="looks ahead"):
        build_elsewhere(said, DictCheckpoint(tensors), dtype=torch.bfloat16, device="cpu", kernels=ReferenceKernels())


def test_through_the_engine(tmp_path):
    """A family that is not written here is found by itself and said; a shared beginning changes no token."""
    model, _, _ = make(CASES["flint"], tmp_path)
    stem, params = prompt(40), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=128, device="cpu") as llm:
        assert any("Transformers computes flint" in reason for reason in llm.built.facts.reasons)
        for more in (prompt(3, 5), prompt(6, 6)):
            asked = stem + more
            found = llm.generate([{"prompt_token_ids": asked}], params, use_tqdm=False)[0].outputs[0].token_ids
            assert list(found) == chosen(model, asked, 12)


def test_who_computes():
    known = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert not is_elsewhere(known, "auto") and is_elsewhere(known, "transformers")
    assert is_elsewhere({"architectures": ["FlintForCausalLM"], "model_type": "flint"}, "auto")
    assert not is_elsewhere({"architectures": ["FlintForCausalLM"], "model_type": "flint"}, "tokenmill")
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
        found[kind] = _tried(kind, folder)
        shutil.rmtree(folder)
        if where := os.environ.get("TOKENMILL_SWEEP"):
            with Path(where, "foreign.txt").open("a") as file:
                file.write(f"{kind}: {found[kind]}\n")
    assert not [kind for kind, said in found.items() if said.startswith("WRONG")]
    assert not [kind for kind, said in found.items() if said.startswith("no tiny model")]


def _tried(kind: str, folder: Path) -> str:
    try:
        config = tiny(kind)
    except Exception as error:
        return f"no tiny model: {type(error).__name__}: {str(error)[:100]}".split("\n")[0]
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in hf.AutoModelForCausalLM.from_config(config).parameters())
    except Exception:
        return "refused: Transformers itself makes no model from its config"
    return verdict(config, folder) if size < 2e7 else f"no tiny model: {size} numbers"
