"""KV pages and forward contexts made by hand, for tests of kernels and models."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, GroupPlan, Kernels, KVFormat, KVSpec, KVView, StateSpec, StepRows
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kvcache.states import StatePool

NOWHERE = 1 << 24
"""In a table behind its entries there may be anything."""


@dataclass
class Tables:
    """One sequence: tokens computed, and per group its (block, first position) entries."""

    computed: int = 0
    entries: list[list[tuple[int, int]]] = field(default_factory=list)


class PagedBatch:
    """Pages poisoned with NaN, tables of shuffled blocks; window groups drop what no query can see any more."""

    def __init__(
        self, specs: tuple[KVSpec, ...], kernels: Kernels, *, dtype: torch.dtype = torch.float32, block_size: int = 16,
        blocks: int = 64, drop: bool = True, device: str = "cpu", states: tuple[StateSpec, ...] = (),
        stored: KVFormat | None = None, rows: int = 8,
    ) -> None:  # fmt: skip
        """stored: how pages hold numbers, where `dtype` does not say it. rows: those that have states."""
        if stored is None and dtype.itemsize == 1:
            stored = KVFormat(str(dtype).removeprefix("torch."))
        self.stored = stored
        self.kernels, self.block_size, self.drop, self.device = kernels, block_size, drop, device
        self.groups = list(dict.fromkeys(specs))
        self.kv = [self._view(spec, blocks, dtype) for spec in specs]
        self.free = [random.Random(i).sample(range(blocks), blocks) for i in range(len(self.groups))]
        self.seqs: dict[str, Tables] = {}
        self.states = StatePool(states, rows, 0, device, ReferenceKernels().copy_rows_).views
        for part in (part for layer in self.states for part in layer):
            part.fill_(float("nan"))

    def _view(self, spec: KVSpec, blocks: int, dtype: torch.dtype) -> KVView:
        heads = 1 if spec.kind == "latent" else spec.heads
        if self.stored is not None:
            return self._scaled(spec, blocks, heads, self.stored)
        key = torch.full((blocks, heads, self.block_size, spec.key_dim), float("nan"), dtype=dtype, device=self.device)
        if spec.kind == "latent":
            return KVView(key, key[..., : spec.value_dim])
        value = torch.full((blocks, heads, self.block_size, spec.value_dim), float("nan"), dtype=dtype)
        return KVView(key, value.to(self.device))

    def _scaled(self, spec: KVSpec, blocks: int, heads: int, form: KVFormat) -> KVView:
        """Narrow pages; the poison lies in the scales."""
        key, key_scale = self._narrow((blocks, heads, self.block_size), spec.key_dim, form)
        if spec.kind == "latent":
            return KVView(key, key if form.packed else key[..., : spec.value_dim], key_scale, key_scale)
        value, value_scale = self._narrow((blocks, heads, self.block_size), spec.value_dim, form.of_values)
        return KVView(key, value, key_scale, value_scale)

    def _narrow(self, shape: tuple[int, ...], dim: int, form: KVFormat) -> tuple[Tensor, Tensor]:
        """Numbers and scales of heads of so many numbers."""
        dtype = torch.uint8 if form.packed else getattr(torch, form.dtype)
        numbers = torch.zeros(*shape, dim // 2 if form.packed else dim, dtype=dtype, device=self.device)
        scales = torch.full((*shape, form.scales(dim)), float("nan"), dtype=torch.bfloat16, device=self.device)
        return numbers, scales

    def step(self, grants: list[tuple[str, int]]) -> ForwardContext:
        """A context that gives each named sequence that many new tokens."""
        spans, positions, start = [], [], 0
        for name, count in grants:
            seq = self.seqs.setdefault(name, Tables(entries=[[] for _ in self.groups]))
            positions += range(seq.computed, seq.computed + count)
            spans.append((start, count, seq.computed + count))
            start += count
            self._grow(seq, count)
        context = ForwardContext(
            kernels=self.kernels,
            positions=self._tensor(positions),
            query_start=self._tensor([0] + [s + n for s, n, _ in spans], torch.int32),
            kv_len=self._tensor([n for _, _, n in spans], torch.int32),
            max_query=max(n for _, n, _ in spans),
            kv=self.kv,
            groups=[self._plan(i, grants) for i in range(len(self.groups))],
            spans=spans if self.device == "cpu" else None,
            block_size=self.block_size,
            rows=StepRows(*self._rows(grants), self.states),
        )
        for name, count in grants:
            self.seqs[name].computed += count
        return context

    def copy_pages(self, other: PagedBatch) -> None:
        """What another batch has stored: kernels that only read need not store it first."""
        for mine, theirs in zip(self.kv, other.kv, strict=True):
            for name in ("key", "value", "key_scale", "value_scale"):
                if (part := getattr(theirs, name)) is not None:
                    getattr(mine, name).copy_(part)

    def _rows(self, grants: list[tuple[str, int]]) -> tuple[Tensor, Tensor]:
        """Of each sequence and each token; a name keeps its row."""
        rows = [list(self.seqs).index(name) for name, _ in grants]
        return self._tensor(rows), self._tensor(
            [row for row, (_, n) in zip(rows, grants, strict=True) for _ in range(n)]
        )

    def _grow(self, seq: Tables, count: int) -> None:
        size = self.block_size
        for index, spec in enumerate(self.groups):
            entries, free = seq.entries[index], self.free[index]
            covered = entries[-1][1] + size if entries else 0
            while covered < seq.computed + count:
                entries.append((free.pop(), covered))
                covered += size
            if spec.kind == "window" and self.drop:
                while entries and entries[0][1] + size <= seq.computed - spec.window + 1:
                    free.insert(0, entries.pop(0)[0])

    def _plan(self, index: int, grants: list[tuple[str, int]]) -> GroupPlan:
        rows = [self.seqs[name].entries[index] for name, _ in grants]
        width = max(len(row) for row in rows) + 1
        tables = [[b for b, _ in row] + [NOWHERE] * (width - len(row)) for row in rows]
        first = [[p for _, p in row] + [NOWHERE] * (width - len(row)) for row in rows]
        plain = all(p == j * self.block_size for row in rows for j, (_, p) in enumerate(row))
        slots = []
        for (name, count), row in zip(grants, rows, strict=True):
            at = {p // self.block_size: b for b, p in row}
            done = self.seqs[name].computed
            slots += [
                at[p // self.block_size] * self.block_size + p % self.block_size for p in range(done, done + count)
            ]
        return GroupPlan(
            tables=self._tensor(tables, torch.int32),
            first=None if plain else self._tensor(first, torch.int32),
            entries=self._tensor([len(row) for row in rows], torch.int32),
            slots=self._tensor(slots),
            reach=self.block_size * sum(len(row) for row, (_, n) in zip(rows, grants, strict=True) if n > 1),
        )

    def _tensor(self, values: list, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)
