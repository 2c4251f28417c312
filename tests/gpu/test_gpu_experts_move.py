"""Experts that move between GPUs against one GPU; skipped where there is one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmill import LLM, SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU or none here")
CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 4096, "hidden_size": 512,
          "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
          "intermediate_size": 512, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
          "tie_word_embeddings": False, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
          "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def answers(folder: Path, **options: Any) -> list[list[int]]:
    """Ids of two rounds of prompts; experts must have moved where they may."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    drawn = random.Random(1)
    prompts = [{"prompt_token_ids": [drawn.randrange(4096) for _ in range(5 + 17 * n)]} for n in range(20)]
    options = {"num_gpu_blocks_override": 800, "max_num_seqs": 32, "max_model_len": 1024, **options}
    with LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, **options) as llm:
        rounds = [llm.generate(prompts, PARAMS, use_tqdm=False) for _ in range(2)]
        if "enable_eplb" in options:
            assert llm.engine.balance.moved and 0.5 <= llm.engine.balance.balancedness <= 1.0
    return [output.outputs[0].token_ids for found in rounds for output in found]


def several(redundant: int) -> dict[str, Any]:
    said = {"window_size": 8, "step_interval": 8, "num_redundant_experts": redundant}
    return {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True, "eplb_config": said}


@pytest.mark.parametrize("redundant", [0, 4])
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"quantization": "int4"}, {"quantization": "fp8"}])
def test_moving_experts_agree_with_one_device(tmp_path: Path, options: dict[str, Any], redundant: int) -> None:
    dtype = {"dtype": "bfloat16"} if "quantization" in options else {"dtype": "float32"}
    wanted = answers(tmp_path, **dtype, **options)
    found = answers(tmp_path, **dtype, **options, **several(redundant))
    same = sum(a[0] == b[0] for a, b in zip(found, wanted, strict=True)) / len(wanted)
    assert same > (0.7 if "quantization" in options else 0.97)


def test_deterministic_ranks_whose_experts_move_repeat_themselves(tmp_path: Path) -> None:
    """Rounds of the same prompts lie before, between and behind moves."""
    found = answers(tmp_path, dtype="bfloat16", deterministic=True, **several(4))
    assert found[:20] == found[20:]
