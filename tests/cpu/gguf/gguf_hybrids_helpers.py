"""Files of Qwen 3.5 as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

BASE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-3,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
MIX = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
CONFIGS = {"qwen35": Qwen3_5TextConfig(**BASE), "qwen35moe": Qwen3_5MoeTextConfig(**BASE, **MIX)}
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
       "lm_head.weight": "output.weight"}  # fmt: skip


def tiled(values: Tensor, c: dict[str, Any], width: int, start: int = 0, dim: int = 0) -> Tensor:
    """Value heads behind `start` in the order of a tiled broadcast: the first of every key head, then the second..."""
    keys, share = c["linear_num_key_heads"], c["linear_num_value_heads"] // c["linear_num_key_heads"]
    order = torch.arange(keys * share * width).view(keys, share, width).transpose(0, 1).reshape(-1) + start
    return values.index_select(dim, torch.cat((torch.arange(start), order)))


def converted(part: str, values: Tensor, c: dict[str, Any]) -> Tensor:
    """What the converter makes of a tensor of a layer."""
    width, keys = c["linear_value_head_dim"], 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"]
    match part:
        case "linear_attn.in_proj_qkv.weight":
            return tiled(values, c, width, keys)
        case "linear_attn.in_proj_z.weight":
            return tiled(values, c, width)
        case "linear_attn.in_proj_b.weight" | "linear_attn.in_proj_a.weight" | "linear_attn.dt_bias":
            return tiled(values, c, 1)
        case "linear_attn.A_log":
            return tiled(-values.exp(), c, 1)
        case "linear_attn.conv1d.weight":
            return tiled(values[:, 0], c, width, keys)
        case "linear_attn.out_proj.weight":
            return tiled(values, c, width, dim=1)
        case "mlp.shared_expert_gate.weight":
            return values[0]
    return values + 1.0 if part.endswith("norm.weight") and part != "linear_attn.norm.weight" else values


def write(path: Path, arch: str, c: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    out = gguf.GGUFWriter(str(path), arch)
    drafts = 1
    out.add_block_count(c["num_hidden_layers"] + drafts)
    out.add_uint32(f"{arch}.nextn_predict_layers", drafts)
    out.add_context_length(c["max_position_embeddings"])
    out.add_embedding_length(c["hidden_size"])
    out.add_head_count(c["num_attention_heads"])
    out.add_head_count_kv(c["num_key_value_heads"])
    out.add_key_length(c["head_dim"])
    out.add_value_length(c["head_dim"])
    out.add_layer_norm_rms_eps(c["rms_norm_eps"])
    out.add_rope_freq_base(c["rope_parameters"]["rope_theta"])
    out.add_rope_dimension_count(int(c["head_dim"] * c["rope_parameters"]["partial_rotary_factor"]))
    out.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
    out.add_ssm_state_size(c["linear_key_head_dim"])
    out.add_ssm_group_count(c["linear_num_key_heads"])
    out.add_ssm_time_step_rank(c["linear_num_value_heads"])
    out.add_ssm_inner_size(c["linear_num_value_heads"] * c["linear_value_head_dim"])
    out.add_uint32(f"{arch}.full_attention_interval", 4)
    if arch == "qwen35":
        out.add_feed_forward_length(c["intermediate_size"])
    else:
        out.add_expert_count(c["num_experts"])
        out.add_expert_used_count(c["num_experts_per_tok"])
        out.add_expert_feed_forward_length(c["moe_intermediate_size"])
        out.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    for name, values in tensors.items():
        if name in TOP:
            out.add_tensor(TOP[name], (values + 1.0 if "norm" in name else values).contiguous().numpy())
        elif ".experts." not in name:
            layer, part = name.removeprefix("model.layers.").split(".", 1)
            said = converted(part, values, c).contiguous().float()
            own = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}.get(part)
            out.add_tensor(f"blk.{layer}.{own or NAMES[part.removesuffix('.weight')] + '.weight'}", said.numpy())
    if arch == "qwen35moe":
        for layer in range(c["num_hidden_layers"]):
            at = f"model.layers.{layer}.mlp.experts"
            for kind in ("gate", "up", "down"):
                stack = torch.stack([tensors[f"{at}.{e}.{kind}_proj.weight"] for e in range(c["num_experts"])])
                out.add_tensor(f"blk.{layer}.ffn_{kind}_exps.weight", stack.numpy())
    out.add_tensor(f"blk.{c['num_hidden_layers']}.nextn.eh_proj.weight", torch.ones(4, 4).numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
