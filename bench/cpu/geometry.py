"""Whole-model speed on a CPU: a 1B Llama geometry with random weights. JSON on stdout; wants a quiet machine.

python bench/cpu/geometry.py [none|int8|int4 ...]       (default: all three)

Decode is the slope between two output lengths, so that prefill and start-up are not in it. Medians of three runs.
"""

from __future__ import annotations

import json
import pathlib
import random
import statistics
import sys
import tempfile
import time

from tokenmill.core.config import calm_threads

calm_threads()

from tokenmill import LLM, SamplingParams  # noqa: E402

GEOMETRY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
RUNS = 3


class Timer:
    """Times generate calls on fresh random prompts."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.random = random.Random(0)

    def seconds(self, count: int, prompt: int, output: int) -> float:
        """`count` prompts at once, `output` tokens each."""
        prompts = [
            {"prompt_token_ids": [self.random.randrange(1000, 100000) for _ in range(prompt)]} for _ in range(count)
        ]
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin

    def decode(self, count: int, output: int) -> float:
        """Tokens per second of `count` sequences decoding together."""
        found = [count * output / (self.seconds(count, 8, output + 1) - self.seconds(count, 8, 1)) for _ in range(RUNS)]
        return round(statistics.median(found), 1)


def measure(folder: str, quantization: str | None) -> dict[str, float]:
    """Load once, then every figure."""
    begin = time.perf_counter()
    options = {"device": "cpu", "load_format": "dummy", "max_model_len": 4096, "max_num_seqs": 32}
    with LLM(model=folder, quantization=quantization, **options) as llm:
        load = round(time.perf_counter() - begin, 2)
        timer = Timer(llm)
        timer.seconds(1, 8, 2)
        prefill = statistics.median(512 / timer.seconds(1, 512, 1) for _ in range(RUNS))
        return {
            "load_s": load,
            "weight_gb": round(llm.built.facts.weight_bytes / 1e9, 3),
            "decode_1": timer.decode(1, 48),
            "prefill_512": round(prefill, 1),
            "decode_8": timer.decode(8, 16),
            "decode_32": timer.decode(32, 8),
        }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(GEOMETRY))
        wanted = sys.argv[1:] or ["none", "int8", "int4"]
        print(json.dumps({name: measure(folder, None if name == "none" else name) for name in wanted}))
