"""Checkpoints made by hand with a layer that guesses later tokens, in DeepSeek's form and in Qwen's.

Each is a model with one layer more than its config says, so that Transformers computes that layer for a reference.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from families_helpers import CASES
from family_cases import ALL
from safetensors.torch import load_file, save_file

AROUND = {
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
}
MODELS = {"deepseek_v3": "deepseek", "glm4_moe": "deepseek", "qwen3-next": "qwen"}


def make_checkpoint(name: str, folder: Path, **changes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """-> Transformers' model, whose last layer is the one that guesses, and the tensors around that. changes: of the
    family's config."""
    form = MODELS[name]
    case = copy.deepcopy(CASES.get(name) or ALL[f"{name}-0"])
    for key, value in changes.items():
        setattr(case.config, key, value)
    if form == "qwen":
        case.config.layer_types = [*case.config.layer_types[:-1], "full_attention"]
    model, _, _ = case.make(folder)
    said = json.loads((folder / "config.json").read_text())
    layers, hidden = said["num_hidden_layers"] - 1, said["hidden_size"]
    said["num_hidden_layers"] = layers
    if "layer_types" in said:
        said["layer_types"] = said["layer_types"][:layers]
    if form == "deepseek":
        said["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(said))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    torch.manual_seed(1)
    names = AROUND[form]
    around = {n: torch.rand(hidden) + (0.5 if form == "deepseek" else -0.5) for n in (names[0], names[1], names[3])}
    around[names[2]] = torch.randn(hidden, 2 * hidden) * 0.2
    last, at = f"model.layers.{layers}.", f"model.layers.{layers}." if form == "deepseek" else "mtp."
    if form == "qwen":
        tensors = {n.replace(last, "mtp.layers.0."): t for n, t in tensors.items()}
    tensors |= {f"{at}{n}.weight": t for n, t in around.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return model, around
