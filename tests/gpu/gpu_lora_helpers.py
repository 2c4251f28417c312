"""What test_gpu_lora.py and other tests share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.gpu.gpu_engine_helpers import CONFIG

from tokenmill import LLM, LoRARequest

pytest.importorskip("triton")
SHAPES = {
    "self_attn.q_proj": (512, 512), "self_attn.k_proj": (128, 512), "self_attn.v_proj": (128, 512),
    "self_attn.o_proj": (512, 512), "mlp.gate_proj": (1024, 512), "mlp.up_proj": (1024, 512),
    "mlp.down_proj": (512, 1024),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 3}))
    return str(folder)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Eight, of ranks 1 to 16, the last one with DoRA, and the head changed by one."""
    root, made = tmp_path_factory.mktemp("adapters"), {}
    for i, rank in enumerate((1, 4, 8, 16, 3, 16, 5, 16)):
        tensors, dora = {}, i == 7
        for layer in range(3):
            for name, (rows, columns) in SHAPES.items():
                key = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{key}.lora_A.weight"] = torch.randn(rank, columns) * 0.05
                tensors[f"{key}.lora_B.weight"] = torch.randn(rows, rank) * 0.05
                if dora:
                    tensors[f"{key}.lora_magnitude_vector"] = torch.rand(rows) + 0.5
        if i == 6:
            tensors["base_model.model.lm_head.lora_A.weight"] = torch.randn(rank, 512) * 0.05
            tensors["base_model.model.lm_head.lora_B.weight"] = torch.randn(2048, rank) * 0.05
        folder = root / f"a{i}"
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        said = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "use_dora": dora}
        (folder / "adapter_config.json").write_text(json.dumps(said))
        made[f"a{i}"] = folder
    return made


def make(model, **options):
    options = {"max_num_seqs": 64, "num_gpu_blocks_override": 600, "enable_lora": True, **options}
    return LLM(model=model, load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, **options)


def asked(adapters: dict[str, Path], count):
    found = [LoRARequest(name, i + 1, str(path)) for i, (name, path) in enumerate(adapters.items())]
    return [None if i % 9 == 8 else found[i % 9] for i in range(count)]
