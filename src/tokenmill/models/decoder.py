"""The skeleton that every family fills in. Owns: embedding, layer loop, final norm, head, taps and pipeline stages.

A family describes its ends in a Skeleton and hands over a constructor for one layer. Knows nothing of families.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, KVSpec, ModelSpec, NormSpec, Weight
from tokenmill.compute.model import Checkpoint, Words
from tokenmill.core.errors import ModelError
from tokenmill.layers.block import Stream, normed, whole
from tokenmill.layers.build import Build, bare
from tokenmill.layers.embedding import Embedding, Head, splits

STAND_IN = KVSpec("full", 1, 16, 16)
"""Pages as small as can be, by which tokens are counted, and which nothing reads."""

Layer = Callable[[Tensor, ForwardContext], Stream]
"""x [T, hidden], context -> [T, hidden]. A layer that returns a Sum accepts one, too (layers/block.py)."""
Before = Callable[[Build], Callable[[Tensor, ForwardContext], Tensor]]
"""Makes what is done to embeddings [T, hidden] before the first layer."""


@dataclass(frozen=True, slots=True)
class Ends:
    """What lies before the first and after the last layer. Names are below `body`, except the head's, which is at the
    root."""

    norm: Callable[[Build], NormSpec] | None
    embed: str = "embed_tokens"
    head: str = "lm_head"
    scale: float = 1.0
    softcap: float = 0.0
    logit_scale: float = 1.0
    head_bias: bool = False
    before: Before | None = None
    """Built once and called with the embeddings: adds learned positions, applies a norm, projects."""
    after: Callable[[Build], Weight] | None = None
    """A projection between the final norm and the head."""
    width: int = 0
    """The width of embedding and head, if it is not the hidden size."""
    unit: float = 1.0
    """Layers take and give a stream that is divided by this; the final norm reads it so."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that every family has."""

    vocab: int
    hidden: int
    layers: int
    tied: bool


class Decoder:
    """A causal language model, or one pipeline stage of it."""

    streams = 1
    """Hidden states of a token that pass from layer to layer side by side. The last layer leaves one."""
    beside: tuple[str, ...] = ()
    """Names of a family's own parts that hold weights and are no layers."""
    undivided = False
    """Do layers read what others hold? Then none is built without the others."""

    def __init__(self, b: Build, body: Build, sizes: Sizes, ends: Ends, layer: Callable[[Build, int], Layer]) -> None:
        if b.book.headless:
            sizes, ends = replace(sizes, tied=True), replace(ends, head_bias=False)
        width = ends.width or sizes.hidden
        first, last = b.layers(sizes.layers, sizes.hidden, sizes.vocab * width)
        self.first = first
        self.taps: tuple[int, ...] = ()
        """The layers whose outputs a drafter reads in every step (ForwardContext.taps)."""
        self.is_first, self.is_last = first == 0, last == sizes.layers
        self.embedding: Embedding | None = None
        if sizes.tied and self.is_last:
            _check_tied(b.checkpoint, body.path(f"{ends.embed}.weight"), b.path(f"{ends.head}.weight"))
        if self.is_first or (self.is_last and (sizes.tied or b.place.words)):
            self.embedding = Embedding(body, ends.embed, (sizes.vocab, width), scale=ends.scale, tied=sizes.tied)
            if sizes.tied and not self.is_last and b.place.stages > 1:  # in the form that a single process would read
                self.embedding.weight = b.settled(self.embedding.weight)
        self.before = ends.before(body) if ends.before is not None and self.is_first else None
        self.head: Head | None = None
        if self.is_last and sizes.tied:  # settled early, while little else is loaded: two copies of it exist meanwhile
            assert self.embedding is not None
            self.head = Head(b, self._head_weight(b, sizes, ends, width), split=self.embedding.split)
            if b.adapters is not None:
                b.adapters.ties(body.path(ends.embed), b.path(ends.head))
        self.layers = [layer(body, i) for i in range(first, last)]
        if self.head is not None:
            b.comes_next(self.head.weight)
        stand_in = not b.book.kv_specs
        if stand_in:  # layers with states only: positions are still counted, and prefixes found, by pages
            b.add_kv(STAND_IN)
        self.softcap, self.logit_scale, self.unit = ends.softcap, ends.logit_scale, ends.unit
        self.bias: Tensor | None = None
        """The bias of a tied head, because the embedding's matrix has none."""
        if self.is_last and sizes.tied and ends.head_bias:
            self.bias = b.tensor(f"{ends.head}.bias", (sizes.vocab,), torch.float32)
            if b.adapters is not None:
                b.adapters.adds(b.path(ends.head), self.bias)
        self.norm: NormSpec | None = None
        self.after: Weight | None = None
        if self.is_last:
            self.norm = ends.norm(body) if ends.norm is not None else None
            self.after = ends.after(body) if ends.after is not None else None
            if self.head is None:
                self.head = Head(b, self._head_weight(b, sizes, ends, width), split=splits(b.group, sizes.vocab))
            if sizes.tied and self.embedding is not None:
                self.embedding.weight = bare(self.head.weight)  # settled: only this form is kept
        self.spec = ModelSpec(
            vocab_size=sizes.vocab,
            max_positions=b.max_positions,
            kv_specs=tuple(b.book.kv_specs),
            hidden_size=sizes.hidden,
            states=tuple(b.book.states),
            ends=(self.is_first, self.is_last),
            flops_per_token=b.book.flops,
            extras={
                "weight_bytes": b.book.weight_bytes,
                "changed": sorted(b.book.changed),
                "repeated": sorted(b.book.repeated),
                "stand_in": stand_in,
                "mixtures": b.book.mixtures,
                "placed": b.book.placed,
                "layers": (first, last),
            },
        )

    def _head_weight(self, b: Build, sizes: Sizes, ends: Ends, width: int) -> Weight:
        if not sizes.tied:
            share = (0, b.group.rank, b.group.size) if splits(b.group, sizes.vocab) else None
            stored = list(b.checkpoint.names())
            if stored and not any(name.startswith(f"{b.path(ends.head)}.") for name in stored):
                raise ModelError(
                    "config.json: without 'tie_word_embeddings' the head has a matrix of its own, and the checkpoint "
                    f"has no tensor '{b.path(ends.head)}.weight'."
                )
            return b.weight(ends.head, (sizes.vocab, width), bias=ends.head_bias, head=True, share=share)
        assert self.embedding is not None
        b.book.flops += 2.0 * sizes.vocab * width
        b.book.used.add(b.path(f"{ends.head}.weight"))
        share = (0, b.group.rank, b.group.size) if self.embedding.split else None
        return b.adapted(self.embedding.weight, ends.head, share=share)

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """tokens [T] -> final-norm hidden states [T, hidden].

        A later pipeline stage takes the hidden states [T, hidden] of the stage before it instead of tokens. Every stage
        but the last returns such states.
        """
        x: Any = self._embed(tokens, ctx) if self.is_first else tokens
        taps = ctx.taps
        if self.taps:
            taps = ctx.taps = dict.fromkeys(self.taps, x)
        for index, layer in enumerate(self.layers, self.first):
            x = layer(x, ctx)
            if taps is not None and index in taps:
                x = whole(x, ctx)
                taps[index] = x if self.unit == 1.0 else x * self.unit
        x = whole(x, ctx) if self.norm is None else normed(x, self.norm, ctx)[1]
        if taps is not None and -1 in taps:
            taps[-1] = x
        found: Tensor = x
        return found

    def logits(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """[n, hidden] -> [n, vocab], logit scale and soft-cap applied; in float32, or as Kernels.chooses says."""
        assert self.head is not None, "only the last pipeline stage has logits"
        return self.scaled(self.head(self._before_head(hidden, ctx), ctx), self.bias)

    @property
    def words(self) -> Words | None:
        """See CausalLM."""
        if self.head is None or not self.head.split:
            return None
        group, count = self.head.group, self.spec.vocab_size // self.head.group.size
        return Words(group, group.rank * count, count)

    def own_logits(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """[n, hidden] -> [n, words.count]; the same logits, for this rank's words."""
        assert self.head is not None, "only the last pipeline stage has logits"
        words, bias = self.words, self.bias
        if words is not None and bias is not None:
            bias = bias[words.first : words.first + words.count]
        return self.scaled(self.head.own(self._before_head(hidden, ctx), ctx), bias)

    def _before_head(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        return hidden if self.after is None else self.after.matmul(hidden, ctx)

    def scaled(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        """What the head's matrix gave, with bias, scale and soft cap."""
        if bias is not None:
            logits = logits.float() + bias
        if self.logit_scale != 1.0 or self.softcap:
            logits = logits.float()
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    def _embed(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        assert self.embedding is not None
        x = self.embedding(tokens, ctx)
        if ctx.embeds is not None:
            rows, values = ctx.embeds
            x = x.index_copy(0, rows, values.to(x.dtype))
        x = x if self.before is None else self.before(x, ctx)
        return x if self.unit == 1.0 else x / self.unit


def _check_tied(checkpoint: Checkpoint, embedding: str, head: str) -> None:
    """Refuse two different matrices where they should be tied. (A checkpoint may hold a tied matrix twice.)"""
    if not {embedding, head} <= set(checkpoint.names()):
        return
    one, other = checkpoint.tensor(embedding), checkpoint.tensor(head)
    codes = one.dtype != other.dtype and min(one.element_size(), other.element_size()) < 2
    if codes or (not one.is_meta and not other.is_meta and not torch.equal(one, other)):
        raise ModelError(
            f"config.json: 'tie_word_embeddings' is true, but {head} is not the matrix of {embedding}: one of the two "
            "is damaged, or the head has a matrix of its own and it must be false."
        )


def check_heads(heads: int, kv_heads: int) -> None:
    """Refuse head counts that do not divide into groups."""
    if heads % kv_heads:
        raise ModelError(
            f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads evenly: see "
            "'num_attention_heads' and 'num_key_value_heads'."
        )
