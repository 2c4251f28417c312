"""States behind drafts. Owns: where a step leaves the states behind its tokens, and which of them a row goes on with.

A recurrent layer overwrites its state with every token, and drafts may be wrong. So a row that tries drafts keeps the
state behind each of its tokens apart (`places_left` in batch.py); the last one lies with the row. Once it is known how
many tokens stand, the row takes the state behind them. Must not know: layers, how drafts are verified.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.core.step import StateSave, StepPlan
from tokenmill.kvcache.states import StatePool
from tokenmill.runner.batch import Batch
from tokenmill.runner.rows import Rows
from tokenmill.sampling.arrays import send_columns


def settle_states(
    states: StatePool | None,
    plan: StepPlan,
    batch: Batch | None,
    rows: Rows,
    stand: tuple[list[int], Tensor] | None,
) -> None:
    """Keep the states that the plan wants kept, and take rows back to the state behind their last token that stands.

    stand: the verified grants, and how many of their samples stand; the rows have already advanced by these."""
    if states is None or batch is None or not (plan.saves or plan.guesses):
        return
    if not states.trail:  # no drafts are tried: grants end exactly at these positions
        if plan.saves:
            states.keep(*send_columns([(save.row, save.slot) for save in plan.saves], rows.device))
        return
    firsts, at = {}, states.first
    for i in range(len(plan.rows)):
        if i in plan.guesses:
            firsts[i] = at
            at += plan.guesses[i]
    if plan.saves:
        _keep(states, plan, batch, rows, firsts)
    if stand is None or not firsts:
        return
    told = [[plan.rows[i], firsts[i], plan.guesses[i], n] for n, i in enumerate(stand[0]) if i in firsts]
    if told:
        row_ids, first, tried, places = send_columns(told, rows.device)
        kept = stand[1][places]
        states.move(torch.where(kept > tried, row_ids, first + kept - 1), row_ids)


def _keep(states: StatePool, plan: StepPlan, batch: Batch, rows: Rows, firsts: dict[int, int]) -> None:
    """Keep the states at the wanted positions of rows that this step took there or past them."""
    grant = {row: i for i, row in enumerate(plan.rows)}
    told = [_line(save, grant[save.row], plan, batch, firsts) for save in plan.saves]
    row_ids, slots, positions, first, tried, begins = send_columns(told, rows.device)
    passed = positions - batch.ctx.positions[begins]
    there = (passed > 0) & (positions <= rows.computed[row_ids])
    places = torch.where(passed <= tried, first + passed - 1, row_ids)
    states.keep(torch.where(there, places, row_ids), torch.where(there, slots, states.nowhere))


def _line(save: StateSave, i: int, plan: StepPlan, batch: Batch, firsts: dict[int, int]) -> list[int]:
    """The numbers that the device needs for a save in grant i."""
    begin = batch.ends[i] - plan.counts[i]
    return [save.row, save.slot, save.position, firsts.get(i, 0), plan.guesses.get(i, 0), begin]
