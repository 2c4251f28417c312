"""Latent attention: one small vector per token is cached. Owns: its products, and how they are absorbed.

The up-projections of keys and values are absorbed: queries are carried into the latent space, and attention's result
is carried out of it, so that the cache is read as stored. A backend may do without for long prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenmill.compute.adapters import Forms
from tokenmill.compute.forward import AttentionSpec, ForwardContext, KVSpec, NormSpec, Touches
from tokenmill.layers.attention import temperatures
from tokenmill.layers.block import Projected
from tokenmill.layers.build import Build
from tokenmill.layers.linear import ColumnLinear, RowLinear, Rows
from tokenmill.layers.rope import attention_gain, make_rope
from tokenmill.models.config import ModelConfig
from tokenmill.models.family_row import Switch
from tokenmill.models.key_index import MakeIndex
from tokenmill.models.parts import on
from tokenmill.models.positions import mistral4_rope, span_temper, whole_rope
from tokenmill.models.rules import check_latent_sizes

_EPS = 1e-6
"""The epsilon of the norms inside attention, whatever the config's rms_norm_eps is."""


@dataclass(frozen=True)
class Latent:
    """What sets a family's latent attention apart."""

    rotates: bool = True
    """False: the part of keys that others rotate is there, and stays as it is."""
    pairs: Switch = "rope_interleave"
    """Do neighbours rotate together?"""
    gate: str = ""
    """The product whose sigmoids multiply the heads' results."""
    output: str = "o_proj"
    scaled: bool = False
    """What is made from a small vector is multiplied as if it were made from one of the model's width."""
    joined: bool = False
    """Queries are made from the small vector before and after its norm, with a gate for each column."""
    tempered: bool = False
    """The settings of rope are Mistral's, and queries grow with their position."""


class LatentAttention(Projected):
    """Multi-head latent attention with absorbed up-projections."""

    def __init__(
        self, c: ModelConfig, b: Build, hidden: int, how: Latent = Latent(), index: MakeIndex | None = None
    ) -> None:
        """index: makes what chooses the keys that a token sees; without one it sees all."""
        heads, bias = c.need("num_attention_heads", int), c.get("attention_bias", bool, False)
        self.nope, self.rotated = c.need("qk_nope_head_dim", int), c.need("qk_rope_head_dim", int)
        self.latent, self.value = c.need("kv_lora_rank", int), c.need("v_head_dim", int)
        check_latent_sizes(c, self.nope, self.rotated)
        q_rank = c.get("q_lora_rank", int, 0)
        self.joined = how.joined
        q_rows = Rows(heads * (self.nope + self.rotated + self.joined * self.value), heads)
        queries = ("q_a_proj", Rows(q_rank, 1, repeats=True)) if q_rank else ("q_proj", q_rows)
        vectors = ("kv_a_proj_with_mqa", Rows(self.latent + self.rotated, 1, repeats=True))
        biased = {"q_a_proj", "kv_a_proj_with_mqa"} if bias else ()
        self.inner = ColumnLinear(b, hidden, dict((queries, vectors)), bias=biased).weight
        """Of the stream: queries or the small vector that they are made from, and what is cached."""
        self.q_norm = b.norm("q_a_layernorm", q_rank, _EPS) if q_rank else None
        self.q_b = ColumnLinear(b, (1 + self.joined) * q_rank, {"q_b_proj": q_rows}).weight if q_rank else None
        self.kv_norm = b.norm("kv_a_layernorm", self.latent, _EPS)
        rows = Rows(heads * (self.nope + self.value), heads)
        up = ColumnLinear(b, self.latent, {"kv_b_proj": rows}).weight
        self.forms = self._apart(up.dense())
        self.site = b.taken(up, self._apart)
        self.up = None if self.site is None else up
        """What adapters are worked into: new weights must reach it."""
        self.output = RowLinear(b, heads * self.value, hidden, how.output, bias=bias)
        self.gate = ColumnLinear(b, hidden, {how.gate: Rows(heads, heads)}).weight if how.gate else None
        settings = (mistral4_rope if how.tempered else whole_rope)(c, self.rotated)
        gain = attention_gain(settings) * (hidden / q_rank if how.scaled and q_rank else 1.0) ** 0.5
        kv = KVSpec("latent", 1, self.latent + self.rotated, self.latent)
        self.spec = AttentionSpec(
            *b.add_kv(kv),
            heads=self.forms.parts[0].shape[0],
            kv=kv,
            scale=(self.nope + self.rotated) ** -0.5 * gain,
            rope=make_rope(b, settings, interleaved=on(c, how.pairs), start=self.latent) if how.rotates else None,
            touches=Touches(temper=_temper(c, b) if how.tempered else None),
        )
        if how.scaled:  # in float32: narrower weights would round the factor
            wider = self.kv_norm.weight.float() * (hidden / self.latent) ** 0.5
            self.kv_norm = replace(self.kv_norm, weight=wider)
        self.fresh = replace(self.spec, touches=replace(self.spec.touches, k_norm=self.kv_norm))
        """For vectors as they are made, whose norm attention may take upon itself."""
        self.index = None if index is None else index(b, settings)

    def inside(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None = None) -> Tensor:
        """Attention of norm(x), before the output matrix; x [T, hidden]."""
        kernels, tokens, heads = ctx.kernels, x.shape[0], self.spec.heads
        if norm is not None and (self.index is not None or self.gate is not None):
            x, norm = kernels.norm(x, norm), None  # others read it, too
        made = self.inner.matmul(x, ctx, norm=norm)
        before, columns = made.shape[1] - self.latent - self.rotated, None
        low, latent, rest = made.split([before, self.latent, self.rotated], dim=1)
        if self.joined and self.q_b is not None and self.q_norm is not None:
            made = self.q_b.matmul(torch.cat((kernels.norm(low, self.q_norm), low), dim=-1), ctx)
            made, columns = made.view(tokens, heads, -1).split([self.nope + self.rotated, self.value], dim=-1)
            q, columns = made.contiguous(), columns.reshape(tokens, -1)
        else:
            q = (low if self.q_b is None else self.q_b.matmul(low, ctx, norm=self.q_norm)).view(tokens, heads, -1)
        keys = None if self.index is None else self.index.choose(x, low, self.q_norm, ctx)
        given = q, (latent, rest), self.forms.parts, self.fresh, ctx, keys
        values = None if self._adapted(ctx) else kernels.attend_latent(*given)
        if values is None:
            absorbed = self._product(q[..., : self.nope], 0, ctx)
            queries = torch.cat((absorbed, q[..., self.nope :]), dim=-1).view(tokens, -1)
            vector = torch.cat((queries, kernels.norm(latent, self.kv_norm), rest), dim=-1)
            mixed = kernels.attend(vector, self.spec, ctx, keys)
            values = self._product(mixed.view(tokens, heads, self.latent), 1, ctx)
        gates = columns if self.gate is None else self.gate.matmul(x, ctx)
        values = values.view(tokens, -1)
        return values if gates is None else kernels.activate(values, "sigmoid", gates)

    def _apart(self, up: Tensor) -> Forms:
        """kv_b_proj [heads * (keys + values), latent]: what carries queries into the latent space, and values out."""
        up = up.view(-1, self.nope + self.value, self.latent)
        return Forms((up[:, : self.nope].transpose(1, 2).contiguous(), up[:, self.nope :].contiguous()))

    def _adapted(self, ctx: ForwardContext) -> bool:
        """May some rows' adapters change the two products?"""
        return bool(self.site and self.site.whole) and ctx.rows is not None and ctx.rows.adapters is not None

    def _product(self, x: Tensor, part: int, ctx: ForwardContext) -> Tensor:
        """x [T, heads, in] with one of the two; rows whose adapters change it have their own."""
        y, site, rows = ctx.kernels.product(x, self.forms.parts[part]), self.site, ctx.rows
        if not self._adapted(ctx):
            return y
        assert site is not None and rows is not None and rows.adapters is not None
        for slot, forms in site.whole.items():
            at = torch.where(rows.adapters == slot)[0]
            if len(at):
                y = y.index_copy(0, at, ctx.kernels.product(x[at], forms.parts[part]))
        return y


def _temper(c: ModelConfig, b: Build) -> Tensor:
    found = span_temper(c)
    return temperatures(b.max_positions, found.beta, found.span, found.offset).to(b.device)
