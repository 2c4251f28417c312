"""What several families share. Owns: reading the common config keys, and the pre-norm layer.

Knows no family: each passes its own defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from tokenmill.compute.forward import Act, ForwardContext, NormSpec
from tokenmill.core.errors import ModelError
from tokenmill.layers.attention import Heads
from tokenmill.layers.block import Block, Stream, Sum, adds, read, through
from tokenmill.layers.build import Build
from tokenmill.models.config import ModelConfig, activation
from tokenmill.models.decoder import Sizes, check_heads


def read_sizes(c: ModelConfig, *, tied: bool = False) -> Sizes:
    """Vocabulary, width, depth and tying, under the names most families use; `tied` is the family's default."""
    return Sizes(
        vocab=c.need("vocab_size", int),
        hidden=c.need("hidden_size", int),
        layers=c.need("num_hidden_layers", int, high=10_000),
        tied=c.get("tie_word_embeddings", bool, tied),
    )


def read_heads(c: ModelConfig) -> Heads:
    """Head counts and size, under the names most families use."""
    heads = c.need("num_attention_heads", int)
    kv_heads = c.get("num_key_value_heads", int, heads)
    check_heads(heads, kv_heads)
    dim = c.get("head_dim", int, 0) or c.need("hidden_size", int) // heads
    if not dim:
        raise c.refuse("hidden_size", f"cannot be shared by {heads} attention heads.")
    return Heads(heads, kv_heads, dim)


def head_size(c: ModelConfig, hidden: int, heads: int) -> int:
    """hidden / heads, which must divide."""
    if hidden % heads:
        raise ModelError(f"config.json: a hidden size of {hidden} cannot be shared by {heads} attention heads.")
    return hidden // heads


def read_act(c: ModelConfig, *, gated: bool, default: str, key: str = "hidden_act") -> Act:
    """The feed-forward activation; gated ones must have a gated kernel."""
    name = activation(c, key, default)
    if gated and name not in ("silu", "gelu", "gelu_tanh"):
        raise c.refuse(key, "is not supported in gated layers.")
    return cast(Act, f"{name}_mul" if gated else name)


def read_top_k(c: ModelConfig, count: int, default: int, *names: str) -> int:
    """How many of `count` experts a token is sent to."""
    top_k = c.first(("num_experts_per_tok", *names), int, default)
    if top_k > count:
        raise ModelError(f"config.json: 'num_experts_per_tok' = {top_k} is more than the {count} experts.")
    return top_k


def as_unit(b: Build, factor: float) -> float:
    """What the stream is divided by: the factor of all that layers add to it, so that nothing has to be multiplied; 1:
    it stays as it is. Norms, which alone read it, see no difference if their epsilon is divided, too. float16 may not
    hold so large a stream."""
    return factor if factor > 1e-3 and b.dtype != torch.float16 else 1.0


def rms(c: ModelConfig, name: str, *, offset: float = 0.0, unit: float = 1.0) -> Callable[[Build], NormSpec]:
    """A constructor for a norm over the hidden size; unit: see `as_unit`."""
    size, eps = c.need("hidden_size", int), c.get("rms_norm_eps", float, 1e-6, low=0.0) / unit**2
    return lambda b: b.norm(name, size, eps, offset=offset)


def layer_norm(size: int, eps: float) -> Callable[[Build, str], NormSpec]:
    """A constructor for layer norms of this size: (where, name) -> descriptor."""
    return lambda b, name: b.norm(name, size, eps, layer=True, bias=True)


def rounded_root(number: int, dtype: torch.dtype) -> float:
    """The root of the size, rounded to the compute dtype, because Gemma 3n and 4 were trained so."""
    return float(torch.tensor(number**0.5, dtype=dtype))


class Parallel:
    """x + attention(norm(x)) + mlp(norm(x)): both read the same x."""

    def __init__(self, attention: Block, mlp: Block, norms: tuple[NormSpec, NormSpec]) -> None:
        self.attention = attention
        self.mlp = mlp
        self.first, self.second = norms

    def __call__(self, x: Stream, ctx: ForwardContext) -> Stream:
        """x [T, hidden] -> [T, hidden]. Ranks add both blocks' parts up at once."""
        x, h, norm = read(x, self.first, ctx)
        second = (h, norm) if self.second is self.first else (x, self.second)
        y, part = x, None
        for block, (given, left) in ((self.attention, (h, norm)), (self.mlp, second)):
            if adds(block):
                made = block.part(given, ctx, left)
                part = made if part is None else ctx.kernels.add(part, made)
            else:
                y = block(given, ctx, norm=left, residual=y)
        return y if part is None else Sum(part, y, block.group)


class PreNorm:
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, attention: Block, mlp: Block, norms: tuple[NormSpec, NormSpec]) -> None:
        self.attention = attention
        self.mlp = mlp
        self.first, self.second = norms

    def __call__(self, x: Stream, ctx: ForwardContext) -> Stream:
        """x [T, hidden] -> [T, hidden]."""
        x = through(x, self.attention, ctx, self.first, ahead=self.mlp)
        return through(x, self.mlp, ctx, self.second)


class Sandwich:
    """x += scale * after(block(before(x))), for attention, then for the feed-forward layer; norms may be absent."""

    def __init__(
        self,
        blocks: tuple[Block, Block],
        before: Sequence[NormSpec | None],
        after: Sequence[NormSpec | None],
        scale: float = 1.0,
    ) -> None:
        self.attention, self.mlp = blocks
        self.around = tuple(zip(blocks, before, after, strict=True))
        self.scale = scale

    def __call__(self, x: Stream, ctx: ForwardContext) -> Stream:
        """x [T, hidden] -> [T, hidden]."""
        for block, before, after in self.around:
            ahead = self.mlp if block is self.attention else None
            x = through(x, block, ctx, before, after=after, scale=self.scale, ahead=ahead)
        return x
