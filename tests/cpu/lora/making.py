"""Adapters made by hand. Owns: PEFT folders of random numbers for a model folder, without PEFT."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    base: Path,
    *,
    rank: int = 4,
    modules: Sequence[str] = ALL,
    seed: int = 0,
    dora: bool = False,
    size: float = 0.1,
    **config: Any,
) -> Path:
    """An adapter of every matrix with these names; -> its folder."""
    made = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in modules or weight.ndim != 2:
            continue
        key = f"base_model.model.{module}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=made) * size
        tensors[f"{key}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=made) * size
        if dora:
            tensors[f"{key}.lora_magnitude_vector"] = torch.rand(weight.shape[0], generator=made) * 0.5 + 0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules), "use_dora": dora}
    (folder / "adapter_config.json").write_text(json.dumps({**said, **config}))
    return folder
