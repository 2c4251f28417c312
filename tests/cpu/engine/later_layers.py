"""Checkpoints made by hand with layers that guess later tokens, in DeepSeek's form and in Qwen's, and what these guess.

Each is a model with more layers than its config says, so that Transformers computes them for a reference.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.cpu.models.families_helpers import CASES
from tests.cpu.models.family_cases import ALL

AROUND = {
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
}
MODELS = {
    "deepseek_v3": "deepseek",
    "deepseek_v32": "deepseek",
    "glm4": "deepseek",
    "glm4_moe": "deepseek",
    "qwen3-next": "qwen",
}


def make_checkpoint(
    name: str, folder: Path, later: int = 1, **changes: Any
) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """-> Transformers' model, the last layers of which are those that guess, and the tensors around each of them.
    changes: of the family's config."""
    form = MODELS[name]
    case = copy.deepcopy(CASES.get(name) or ALL[f"{name}-0"])
    for key, value in changes.items():
        setattr(case.config, key, value)
    case.config.num_hidden_layers += later - 1
    if form == "qwen":
        case.config.layer_types = [*case.config.layer_types[:-1], *["full_attention"] * later]
    model, _, _ = case.make(folder)
    said = json.loads((folder / "config.json").read_text())
    layers, hidden = said["num_hidden_layers"] - later, said["hidden_size"]
    said["num_hidden_layers"] = layers
    for key in {"layer_types", "mlp_layer_types"} & set(said):
        said[key] = said[key][:layers]
    said["num_nextn_predict_layers" if form == "deepseek" else "mtp_num_hidden_layers"] = later
    (folder / "config.json").write_text(json.dumps(said))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    torch.manual_seed(1)
    names, around = AROUND[form], []
    for n in range(later):
        if form == "deepseek" or n == 0:
            near = 0.5 if form == "deepseek" else -0.5
            around.append({each: torch.rand(hidden) + near for each in (names[0], names[1], names[3])})
            around[-1][names[2]] = torch.randn(hidden, 2 * hidden) * 0.2
        else:
            around.append(around[0])
        at = f"model.layers.{layers + n}."
        if form == "qwen":
            tensors = {key.replace(at, f"mtp.layers.{n}."): t for key, t in tensors.items()}
            at = "mtp."
        tensors |= {f"{at}{key}.weight": t for key, t in around[-1].items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return model, around


class Reference:
    """Guesses in plain torch, over whole texts."""

    def __init__(self, name: str, model: Any, around: list[dict[str, torch.Tensor]]) -> None:
        self.form = MODELS[name]
        self.model, self.inner, self.around = model, model.model, around
        self.layers, self.norm = list(self.inner.layers), self.inner.norm

    def _run(self, layers: list[Any], norm: Any, **given: Any) -> torch.Tensor:
        self.inner.layers, self.inner.norm = torch.nn.ModuleList(layers), norm
        config = self.inner.config
        count, config.num_hidden_layers = config.num_hidden_layers, len(layers)
        kinds = getattr(config, "layer_types", None)
        if kinds is not None:  # a layer's mask goes by its place
            config.layer_types = [kinds[self.layers.index(layer)] for layer in layers]
        try:
            with torch.no_grad():
                return self.inner(**given, use_cache=False).last_hidden_state
        finally:
            self.inner.layers, self.inner.norm = torch.nn.ModuleList(self.layers), self.norm
            config.num_hidden_layers = count
            if kinds is not None:
                config.layer_types = kinds

    def _normed(self, around: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
        eps = getattr(self.inner.config, "rms_norm_eps", 1e-6)
        unit = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return unit * (around[name] + (1.0 if self.form == "qwen" else 0.0))

    def guesses(self, tokens: list[int], count: int) -> list[int]:
        """Each layer reads the states of the one before it, all over; further guesses are the last one's."""
        embedding, state, join, last = AROUND[self.form]
        later = len(self.around)
        given = self._run(self.layers[:-later], self.norm, input_ids=torch.tensor([tokens[:-1]]))[0]
        made = given
        found: list[int] = []
        for n in range(count):
            at = min(n, later - 1)
            given = made if n < later else torch.cat((given, made[-1:]))
            words = self.inner.embed_tokens(torch.tensor((tokens + found)[at + 1 :]))
            around = self.around[at]
            both = torch.cat((self._normed(around, embedding, words), self._normed(around, state, given)), -1)
            layer = self.layers[len(self.layers) - later + at]
            x = (both @ around[join].T)[None]
            out = self._run([layer], torch.nn.Identity(), inputs_embeds=x)[0]
            normed = self._normed(around, last, out)
            found.append(int((normed[-1] @ self.model.lm_head.weight.T).argmax()))
            made = normed if self.form == "qwen" else out
        return found
