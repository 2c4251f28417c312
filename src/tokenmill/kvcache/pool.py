"""The tensors of the K/V cache. Owns: page layout, sizes in bytes, and how many blocks a budget buys.

Must not know: sequences, tables, scheduling. A KV group's page holds one block of every layer of the group; groups
whose pages are equally large draw their blocks from one pool. One extra block at the end of each pool is scratch.

    page = layer 0's share | layer 1's share | ...
    share = key [heads, block, key_dim] | value | key scales [heads, block, scales] | value scales (scaled formats only;
            in int4 scales and least values)

A pool lies in memory layer by layer where all its layers are equally large ([layers, blocks + 1, a layer's share]),
else page by page: what one layer reads then lies close together, which address translation on GPUs rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.compute.forward import KVFormat, KVSpec, KVView
from tokenmill.core.errors import ParameterError, UserError
from tokenmill.core.step import BlockCopy
from tokenmill.kernels.stored_kv import page_parts
from tokenmill.kvcache.allocation import GroupLayout
from tokenmill.kvcache.states import StatePool
from tokenmill.kvcache.zeros import zeros

ALIGN = 16
"""In bytes. Layers' shares begin at multiples of it, so that every part of a share is aligned for its type."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The KV groups of a model: `group_of[layer]`, a GroupLayout for each group, and the bytes of a page in each
    pool."""

    specs: tuple[KVSpec, ...]
    group_specs: tuple[KVSpec, ...]
    group_of: tuple[int, ...]
    groups: tuple[GroupLayout, ...]
    page_bytes: tuple[int, ...]
    block_size: int
    format: KVFormat

    def pool_of(self, layer: int) -> int:
        """The number of the pool that this layer's pages lie in."""
        return self.groups[self.group_of[layer]].pool

    def share_bytes(self, spec: KVSpec) -> int:
        """The bytes of one layer's share of a page."""
        return _share_bytes(spec, self.block_size, self.format)


def make_layout(
    specs: tuple[KVSpec, ...],
    block_size: int,
    kv_format: KVFormat,
    apart: Mapping[KVSpec, tuple[int, ...]] | None = None,
) -> CacheLayout:
    """Group equal specs, in order of first appearance; groups with equal page sizes share a pool. apart: for the layers
    of one of several stages, what separates pools instead of page sizes (stages.py)."""
    for spec in specs:
        _check(spec, kv_format)
    group_specs = tuple(dict.fromkeys(specs))
    group_of = tuple(group_specs.index(spec) for spec in specs)
    pages = [group_of.count(g) * _share_bytes(spec, block_size, kv_format) for g, spec in enumerate(group_specs)]
    marks: list[tuple[int, ...]] = (
        [(page,) for page in pages] if apart is None else [apart[spec] for spec in group_specs]
    )
    pools = list(dict.fromkeys(marks))
    sizes = tuple(pages[marks.index(mark)] for mark in pools)
    groups = tuple(
        GroupLayout(pools.index(mark), spec.window if spec.kind == "window" else 0)
        for mark, spec in zip(marks, group_specs, strict=True)
    )
    return CacheLayout(specs, group_specs, group_of, groups, sizes, block_size, kv_format)


def _check(spec: KVSpec, kv_format: KVFormat) -> None:
    """Refuse heads that the format cannot hold."""
    sizes = f"heads of {spec.key_dim} and {spec.value_dim} numbers"
    if kv_format.group and (spec.key_dim % kv_format.group or spec.value_dim % kv_format.group):
        raise ParameterError(
            f"--kv-cache-group {kv_format.group} does not divide this model's {sizes}.", param="kv_cache_group"
        )
    if kv_format.of_values.packed and (spec.key_dim % 2 or spec.value_dim % 2):
        raise ParameterError(f"--kv-cache-dtype int4: this model has {sizes}, not even ones.", param="kv_cache_dtype")
    if kv_format.values and spec.kind == "latent":
        raise ParameterError(
            "--kv-cache-dtype int4-fp8k: this model's values lie in its keys; use int4 or fp8.", param="kv_cache_dtype"
        )


def _share_bytes(spec: KVSpec, block_size: int, kv_format: KVFormat) -> int:
    return -(-kv_format.bytes_per_token(spec) * block_size // ALIGN) * ALIGN


def buy_blocks(layout: CacheLayout, budget_bytes: int, max_length: int, slack: int) -> list[int]:
    """How many blocks each pool gets for this many bytes, in proportion to what one longest sequence needs of each.

    `slack`: tokens of one step, which a window group may hold beyond its window.
    """
    need, unit = _blocks_of(layout, max_length, slack), sequence_bytes(layout, max_length, slack)
    if budget_bytes < unit * layout.block_size / max(max_length, 1):
        raise UserError(
            f"A K/V cache of {budget_bytes / 2**20:.1f} MiB holds not even one block: "
            "give more with --kv-cache-memory-bytes."
        )
    return [max(1, budget_bytes * n // unit) for n in need]


def sequence_bytes(layout: CacheLayout, length: int, slack: int) -> int:
    """The bytes of all pages of a sequence of this length. slack: see `buy_blocks`."""
    return sum(n * page for n, page in zip(_blocks_of(layout, length, slack), layout.page_bytes, strict=True))


def _blocks_of(layout: CacheLayout, length: int, slack: int) -> list[int]:
    """How many blocks of each pool such a sequence has."""
    need = [0] * len(layout.page_bytes)
    for group in layout.groups:
        reach = min(length, group.window + slack) if group.window else length
        need[group.pool] += -(-reach // layout.block_size) + 1
    return need


class KVPool:
    """Zeroed pages on a device."""

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: list[int],
        device: str,
        states: StatePool | None = None,
        make: Callable[[int, int, str], Tensor] = zeros,
        drafter_states: StatePool | None = None,
    ) -> None:
        """states: the state pool of a model whose rows have states besides their pages. make: makes zeroed memory.
        drafter_states: the states of a drafter's own layers; the drafter says what lies where."""
        self.layout = layout
        self.states = states
        self.state_views = [] if states is None else states.views
        self.drafter_states = drafter_states
        self.num_blocks = num_blocks
        self.storage = [
            make(blocks + 1, page, device) for blocks, page in zip(num_blocks, layout.page_bytes, strict=True)
        ]
        self.views = self._views()

    @property
    def size_bytes(self) -> int:
        """The bytes of all pages."""
        return sum(s.numel() for s in self.storage)

    def group_views(self, group: int) -> list[KVView]:
        """The pages of one KV group's layers."""
        return [view for view, g in zip(self.views, self.layout.group_of, strict=True) if g == group]

    def turns(self, copies: Iterable[BlockCopy]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Copies as groups with their pairs, to be made in this order. A block that one of them reads may have been
        freed, and taken for another group of its pool, by those behind it: they have a turn of their own."""
        turn: dict[int, list[tuple[int, int]]] = {}
        read: set[tuple[int, int]] = set()
        for copy in copies:
            pool = self.layout.groups[copy.group].pool
            if (pool, copy.dst) in read:
                yield from turn.items()
                turn, read = {}, set()
            turn.setdefault(copy.group, []).append((copy.src, copy.dst))
            read.add((pool, copy.src))
        yield from turn.items()

    def copy_blocks(self, group: int, src: Tensor, dst: Tensor) -> None:
        """Copy blocks src [n] of a group's layers to dst [n]; every source is read before any block is written."""
        for view in self.group_views(group):
            for part in page_parts(view):
                plain = part.view(torch.uint8)
                plain[dst] = plain[src]

    def _views(self) -> list[KVView]:
        layout = self.layout
        offsets = [0] * len(layout.groups)
        views = []
        for layer, spec in enumerate(layout.specs):
            group = layout.group_of[layer]
            share = _Share(*self._share(layer, offsets[group]), layout.block_size)
            offsets[group] += layout.share_bytes(spec)
            views.append(_view(share, spec, layout.format))
        return views

    def _share(self, layer: int, offset: int) -> tuple[Tensor, int]:
        """The pages [blocks + 1, ...] and the byte in each where the layer's share begins. offset: place within its
        page."""
        layout, pool = self.layout, self.layout.pool_of(layer)
        pages = self.storage[pool]
        shares = {layout.share_bytes(s) for i, s in enumerate(layout.specs) if layout.pool_of(i) == pool}
        if len(shares) > 1:
            return pages, offset
        share = shares.pop()
        return pages.view(-1, pages.shape[0], share)[offset // share], 0


@dataclass(slots=True)
class _Share:
    """One layer's share of the pages [blocks + 1, bytes], cut into pieces from byte `at` on."""

    pages: Tensor
    at: int
    block_size: int

    def cut(self, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        """The next piece, as [blocks + 1, heads, block_size, dim]. Behind an odd number of bytes one is left out:
        such a share is no multiple of ALIGN, so it has one to spare."""
        size = dtype.itemsize
        start = -(-self.at // size) * size
        self.at = start + heads * self.block_size * dim * size
        return self.pages[:, start : self.at].view(dtype).unflatten(1, (heads, self.block_size, dim))

    def numbers(self, heads: int, dim: int, kv_format: KVFormat) -> Tensor:
        """The next piece, as numbers of keys in this format."""
        if kv_format.packed:
            return self.cut(heads, dim // 2, torch.uint8)
        return self.cut(heads, dim, getattr(torch, kv_format.dtype))


def _view(share: _Share, spec: KVSpec, kv_format: KVFormat) -> KVView:
    keys, values, half = kv_format, kv_format.of_values, torch.bfloat16
    if spec.kind == "latent":
        key = share.numbers(1, spec.key_dim, keys)
        scale = share.cut(1, keys.scales(spec.key_dim), half) if keys.scaled else None
        return KVView(key, key if keys.packed else key[..., : spec.value_dim], scale, scale)
    key = share.numbers(spec.heads, spec.key_dim, keys)
    value = share.numbers(spec.heads, spec.value_dim, values)
    if not kv_format.scaled:
        return KVView(key, value)
    key_scale = share.cut(spec.heads, keys.scales(spec.key_dim), half)
    return KVView(key, value, key_scale, share.cut(spec.heads, values.scales(spec.value_dim), half))
