"""Older families, as Transformers builds them and llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tests.cpu.gguf.gguf_layers_helpers import C, write
from tests.cpu.gguf.writing import permute
from tests.cpu.models.parity import make
from torch import Tensor

USUAL = ("phi2", "stablelm", "gptneox", "bloom", "falcon-40b", "mpt", "olmo", "starcoder", "gpt2", "dbrx")
NO_IDS: C = {"bos_token_id": None, "eos_token_id": None}
BASE: C = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
           "num_attention_heads": 4, "max_position_embeddings": 256}  # fmt: skip
GPT: C = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, **NO_IDS}
FALCON: C = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NEWER: C = {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}


def same(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    return {name: x}


def one_after_another(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    """All queries, all keys, all values."""
    name = name.replace("transformer.", "") if c["model_type"] == "bloom" else name
    if "query_key_value" not in name:
        return {name: x}
    parts = x.reshape(4, 3, -1, *x.shape[1:])
    return {name: torch.cat([parts[:, i].reshape(-1, *x.shape[1:]) for i in range(3)])}


def groups(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    if "query_key_value" not in name:
        return {name: x}
    keys = c["num_kv_heads"] if c["new_decoder_architecture"] else 1
    parts = x.view(keys, 4 // keys + 2, 16, 64)
    return {
        name: torch.cat([parts[:, :-2].reshape(-1, 64), parts[:, -2].reshape(-1, 64), parts[:, -1].reshape(-1, 64)])
    }


def turned(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    return {name: x.t() if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else x}


def woven(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    kinds = {"q_proj.weight": "num_attention_heads", "k_proj.weight": "num_key_value_heads"}
    return {name: next((permute(x, c[key]) for end, key in kinds.items() if name.endswith(end)), x)}


def dbrx(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
    """Experts apart, the last matrix turned."""
    if ".experts." not in name:
        return {name: x}
    parts = x.view(4, 256, 64)
    return {f"{name}.weight": parts.transpose(1, 2) if name.endswith("w2") else parts}


class Stacked:
    """The norms of a layer's heads, which are one tensor once all are there."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Tensor]] = {}

    def __call__(self, name: str, x: Tensor, c: C) -> dict[str, Tensor]:
        at, dot, _ = name.partition(".norms.")
        if not dot:
            return {name: x}
        parts = self.seen.setdefault(at, [])
        parts.append(x)
        count = c["num_attention_heads" if at.endswith("q_layernorm") else "num_key_value_heads"]
        return {f"{at}.weight": torch.stack(parts)} if len(parts) == count else {}


class Fused:
    """Queries, keys and values in one tensor, as older files have them."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[int, Tensor]]] = {}

    def __call__(self, name: str, x: Tensor, c: C) -> dict[str, Tensor]:
        if not any(f".{part}_proj." in name for part in "qkv"):
            return {name: x}
        layer, kind = name.split(".")[2], name.rpartition(".")[2]
        parts = self.seen.setdefault(f"{layer}.{kind}", [])
        parts.append(("qkv".index(name.split("_proj")[0][-1]), x))
        if len(parts) < 3:
            return {}
        ordered = [part for _, part in sorted(parts, key=lambda one: one[0])]
        return {f"blk.{layer}.attn_qkv.{kind}": torch.cat(ordered)}


def rotating(part: float) -> Callable[[C], C]:
    """What the converters write of families that rotate a part of each head: no base, which is then the usual one."""
    return lambda c: {"rope.dimension_count": int(part * 16), "rope.freq_base": None, "attention.key_length": None,
                      "attention.value_length": None}  # fmt: skip


def still(c: C) -> C:
    """Of families that do not rotate."""
    return {"rope.dimension_count": None, "rope.freq_base": None, "attention.key_length": None,
            "attention.value_length": None}  # fmt: skip


def cut(c: C) -> C:
    return {**still(c), "attention.clamp_kqv": c["attn_config"]["clip_qkv"], "attention.max_alibi_bias": 8.0}


def mixed(c: C) -> C:
    return {"expert_count": 4, "expert_used_count": 2, "attention.clamp_kqv": c["attn_config"]["clip_qkv"],
            "rope.dimension_count": None}  # fmt: skip


Case = tuple[str, Any, Callable[[], Any], Callable[[C], C]]
PHI = hf.PhiConfig(**BASE)
STABLE: C = {**BASE, "num_key_value_heads": 2}
CASES: dict[str, Case] = {
    "phi2": ("PHI2", PHI, lambda: same, rotating(0.5)),
    "phi2-fused": ("PHI2", PHI, Fused, rotating(0.5)),
    "stablelm": ("STABLELM", hf.StableLmConfig(**STABLE, use_qkv_bias=True, qk_layernorm=True), Stacked,
                 rotating(0.25)),
    "stablelm-parallel": ("STABLELM", hf.StableLmConfig(**STABLE, use_parallel_residual=True), Stacked, rotating(0.25)),
    "gptneox": ("GPTNEOX", hf.GPTNeoXConfig(**BASE), lambda: one_after_another, rotating(0.25)),
    "gptneox-serial": ("GPTNEOX", hf.GPTNeoXConfig(**BASE, use_parallel_residual=False), lambda: one_after_another,
                       lambda c: {**rotating(0.25)(c), "use_parallel_residual": False}),
    "bloom": ("BLOOM", hf.BloomConfig(vocab_size=96, hidden_size=64, n_layer=2, n_head=4, **NO_IDS),
              lambda: one_after_another, still),
    "falcon-7b": ("FALCON", hf.FalconConfig(**FALCON), lambda: groups, still),
    "falcon-untied": ("FALCON", hf.FalconConfig(**FALCON, tie_word_embeddings=False), lambda: groups, still),
    "bloom-untied": ("BLOOM", hf.BloomConfig(
        vocab_size=96, hidden_size=64, n_layer=2, n_head=4, tie_word_embeddings=False, **NO_IDS),
        lambda: one_after_another, still),
    "gpt2-untied": ("GPT2", hf.GPT2Config(**GPT, tie_word_embeddings=False), lambda: turned, still),
    "mpt-untied": ("MPT", hf.MptConfig(
        vocab_size=96, d_model=64, n_heads=4, n_layers=2, max_seq_len=256, tie_word_embeddings=False), lambda: same,
        cut),
    "starcoder-untied": ("STARCODER", hf.GPTBigCodeConfig(**GPT, tie_word_embeddings=False), lambda: same, still),
    "gptneox-tied": ("GPTNEOX", hf.GPTNeoXConfig(**BASE, tie_word_embeddings=True), lambda: one_after_another,
                     rotating(0.25)),
    "falcon-40b": ("FALCON", hf.FalconConfig(**NEWER), lambda: groups, still),
    "falcon-11b": ("FALCON", hf.FalconConfig(**NEWER, num_ln_in_parallel_attn=1), lambda: groups, still),
    "mpt": ("MPT", hf.MptConfig(vocab_size=96, d_model=64, n_heads=4, n_layers=2, max_seq_len=256,
                                attn_config={"clip_qkv": 0.8}), lambda: same, cut),
    "olmo": ("OLMO", hf.OlmoConfig(**BASE, num_key_value_heads=2, clip_qkv=0.8), lambda: woven,
             lambda c: {"attention.clamp_kqv": c["clip_qkv"]}),
    "starcoder": ("STARCODER", hf.GPTBigCodeConfig(**GPT), lambda: same, still),
    "dbrx": ("DBRX", hf.DbrxConfig(
        vocab_size=96, d_model=64, n_heads=4, n_layers=2, max_seq_len=256,
        attn_config={"clip_qkv": 0.7, "kv_n_heads": 2, "rope_theta": 10000.0}, ffn_config={
            "ffn_hidden_size": 256, "moe_num_experts": 4, "moe_top_k": 2}), lambda: dbrx, mixed),
    "gpt2": ("GPT2", hf.GPT2Config(**GPT), lambda: turned, still),
}  # fmt: skip


def written(name: str, folder: Path, kind: str = "F32") -> tuple[Any, Path]:
    """Transformers' model, and the file."""
    arch, config, change, more = CASES[name]
    reference, said, tensors = make(config, folder)
    said = {**config.to_dict(), **said}
    names = {
        "hidden_size": ("d_model", "n_embd"),
        "num_hidden_layers": ("n_layers", "n_layer"),
        "num_attention_heads": ("n_heads", "n_head"),
        "max_position_embeddings": ("max_seq_len", "n_positions"),
    }
    for usual, others in names.items():
        said[usual] = next((said[other] for other in (usual, *others) if said.get(other)), 256)
    keys = said.get("num_key_value_heads") or said["num_attention_heads"]
    if arch == "DBRX":
        keys = said["attn_config"]["kv_n_heads"]
    if arch in ("FALCON", "STARCODER"):
        keys = said["num_kv_heads"] if said.get("new_decoder_architecture") else 1
    said |= {"num_key_value_heads": keys, "intermediate_size": 256}
    own = {**more(said), "attention.layer_norm_epsilon": said.get("layer_norm_eps", 1e-5)}
    write(folder / f"{kind}.gguf", arch, said, tensors, kind, more=own, change=change())
    return reference, folder / f"{kind}.gguf"
