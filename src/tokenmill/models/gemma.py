"""Gemma 2 and Gemma 3 (text): norms around both blocks, local and global layers, soft-caps.

Gemma 3 norms queries and keys instead of capping scores, and rotates local layers with their own base.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.core.forward import ForwardContext, NormSpec
from tokenmill.layers.attention import Attention, attention_spec, separate_qkv
from tokenmill.layers.build import Build
from tokenmill.layers.linear import RowLinear
from tokenmill.layers.mlp import MLP, gated_mlp
from tokenmill.layers.norm import add_normed
from tokenmill.layers.rope import RopeSettings, make_rope, rope_settings
from tokenmill.models.common import layer_type, read_act, read_heads, read_sizes, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends

_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


class GemmaLayer:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))."""

    def __init__(self, attention: Attention, mlp: MLP, norms: list[NormSpec]) -> None:
        self.attention = attention
        self.mlp = mlp
        self.norms = norms

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        before, after, before_mlp, after_mlp = self.norms
        x = add_normed(x, self.attention(x, ctx, norm=before), after, ctx)
        return add_normed(x, self.mlp(x, ctx, norm=before_mlp), after_mlp, ctx)


def build(c: ModelConfig, b: Build) -> Decoder:
    """Gemma 2 or Gemma 3 from its config."""
    third = c.architecture == "Gemma3ForCausalLM"
    sizes, heads = read_sizes(c, tied=True), read_heads(c)
    act = read_act(c, gated=True, default="gelu_pytorch_tanh", key="hidden_activation")
    inner, bias = c.need("intermediate_size", int), c.get("attention_bias", bool, False)
    eps, scale = c.get("rms_norm_eps", float, 1e-6, low=0.0), c.get("query_pre_attn_scalar", float, 256.0, low=1e-6)
    softcap = c.get("attn_logit_softcapping", float, 0.0, low=1e-6)
    final = c.get("final_logit_softcapping", float, 0.0, low=1e-6)
    pattern = c.get("sliding_window_pattern", int, 6 if third else 2)
    window = c.need("sliding_window", int)
    around = [rms(c, name, offset=1.0) for name in _NORMS]

    def layer(body: Build, index: int) -> GemmaLayer:
        at = body.at(f"layers.{index}")
        inside = at.at("self_attn")
        kind = layer_type(c, index, "sliding_attention" if (index + 1) % pattern else "full_attention")
        norm = [inside.norm(name, heads.dim, eps, offset=1.0) if third else None for name in ("q_norm", "k_norm")]
        spec = attention_spec(
            b,
            heads,
            scale=scale**-0.5,
            rope=make_rope(b, _rope(c, heads.dim, kind, third)),
            window=window if kind == "sliding_attention" else 0,
            softcap=softcap,
            norms=(norm[0], norm[1]),
        )
        output = RowLinear(inside, heads.width, sizes.hidden, "o_proj", bias=bias)
        attention = Attention(separate_qkv(inside, sizes.hidden, heads, bias=bias), output, spec)
        return GemmaLayer(attention, gated_mlp(at.at("mlp"), sizes.hidden, inner, act), [norm(at) for norm in around])

    # The scale is rounded to the compute dtype, as these models were trained.
    embed_scale = float(torch.tensor(sizes.hidden**0.5, dtype=b.dtype))
    ends = Ends(norm=rms(c, "norm", offset=1.0), scale=embed_scale, softcap=final)
    return Decoder(b, b.under("model", "embed_tokens.weight"), sizes, ends, layer)


def _rope(c: ModelConfig, dim: int, kind: str, third: bool) -> RopeSettings:
    """Gemma 3's local layers have their own base and no scaling, in either spelling."""
    config: dict[str, Any] = dict(c.data)
    if third:
        local = kind == "sliding_attention"
        nested = c.get("rope_parameters", dict, {})
        if nested and not any(isinstance(value, dict) for value in nested.values()):
            raise c.refuse("rope_parameters", "must say it for each kind of layer (full_attention, sliding_attention).")
        if "rope_type" not in c.get("rope_scaling", dict, {"rope_type": ""}):
            raise c.refuse("rope_scaling", "needs a 'rope_type'.")
        base = c.get("rope_local_base_freq" if local else "rope_theta", float, 10000.0 if local else 1e6, low=1.0)
        own = ModelConfig(nested, "rope_parameters").get(kind, dict, {})
        scaled = {} if local else c.get("rope_scaling", dict, {})
        config |= {"rope_theta": base, "rope_parameters": {**own, **scaled}, "rope_scaling": None}
    found = rope_settings(config, dim)
    if found.dim != dim:
        raise ModelError("config.json: 'partial_rotary_factor' is not supported in Gemma.")
    return found
