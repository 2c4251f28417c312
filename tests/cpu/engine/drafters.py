"""Drafters made by hand: folders of random heads for tiny models."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file

MOST = 3
"""Drafts, and Medusa heads."""


def make_medusa(folder, hidden=64, vocab=320):
    """Random heads in our own form."""
    folder.mkdir()
    torch.manual_seed(0)
    heads = {}
    for n in range(MOST):
        heads |= {
            f"blocks.{n}.layers.0.weight": torch.randn(hidden, hidden) * 0.1,
            f"blocks.{n}.layers.0.bias": torch.zeros(hidden),
        }
    save_file(heads, folder / "model.safetensors")
    config = {"model_type": "medusa", "hidden_size": hidden, "vocab_size": vocab, "num_heads": MOST}
    config |= {"num_hidden_layers": 1, "original_lm_head": True, "medusa_fc_bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_eagle(folder, words=0, hidden=64, heads=4, seed=0, layers=1, reads=(1, 1, 2)):
    """A random head of EAGLE-1, or of EAGLE-3 if it has words of its own; reads: of the target's layers."""
    folder.mkdir()
    torch.manual_seed(seed)
    layer, wide = ("midlayer", 2 * hidden) if words else ("layers.0", hidden)
    tensors = {}
    for at, width in ((layer, wide), *((f"layers.{n}", hidden) for n in range(1, layers))):
        shapes = {f"self_attn.{x}_proj": (hidden, width) for x in "qkv"} | {"self_attn.o_proj": (hidden, hidden)}
        shapes |= {"mlp.gate_proj": (96, hidden), "mlp.up_proj": (96, hidden), "mlp.down_proj": (hidden, 96)}
        tensors |= {f"{at}.{name}.weight": torch.randn(shape) * 0.1 for name, shape in shapes.items()}
    tensors["fc.weight"] = torch.randn(hidden, (3 if words else 2) * hidden) * 0.1
    norms = [f"{layer}.post_attention_layernorm"]
    config = {"hidden_size": hidden, "intermediate_size": 96, "num_attention_heads": heads, "vocab_size": 320}
    config |= {"rms_norm_eps": 1e-6, "num_hidden_layers": layers, "max_position_embeddings": 2048}
    norms += [f"layers.{n}.{x}" for n in range(1, layers) for x in ("input_layernorm", "post_attention_layernorm")]
    if words:
        norms += [f"{layer}.input_layernorm", f"{layer}.hidden_norm", "norm"]
        tensors["lm_head.weight"] = torch.randn(words, hidden)
        tensors["d2t"] = torch.arange(words) * 2
        tensors["t2d"] = torch.zeros(320, dtype=torch.bool)
        config |= {"draft_vocab_size": words, "eagle_aux_hidden_state_layer_ids": list(reads)}
    save_file(tensors | {f"{name}.weight": torch.ones(hidden) for name in norms}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
