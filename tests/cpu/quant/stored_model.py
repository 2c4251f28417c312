"""Whole models whose matrices are stored in any of the forms of stored_forms_helpers. Owns: writing them.

The numbers are random and mean nothing; layers norm what they read, so that nothing overflows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.cpu.quant import stored_forms_helpers as stored
from torch import Tensor

from tokenmill.quant import bits

SIZES = {"vocab_size": 68, "hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 512, "max_position_embeddings": 128,
         "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}  # fmt: skip
DENSE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZES}
MIXTURE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **SIZES, "num_experts": 4,
           "num_experts_per_tok": 2, "moe_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": [],
           "norm_topk_prob": True}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The matrices that are stored in a form."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    at = "model.layers.0"
    found = {
        f"{at}.self_attn.{name}": shape
        for name, shape in (
            ("q_proj", (q, hidden)),
            ("k_proj", (kv, hidden)),
            ("v_proj", (kv, hidden)),
            ("o_proj", (hidden, q)),
        )
    }
    places = (
        [f"{at}.mlp.experts.{i}" for i in range(config["num_experts"])] if "num_experts" in config else [f"{at}.mlp"]
    )
    for place in places:
        found |= {f"{place}.{name}": (inner, hidden) for name in ("gate_proj", "up_proj")}
        found[f"{place}.down_proj"] = (hidden, inner)
    return found


def make(form: str, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of a model in this form."""
    random = torch.Generator().manual_seed(1)
    hidden, head = config["hidden_size"], config["head_dim"]
    at = "model.layers.0"
    tensors: dict[str, Tensor] = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=random),
        "lm_head.weight": torch.randn(config["vocab_size"], hidden, generator=random) * 0.05,
        **{name: torch.ones(hidden) for name in (
            "model.norm.weight", f"{at}.input_layernorm.weight", f"{at}.post_attention_layernorm.weight")},
        **{f"{at}.self_attn.{name}.weight": torch.ones(head) for name in ("q_norm", "k_norm")},
    }  # fmt: skip
    if "num_experts" in config:
        tensors[f"{at}.mlp.gate.weight"] = torch.randn(config["num_experts"], hidden, generator=random) * 0.05
    said: dict[str, Any] = {}
    before = stored.OUT, stored.IN, stored.GROUP, stored.words_by_bit
    try:
        stored.GROUP, stored.words_by_bit = 128, bits.pack
        for name, (stored.OUT, stored.IN) in shapes(config).items():
            made, said = blocks(stored.OUT, stored.IN, form) if form.startswith("fp8 b") else _made(form)
            tensors |= {f"{name}.{each}": tensor for each, tensor in made.items()}
    finally:
        stored.OUT, stored.IN, stored.GROUP, stored.words_by_bit = before
    return {**config, "quantization_config": said}, {name: tensor.clone() for name, tensor in tensors.items()}


def _made(form: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, _, said = stored.FORMS[form][0]()
    if "weight.nested_absmax" in tensors:  # one for 256 groups
        tensors["weight.nested_absmax"] = tensors["weight.nested_absmax"].expand(stored.OUT * stored.IN // 64 // 256)
    return tensors, said


def blocks(out: int, inner: int, form: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As `block_fp8`, of any size."""
    data = torch.randn(out, inner, generator=torch.Generator().manual_seed(2)).to(torch.float8_e4m3fn)
    scales = torch.rand(out // 128, inner // 128, generator=torch.Generator().manual_seed(3)) + 0.5
    if form.endswith("powers"):
        scales = torch.exp2((scales * 4).round() - 5).to(torch.float8_e8m0fnu)
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return {"weight": data, "weight_scale_inv": scales}, said


def write(form: str, config: dict[str, Any], folder: Path) -> Path:
    """The model as a folder."""
    said, tensors = make(form, config)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(said))
    return folder
