"""Writes tiny GGUF models with the format's own library, changed as its converter changes them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

ARCHES = {
    "llama": "LLAMA",
    "mistral": "LLAMA",
    "mixtral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "qwen3_moe": "QWEN3MOE",
    "gemma2": "GEMMA2",
    "gemma3_text": "GEMMA3",
    "phi3": "PHI3",
    "gpt_oss": "GPT_OSS",
    "arcee": "ARCEE",
    "cohere2": "COHERE2",
    "ernie4_5": "ERNIE4_5",
    "exaone4": "EXAONE4",
    "glm4": "GLM4",
    "granite": "GRANITE",
    "hunyuan_v1_dense": "HUNYUAN_DENSE",
    "olmo2": "OLMO2",
    "seed_oss": "SEED_OSS",
    "smollm3": "SMOLLM3",
    "starcoder2": "STARCODER2",
}
WOVEN = ("llama", "arcee", "granite", "smollm3")
# Where a type has its half-precision scales, and values for them that give weights around 0.1.
HALVES = {
    "Q2_K": ((80, 2e-3), (82, 3e-3)),
    "Q3_K": ((108, 8e-4),),
    "Q4_K": ((0, 2e-4), (2, 15e-4)),
    "Q5_K": ((0, 1e-4), (2, 15e-4)),
    "Q6_K": ((208, 3e-5),),
    "IQ4_NL": ((0, 1e-3),),
    "IQ4_XS": ((0, 4e-5),),
    "IQ2_S": ((0, 1e-3),),
    "IQ3_S": ((0, 5e-4),),
    "NVFP4": (),
}


def blocks_of(values: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    """Values as blocks of a type; where the library cannot write it, random blocks of that type."""
    which = GGMLQuantizationType[kind]
    if kind not in HALVES:
        return quants.quantize(values, which)
    elements, size = gguf.GGML_QUANT_SIZES[which]
    raw = rng.integers(0, 256, (values.size // elements, size), dtype=np.uint8)
    for at, typical in HALVES[kind]:
        halves = (typical * rng.uniform(0.5, 1.0, len(raw))).astype(np.float16)
        raw[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    if kind == "NVFP4":  # scales of one byte
        raw[:, :4] = rng.integers(8, 24, (len(raw), 4))
    return raw.reshape(*values.shape[:-1], -1)


def permute(values: Tensor, heads: int) -> Tensor:
    """The converter's reordering of Llama's query and key rows."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def unpermute(values: Tensor, heads: int) -> Tensor:
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


class Writer:
    """One tiny model: `dense` are the Transformers weights that the file then says."""

    def __init__(self, path: Path, config: dict[str, Any], tensors: dict[str, Tensor], kind: str | dict[str, str]):
        self.model, self.config, self.kind = config["model_type"], config, kind
        arch = getattr(gguf.MODEL_ARCH, ARCHES[self.model])
        self.names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
        self.arch = gguf.MODEL_ARCH_NAMES[arch]
        self.out = gguf.GGUFWriter(str(path), self.arch)
        self.rng = np.random.default_rng(3)
        self.dense: dict[str, Tensor] = {}
        self.tensors = tensors

    def metadata(self) -> None:
        c, out = self.config, self.out
        heads = c["num_attention_heads"]
        head = c.get("head_dim") or c["hidden_size"] // heads
        rope = c.get("rope_parameters") or {}
        full = rope.get("full_attention", rope)
        out.add_block_count(c["num_hidden_layers"])
        out.add_context_length(c["max_position_embeddings"])
        out.add_embedding_length(c["hidden_size"])
        out.add_feed_forward_length(c["intermediate_size"])
        out.add_head_count(heads)
        out.add_head_count_kv(c["num_key_value_heads"])
        if "rms_norm_eps" in c:
            out.add_layer_norm_rms_eps(c["rms_norm_eps"])
        else:
            out.add_layer_norm_eps(c.get("layer_norm_eps") or c["norm_epsilon"])
        for key, add in {"embedding_multiplier": out.add_embedding_scale, "residual_multiplier": out.add_residual_scale,
                         "attention_multiplier": out.add_attention_scale, "logits_scaling": out.add_logit_scale,
                         "logit_scale": out.add_logit_scale}.items():  # fmt: skip
            if key in c:
                add(c[key])
        out.add_rope_freq_base(full.get("rope_theta", 10000.0))
        out.add_key_length(head)
        out.add_value_length(head)
        out.add_rope_dimension_count(int(head * (full.get("partial_rotary_factor") or 1.0)))
        self.scaling(full)
        experts = c.get("num_local_experts") or c.get("num_experts")
        if experts:
            out.add_expert_count(experts)
            out.add_expert_used_count(c["num_experts_per_tok"])
            out.add_expert_feed_forward_length(c.get("moe_intermediate_size") or c["intermediate_size"])
        if c.get("sliding_window"):
            out.add_sliding_window(c["sliding_window"])
        if c.get("final_logit_softcapping"):
            out.add_final_logit_softcapping(c["final_logit_softcapping"])
            out.add_attn_logit_softcapping(c["attn_logit_softcapping"])

    def scaling(self, rope: dict[str, Any]) -> None:
        kind, out, config = rope.get("rope_type", "default"), self.out, self.config
        if kind == "linear":
            out.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            out.add_rope_scaling_factor(rope["factor"])
        elif kind == "yarn":
            out.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            out.add_rope_scaling_factor(rope["factor"])
            out.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        elif kind == "llama3":
            self.vector("rope_freqs.weight", torch.tensor(llama3_factors(rope, config["head_dim"])))
        elif kind == "longrope":
            original = config["original_max_position_embeddings"]
            scale = config["max_position_embeddings"] / original
            out.add_rope_scaling_orig_ctx_len(original)
            out.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
            self.vector("rope_factors_long.weight", torch.tensor(rope["long_factor"]))
            self.vector("rope_factors_short.weight", torch.tensor(rope["short_factor"]))

    def vector(self, name: str, values: Tensor) -> None:
        self.out.add_tensor(name, values.float().numpy())

    def matrix(self, name: str, values: Tensor) -> Tensor:
        """Write a matrix (or a stack of them) in its type; -> what the file then says."""
        kind = self.kind if isinstance(self.kind, str) else self.kind.get(name.split(".")[-2], self.kind["*"])
        if "ffn_gate_inp" in name:
            kind = "F32"
        which = GGMLQuantizationType[kind]
        plain = {"F32": np.float32, "F16": np.float16}.get(kind)
        raw = values.numpy().astype(plain) if plain else blocks_of(values.numpy(), kind, self.rng)
        self.out.add_tensor(name, raw, raw_dtype=which)
        return values if kind == "F32" else torch.from_numpy(quants.dequantize(raw, which)).view(values.shape)

    def add(self, name: str, values: Tensor) -> None:
        base, _, suffix = name.rpartition(".")
        found = self.names.get_name(base) or self.names.get_name(name)
        assert found, name
        target = f"{found}.{suffix if suffix in ('weight', 'bias') else 'weight'}"
        heads = 0
        if self.arch in WOVEN and base.endswith(("q_proj", "k_proj")):
            heads = self.config["num_attention_heads" if base.endswith("q_proj") else "num_key_value_heads"]
        if heads:
            values = permute(values, heads)
        if values.ndim == 1:
            plus = 1.0 if self.arch.startswith("gemma") and "norm" in name else 0.0
            self.vector(target, values + plus)
            said = (values + plus) - plus
        else:
            said = self.matrix(target, values.contiguous())
        self.dense[name] = unpermute(said, heads) if heads else said

    def experts(self, layer: int) -> None:
        """Experts of one layer, stacked; whatever way Transformers saved them."""
        at = f"model.layers.{layer}"
        inside = f"{at}.block_sparse_moe" if f"{at}.block_sparse_moe.gate.weight" in self.tensors else f"{at}.mlp"
        count = self.config.get("num_local_experts") or self.config["num_experts"]
        names = ("w1", "w3", "w2") if self.model == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        for ours, stored in zip(names, ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), strict=True):
            keys = [f"{inside}.experts.{e}.{ours}.weight" for e in range(count)]
            said = self.matrix(f"blk.{layer}.{stored}.weight", torch.stack([self.tensors[key] for key in keys]))
            self.dense.update(zip(keys, said, strict=True))

    def harmony_experts(self, layer: int) -> None:
        """gpt-oss: [E, in, out] with gate and up interleaved, and biases."""
        at = f"model.layers.{layer}.mlp.experts"
        gate_up, bias = self.tensors[f"{at}.gate_up_proj"], self.tensors[f"{at}.gate_up_proj_bias"]
        said = torch.empty_like(gate_up)
        for place, stored in enumerate(("ffn_gate_exps", "ffn_up_exps")):
            part = gate_up[:, :, place::2].transpose(1, 2).contiguous()
            said[:, :, place::2] = self.matrix(f"blk.{layer}.{stored}.weight", part).transpose(1, 2)
            self.vector(f"blk.{layer}.{stored}.bias", bias[:, place::2].contiguous())
        self.dense[f"{at}.gate_up_proj"] = said
        down = self.tensors[f"{at}.down_proj"].transpose(1, 2).contiguous()
        said = self.matrix(f"blk.{layer}.ffn_down_exps.weight", down)
        self.dense[f"{at}.down_proj"] = said.transpose(1, 2).contiguous()
        self.vector(f"blk.{layer}.ffn_down_exps.bias", self.tensors[f"{at}.down_proj_bias"])

    def write(self) -> dict[str, Tensor]:
        self.metadata()
        for name, values in self.tensors.items():
            if ".experts." not in name and not (name == "lm_head.weight" and self.config.get("tie_word_embeddings")):
                self.add(name, values.float())
        for layer in range(self.config["num_hidden_layers"]):
            if self.model == "gpt_oss":
                self.harmony_experts(layer)
            elif any(".experts." in name for name in self.tensors):
                self.experts(layer)
        self.close()
        return self.dense

    def close(self) -> None:
        self.out.write_header_to_file()
        self.out.write_kv_data_to_file()
        self.out.write_tensors_to_file()
        self.out.close()


def llama3_factors(rope: dict[str, Any], dim: int) -> list[float]:
    """The divisors that the converter stores for Llama 3.1's scaling."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, found = rope["original_max_position_embeddings"], []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / dim)
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return found
