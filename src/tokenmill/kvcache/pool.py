"""The tensors of the K/V cache. Owns: page layout, sizes in bytes, and how many blocks a budget buys.

Must not know: sequences, tables, scheduling. A KV group's page holds one block of every layer of the group; groups
whose pages are equally large draw their blocks from one pool. One extra block at the end of each pool is scratch.

    page = layer 0 key [heads, block, key_dim] | layer 0 value | layer 1 key | ...

A pool lies in memory layer by layer where all its layers are equally large ([layers, blocks + 1, a layer's share]),
else page by page: what one layer reads then lies close together, which address translation on GPUs rewards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.core.errors import UserError
from tokenmill.core.forward import KVSpec, KVView
from tokenmill.kvcache.allocation import GroupLayout


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """KV groups of a model: `group_of[layer]`, one GroupLayout per group, page elements per pool."""

    specs: tuple[KVSpec, ...]
    group_specs: tuple[KVSpec, ...]
    group_of: tuple[int, ...]
    groups: tuple[GroupLayout, ...]
    page_elements: tuple[int, ...]
    block_size: int

    def pool_of(self, layer: int) -> int:
        """The pool that this layer's pages lie in."""
        return self.groups[self.group_of[layer]].pool


def make_layout(specs: tuple[KVSpec, ...], block_size: int) -> CacheLayout:
    """Group equal specs (in order of first appearance); equal page sizes share a pool."""
    group_specs = tuple(dict.fromkeys(specs))
    group_of = tuple(group_specs.index(spec) for spec in specs)
    pages = [group_of.count(g) * spec.elements_per_token * block_size for g, spec in enumerate(group_specs)]
    sizes = list(dict.fromkeys(pages))
    groups = tuple(
        GroupLayout(sizes.index(page), spec.window if spec.kind == "window" else 0)
        for page, spec in zip(pages, group_specs, strict=True)
    )
    return CacheLayout(specs, group_specs, group_of, groups, tuple(sizes), block_size)


def buy_blocks(layout: CacheLayout, budget_bytes: int, element_bytes: int, max_length: int, slack: int) -> list[int]:
    """Blocks per pool for this many bytes, shared in proportion to what one longest sequence needs of each pool.

    `slack`: tokens of one step, which a window group may hold beyond its window.
    """
    need = [0] * len(layout.page_elements)
    for group in layout.groups:
        length = min(max_length, group.window + slack) if group.window else max_length
        need[group.pool] += -(-length // layout.block_size) + 1
    unit = sum(n * page * element_bytes for n, page in zip(need, layout.page_elements, strict=True))
    if budget_bytes < unit * layout.block_size / max(max_length, 1):
        raise UserError(
            f"The KV cache budget of {budget_bytes / 2**20:.1f} MiB holds not even one block: "
            "give more with --kv-cache-memory-bytes."
        )
    return [max(1, budget_bytes * n // unit) for n in need]


class KVPool:
    """Zeroed pages on a device."""

    def __init__(self, layout: CacheLayout, num_blocks: list[int], dtype: torch.dtype, device: str) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.storage = [
            torch.zeros(blocks + 1, page, dtype=dtype, device=device)
            for blocks, page in zip(num_blocks, layout.page_elements, strict=True)
        ]
        self.views = self._views()

    @property
    def size_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(s.numel() * s.element_size() for s in self.storage)

    def group_views(self, group: int) -> list[KVView]:
        """The pages of one KV group's layers."""
        return [view for view, g in zip(self.views, self.layout.group_of, strict=True) if g == group]

    def _views(self) -> list[KVView]:
        size = self.layout.block_size
        offsets = [0] * len(self.layout.groups)
        views = []
        for layer, spec in enumerate(self.layout.specs):
            group = self.layout.group_of[layer]
            pages, start = self._share(layer, offsets[group])
            offsets[group] += spec.elements_per_token * size
            if spec.kind == "latent":
                key = _part(pages, start, 1, size, spec.key_dim)
                views.append(KVView(key, key[..., : spec.value_dim]))
                continue
            key = _part(pages, start, spec.heads, size, spec.key_dim)
            value = _part(pages, start + spec.heads * size * spec.key_dim, spec.heads, size, spec.value_dim)
            views.append(KVView(key, value))
        return views

    def _share(self, layer: int, offset: int) -> tuple[Tensor, int]:
        """Pages [blocks + 1, ...] and the place in them where the layer's share begins; offset: within its page."""
        layout, pool = self.layout, self.layout.pool_of(layer)
        pages = self.storage[pool]
        shares = {s.elements_per_token for i, s in enumerate(layout.specs) if layout.pool_of(i) == pool}
        if len(shares) > 1:
            return pages, offset
        share = shares.pop() * layout.block_size
        return pages.view(-1, pages.shape[0], share)[offset // share], 0


def _part(pages: Tensor, start: int, heads: int, size: int, dim: int) -> Tensor:
    return pages[:, start : start + heads * size * dim].unflatten(1, (heads, size, dim))
