"""Do blocks and memory come back? 10,000 requests, a third of them aborted, on an NVIDIA GPU.

python bench/gpu_leak.py [COUNT]      (a small model with random weights; prints what was held before and after)
"""

from __future__ import annotations

import gc
import json
import pathlib
import random
import sys
import tempfile
import time

import torch

from tokenmill import LLM, SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def rush(llm: LLM, count: int, seed: int) -> tuple[int, int]:
    """Add and abort while steps run; (ended by themselves, aborted)."""
    dice = random.Random(seed)
    live: set[str] = set()
    asked = ended = aborted = 0
    while asked < count or llm.engine.has_work:
        while asked < count and len(live) < 400:
            tokens = [dice.randrange(2048) for _ in range(dice.randint(1, 300))]
            warm = dice.random() < 0.5
            params = SamplingParams(
                temperature=0.8 if warm else 0.0, n=dice.choice([1, 2]) if warm else 1,
                max_tokens=dice.randint(1, 24), ignore_eos=True,
            )  # fmt: skip
            request = llm._request(None, tokens, params)
            llm.engine.add(request)
            live.add(request.id)
            asked += 1
        for delta in llm.engine.step():
            if delta.finish is not None and delta.request_id in live and delta.index == 0:
                live.discard(delta.request_id)
                ended += 1
        if live and dice.random() < 0.8:
            for victim in dice.sample(sorted(live), min(len(live), 8)):
                llm.engine.abort(victim)
                live.discard(victim)
                aborted += 1
    return ended, aborted


def held(llm: LLM) -> dict[str, int]:
    gc.collect()
    torch.cuda.synchronize()
    pool = llm.engine.scheduler.tables.pools[0]
    return {
        "free blocks": pool.available,
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
    }


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024, "max_num_seqs": 256}
        with LLM(model=folder, num_gpu_blocks_override=3000, **options) as llm:
            rush(llm, 500, 0)
            before, start = held(llm), time.perf_counter()
            ended, aborted = rush(llm, count, 1)
            after = held(llm)
    print(f"{count} requests in {time.perf_counter() - start:.1f} s: {ended} ended, {aborted} aborted")
    print("before", before)
    print("after ", after)
    assert after["free blocks"] == before["free blocks"], "blocks leak"
    assert after["allocated"] <= before["allocated"] + (1 << 20), "device memory leaks"
    assert after["reserved"] <= before["reserved"] + (64 << 20), "reserved memory grows"


if __name__ == "__main__":
    main()
