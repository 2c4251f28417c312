"""Attention of one step: which kernels serve it, and what its layers share. Owns: the shared prefix and the gathered
order of a step, found once. Must not know: latent attention.
"""

from __future__ import annotations

from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, GroupPlan
from tokenmill.kernels.triton.attention.cascade import attend_shared, can_share, common_entries, shared_parts
from tokenmill.kernels.triton.attention.decode import attend_one, decode_config, early_keys, is_wide
from tokenmill.kernels.triton.attention.gathered import arrange, gather
from tokenmill.kernels.triton.attention.long import attend_long, can_gather
from tokenmill.kernels.triton.attention.prefill import attend_many
from tokenmill.kernels.triton.attention.prepare import can_prepare
from tokenmill.kernels.triton.attention.stored import can_pair
from tokenmill.kernels.triton.common import INTERPRETED
from tokenmill.kernels.triton.launch import Launch

_WIDEST_HEAD = 512


def has_heads(spec: AttentionSpec, q: Tensor) -> bool:
    """Are there attention kernels for heads of this size? Wide ones of 32 bits would not fit."""
    return max(spec.kv.key_dim, spec.kv.value_dim) <= (_WIDEST_HEAD if q.element_size() == 2 or INTERPRETED else 256)


class Stepping:
    """cascade: a shared prefix is read once."""

    def __init__(self, launch: Launch, *, cascade: bool) -> None:
        self.launch, self.cascade = launch, cascade
        self._common: tuple[GroupPlan, Tensor] | None = None
        self._arranged: tuple[GroupPlan, int, tuple[Tensor, Tensor]] | None = None

    def attend(self, q: Tensor, out: Tensor, spec: AttentionSpec, ctx: ForwardContext) -> None:
        """Contiguous q [T, H, Dk] against the pages -> out [T, H * Dv]."""
        seqs = ctx.kv_len.shape[0]
        if self.launch.steady or not can_pair(ctx.kv[spec.layer]):
            attend_many(q, out, spec, ctx, self.launch.scratch, pdl=self.launch.pdl, steady=self.launch.steady)
            return
        if ctx.max_query == 1:
            self._attend_one(q, out, spec, ctx)
            return
        # Some sequences may have one new token; each kernel leaves the other's alone.
        mixed = seqs > 1
        plan = ctx.groups[spec.group]
        if can_gather(q, spec, plan, ctx.max_query, hopper=self.launch.hopper) and not (
            self.launch.small or self.launch.steady
        ):
            arranged = self.arranged(spec, ctx, q.shape[0], spec.heads // spec.kv.heads)
            gathered = gather(spec, ctx, arranged[0], q.dtype, pdl=self.launch.pdl)
            attend_long(q, out, spec, ctx, arranged, gathered, pdl=self.launch.pdl, hopper=self.launch.hopper)
        else:
            attend_many(
                q, out, spec, ctx, self.launch.scratch, pdl=self.launch.pdl, mixed=True,
                config=(64, 32, 4, 2) if self.launch.small else None,
            )  # fmt: skip
        if mixed:
            attend_one(q, out, spec, ctx, self.launch.scratch, pdl=self.launch.pdl, mixed=True)

    def arranged(self, spec: AttentionSpec, ctx: ForwardContext, tokens: int, group: int) -> tuple[Tensor, Tensor]:
        """The gathered order of the step; group: query heads that share a key, which layers may differ in."""
        plan = ctx.groups[spec.group]
        if self._arranged is None or self._arranged[0] is not plan or self._arranged[1] != group:
            self._arranged = plan, group, arrange(ctx, tokens, group)
        return self._arranged[2]

    def takes_new_keys(self, qkv: Tensor, spec: AttentionSpec, ctx: ForwardContext) -> bool:
        """Can one launch prepare queries, keys and values, and attend?"""
        plan, kv = ctx.groups[spec.group], ctx.kv[spec.layer]
        if self.launch.steady or not self.launch.fuses or ctx.max_query != 1 or qkv.shape[0] == 0:
            return False
        if plan.paths is not None or spec.touches.values == "stored":  # new keys of other sequences, or layers
            return False
        if not can_prepare(spec) or not can_pair(kv):
            return False
        units = ctx.kv_len.shape[0] * spec.kv.heads
        if not early_keys(units, wide=is_wide(spec), narrow=kv.key_scale is not None):
            return False
        return has_heads(spec, qkv) and not self._shares(plan, spec, ctx, qkv.element_size())

    def _shares(self, plan: GroupPlan, spec: AttentionSpec, ctx: ForwardContext, size: int) -> bool:
        """Is a common prefix to be read once?"""
        if self.launch.steady or self.launch.small or not self.cascade:
            return False
        return plan.shared and can_share(spec, plan, size) and ctx.kv_len.shape[0] >= 2

    def _attend_one(self, q: Tensor, out: Tensor, spec: AttentionSpec, ctx: ForwardContext) -> None:
        plan, seqs = ctx.groups[spec.group], ctx.kv_len.shape[0]
        if not self._shares(plan, spec, ctx, q.element_size()):
            attend_one(q, out, spec, ctx, self.launch.scratch, pdl=self.launch.pdl)
            return
        before = shared_parts(seqs, spec)
        splits, *rest = decode_config(seqs * spec.kv.heads, plan.tables.shape[1] * ctx.block_size, spec, beside=True)
        room = self.launch.scratch.floats // (seqs * spec.heads * (spec.kv.value_dim + 2))
        splits = max(1, min(splits, room - before)) if seqs * spec.kv.heads <= self.launch.scratch.num_counters else 1
        if room < before + splits:
            attend_one(q, out, spec, ctx, self.launch.scratch, pdl=self.launch.pdl)
            return
        if self._common is None or self._common[0] is not plan:
            self._common = plan, common_entries(plan, ctx, pdl=self.launch.pdl)
        common = self._common[1]
        attend_shared(
            q, spec, ctx, common, self.launch.scratch, before=before, parts=before + splits, pdl=self.launch.pdl
        )
        config = (splits, rest[0], rest[1], rest[2], rest[3], rest[4])
        attend_one(
            q, out, spec, ctx, self.launch.scratch, pdl=self.launch.pdl, before=before, shared=common, config=config
        )
