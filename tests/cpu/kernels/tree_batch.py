"""Contexts of trees made by hand, for tests of kernels."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, KVSpec, Paths, RopeSpec
from tokenmill.runner.trees import climb

LEVELS = 6


def attention_of(kv: KVSpec, device: str = "cpu", **options: Any) -> AttentionSpec:
    """Four query heads, the last eight numbers of which are rotated."""
    turns = torch.arange(256)[:, None] * torch.rand(4, generator=torch.Generator().manual_seed(2))
    rope = RopeSpec(turns.cos().to(device), turns.sin().to(device), 8, start=kv.key_dim - 8)
    return AttentionSpec(0, 0, 4, kv, scale=0.2, rope=rope, window=kv.window, **options)


def width(kv: KVSpec) -> int:
    """Of the product that attention begins with."""
    own = kv.key_dim if kv.kind == "latent" else kv.heads * (kv.key_dim + kv.value_dim)
    return 4 * kv.key_dim + own


def grown(count: int, dice: random.Random) -> list[int]:
    """Parents of so many drafts, in trees of up to LEVELS."""
    depth, parents = [0], []
    for _ in range(count):
        parents.append(dice.choice([n for n, deep in enumerate(depth) if deep < LEVELS][-8:]))
        depth.append(depth[parents[-1]] + 1)
    return parents


def as_trees(ctx: ForwardContext, trees: dict[int, list[int]]) -> ForwardContext:
    """A context's sequences, of which those named by trees are a root and its drafts; the others stay."""
    device = ctx.positions.device

    def made(values: list, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    (plan,), sizes = ctx.groups, ctx.query_start.diff().tolist()
    whose, roots, places, kv_len, positions, starts, at = [], [], [], [], [], [0], 0
    for seq, (size, end) in enumerate(zip(sizes, ctx.kv_len.tolist(), strict=True)):
        if seq not in trees:
            whose.append(seq)
            roots.append(end)
            places.append([0] * (LEVELS + 1))
            kv_len.append(end)
            positions += ctx.positions[at : at + size].tolist()
            starts.append(starts[-1] + size)
        else:
            found, root = climb(torch.tensor([trees[seq]]), torch.tensor([LEVELS]), LEVELS), end - size
            whose += [seq] * size
            roots += [root] * size
            places += found.places[0].tolist()
            kv_len += (root + 1 + found.depth[0]).tolist()
            positions += (root + found.depth[0]).tolist()
            starts += range(starts[-1] + 1, starts[-1] + size + 1)
        at += size
    plan = dataclasses.replace(
        plan,
        tables=plan.tables[whose].contiguous(),
        first=None if plan.first is None else plan.first[whose].contiguous(),
        entries=plan.entries[whose].contiguous(),
        paths=Paths(made(roots), made(places, torch.int32)),
    )
    counts = [b - a for a, b in itertools.pairwise(starts)]
    return dataclasses.replace(
        ctx,
        positions=made(positions),
        query_start=made(starts, torch.int32),
        kv_len=made(kv_len, torch.int32),
        groups=[plan],
        spans=None if ctx.spans is None else list(zip(starts, counts, kv_len, strict=False)),
        max_query=max(counts),
    )
