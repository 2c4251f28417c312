"""EAGLE heads as they lie on hubs. Owns: the networks of EAGLE-1 and EAGLE-3, and their tensors' names.

EAGLE-1   fc, layers.0.* (without its first norm), embed_tokens; reads the target's final hidden states, and the
          target's head reads its own
EAGLE-3   fc, midlayer.* (or layers.0.*), norm, lm_head, d2t; reads the outputs of three layers of the target, and
          chooses among words of its own. Its states may be narrower than the target's (then it has embed_tokens, too);
          input_norm or fc_norm.N norm what it reads
deeper    layers.1.* and so on behind the first one, in both: plain decoder layers

Which projections have a bias, the tensors tell. Must not know: the config's forms (eagle_config.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, NormSpec, Touches, Weight
from tokenmill.core.errors import ModelError
from tokenmill.layers.attention import Attention, attention_spec, separate_qkv
from tokenmill.layers.build import Build
from tokenmill.layers.embedding import Embedding
from tokenmill.layers.linear import RowLinear
from tokenmill.layers.mlp import MLP, gated_mlp
from tokenmill.layers.rope import make_rope
from tokenmill.models.common import read_act, read_heads
from tokenmill.models.positions import whole_rope
from tokenmill.speculate.eagle import Embed
from tokenmill.speculate.eagle_config import FINAL, HeadConfig, read_head, window_of


@dataclass(frozen=True, slots=True)
class EagleLayer:
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
class Joining:
    """From what is read of the target, side by side, to the states that EAGLE-3's layer reads first. norm: of all of it
    at once; norms: of each part; fc None: it is one such state."""

    fc: Weight | None
    norm: NormSpec | None = None
    norms: tuple[NormSpec, ...] = ()

    def __call__(self, taps: Tensor, ctx: ForwardContext) -> Tensor:
        """taps [T, hidden of all taps] -> [T, hidden]."""
        if self.norm is not None:
            taps = ctx.kernels.norm(taps, self.norm)
        if self.norms:
            parts = zip(taps.chunk(len(self.norms), -1), self.norms, strict=True)
            taps = torch.cat([ctx.kernels.norm(part.contiguous(), norm) for part, norm in parts], -1)
        return taps if self.fc is None else self.fc.matmul(taps, ctx)


@dataclass(frozen=True, slots=True)
class EagleNet:
    """hidden: numbers in a state. taps: what it reads of the target, side by side. words [W]: what each of its own
    words means (None: itself). more: layers behind the first. fc: EAGLE-1's; join: EAGLE-3's. last: the norm behind
    which it goes on, if there is one."""

    hidden: int
    taps: tuple[int, ...]
    embed: Embed
    layer: EagleLayer
    norm: NormSpec | None
    head: Weight | None
    words: Tensor | None
    more: tuple[Deeper, ...] = ()
    fc: Weight | None = None
    join: Joining | None = None
    last: NormSpec | None = None

    def begin(self, tokens: Tensor, taps: Tensor, ctx: ForwardContext) -> Tensor:
        """tokens [T], each one behind its tap [T, hidden of all taps] -> states [T, hidden]."""
        return self.go_on(tokens, taps if self.join is None else self.join(taps, ctx), ctx)

    def go_on(self, tokens: Tensor, states: Tensor, ctx: ForwardContext) -> Tensor:
        """tokens [T], each one behind a state of its own making [T, hidden] -> states [T, hidden]."""
        words = self.embed(tokens, ctx)
        if self.fc is not None:
            states = self.fc.matmul(torch.cat((words, states), -1), ctx)
        found = self.layer(words, states, ctx)
        for layer in self.more:
            found = layer(found, ctx)
        return found if self.last is None else ctx.kernels.norm(found, self.last)


def build_eagle(config: dict[str, Any], b: Build, target: Any, *, third: bool, where: str) -> EagleNet:
    """The network of a folder, for a target with `spec`, `embedding` and `layers`."""
    vocab, count = target.spec.vocab_size, target.first + len(target.layers)
    head = read_head(config, (target.spec.hidden_size, vocab, count), third=third, where=where)
    if FINAL not in head.taps and min(head.taps) < target.first:
        raise ModelError(
            f"{where}: it reads what layer {min(head.taps)} gives, and the last of --pipeline-parallel-size stages has "
            f"only those from {target.first} on: use --tensor-parallel-size, or a head of EAGLE-1."
        )
    if target.streams > 1 and any(tap not in (FINAL, count - 1) for tap in head.taps):
        raise ModelError(
            f"{where}: it reads one state of each of the layers {', '.join(map(str, head.taps))}, and layers of this "
            f"model pass on {target.streams} states side by side: use a draft model, or a head of EAGLE-1."
        )
    layer, more = _layers(head, b, third=third)
    norm = b.norm("norm", head.hidden, _eps(head)) if third else None
    net = EagleNet(
        hidden=head.hidden,
        taps=head.taps,
        embed=_words_of(head, b, target, vocab, where),
        layer=layer,
        norm=None if head.onward else norm,
        head=_head(head, b, vocab, where) if third else None,
        words=_meanings(b, head.words, vocab, where),
        more=more,
        fc=None if third else _fc(b, head.hidden, 2 * head.hidden),
        join=_joining(head, b) if third else None,
        last=norm if head.onward else None,
    )
    b.book.used |= {b.path(name) for name in ("t2d", "d2t", "lm_head.weight", "embed_tokens.weight")}
    b.check_leftovers()
    return net


def _eps(head: HeadConfig) -> float:
    return head.decoder.get("rms_norm_eps", float, 1e-6, low=0.0)


def _layers(head: HeadConfig, b: Build, *, third: bool) -> tuple[EagleLayer, tuple[Deeper, ...]]:
    """The first layer and those behind it."""
    hidden, eps = head.hidden, _eps(head)
    body = b.at("midlayer") if b.has("midlayer.post_attention_layernorm.weight") else b.at("layers.0")
    parts = _parts(head, body, 0, hidden * (2 if third else 1))
    before = (body.norm("input_layernorm", hidden, eps), body.norm("hidden_norm", hidden, eps)) if third else None
    layer = EagleLayer(*parts, body.norm("post_attention_layernorm", hidden, eps), before, head.norm_first)
    more = []
    for n in range(1, head.layers):
        at = b.at(f"layers.{n}")
        own = at.norm("input_layernorm", hidden, eps)
        more.append(Deeper(own, *_parts(head, at, n, hidden), at.norm("post_attention_layernorm", hidden, eps)))
    return layer, tuple(more)


def _parts(head: HeadConfig, body: Build, n: int, width: int) -> tuple[Attention, MLP]:
    """A layer's attention, which reads `width` numbers of each token, and its feed-forward layer."""
    c, hidden = head.decoder, head.hidden
    heads, inside = read_heads(c), body.at("self_attn")
    turned = [
        inside.norm(x, heads.dim, _eps(head)) if _stored(inside, f"{x}.weight") else None for x in ("q_norm", "k_norm")
    ]
    rope = make_rope(body, whole_rope(c, heads.dim))
    spec = attention_spec(body, heads, rope=rope, window=window_of(c, n), touches=Touches(turned[0], turned[1]))
    attention = Attention(
        separate_qkv(inside, width, heads, bias=_stored(inside, "q_proj.bias")),
        RowLinear(inside, heads.width, hidden, "o_proj", bias=_stored(inside, "o_proj.bias")),
        spec,
    )
    act, inner = read_act(c, gated=True, default="silu"), c.need("intermediate_size", int)
    return attention, gated_mlp(body.at("mlp"), hidden, inner, act, bias=_stored(body, "mlp.down_proj.bias"))


def _words_of(head: HeadConfig, b: Build, target: Any, vocab: int, where: str) -> Embed:
    """Its own embeddings, or the target's."""
    if _stored(b, "embed_tokens.weight") or (head.hidden != head.wide and b.has("embed_tokens.weight")):
        return Embedding(b, "embed_tokens", (vocab, head.hidden))
    if head.hidden != head.wide:
        raise ModelError(f"{where}: it has states of {head.hidden} numbers, and no embeddings for them (embed_tokens).")
    embed: Embed = target.embedding
    if (width := target.embedding.weight.shape[1]) != head.hidden:  # OPT-350M's are narrower than its states
        raise ModelError(
            f"{where}: it reads this model's embeddings beside states of {head.hidden} numbers, and they have {width}: "
            "use a draft model, Medusa heads, or a head with embeddings of its own (embed_tokens)."
        )
    return embed


def _head(head: HeadConfig, b: Build, vocab: int, where: str) -> Weight | None:
    """What gives the logits of its words; None: the target's head does."""
    if b.has("lm_head.weight") or (head.words, head.hidden) != (vocab, head.wide):
        return b.settled(b.weight("lm_head", (head.words, head.hidden), head=True))
    return None


def _fc(b: Build, hidden: int, width: int) -> Weight:
    return b.settled(b.weight("fc", (hidden, width), bias=_stored(b, "fc.bias")))


def _joining(head: HeadConfig, b: Build) -> Joining:
    """What leads from the target's states to its own."""
    count, eps = len(head.taps), _eps(head)
    norm = b.norm("input_norm", count * head.wide, eps) if head.norm_taps == "together" else None
    norms = [b.norm(f"fc_norm.{n}", head.wide, eps) for n in range(count)] if head.norm_taps == "apart" else []
    direct = head.taps == (FINAL,) and head.hidden == head.wide and not _stored(b, "fc.weight")  # ModelOpt's
    return Joining(None if direct else _fc(b, head.hidden, count * head.wide), norm, tuple(norms))


def _meanings(b: Build, words: int, vocab: int, where: str) -> Tensor | None:
    """[words]: d2t holds how far each word of the head lies from the target's. None: they are the same."""
    own = torch.arange(words, device=b.device)
    if not _stored(b, "d2t"):
        if words == vocab:
            return None
        if words > vocab or list(b.checkpoint.names()):
            raise ModelError(f"{where}: a head with {words} words of its own needs d2t, which says what they mean.")
        return own
    kind = b.checkpoint.tensor(b.path("d2t"), (words,)).dtype
    if kind not in (torch.int16, torch.int32, torch.int64):  # a float may be a number that was rounded
        stored = str(kind).removeprefix("torch.")
        raise ModelError(f"{where}: d2t is stored as {stored}; distances between words are whole numbers.")
    found = own + b.tensor("d2t", (words,), torch.int64)
    if int(found.min()) < 0 or int(found.max()) >= vocab:
        raise ModelError(f"{where}: d2t leads to words that the model does not have (it has {vocab}).")
    return None if words == vocab and torch.equal(found, own) else found


def _stored(b: Build, name: str) -> bool:
    """Is this tensor in the file? (Weights that are invented have every name.)"""
    return bool(list(b.checkpoint.names())) and b.has(name)
