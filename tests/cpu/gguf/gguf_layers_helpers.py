"""What test_gguf_layers.py and other tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as hf
from tests.cpu.gguf.writing import permute
from tests.cpu.models.parity import make
from torch import Tensor

FULL = os.environ.get("TOKENMILL_FAMILIES") == "1"
C = dict[str, Any]
BASE: C = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
           "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}  # fmt: skip
NO_IDS: C = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
DEEPSEEK: C = {**BASE, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
               "v_head_dim": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
               "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}  # fmt: skip
LATENT_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0,
               "mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
INDEX: C = {"q_lora_rank": 40, "index_n_heads": 16, "index_head_dim": 24, "index_topk": 12}
DELTA: C = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
            "linear_value_head_dim": 12, "rms_norm_eps": 1e-3}  # fmt: skip
MIX: C = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA2: C = {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "rms_norm_eps": 1e-3}
WINDOWED = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
GEMMA4: C = {**BASE, "head_dim": 16, "global_head_dim": 32, "sliding_window": 20, "hidden_size_per_layer_input": 8,
             "vocab_size_per_layer_input": 96, "final_logit_softcapping": 3.0, "layer_types": WINDOWED,
             "num_kv_shared_layers": 1, "use_double_wide_mlp": True}  # fmt: skip
GRANITE: C = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
              "logits_scaling": 2.0, "shared_intermediate_size": 48}  # fmt: skip
QUANTISED = ("proj", "query_key_value", "c_attn", "c_fc", "self_attention.dense", "Wqkv", "experts.mlp")
# Transformers finds this class by itself only inside models that see.
hf.AutoModelForCausalLM.register(hf.Mistral4Config, hf.Mistral4ForCausalLM, exist_ok=True)
CASES: dict[str, tuple[str, Any]] = {
    "glm4moe": ("GLM4_MOE", hf.Glm4MoeConfig(
        **BASE, head_dim=16, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=3, n_group=1,
        topk_group=1, first_k_dense_replace=1, routed_scaling_factor=1.7, use_qk_norm=True, attention_bias=True)),
    "deepseek2-v3": ("DEEPSEEK2", hf.DeepseekV3Config(
        **DEEPSEEK, q_lora_rank=40, n_group=4, topk_group=2, rope_parameters=LATENT_YARN)),
    "deepseek2-v2": ("DEEPSEEK2", hf.DeepseekV2Config(**DEEPSEEK, q_lora_rank=None)),
    "mistral4": ("MISTRAL4", hf.Mistral4Config(
        **{**DEEPSEEK, "first_k_dense_replace": 0}, **NO_IDS, q_lora_rank=40, n_group=1, topk_group=1,
        norm_topk_prob=True, rope_parameters={**LATENT_YARN, "llama_4_scaling_beta": 0.5})),
    "glm-dsa": ("GLM_DSA", hf.GlmMoeDsaConfig(
        **DEEPSEEK, **INDEX, n_group=1, topk_group=1, norm_topk_prob=True, rope_parameters=LATENT_YARN,
        indexer_types=["full", "shared", "full", "full"])),
    "deepseek32": ("DEEPSEEK32", hf.DeepseekV32Config(
        **DEEPSEEK, **INDEX, n_group=4, topk_group=2, norm_topk_prob=True, rope_parameters=LATENT_YARN)),
    "qwen3next": ("QWEN3NEXT", hf.Qwen3NextConfig(
        **BASE, **DELTA, **MIX, head_dim=16, shared_expert_intermediate_size=40, norm_topk_prob=True,
        layer_types=["linear_attention"] * 3 + ["full_attention"])),
    "qwen2moe": ("QWEN2MOE", hf.Qwen2MoeConfig(
        **BASE, **MIX, shared_expert_intermediate_size=40, norm_topk_prob=False)),
    "glm4": ("GLM4", hf.Glm4Config(
        **BASE, head_dim=16, attention_bias=True, pad_token_id=0, eos_token_id=[1])),
    "qwen2vl": ("QWEN2VL", hf.Qwen2Config(**BASE)),
    "qwen3vl": ("QWEN3VL", hf.Qwen3Config(**BASE, head_dim=16)),
    "qwen3vlmoe": ("QWEN3VLMOE", hf.Qwen3MoeConfig(**BASE, **MIX, head_dim=16, norm_topk_prob=True)),
    "gemma4": ("GEMMA4", hf.Gemma4TextConfig(**GEMMA4, pad_token_id=0)),
    "gemma4-moe": ("GEMMA4", hf.Gemma4TextConfig(
        **{**GEMMA4, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False},
        pad_token_id=0, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32,
        attention_k_eq_v=True, num_global_key_value_heads=1)),
    "granitehybrid": ("GRANITE_HYBRID", hf.GraniteMoeHybridConfig(
        **BASE, **MAMBA2, **GRANITE, num_local_experts=0, layer_types=["mamba", "attention", "mamba", "mamba"])),
    "granitehybrid-moe": ("GRANITE_HYBRID", hf.GraniteMoeHybridConfig(
        **BASE, **MAMBA2, **GRANITE, num_local_experts=4, num_experts_per_tok=2, position_embedding_type="rope",
        layer_types=["mamba", "attention", "mamba", "mamba"])),
    "lfm2": ("LFM2", hf.Lfm2Config(**BASE, layer_types=["conv", "full_attention"] * 2)),
    "lfm2moe": ("LFM2MOE", hf.Lfm2MoeConfig(
        **BASE, **MIX, num_dense_layers=1, use_expert_bias=True, layer_types=["conv", "full_attention"] * 2)),
    "falcon-h1": ("FALCON_H1", hf.FalconH1Config(
        **BASE, head_dim=16, mamba_d_ssm=96, mamba_n_heads=6, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=8,
        mamba_rms_norm=True, mamba_norm_before_gate=False, rms_norm_eps=1e-3, lm_head_multiplier=0.5,
        embedding_multiplier=2.0, mlp_multipliers=[0.6, 0.7], key_multiplier=0.8, attention_out_multiplier=0.9,
        attention_in_multiplier=1.1, ssm_multipliers=[0.5, 0.6, 0.7, 0.8, 0.9], ssm_in_multiplier=1.2,
        ssm_out_multiplier=1.3)),
    "nemotron_h": ("NEMOTRON_H", hf.NemotronHConfig(
        **{k: v for k, v in BASE.items() if k != "num_hidden_layers"}, head_dim=16, mamba_num_heads=8,
        mamba_head_dim=16, n_groups=2, ssm_state_size=8, layers_block_type=["mamba", "attention", "mlp", "mamba"],
        layer_norm_epsilon=1e-3)),
    "nemotron_h_moe": ("NEMOTRON_H_MOE", hf.NemotronHConfig(
        **{k: v for k, v in BASE.items() if k != "num_hidden_layers"}, head_dim=16, mamba_num_heads=8,
        mamba_head_dim=16, n_groups=2, ssm_state_size=8, layers_block_type=["mamba", "moe", "attention", "mamba"],
        layer_norm_epsilon=1e-3, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=40, n_group=1, topk_group=1, routed_scaling_factor=1.5)),
    "mamba": ("MAMBA", hf.MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, state_size=8, **NO_IDS)),
    "falcon-mamba": ("MAMBA", hf.FalconMambaConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=2, state_size=8, **NO_IDS)),
    "mamba2": ("MAMBA2", hf.Mamba2Config(
        vocab_size=96, hidden_size=64, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=16, n_groups=1,
        **NO_IDS)),
    "jamba": ("JAMBA", hf.JambaConfig(
        **BASE, num_experts=4, num_experts_per_tok=2, expert_layer_period=2, expert_layer_offset=1,
        attn_layer_period=4, attn_layer_offset=2, mamba_d_state=8, mamba_dt_rank=6, use_mamba_kernels=False)),
}  # fmt: skip


def latent(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    """Keys and values apart, keys head by head the other way round."""
    if not name.endswith("kv_b_proj.weight"):
        return {name: x}
    heads, keys = c["num_attention_heads"], c["qk_nope_head_dim"]
    parts = x.view(heads, -1, x.shape[-1])
    return {name.replace("kv_b", "k_b"): parts[:, :keys].transpose(1, 2), name.replace("kv_b", "v_b"): parts[:, keys:]}


def together(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    """The same, with the two first products of experts in one tensor."""
    said = {"experts.gate_up_proj": "ffn_gate_up_exps", "experts.down_proj": "ffn_down_exps"}
    for end, target in said.items():
        if name.endswith(end):
            return {f"blk.{name.split('.')[2]}.{target}.weight": x}
    return latent(name, x, c)


def states(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    """Mamba-1."""
    if name.endswith("A_log"):
        return {name: -x.exp()}
    return {name: x.squeeze() if "conv1d.weight" in name or "conv.conv.weight" in name else x}


def second_states(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    """Mamba-2."""
    groups = c.get("mamba_n_groups") or c.get("n_groups") or 1
    if name.endswith(("A_log", ".D")):
        x = x.reshape(-1, 1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        x = x.reshape(groups, -1)
    name = name.replace(".dt_bias", ".dt_proj.bias")
    return states(name, x, c)


def woven(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    """Mamba-2, and attention whose rows are woven."""
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        return {name: permute(x, c["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])}
    if name.endswith("e_score_correction_bias"):
        return {name.replace("_bias", ".bias"): x}
    return second_states(name, x, c)


def granite(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    """Gates and ups apart."""
    layer = name.split(".")[2] if ".layers." in name else ""
    experts = c["num_local_experts"]
    if name.endswith("block_sparse_moe.input_linear.weight"):
        gate, up = x.chunk(2, dim=-2)
        return {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = x.chunk(2, dim=-2)
        end = "_shexp" if experts else ""
        return {f"blk.{layer}.ffn_gate{end}.weight": gate, f"blk.{layer}.ffn_up{end}.weight": up}
    if not experts and name.endswith("shared_mlp.output_linear.weight"):
        return {f"blk.{layer}.ffn_down.weight": x}
    return woven(name, x, c)


def delta(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    """Products apart, head by head no more; norms plus one."""
    if name.endswith("in_proj_qkvz.weight"):
        keys, width = c["linear_num_key_heads"], c["linear_key_head_dim"]
        values = c["linear_num_value_heads"] // keys * c["linear_value_head_dim"]
        parts = x.view(keys, -1, x.shape[-1]).split([width, width, values, values], dim=1)
        flat = [part.reshape(-1, x.shape[-1]) for part in parts]
        layer = name.split(".")[2]
        return {f"blk.{layer}.attn_qkv.weight": torch.cat(flat[:3]), f"blk.{layer}.attn_gate.weight": flat[3]}
    if name.endswith("norm.weight") and "linear_attn.norm" not in name:
        return {name: x + 1.0}
    if name.endswith("shared_expert_gate.weight"):
        return {name: x[0]}
    return states(name.replace(".dt_bias", ".dt_proj.bias"), x, c)


def falcon(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    """Every multiplier is in the weights."""
    ((name, x),) = second_states(name, x, c).items()
    factors = {"down_proj": c["mlp_multipliers"][1], "gate_proj": c["mlp_multipliers"][0],
               "k_proj": c["key_multiplier"] * c["attention_in_multiplier"], "q_proj": c["attention_in_multiplier"],
               "v_proj": c["attention_in_multiplier"], "o_proj": c["attention_out_multiplier"],
               "out_proj": c["ssm_out_multiplier"], "lm_head": c["lm_head_multiplier"],
               "embed_tokens": c["embedding_multiplier"]}  # fmt: skip
    if "in_proj" in name:
        inner, groups = c["mamba_d_ssm"], c["mamba_n_groups"] * c["mamba_d_state"]
        sizes = [inner, inner, groups, groups, c["mamba_n_heads"]]
        rows = torch.cat([torch.full((n,), m) for n, m in zip(sizes, c["ssm_multipliers"], strict=True)])
        return {name: x * c["ssm_in_multiplier"] * rows[:, None]}
    return {name: x * next((factor for key, factor in factors.items() if key in name), 1.0)}


def gemma(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("router.scale"):
        return {f"blk.{layer}.ffn_gate_inp.scale": x}
    if name.endswith("per_expert_scale"):
        return {f"blk.{layer}.ffn_down_exps.scale": x}
    if name.endswith("layer_scalar") or (".experts." in name and not name.endswith(".weight")):
        return {name + ".weight": x}
    return {name: x}


def bias(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    if name.endswith(".expert_bias"):
        return {name + ".bias": x}
    if name.endswith("e_score_correction_bias"):
        return {name.replace("_bias", ".bias"): x}
    return latent(name, x, c) if "kv_lora_rank" in c else states(name, x, c)


def plain(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    return {name: x[0] if name.endswith("shared_expert_gate.weight") else x}


CHANGES: dict[str, Callable[[str, Tensor, C], dict[str, Tensor]]] = {
    **dict.fromkeys(("GLM4", "QWEN2MOE", "QWEN2VL", "QWEN3VL", "QWEN3VLMOE"), plain),
    **dict.fromkeys(("GLM4_MOE", "DEEPSEEK2", "DEEPSEEK32", "GLM_DSA", "LFM2", "LFM2MOE"), bias),
    "QWEN3NEXT": delta, "GEMMA4": gemma, "MISTRAL4": together,
    "GRANITE_HYBRID": granite, "FALCON_H1": falcon, "NEMOTRON_H": woven, "NEMOTRON_H_MOE": woven,
    "MAMBA": states, "MAMBA2": second_states, "JAMBA": states,
}  # fmt: skip


def stacked(tensors: dict[str, Tensor], c: C) -> dict[str, Tensor]:
    """Experts that were saved one by one, as one tensor each."""
    found, stacks = {}, {}
    for name, x in tensors.items():
        before, dot, after = name.partition(".experts.")
        if dot and after.split(".")[0].isdigit():
            number, rest = after.split(".", 1)
            if "expert_layer_period" in c and len([k for k in tensors if k.startswith(f"{before}.experts.")]) < 4:
                found[f"{before}.{rest}"] = x
            else:
                stacks.setdefault(f"{before}.experts.{rest}", {})[int(number)] = x
        else:
            found[name] = x
    for name, parts in stacks.items():
        merged = name.removeprefix("model.") if ".feed_forward.experts.w" in name else name
        merged = merged.replace("backbone.", "model.").replace("mixer.experts", "mlp.experts")
        merged = merged.replace("feed_forward.experts.", "mlp.experts.") if "expert_layer_period" in c else merged
        found[merged] = torch.stack([parts[i] for i in sorted(parts)])
    return found


def write(
    path: Path,
    arch: str,
    c: C,
    tensors: dict[str, Tensor],
    kind: str = "F32",
    more: C | None = None,
    change: Callable[[str, Tensor, C], dict[str, Tensor]] | None = None,
) -> None:
    """kind: F32, Q8_0, or F32 with the numbers that Q8_0 makes of them (rounded); more: further keys."""
    which = getattr(gguf.MODEL_ARCH, "GLM_DSA" if arch == "DEEPSEEK32" else arch)  # older libraries lack its name
    layers = c.get("num_hidden_layers") or len(c["layers_block_type"])
    names = gguf.get_tensor_name_map(which, layers)
    said = "deepseek32" if arch == "DEEPSEEK32" else gguf.MODEL_ARCH_NAMES[which]
    out = gguf.GGUFWriter(str(path), said)
    metadata(out, said, c, layers, more or {})
    for name, x in stacked(tensors, c).items():
        if name == "lm_head.weight" and c.get("tie_word_embeddings"):
            continue
        for said, values in (change or CHANGES[arch])(name, x.float(), c).items():
            target = said if said.startswith("blk.") else names.get_name(said, try_suffixes=(".weight", ".bias"))
            assert target, said
            values = values.contiguous().numpy()
            matrix = values.ndim > 1 and any(part in name for part in QUANTISED)
            if kind != "F32" and matrix and values.shape[-1] % 32 == 0:
                which = gguf.GGMLQuantizationType.Q8_0
                quantised = gguf.quants.quantize(values, which)
                if kind == "Q8_0":
                    out.add_tensor(target, quantised, raw_dtype=which)
                else:
                    out.add_tensor(target, gguf.quants.dequantize(quantised, which))
            else:
                out.add_tensor(target, values.astype(np.float32))
    if arch == "GEMMA4":
        pairs, part = c["global_head_dim"] // 2, c["rope_parameters"]["full_attention"]["partial_rotary_factor"]
        turning = int(c["global_head_dim"] * part / 2)
        out.add_tensor("rope_freqs.weight", np.array([1.0] * turning + [1e30] * (pairs - turning), np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def metadata(out: Any, arch: str, c: C, layers: int, more: C) -> None:
    """The keys that the converter writes, from whichever of a config's names there are."""
    heads = c.get("num_attention_heads") or 0
    kinds = c.get("layer_types") or c.get("layers_block_type") or []
    keys: C = {
        "context_length": c.get("max_position_embeddings", 1 << 20), "embedding_length": c["hidden_size"],
        "block_count": layers, "expert_count": c.get("n_routed_experts") or c.get("num_local_experts")
        or c.get("num_experts"), "expert_used_count": c.get("top_k_experts") or c.get("num_experts_per_tok"),
        "expert_feed_forward_length": c.get("moe_intermediate_size"), "expert_shared_count": c.get("n_shared_experts"),
        "leading_dense_block_count": c.get("first_k_dense_replace", c.get("num_dense_layers")),
        "expert_weights_scale": c.get("routed_scaling_factor"), "expert_weights_norm": c.get("norm_topk_prob"),
        "expert_shared_feed_forward_length": c.get("shared_expert_intermediate_size")
        or c.get("moe_shared_expert_intermediate_size"), "embedding_scale": c.get("embedding_multiplier"),
        "residual_scale": c.get("residual_multiplier"), "attention.scale": c.get("attention_multiplier"),
        "logit_scale": c.get("logits_scaling"), "shortconv.l_cache": c.get("conv_L_cache"),
        "final_logit_softcapping": c.get("final_logit_softcapping"),
        "attention.sliding_window": c.get("sliding_window"),
        "attention.head_count": heads, "feed_forward_length": c.get("intermediate_size", 0),
        "attention.layer_norm_rms_epsilon": next(c[k] for k in ("layer_norm_epsilon", "rms_norm_eps", "norm_eps")
                                                 if k in c) if "attention.layer_norm_epsilon" not in more else None,
    }  # fmt: skip
    if heads:
        head = c.get("head_dim") or c["hidden_size"] // heads
        rope = c.get("rope_parameters") or {}
        rope = rope.get("full_attention", rope)
        keys.update({"attention.key_length": head, "attention.value_length": head,
                     "attention.head_count_kv": c["num_key_value_heads"],
                     "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
                     "rope.dimension_count": int(head * rope.get("partial_rotary_factor", 1.0))})  # fmt: skip
    attends = [kind in ("attention", "full_attention") for kind in kinds]
    if arch in ("granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"):
        keys["attention.head_count_kv"] = [c["num_key_value_heads"] if one else 0 for one in attends]
    if arch == "jamba":
        keys["attention.head_count_kv"] = [
            c["num_key_value_heads"] if i % c["attn_layer_period"] == c["attn_layer_offset"] else 0
            for i in range(layers)]  # fmt: skip
    if arch in ("glm4moe", "lfm2moe"):
        keys["expert_gating_func"] = 2
    if arch in ("nemotron_h", "nemotron_h_moe"):
        width = c["intermediate_size"] if arch == "nemotron_h" else c["moe_intermediate_size"]
        keys["feed_forward_length"] = [width if kind in ("mlp", "moe") else 0 for kind in c["layers_block_type"]]
        if arch == "nemotron_h":
            keys.update({key: None for key in keys if key.startswith("expert_")})
    if arch == "lfm2":
        keys["feed_forward_length"] = lfm2_width(c)
    space(keys, c, arch)
    if arch in ("deepseek2", "deepseek32", "glm-dsa", "mistral4"):
        latent_keys(keys, c)
    if arch == "gemma4":
        gemma_keys(keys, c, layers)
    if arch == "granitehybrid":
        keys["rope.scaling.finetuned"] = c["position_embedding_type"] == "rope"
    if arch == "falcon-h1":
        keys["embedding_scale"] = None  # it is in the matrix
    for key, value in {**keys, **more}.items():
        if value is not None:
            add(out, key if key.startswith("xielu.") else f"{arch}.{key}", value)


def lfm2_width(c: C) -> int:
    wide = int(2 * c["intermediate_size"] / 3)
    return c["block_multiple_of"] * -(-wide // c["block_multiple_of"])


def space(keys: C, c: C, arch: str) -> None:
    if arch == "qwen3next":
        values = c["linear_num_value_heads"]
        keys.update({"ssm.conv_kernel": 4, "ssm.state_size": c["linear_key_head_dim"], "ssm.group_count":
                     c["linear_num_key_heads"], "ssm.time_step_rank": values, "ssm.inner_size":
                     values * c["linear_value_head_dim"], "full_attention_interval": 4})  # fmt: skip
    elif arch in ("mamba", "jamba"):
        inner = c.get("intermediate_size") if arch == "mamba" else c["mamba_expand"] * c["hidden_size"]
        keys.update({"ssm.conv_kernel": c.get("conv_kernel", 4), "ssm.inner_size": inner, "ssm.state_size":
                     c.get("state_size") or c["mamba_d_state"], "ssm.time_step_rank":
                     c.get("time_step_rank") or c["mamba_dt_rank"],
                     "ssm.dt_b_c_rms": c["model_type"] == "falcon_mamba"})  # fmt: skip
    elif arch in ("mamba2", "granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe"):
        count = c.get("mamba_n_heads") or c.get("mamba_num_heads") or c.get("num_heads")
        inner = c.get("mamba_d_ssm") or count * (c.get("mamba_head_dim") or c.get("mamba_d_head") or c.get("head_dim"))
        keys.update({"ssm.conv_kernel": 4, "ssm.inner_size": inner, "ssm.time_step_rank": count, "ssm.state_size":
                     c.get("mamba_d_state") or c.get("ssm_state_size") or c.get("state_size"), "ssm.group_count":
                     c.get("mamba_n_groups") or c.get("n_groups")})  # fmt: skip


def latent_keys(keys: C, c: C) -> None:
    rank, rope = c["kv_lora_rank"], c["rope_parameters"]
    keys.update({
        "attention.q_lora_rank": c["q_lora_rank"], "attention.kv_lora_rank": rank, "attention.head_count_kv": 1,
        "attention.key_length": rank + c["qk_rope_head_dim"], "attention.value_length": rank,
        "attention.key_length_mla": c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
        "attention.value_length_mla": c["v_head_dim"], "rope.dimension_count": c["qk_rope_head_dim"]})  # fmt: skip
    if "index_topk" in c:
        keys.update(
            {
                "attention.indexer.head_count": c["index_n_heads"],
                "attention.indexer.key_length": c["index_head_dim"],
                "attention.indexer.top_k": c["index_topk"],
            }
        )
    if "indexer_types" in c:
        keys["attention.indexer.types"] = [kind == "full" for kind in c["indexer_types"]]
    if c["model_type"] in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa"):
        keys.update({"expert_gating_func": 2, "expert_group_count": c["n_group"],
                     "expert_group_used_count": c["topk_group"]})  # fmt: skip
    elif c["model_type"] == "mistral4":
        keys["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    else:
        keys["expert_weights_norm"] = None
    if rope["rope_type"] == "yarn":
        keys.update({"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
                     "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
                     "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"]})  # fmt: skip


def gemma_keys(keys: C, c: C, layers: int) -> None:
    local = [kind == "sliding_attention" for kind in c["layer_types"]]
    shared = c["num_kv_shared_layers"]
    keys.update({
        "attention.key_length": c["global_head_dim"], "attention.value_length": c["global_head_dim"],
        "attention.key_length_swa": c["head_dim"], "attention.value_length_swa": c["head_dim"],
        "attention.shared_kv_layers": shared, "attention.sliding_window_pattern": local,
        "embedding_length_per_layer_input": c["hidden_size_per_layer_input"], "rope.dimension_count":
        c["global_head_dim"], "rope.dimension_count_swa": c["head_dim"], "rope.freq_base_swa": 10000.0})  # fmt: skip
    if c["use_double_wide_mlp"]:
        keys["feed_forward_length"] = [c["intermediate_size"] * (2 if i >= layers - shared else 1)
                                       for i in range(layers)]  # fmt: skip
    if c.get("num_global_key_value_heads"):
        keys["attention.head_count_kv"] = [c["num_key_value_heads"] if one else c["num_global_key_value_heads"]
                                           for one in local]  # fmt: skip


def add(out: Any, key: str, value: Any) -> None:
    if isinstance(value, list):
        out.add_array(key, value)
    elif isinstance(value, bool):
        out.add_bool(key, value)
    elif isinstance(value, str):
        out.add_string(key, value)
    elif isinstance(value, float):
        out.add_float32(key, value)
    else:
        out.add_uint32(key, value)


def models(name: str, folder: Path) -> tuple[Any, C, dict[str, Tensor]]:
    """Transformers' model, what its config says, and its tensors."""
    made, config, tensors = make(CASES[name][1], folder)
    said = {**CASES[name][1].to_dict(), **config}
    if name.startswith("gemma4"):  # the class keeps it layer by layer
        full = next(iter(said["per_layer_config"].values()))
        said |= {"global_head_dim": full["head_dim"], "num_global_key_value_heads": full.get("num_key_value_heads")}
    return made, said, tensors
