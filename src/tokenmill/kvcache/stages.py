"""K/V groups of a model whose layers lie in several stages. Owns: one numbering of groups and pools for the scheduler,
another one in each stage, and the translation of a plan between them.

The scheduler counts blocks of the whole model's groups. A stage keeps pages of its own layers. Groups share a pool
where their pages are equally large in every stage. Must not know: how stages exchange anything, models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tokenmill.compute.forward import KVFormat, KVSpec
from tokenmill.core.step import StepPlan
from tokenmill.kvcache.allocation import GroupLayout
from tokenmill.kvcache.pool import CacheLayout, make_layout


class StageReport(msgspec.Struct, frozen=True):
    """What a stage reports about its attention layers. stands_in: it has none, and keeps pages that nothing reads."""

    specs: tuple[KVSpec, ...]
    stands_in: bool


@dataclass(frozen=True, slots=True)
class StageLayout:
    """One stage's pages among those of all stages. groups: the groups of the whole model. own: the stage's number for
    each group that it has. pools: the whole model's number for each of the stage's pools."""

    cache: CacheLayout
    groups: tuple[GroupLayout, ...]
    own: dict[int, int]
    pools: tuple[int, ...]

    def everywhere(self, blocks: list[int], many: int) -> list[int]:
        """Block counts by the stage's pools -> by the whole model's. many: the count for pools that the stage lacks."""
        found = [many] * (1 + max(group.pool for group in self.groups))
        for pool, count in zip(self.pools, blocks, strict=True):
            found[pool] = count
        return found

    def here(self, blocks: list[int]) -> list[int]:
        """Block counts by the whole model's pools -> by the stage's pools."""
        return [blocks[pool] for pool in self.pools]

    def translate(self, plan: StepPlan) -> None:
        """Change a plan for the whole model into one for this stage, in place."""
        plan.edits = [edit for edit in plan.edits if edit.group in self.own]
        plan.copies = [copy for copy in plan.copies if copy.group in self.own]
        for edit in plan.edits:
            edit.group = self.own[edit.group]
        for copy in plan.copies:
            copy.group = self.own[copy.group]


def lay_out_stage(every: Sequence[StageReport], stage: int, block_size: int, kv_format: KVFormat) -> StageLayout:
    """The page layout of one stage. every: what each stage reports."""
    real = [said.specs for said in every if not said.stands_in] or [said.specs for said in every]
    specs = tuple(dict.fromkeys(spec for layers in real for spec in layers))
    sizes: list[dict[KVSpec, int]] = []
    for layers in real:
        layout = make_layout(layers, block_size, kv_format)
        sizes.append({spec: layout.group_of.count(g) * layout.share_bytes(spec)
                      for g, spec in enumerate(layout.group_specs)})  # fmt: skip
    marks = {spec: tuple(each.get(spec, 0) for each in sizes) for spec in specs}
    pools = list(dict.fromkeys(marks.values()))
    groups = tuple(GroupLayout(pools.index(marks[spec]), spec.window if spec.kind == "window" else 0) for spec in specs)
    own = every[stage].specs
    if every[stage].stands_in and not all(said.stands_in for said in every):  # its pages follow the first group's
        return StageLayout(make_layout(own, block_size, kv_format), groups, {0: 0}, (groups[0].pool,))
    cache = make_layout(own, block_size, kv_format, marks)
    numbers = {specs.index(spec): g for g, spec in enumerate(cache.group_specs)}
    place = {cache.groups[g].pool: groups[number].pool for number, g in numbers.items()}
    return StageLayout(cache, groups, numbers, tuple(place[pool] for pool in range(len(cache.page_bytes))))
