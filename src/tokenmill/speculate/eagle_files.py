"""EAGLE heads as they lie on hubs. Owns: the networks of EAGLE-1 and EAGLE-3, their configs and their tensors' names.

EAGLE-1   fc, layers.0.* (without its first norm), embed_tokens; reads the target's final hidden states, and the
          target's head reads its own
EAGLE-3   fc, midlayer.* (or layers.0.*), norm, lm_head, d2t; reads the outputs of three layers of the target, and
          chooses among words of its own
deeper    layers.1.* and so on behind the first one, in both: plain decoder layers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, NormSpec, Weight
from tokenmill.core.errors import ModelError
from tokenmill.layers.attention import Attention, attention_spec, separate_qkv
from tokenmill.layers.build import Build
from tokenmill.layers.embedding import Embedding
from tokenmill.layers.linear import RowLinear
from tokenmill.layers.mlp import MLP, gated_mlp
from tokenmill.layers.rope import make_rope
from tokenmill.models.common import read_act, read_heads, read_rope
from tokenmill.models.config import ModelConfig
from tokenmill.speculate.eagle import FINAL, Embed


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer on [words | states]: `before` norms each of them (None: they are one already)."""

    attention: Attention
    mlp: MLP
    after: NormSpec
    before: tuple[NormSpec, NormSpec] | None = None
    norm_first: bool = False

    def __call__(self, words: Tensor, states: Tensor, ctx: ForwardContext) -> Tensor:
        """words, states [T, hidden] -> [T, hidden]; EAGLE-1's layer is given its one input as `states`."""
        if self.before is None:
            x, residual = states, states
        else:
            normed = ctx.kernels.norm(states, self.before[1])
            x = torch.cat((ctx.kernels.norm(words, self.before[0]), normed), -1)
            residual = normed if self.norm_first else states
        middle = self.attention(x, ctx, residual=residual)
        return self.mlp(middle, ctx, norm=self.after, residual=middle)


@dataclass(frozen=True, slots=True)
class Deeper:
    """One decoder layer behind the first."""

    norm: NormSpec
    attention: Attention
    mlp: MLP
    after: NormSpec

    def __call__(self, states: Tensor, ctx: ForwardContext) -> Tensor:
        """states [T, hidden] -> [T, hidden]."""
        middle = self.attention(ctx.kernels.norm(states, self.norm), ctx, residual=states)
        return self.mlp(middle, ctx, norm=self.after, residual=middle)


@dataclass(frozen=True, slots=True)
class EagleNet:
    """taps: what it reads of the target, side by side. words [W]: what each of its own words means (None: itself).
    more: layers behind the first."""

    taps: tuple[int, ...]
    embed: Embed
    fc: Weight
    layer: Layer
    norm: NormSpec | None
    head: Weight | None
    words: Tensor | None
    more: tuple[Deeper, ...] = ()

    def begin(self, tokens: Tensor, taps: Tensor, ctx: ForwardContext) -> Tensor:
        """tokens [T], each one behind its tap [T, hidden of all taps] -> states [T, hidden]."""
        if len(self.taps) > 1:
            return self._through(self.embed(tokens, ctx), self.fc.matmul(taps, ctx), ctx)
        return self.go_on(tokens, taps, ctx)

    def go_on(self, tokens: Tensor, states: Tensor, ctx: ForwardContext) -> Tensor:
        """tokens [T], each one behind a state of its own making [T, hidden] -> states [T, hidden]."""
        words = self.embed(tokens, ctx)
        if self.layer.before is not None:
            return self._through(words, states, ctx)
        return self._through(words, self.fc.matmul(torch.cat((words, states), -1), ctx), ctx)

    def _through(self, words: Tensor, states: Tensor, ctx: ForwardContext) -> Tensor:
        found = self.layer(words, states, ctx)
        for layer in self.more:
            found = layer(found, ctx)
        return found


def build_eagle(config: dict[str, Any], b: Build, target: Any, *, third: bool, where: str) -> EagleNet:
    """The network of a folder, for a target with `spec`, `embedding` and `layers`."""
    hidden, vocab, count = target.spec.hidden_size, target.spec.vocab_size, target.first + len(target.layers)
    c = ModelConfig(config, architecture="LlamaForCausalLM")
    if c.need("hidden_size", int) != hidden:
        raise ModelError(
            f"{where}: a head for hidden states of {config['hidden_size']} numbers; the model has {hidden}."
        )
    layers = c.get("num_hidden_layers", int, 1, low=1, high=64)
    words = c.get("draft_vocab_size", int, vocab) if third else vocab
    eps = c.get("rms_norm_eps", float, 1e-6)
    body = b.at("midlayer") if b.has("midlayer.post_attention_layernorm.weight") else b.at("layers.0")
    attention, mlp = _parts(c, body, hidden * (2 if third else 1))
    norms = (body.norm("input_layernorm", hidden, eps), body.norm("hidden_norm", hidden, eps)) if third else None
    first = c.get("norm_before_residual", bool, False)
    layer = Layer(attention, mlp, body.norm("post_attention_layernorm", hidden, eps), norms, first)
    more = []
    for at in (b.at(f"layers.{n}") for n in range(1, layers)):
        own = at.norm("input_layernorm", hidden, eps)
        more.append(Deeper(own, *_parts(c, at, hidden), at.norm("post_attention_layernorm", hidden, eps)))
    taps = _taps(c, count, where) if third else (FINAL,)
    if third and min(taps) < target.first:
        raise ModelError(
            f"{where}: it reads what layer {min(taps)} gives, and the last of --pipeline-parallel-size stages has only "
            f"those from {target.first} on: use --tensor-parallel-size, or a head of EAGLE-1."
        )
    invented = not list(b.checkpoint.names())
    embed: Embed = target.embedding
    if b.has("embed_tokens.weight") and not invented:
        embed = Embedding(b, "embed_tokens", (vocab, hidden))
    fc = b.weight("fc", (hidden, hidden * (len(taps) if third else 2)), bias=b.has("fc.bias") and not invented)
    head = b.settled(b.weight("lm_head", (words, hidden), head=True)) if third else None
    net = EagleNet(
        taps=taps,
        embed=embed,
        fc=b.settled(fc),
        layer=layer,
        norm=b.norm("norm", hidden, eps) if third else None,
        head=head,
        words=_meanings(b, words, vocab, invented=invented) if third and words != vocab else None,
        more=tuple(more),
    )
    b.book.used |= {b.path(name) for name in ("t2d", "d2t", "lm_head.weight", "embed_tokens.weight")}
    b.check_leftovers()
    return net


def _parts(c: ModelConfig, body: Build, width: int) -> tuple[Attention, MLP]:
    """A layer's attention, which reads `width` numbers of each token, and its feed-forward layer."""
    hidden, heads, inside = c.need("hidden_size", int), read_heads(c), body.at("self_attn")
    spec, bias = (
        attention_spec(body, heads, rope=make_rope(body, read_rope(c, heads.dim))),
        c.get("attention_bias", bool, False),
    )
    attention = Attention(
        separate_qkv(inside, width, heads, bias=bias), RowLinear(inside, heads.width, hidden, "o_proj", bias=bias), spec
    )
    act = read_act(c, gated=True, default="silu")
    return attention, gated_mlp(body.at("mlp"), hidden, c.need("intermediate_size", int), act)


def _taps(c: ModelConfig, count: int, where: str) -> tuple[int, ...]:
    """The layers whose outputs are read; configs name the layers that would read them next."""
    told = c.sub("eagle_config").get("eagle_aux_hidden_state_layer_ids", list, [])
    told = told or c.get("eagle_aux_hidden_state_layer_ids", list, []) or [2, count // 2, count - 3]
    if not all(isinstance(one, int) and 1 <= one <= count for one in told):
        raise ModelError(f"{where}: the layers {told} that the head reads are not among the model's {count}.")
    return tuple(one - 1 for one in told)


def _meanings(b: Build, words: int, vocab: int, *, invented: bool) -> Tensor:
    """[words]: d2t holds how far each word of the head lies from the target's."""
    own = torch.arange(words, device=b.device)
    if invented:
        return own
    return (own + b.tensor("d2t", (words,), torch.int64)).clamp_(0, vocab - 1)
