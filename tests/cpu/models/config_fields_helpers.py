"""What test_config_fields.py and other tests share."""

from __future__ import annotations

from typing import Any

import transformers as hf
from tests.cpu.models.families_helpers import BASE, CASES, MLA, MOE, YARN
from tests.cpu.models.family_cases import FIRST, Case

SMALL = {
    **FIRST,
    "LlamaForCausalLM": Case(hf.LlamaConfig(**BASE)),
    "MistralForCausalLM": Case(hf.MistralConfig(**BASE, sliding_window=20)),
    "Qwen2ForCausalLM": CASES["qwen2-window"],
    "Qwen3ForCausalLM": Case(hf.Qwen3Config(**{**BASE, "num_hidden_layers": 3}, head_dim=8, use_sliding_window=True,
                                            sliding_window=20, max_window_layers=1)),
    "Qwen3MoeForCausalLM": Case(hf.Qwen3MoeConfig(**BASE, head_dim=16, num_experts=6, num_experts_per_tok=3,
                                                  moe_intermediate_size=20, mlp_only_layers=[0],
                                                  use_sliding_window=True, sliding_window=20)),
    "MixtralForCausalLM": CASES["mixtral"],
    "Phi3ForCausalLM": CASES["phi3-long"],
    "GptOssForCausalLM": CASES["gpt-oss"],
    "Gemma2ForCausalLM": CASES["gemma2"],
    "Gemma3ForCausalLM": CASES["gemma3"],
    "DeepseekV2ForCausalLM": Case(hf.DeepseekV2Config(**MLA, **MOE, q_lora_rank=20, n_group=4, topk_group=2,
                                                      topk_method="group_limited_greedy",
                                                      rope_parameters=dict(YARN))),
    "FalconForCausalLM": Case(CASES["falcon-40b"].config, attention="sdpa"),  # the eager one adds ALiBi twice
    "GPT2LMHeadModel": CASES["gpt2"],
    "GPTNeoXForCausalLM": CASES["gpt-neox"],
    "OPTForCausalLM": CASES["opt"],
    "BloomForCausalLM": CASES["bloom"],
    "Qwen3NextForCausalLM": CASES["qwen3-next"],
    "Qwen3_5ForCausalLM": CASES["qwen3-5"],
    "Qwen3_5MoeForCausalLM": CASES["qwen3-5-moe"],
}  # fmt: skip


def numbers(said: Any) -> Any:
    """A config with numbers where a file says them in objects, as Transformers reads it."""
    if isinstance(said, dict):
        return float(said["__float__"]) if "__float__" in said else {k: numbers(v) for k, v in said.items()}
    return [numbers(one) for one in said] if isinstance(said, list) else said
