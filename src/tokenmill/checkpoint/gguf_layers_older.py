"""GGUF tensor names of families from before root-mean-square norms were usual. Owns: one table per architecture, and
how the converter's changes are undone there.

Must not know: metadata other than the config made from it, tensor data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.checkpoint.gguf_file import TensorInfo
from tokenmill.checkpoint.gguf_layers import Names, Part, attention, both, feed
from tokenmill.checkpoint.gguf_source import Places, TensorSource
from tokenmill.core.errors import ModelError

_Config = Mapping[str, Any]
MAX_HEADS = 4096


def _rows(info: TensorInfo, heads: int, keys: int) -> int:
    """One head's rows in a tensor that holds queries, keys and values."""
    if info.shape[0] % (heads + 2 * keys):
        raise ModelError(f"Tensor {info.name!r} of {info.shape[0]} rows cannot hold {heads} heads, {keys} of keys.")
    return info.shape[0] // (heads + 2 * keys)


def _head_by_head(info: TensorInfo, config: _Config) -> dict[str, Any]:
    """Turns queries, keys and values that lie one after the other into one head after the other, as these families have
    them."""
    heads = config["num_attention_heads"]
    width = _rows(info, heads, heads)
    return {"rows": tuple((part * heads + head) * width + row
                          for head in range(heads) for part in range(3) for row in range(width))}  # fmt: skip


def _groups(info: TensorInfo, config: _Config) -> dict[str, Any]:
    """The same for Falcon: the queries of a group, then the head of keys and the head of values that they use."""
    if not config["new_decoder_architecture"]:
        return {}
    heads, keys = config["num_attention_heads"], config["num_kv_heads"]
    width, share = _rows(info, heads, keys), heads // keys
    order = []
    for group in range(keys):
        order += [*range(group * share, group * share + share), heads + group, heads + keys + group]
    return {"rows": tuple(head * width + row for head in order for row in range(width))}


def _turned(info: TensorInfo, config: _Config) -> dict[str, Any]:
    return {"turned": True} if len(info.shape) == 2 else {}


def _flat_experts(info: TensorInfo, config: _Config) -> dict[str, Any]:
    """A tensor that holds all experts, one above the other."""
    return {"lifted": (info.shape[0] * info.shape[1], info.shape[2])} if len(info.shape) == 3 else {}


def _flat_turned(info: TensorInfo, config: _Config) -> dict[str, Any]:
    """The same, with each expert transposed."""
    if len(info.shape) != 3:
        return {}
    return {"turned": True, "lifted": (info.shape[0] * info.shape[2], info.shape[1])}


def _head_norms(at: str, info: TensorInfo, config: _Config) -> Places:
    """One norm per head, stacked."""
    if len(info.shape) != 2 or info.shape[0] > MAX_HEADS:
        raise ModelError(f"Tensor {info.name!r} should hold one norm per head, but has the shape {info.shape}.")
    which = "q" if ".attn_q_norm." in info.name else "k"
    return [(f"{at}self_attn.{which}_layernorm.norms.{head}.weight", TensorSource(info, expert=head))
            for head in range(info.shape[0])]  # fmt: skip


def _apart(at: str, info: TensorInfo, config: _Config) -> Places:
    """Splits queries, keys and values, which lie one after the other, into three matrices."""
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    width, kind, start = _rows(info, heads, keys), info.name.rpartition(".")[2], 0
    found: Places = []
    for name, count in (("q", heads), ("k", keys), ("v", keys)):
        rows = tuple(range(start, start + count * width))
        found.append((f"{at}self_attn.{name}_proj.{kind}", TensorSource(info, rows=rows)))
        start += count * width
    return found


def _top(body: str, embedding: str, norm: str, head: str = "lm_head") -> dict[str, Part]:
    return both({"token_embd": f"{body}.{embedding}", "output_norm": f"{body}.{norm}", "output": head})


def _norms(first: str = "input_layernorm", second: str = "post_attention_layernorm") -> dict[str, Part]:
    return both({"attn_norm": first, "ffn_norm": second})


_LAST = _top("model", "embed_tokens", "norm")
_WIDE = both({"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"})
_QKV = "query_key_value"
_GPT_TOP = {**_top("transformer", "wte", "ln_f"), "position_embd.weight": "transformer.wpe.weight"}
_GPT_NORMS = _norms("ln_1", "ln_2")
_GPT_MATRICES = {"attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_up": "mlp.c_fc",
                 "ffn_down": "mlp.c_proj"}  # fmt: skip

OLDER_LAYERS: dict[str, Names] = {
    "phi2": Names({
        **attention(out="dense"), **both({"attn_norm": "input_layernorm", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}),
    }, top=_top("model", "embed_tokens", "final_layernorm"),
        several={"attn_qkv.weight": _apart, "attn_qkv.bias": _apart}),
    "phimoe": Names({**attention(), **_norms(), "ffn_gate_inp.weight": "block_sparse_moe.gate.weight"},
                    {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}, "block_sparse_moe.experts",
                    _LAST, several={"attn_qkv.weight": _apart, "attn_qkv.bias": _apart}),
    "stablelm": Names({**attention(), **_norms(), **feed("mlp")}, top=_LAST,
                      several={"attn_q_norm.weight": _head_norms, "attn_k_norm.weight": _head_norms}),
    "gptneox": Names({
        **_norms(), **_WIDE, **both({"attn_output": "attention.dense"}),
        **{f"attn_qkv.{kind}": (f"attention.{_QKV}.{kind}", _head_by_head) for kind in ("weight", "bias")},
    }, top=_top("gpt_neox", "embed_in", "final_layer_norm", "embed_out"), body="gpt_neox.layers"),
    "bloom": Names({
        **_norms(), **_WIDE, **both({"attn_output": "self_attention.dense"}),
        **{f"attn_qkv.{kind}": (f"self_attention.{_QKV}.{kind}", _head_by_head) for kind in ("weight", "bias")},
    }, top={**_top("transformer", "word_embeddings", "ln_f"),
            **both({"token_embd_norm": "transformer.word_embeddings_layernorm"})}, body="transformer.h"),
    "mpt": Names({
        "attn_norm.weight": "norm_1.weight", "ffn_norm.weight": "norm_2.weight", "attn_qkv.weight": "attn.Wqkv.weight",
        "attn_output.weight": "attn.out_proj.weight", "ffn_up.weight": "ffn.up_proj.weight",
        "ffn_down.weight": "ffn.down_proj.weight",
    }, top=_top("transformer", "wte", "norm_f"), body="transformer.blocks"),
    "dbrx": Names({
        "attn_norm.weight": "norm_attn_norm.norm_1.weight", "attn_output_norm.weight": "norm_attn_norm.norm_2.weight",
        "attn_qkv.weight": "norm_attn_norm.attn.Wqkv.weight", "ffn_gate_inp.weight": "ffn.router.layer.weight",
        "attn_output.weight": "norm_attn_norm.attn.out_proj.weight",
        "ffn_gate_exps.weight": ("ffn.experts.mlp.w1", _flat_experts),
        "ffn_up_exps.weight": ("ffn.experts.mlp.v1", _flat_experts),
        "ffn_down_exps.weight": ("ffn.experts.mlp.w2", _flat_turned),
    }, top=_top("transformer", "wte", "norm_f"), body="transformer.blocks"),
    "olmo": Names({**attention(woven=True), **feed("mlp")}, top=_LAST),
    "starcoder": Names({**_GPT_NORMS, **both(_GPT_MATRICES)}, top=_GPT_TOP, body="transformer.h"),
    "gpt2": Names({
        **_GPT_NORMS, **both(_GPT_MATRICES),
        **{f"{theirs}.weight": (f"{ours}.weight", _turned) for theirs, ours in _GPT_MATRICES.items()},
    }, top=_GPT_TOP, body="transformer.h"),
}  # fmt: skip


def _falcon(two_norms: bool) -> Names:
    """Falcon calls its first norm differently if there are two."""
    norms = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"} if two_norms else {"attn_norm": "input_layernorm"}
    return Names({
        **both(norms), "attn_qkv.weight": (f"self_attention.{_QKV}.weight", _groups),
        "attn_output.weight": "self_attention.dense.weight", "ffn_up.weight": "mlp.dense_h_to_4h.weight",
        "ffn_down.weight": "mlp.dense_4h_to_h.weight",
    }, top=_top("transformer", "word_embeddings", "ln_f"), body="transformer.h")  # fmt: skip


def older_names(arch: str, config: _Config) -> Names | None:
    """The table of an architecture; None: it is not in this file."""
    if arch == "falcon":
        return _falcon(config.get("num_ln_in_parallel_attn") == 2)
    return OLDER_LAYERS.get(arch)
