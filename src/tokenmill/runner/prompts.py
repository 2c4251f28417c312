"""What prompts are asked for besides the tokens behind them. Owns: log-probabilities of their tokens, pooled states.

Must not know: sampling, drafts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.model import CausalLM
from tokenmill.core.step import StepPlan, StepResult
from tokenmill.runner.batch import Batch
from tokenmill.runner.rows import Rows
from tokenmill.sampling.logprobs import token_logprobs

LOGITS_SLICE = 256
"""How many prompt positions have logits at one time: 256 lines of a 128k vocabulary are 128 MB in float32."""


def score_prompts(model: CausalLM, rows: Rows, plan: StepPlan, batch: Batch, hidden: Tensor) -> dict[int, list[Any]]:
    """By grant the log-probabilities of its positions, computed in bounded slices of logits."""
    found: dict[int, list[Any]] = {}
    for i, row in enumerate(plan.rows):
        wanted = rows.sampling.params[row].num_prompt_logprobs
        if wanted < 0:
            continue
        start = batch.ends[i] - plan.counts[i]
        first = int(batch.ctx.positions[start])
        stop = min(first + plan.counts[i], rows.num_prompt[row] - 1)
        for at in range(first, stop, LOGITS_SLICE):
            end = min(at + LOGITS_SLICE, stop)
            lines = slice(start + at - first, start + end - first)
            logits = model.logits(hidden[lines], batch.ctx.of(lines))
            targets = rows.tokens[row, at + 1 : end + 1].long()
            found.setdefault(i, []).extend(token_logprobs(logits.float(), targets, wanted))
    return found


def pool_states(rows: Rows, plan: StepPlan, batch: Batch, hidden: Tensor, result: StepResult) -> None:
    """Pool the hidden states of embedding rows: take the last token's, or the mean over the prompt."""
    for i, row in enumerate(plan.rows):
        kind = rows.pools.get(row)
        if kind is None:
            continue
        part = hidden[batch.ends[i] - plan.counts[i] : batch.ends[i]]
        if kind == "mean":
            # Add strictly one position after the other: chunk borders must not change the sum.
            before = rows.sums[row][None] if row in rows.sums else part.new_zeros(1, part.shape[1]).double()
            rows.sums[row] = torch.cat([before, part.double()]).cumsum(0)[-1]
        if plan.samples[i]:
            pooled = (rows.sums.pop(row) / rows.num_prompt[row] if kind == "mean" else part[-1]).float()
            if pooled.isfinite().all():
                result.pooled[i] = torch.nn.functional.normalize(pooled, dim=0).tolist()
            else:
                result.errors[i] = "The model's hidden state holds NaN or infinity, so there is no embedding."
