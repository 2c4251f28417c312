"""Families of several shapes, as Transformers builds them and llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tests.cpu.gguf.gguf_layers_helpers import BASE, MIX, C, granite, woven, write
from tests.cpu.gguf.gguf_models_helpers import LLAMA3, YARN
from tests.cpu.gguf.writing import llama3_factors
from tests.cpu.models.parity import make
from torch import Tensor

USUAL = ("gemma3n", "llama4", "ernie4_5-moe", "afmoe", "olmo3", "bitnet", "mistral3", "jais2", "exaone", "exaone-moe",
         "minicpm3", "phimoe", "apertus", "exaone4", "mimo2")  # fmt: skip
LATENT: C = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 40}
MINISTRAL3 = {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
              "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}  # fmt: skip
PHIMOE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_mscale": 1.243163121016122, "long_mscale":
          1.243163121016122, "original_max_position_embeddings": 4096, "short_factor": [1.0 + i / 8 for i in range(8)],
          "long_factor": [1.0 + i / 8 for i in range(8)]}  # fmt: skip
MINICPM3 = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.25, 1.5, 1.75],
            "long_factor": [1.0, 1.25, 1.5, 1.75], "original_max_position_embeddings": 256}  # fmt: skip
WINDOWS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]


def plus_one(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    return {name: x + 1.0 if name.endswith("norm.weight") else x}


def same(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    return {name: x}


def mimo2(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    return {f"{name}.weight": x} if name.endswith("sink_bias") else bias(name, x, c)


def narrow_values(c: C) -> C:
    windows = [kind == "sliding_attention" for kind in c["layer_types"]]
    keys = c["num_key_value_heads"]
    return {"attention.head_count_kv": [keys * (1 + window) for window in windows], "attention.value_length": 8,
            "attention.sliding_window": c["sliding_window"] - 1, "attention.sliding_window_pattern": windows,
            "rope.freq_base": 5e6, "rope.freq_base_swa": 1e4, "rope.dimension_count": 4}  # fmt: skip


def bias(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    if name.endswith(".expert_bias"):
        return {name + ".bias": x}
    return {name.replace("e_score_correction_bias", "e_score_correction.bias"): x}


def llama4(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    """Gates and ups apart, the other way round."""
    if name.endswith("experts.gate_up_proj"):
        layer = name.split(".")[2]
        gate, up = x.transpose(1, 2).chunk(2, dim=1)
        return {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
    return {f"{name}.weight": x.transpose(1, 2)} if name.endswith("experts.down_proj") else {name: x}


def bitnet(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    """The names of the family's first models, which the format's library knows."""
    return {name.replace("attn_sub_norm", "inner_attn_ln").replace("ffn_sub_norm", "ffn_layernorm"): x}


def without_numbers(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    """The numbers of activations are keys."""
    return {} if ".act_fn." in name else {name: x}


class Streams:
    """Projections of streams, which are one tensor once all are there."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Tensor]] = {}

    def __call__(self, name: str, x: Tensor, c: C) -> dict[str, Tensor]:
        if "altup_projections" not in name and "altup_unembed" not in name:
            return {name + ".weight" if name.endswith("_scale") else name: x}
        at = name.rsplit(".", 2)[0]
        parts = self.seen.setdefault(at, [])
        parts.append(x)
        return {f"{at}.weight": torch.stack(parts)} if len(parts) == c["altup_num_inputs"] - 1 else {}


def gemma3n(c: C) -> C:
    points = torch.distributions.normal.Normal(0, 1).icdf(torch.tensor(c["activation_sparsity_pattern"]))
    return {"altup.num_inputs": c["altup_num_inputs"], "altup.active_idx": c["altup_active_idx"],
            "embedding_length_per_layer_input": c["hidden_size_per_layer_input"],
            "attention.shared_kv_layers": c["num_kv_shared_layers"], "feed_forward_length": c["intermediate_size"],
            "activation_sparsity_scale": points.tolist(), "rope.freq_base": 1e6, "attention.sliding_window_pattern":
            [kind == "sliding_attention" for kind in c["layer_types"]]}  # fmt: skip


def layered(c: C) -> C:
    return {"attention.layer_norm_epsilon": c.get("layer_norm_eps") or c["norm_eps"],
            "logit_scale": c.get("logit_scale")}  # fmt: skip


def shared(c: C) -> C:
    return {"expert_shared_count": c["num_shared_experts"], "expert_weights_scale": c["route_scale"],
            "expert_weights_norm": True}  # fmt: skip


def ernie(c: C) -> C:
    return {"expert_count": c["moe_num_experts"], "expert_used_count": c["moe_k"], "interleave_moe_layer_step": 1,
            "leading_dense_block_count": c["moe_layer_start_index"],
            "expert_shared_count": c["moe_num_shared_experts"]}  # fmt: skip


def hunyuan(c: C) -> C:
    inner = c["intermediate_size"]
    return {"expert_used_count": c["moe_topk"], "expert_feed_forward_length": inner, "expert_shared_count": 1,
            "expert_shared_feed_forward_length": inner}  # fmt: skip


def chunks(c: C) -> C:
    return {"feed_forward_length": c["intermediate_size_mlp"], "expert_feed_forward_length": c["intermediate_size"],
            "interleave_moe_layer_step": c["interleave_moe_layer_step"]}  # fmt: skip


def olmo3(c: C) -> C:
    rope = c["rope_parameters"]["full_attention"]
    return {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in c["layer_types"]],
            "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"]}  # fmt: skip


def stretched_by_one(c: C) -> C:
    act = {} if c["hidden_act"] == "silu" else {"hidden_activation": c["hidden_act"]}
    return {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0, **act}


def tempered(c: C) -> C:
    rope = c["rope_parameters"]
    return {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"], "attention.temperature_scale":
            rope["llama_4_scaling_beta"], "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"], "rope.scaling.yarn_beta_slow": rope["beta_slow"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"]}  # fmt: skip


def exaone(c: C) -> C:
    return {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in c["layer_types"]],
            "expert_gating_func": 2, "expert_shared_count": c["num_shared_experts"], "rope.scaling.type": "none",
            "expert_shared_feed_forward_length": c["moe_intermediate_size"] * c["num_shared_experts"],
            "leading_dense_block_count": 1}  # fmt: skip


def latent(c: C) -> C:
    return {"attention.key_length": 24, "attention.value_length": None, "rope.dimension_count": 8, "rope.freq_base":
            None, "attention.kv_lora_rank": 32, "attention.q_lora_rank": 40}  # fmt: skip


def factored(c: C) -> C:
    rope = c["rope_parameters"]
    return {"rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.attn_factor": 1.19, "expert_feed_forward_length": None}  # fmt: skip


def nothing(c: C) -> C:
    return {}


def inner(c: C) -> C:
    return {"expert_feed_forward_length": c["intermediate_size"]}


Case = tuple[str, Any, Callable[[], Any], Callable[[C], C]]
CASES: dict[str, Case] = {
    "gemma3n": ("GEMMA3N", hf.Gemma3nTextConfig(
        **{**BASE, "intermediate_size": [96, 80, 96, 64]}, head_dim=16, sliding_window=20, layer_types=WINDOWS,
        vocab_size_per_layer_input=96, hidden_size_per_layer_input=8, laurel_rank=6, num_kv_shared_layers=1,
        activation_sparsity_pattern=[0.95, 0.6, 0.0, 0.0], pad_token_id=0), Streams, gemma3n),
    "llama4": ("LLAMA4", hf.Llama4TextConfig(
        **BASE, head_dim=16, num_local_experts=4, intermediate_size_mlp=48, interleave_moe_layer_step=2,
        tie_word_embeddings=False), lambda: llama4, chunks),
    "olmoe": ("OLMOE", hf.OlmoeConfig(**BASE, num_experts=4, num_experts_per_tok=2), lambda: same, nothing),
    "granitemoe": ("GRANITE_MOE", hf.GraniteMoeConfig(
        **BASE, num_local_experts=4, embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.2,
        logits_scaling=2.0), lambda: granite, inner),
    "granitemoe-shared": ("GRANITE_MOE", hf.GraniteMoeSharedConfig(
        **BASE, num_local_experts=4, shared_intermediate_size=40, attention_multiplier=0.2), lambda: granite, inner),
    "dots1": ("DOTS1", hf.Dots1Config(
        **BASE, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=2,
        first_k_dense_replace=1, routed_scaling_factor=1.5, norm_topk_prob=True, n_group=1, topk_group=1,
        sliding_window=None), lambda: bias, nothing),
    "ernie4_5-moe": ("ERNIE4_5_MOE", hf.Ernie4_5_MoeConfig(
        **BASE, moe_num_experts=6, moe_k=3, moe_intermediate_size=32, moe_num_shared_experts=2, rope_theta=10000.0),
        lambda: bias, ernie),
    "hunyuan-moe": ("HUNYUAN_MOE", hf.HunYuanMoEV1Config(**BASE, head_dim=16, num_experts=4, moe_topk=2), lambda: same,
                    hunyuan),
    "mimo2": ("MIMO2", hf.MiMoV2FlashConfig(
        **BASE, head_dim=12, v_head_dim=8, sliding_window=20, layer_types=WINDOWS, n_routed_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=32), lambda: mimo2, narrow_values),
    "minimax-m2": ("MINIMAXM2", hf.MiniMaxM2Config(
        **BASE, head_dim=16, num_local_experts=6, num_experts_per_tok=3, rotary_dim=8), lambda: bias, lambda c: {
            **inner(c), "rope.dimension_count": 8}),
    "afmoe": ("AFMOE", hf.AfmoeConfig(
        **BASE, **MIX, head_dim=16, sliding_window=20, mup_enabled=True, route_scale=1.7, num_dense_layers=1),
        lambda: bias, shared),
    "gemma": ("GEMMA", hf.GemmaConfig(**BASE, head_dim=16), lambda: plus_one, nothing),
    "command-r": ("COMMAND_R", hf.CohereConfig(**BASE, use_qk_norm=True, logit_scale=0.5), lambda: same, layered),
    "nemotron": ("NEMOTRON", hf.NemotronConfig(**BASE, partial_rotary_factor=0.5), lambda: plus_one, layered),
    "olmo3": ("OLMO2", hf.Olmo3Config(
        **BASE, sliding_window=20, layer_types=WINDOWS, rope_parameters={
            "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}),
        lambda: same, olmo3),
    "apertus": ("APERTUS", hf.ApertusConfig(**BASE, rope_parameters=LLAMA3), lambda: without_numbers, nothing),
    "bitnet": ("BITNET", hf.BitNetConfig(
        **BASE, hidden_act="silu", tie_word_embeddings=True), lambda: bitnet, stretched_by_one),
    "bitnet-relu2": ("BITNET", hf.BitNetConfig(**BASE, tie_word_embeddings=True), lambda: bitnet, stretched_by_one),
    "mistral3": ("MISTRAL3", hf.Ministral3Config(
        **BASE, head_dim=16, sliding_window=None, rope_parameters=MINISTRAL3), lambda: woven, tempered),
    "mistral3-text": ("MISTRAL3", hf.MistralConfig(**BASE, sliding_window=None), lambda: woven, nothing),
    "jais2": ("JAIS2", hf.Jais2Config(**BASE), lambda: same, layered),
    "exaone4": ("EXAONE4", hf.Exaone4Config(
        **BASE, head_dim=16, sliding_window=20, layer_types=WINDOWS), lambda: same, lambda c: {
            "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in c["layer_types"]]}),
    "exaone": ("EXAONE", hf.LlamaConfig(**BASE), lambda: same, nothing),
    "exaone-moe": ("EXAONE_MOE", hf.ExaoneMoeConfig(
        **BASE, **MIX, head_dim=16, sliding_window=20, num_shared_experts=2, layer_types=WINDOWS), lambda: bias,
        exaone),
    "minicpm3": ("MINICPM3", hf.MiniCPM3Config(
        **{**BASE, "num_key_value_heads": 4}, **LATENT, v_head_dim=16, rope_parameters=MINICPM3), lambda: same, latent),
    "phimoe": ("PHIMOE", hf.PhimoeConfig(
        **{**BASE, "max_position_embeddings": 131072}, num_local_experts=4, num_experts_per_tok=2, attention_bias=True,
        lm_head_bias=True, sliding_window=None, rope_parameters=PHIMOE), lambda: same, factored),
}  # fmt: skip
FACTORS = {"phimoe": PHIMOE, "minicpm3": MINICPM3}


def written(name: str, folder: Path) -> tuple[Any, Path]:
    """Transformers' model, and the file."""
    arch, config, change, more = CASES[name]
    reference, said, tensors = make(config, folder)
    said = {**config.to_dict(), **said}
    if name in FACTORS:
        stored = {
            f"rope_factors_{one}.weight": torch.tensor(FACTORS[name][f"{one}_factor"]) for one in ("long", "short")
        }
        tensors |= stored
    keys = more(said)
    if name == "apertus":
        tensors["rope_freqs.weight"] = torch.tensor(llama3_factors(LLAMA3, 16))
        for one in ("alpha_p", "alpha_n", "beta", "eps"):
            keys[f"xielu.{one}"] = [float(tensors[f"model.layers.{i}.mlp.act_fn.{one}"]) for i in range(4)]
    write(folder / "m.gguf", arch, said, tensors, more=keys, change=change())
    return reference, folder / "m.gguf"
