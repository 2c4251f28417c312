"""What test_gpu_engine.py and other tests share."""

from __future__ import annotations

import json

import pytest
import torch

from tokenmill import LLM

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def make(model, **options):
    options = {"max_num_seqs": 64, "num_gpu_blocks_override": 600, **options}
    return LLM(model=model, load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, **options)


def prompts(count):
    return [{"prompt_token_ids": torch.randint(0, 2048, (5 + 13 * i % 200,)).tolist()} for i in range(count)]


def ids(outputs):
    return [list(o.outputs[0].token_ids) for o in outputs]


def agreement(a, b):
    """Share of tokens before the first difference: bf16 sums in another order may flip a near tie."""
    same = total = 0
    for x, y in zip(a, b, strict=True):
        assert len(x) == len(y)
        first = next((i for i, (m, n) in enumerate(zip(x, y, strict=True)) if m != n), len(x))
        same, total = same + first, total + len(x)
    return same / total
