"""An index that chooses which keys a layer's queries see (DeepSeek V3.2, GLM-5, Hy4). Owns: its products, its keys'
place in the cache, and which layers take the choice of an earlier one.

It is a small attention of its own, with one key head and no values: keys lie in pages of their own, and for each token
those with the best scores are chosen. Must not know: what attends to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, KVSpec, NormSpec
from tokenmill.core.errors import UndividedError
from tokenmill.layers.build import Build, Carried
from tokenmill.layers.rope import RopeSettings, make_rope
from tokenmill.models.config import ModelConfig
from tokenmill.models.family_row import Switch
from tokenmill.models.parts import on

_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class IndexStyle:
    """What sets a family's index apart."""

    pairs: Switch = False
    """Do neighbours rotate together?"""
    late: bool = False
    """Numbers at the end of keys rotate, not those at the front, and the norm is as exact as the gains."""
    shared: Callable[[ModelConfig, int], bool] | None = None
    """Does this layer take the choice of an earlier one, if the config lists no kinds? None: no layer does."""


class KeyIndex:
    """The index of one layer. chosen: where later layers without one find its choice."""

    def __init__(self, c: ModelConfig, b: Build, rope: RopeSettings, chosen: Carried, style: IndexStyle) -> None:
        heads, dim, hidden = c.need("index_n_heads", int), c.need("index_head_dim", int), c.need("hidden_size", int)
        if dim < rope.dim:
            raise c.refuse("index_head_dim", f"is less than 'qk_rope_head_dim' = {rope.dim}.")
        self.top, self.chosen = c.need("index_topk", int), chosen
        self.queries = b.settled(b.weight("wq_b", (heads * dim, c.need("q_lora_rank", int))))
        self.keys = b.settled(b.weight("wk", (dim, hidden)))
        eps = c.get("rms_norm_eps", float, 1e-5, low=0.0) if style.late else _EPS
        self.norm = (b.exactly(torch.float32) if style.late else b).norm("k_norm", dim, eps, layer=True, bias=True)
        # It stays in float32, as a router does: rounding would change which keys are chosen.
        self.gains = b.settled(b.exactly(torch.float32).weight("weights_proj", (heads, hidden), exact=True))
        kv = KVSpec("latent", 1, dim, dim)
        layer, group = b.add_kv(kv)
        self.spec = AttentionSpec(
            layer=layer,
            group=group,
            heads=heads,
            kv=kv,
            scale=(dim * heads) ** -0.5,
            rope=make_rope(b, rope, interleaved=on(c, style.pairs), start=dim - rope.dim if style.late else 0),
        )

    def choose(self, x: Tensor, low: Tensor, norm: NormSpec | None, ctx: ForwardContext) -> Tensor | None:
        """The positions [T, K] of each token's keys (None: all); x [T, hidden], and norm(low) [T, q_lora_rank] makes
        queries."""
        q, k = self.queries.matmul(low, ctx, norm=norm), ctx.kernels.norm(self.keys.matmul(x, ctx), self.norm)
        gains = self.gains.matmul(x.float(), ctx)
        self.chosen.tensor = ctx.kernels.choose_keys(torch.cat((q, k), dim=-1), gains, self.spec, self.top, ctx)
        return self.chosen.tensor


@dataclass(frozen=True, slots=True)
class SharedIndex:
    """The choice of the last layer that has an index."""

    chosen: Carried

    def choose(self, _x: Tensor, _low: Tensor, _norm: NormSpec | None, _ctx: ForwardContext) -> Tensor | None:
        """What was chosen."""
        return self.chosen.tensor


MakeIndex = Callable[[Build, RopeSettings], KeyIndex | SharedIndex]


class Indices:
    """Makes the indices of a model's layers, in their order."""

    def __init__(self, c: ModelConfig, style: IndexStyle = IndexStyle()) -> None:
        self.c, self.style = c, style
        self.last: Carried | None = None

    def of(self, b: Build, layer: int) -> MakeIndex | None:
        """What makes this layer's index, whose attention lies `b` there. None: each token sees all keys, because there
        are no more than an index would choose."""
        if b.max_positions <= self.c.need("index_topk", int):
            inside = b.path("indexer.")
            b.book.used.update(name for name in b.checkpoint.names() if name.startswith(inside))
            return None
        shared = _is_shared(self.c, layer, self.style)
        if not shared:
            self.last = Carried()
        elif self.last is None and not b.place.is_whole:
            raise UndividedError("A model whose layers share the choice of keys")
        elif self.last is None:
            raise self.c.refuse(
                "indexer_types", f"lets layer {layer} share the index of an earlier one: there is none."
            )
        chosen = self.last
        assert chosen is not None, "made above"
        if shared:
            return lambda b, rope: SharedIndex(chosen)
        return lambda b, rope: KeyIndex(self.c, b.at("indexer"), rope, chosen, self.style)


def _is_shared(c: ModelConfig, layer: int, style: IndexStyle) -> bool:
    """Does this layer take the choice of an earlier one? Layers that draft later tokens never do."""
    layers = c.need("num_hidden_layers", int)
    if style.shared is None or layer >= layers:
        return False
    name = next((name for name in ("indexer_types", "index_topk_pattern") if c.has(name)), None)
    if name is not None:
        kinds = [{"F": "full", "S": "shared"}.get(str(kind), str(kind)) for kind in c.data[name]]
        if len(kinds) != layers or not set(kinds) <= {"full", "shared"}:
            raise c.refuse(name, "must name 'full' or 'shared' for each of num_hidden_layers.")
        return kinds[layer] == "shared"
    return style.shared(c, layer)


def between_some(c: ModelConfig, layer: int) -> bool:
    """The first layers, and some from there on, have an index."""
    every, offset = c.get("index_topk_freq", int, 1), c.get("index_skip_topk_offset", int, 2, low=0)
    return max(layer - offset + 1, 0) % every != 0
