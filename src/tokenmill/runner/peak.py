"""The largest possible step, made up. Owns: a plan that uses the whole token budget, to measure memory and to warm up.

Must not know: models. It is an ordinary plan and runs like any other.
"""

from __future__ import annotations

from tokenmill.core.step import RowSampling, RowStart, StepPlan, TableEdit
from tokenmill.kvcache.pool import CacheLayout


def peak_plan(max_rows: int, step_tokens: int, max_len: int, layout: CacheLayout) -> tuple[StepPlan, list[int], int]:
    """Make a plan of the largest possible step; -> the plan, the blocks that it needs of each pool, its rows'
    length."""
    rows = min(max_rows, step_tokens)
    count = min(-(-step_tokens // rows), max_len)
    held = -(-count // layout.block_size)
    need = [0] * len(layout.page_bytes)
    plan = StepPlan(id=0)
    for row in range(rows):
        plan.starts.append(
            RowStart(row=row, tokens=[row % 7] * count, num_prompt=count, computed=0, sampling=RowSampling())
        )
        for group, spec in enumerate(layout.groups):
            first = need[spec.pool]
            need[spec.pool] += held
            starts = [layout.block_size * i for i in range(held)]
            plan.edits.append(TableEdit(row, group, 0, 0, list(range(first, first + held)), starts))
    plan.rows = list(range(rows))
    plan.counts = [count] * rows
    if rows > 1:  # with one row that decodes, so that both kinds of kernels are compiled
        plan.counts[-1] = 1
        plan.starts[-1].computed = count - 1
    plan.samples = [True] * rows
    return plan, need, count
