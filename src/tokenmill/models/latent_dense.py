"""Youtu and MiniCPM3: latent attention, plain feed-forward layers, and (MiniCPM3) factors on embeddings, blocks and
logits."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.layers.build import Build
from tokenmill.layers.mlp import gated_mlp
from tokenmill.models.common import Sandwich, as_unit, read_act, read_sizes, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends
from tokenmill.models.latent_attention import LatentAttention


@dataclass(frozen=True)
class Factors:
    """Factors of the embeddings, of a block's result, and of the logits."""

    embeddings: float = 1.0
    blocks: float = 1.0
    logits: float = 1.0


def build(c: ModelConfig, b: Build) -> Decoder:
    """Build one of the two from its config."""
    sizes, act = read_sizes(c), read_act(c, gated=True, default="silu")
    inner = c.need("intermediate_size", int)
    factors = _factors(c, sizes.hidden, sizes.layers) if c.architecture == "MiniCPM3ForCausalLM" else Factors()
    unit = as_unit(b, factors.blocks)
    if not c.has("v_head_dim"):
        value = sizes.hidden // c.need("num_attention_heads", int)
        c = ModelConfig({**c.data, "v_head_dim": value}, architecture=c.architecture)

    def layer(body: Build, index: int) -> Sandwich:
        at = body.at(f"layers.{index}")
        before = [rms(c, name, unit=unit)(at) for name in ("input_layernorm", "post_attention_layernorm")]
        attention = LatentAttention(c, at.at("self_attn"), sizes.hidden)
        blocks = (attention, gated_mlp(at.at("mlp"), sizes.hidden, inner, act))
        return Sandwich(blocks, before, (None, None), factors.blocks / unit)

    ends = Ends(norm=rms(c, "norm", unit=unit), scale=factors.embeddings, logit_scale=factors.logits, unit=unit)
    return Decoder(b, b.under("model", "embed_tokens.weight"), sizes, ends, layer)


def _factors(c: ModelConfig, hidden: int, layers: int) -> Factors:
    return Factors(
        embeddings=c.get("scale_emb", float, 12.0),
        blocks=c.get("scale_depth", float, layers**0.5) / layers**0.5,
        logits=c.get("dim_model_base", float, float(hidden), low=1e-6) / hidden,
    )
