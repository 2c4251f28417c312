"""Do hybrids decode as many bytes a second as Llama does, and is their prefill as near to the ceiling? 1B geometries
with random weights. JSON on stdout, one line a model; wants a quiet machine.

    python bench/cpu/hybrid.py [llama qwen3_5 lfm2 mamba2 recurrent_gemma ...] [--quantization int8]

Bytes of a step are what must move: every weight once, and each row's state read and written. Operations are those of
the weights. `decode_gb_s` of a hybrid beside Llama's is the figure: below 1, something beside the weights costs; so is
`prefill_gflop_s`. Decode is the slope between two output lengths; medians of three runs.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import tempfile
from typing import Any

from tokenmill.core.config import calm_threads

calm_threads()

from geometry import GEOMETRY, RUNS, Timer  # noqa: E402

from tokenmill import LLM  # noqa: E402

_COMMON = {"vocab_size": 128256, "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
           "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GEOMETRIES: dict[str, dict[str, Any]] = {
    "llama": GEOMETRY,
    "qwen3_5": {
        **_COMMON, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    },
    "lfm2": {
        **_COMMON, "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 2048,
        "intermediate_size": 12288, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3, "norm_eps": 1e-5, "vocab_size": 65536,
    },
    "mamba2": {
        **_COMMON, "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 2048,
        "num_hidden_layers": 48, "num_heads": 64, "head_dim": 64, "state_size": 128, "n_groups": 1,
        "vocab_size": 50288,
    },
    "recurrent_gemma": {
        **_COMMON, "architectures": ["RecurrentGemmaForCausalLM"], "model_type": "recurrent_gemma",
        "hidden_size": 2048, "intermediate_size": 12288, "num_hidden_layers": 18, "num_attention_heads": 8,
        "num_key_value_heads": 1, "attention_window_size": 2048,
    },
}  # fmt: skip
PROMPT = 512


def measure(name: str, quantization: str | None) -> dict[str, Any]:
    """One model: loaded once, then every figure."""
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(GEOMETRIES[name]))
        options: dict[str, Any] = {"load_format": "dummy", "max_model_len": 4096, "max_num_seqs": 16,
                                   "skip_tokenizer_init": True}  # fmt: skip
        with LLM(model=folder, quantization=quantization, **options) as llm:
            spec = llm.engine.executor.runner.model.spec
            timer = Timer(llm)
            timer.seconds(1, 8, 2)
            states = sum(one.size_bytes for one in spec.states)
            weights = llm.built.facts.weight_bytes
            single, eight = timer.decode(1, 48), timer.decode(8, 16)
            took = statistics.median(timer.seconds(1, PROMPT, 1) for _ in range(RUNS))
            return {
                "model": name, "weight_gb": round(weights / 1e9, 3), "state_mb": round(states / 1e6, 2),
                "decode_1": single, "decode_8": eight, "prefill": round(PROMPT / took, 1),
                "decode_gb_s": round(single * (weights + 2 * states) / 1e9, 2),
                "decode_8_gb_s": round(eight * (weights / 8 + 2 * states) / 1e9, 2),
                "prefill_gflop_s": round(spec.flops_per_token * PROMPT / took / 1e9, 1),
            }  # fmt: skip


def main() -> None:
    """Every model that is named, and its figures beside the first one's."""
    parser = argparse.ArgumentParser(description="hybrids beside Llama on a CPU")
    parser.add_argument("models", nargs="*", default=list(GEOMETRIES))
    parser.add_argument("--quantization")
    given = parser.parse_args()
    first: dict[str, Any] | None = None
    for name in given.models:
        found = measure(name, given.quantization)
        first = first or found
        for key in ("decode_gb_s", "prefill_gflop_s"):
            found[f"{key}_share"] = round(found[key] / first[key], 3)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
