"""Runs plans on one device. Owns: the order forward -> logits of the sampled lines -> sampling -> rows -> result.

Must not know: requests, scheduling, text. `begin` and `sample` enqueue work without waiting for the device;
`finish` reads the results. A failed plan fails every later plan of its epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenmill.core.protocols import CausalLM, Kernels
from tokenmill.core.step import LateInputs, StepPlan, StepResult
from tokenmill.kvcache.pool import KVPool
from tokenmill.runner.batch import Batch, make_batch
from tokenmill.runner.rows import Rows
from tokenmill.sampling.logprobs import token_logprobs
from tokenmill.sampling.sampler import Lines, Sampled, sample
from tokenmill.sampling.verify import accept

LOGITS_SLICE = 256
"""Prompt positions whose logits exist at one time: 256 lines of a 128k vocabulary are 128 MB in float32."""


@dataclass(slots=True)
class Running:
    """A plan on the device: its batch, hidden states, and per sampled line the grant it belongs to."""

    plan: StepPlan
    batch: Batch | None = None
    hidden: Tensor | None = None
    lines: list[int] = field(default_factory=list)
    sampled: Sampled | None = None
    result: StepResult | None = None
    scores: dict[int, list] = field(default_factory=dict)


class Runner:
    """One model on one device."""

    def __init__(self, model: CausalLM, kernels: Kernels, pool: KVPool, max_rows: int, max_len: int) -> None:
        self.model = model
        self.kernels = kernels
        self.pool = pool
        device = pool.storage[0].device
        self.rows = Rows(max_rows, max_len, pool.layout, model.spec.vocab_size, str(device))
        self.failed_epoch = -1

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> Running:
        """Apply the plan and compute hidden states."""
        running = Running(plan)
        if plan.epoch == self.failed_epoch:
            running.result = StepResult(plan_id=plan.id, failure="an earlier step failed")
            return running
        try:
            self._forward(running)
        except Exception as error:
            self._fail(running, error)
        return running

    @torch.inference_mode()
    def sample(self, running: Running, late: LateInputs | None) -> None:
        """Choose tokens and write them into the rows."""
        if running.result is not None:
            return
        try:
            self._sample(running, late or LateInputs())
        except Exception as error:
            self._fail(running, error)

    @torch.inference_mode()
    def finish(self, running: Running) -> StepResult:
        """Wait for the device and gather what the host must know."""
        if running.result is not None:
            return running.result
        try:
            return self._collect(running)
        except Exception as error:
            self._fail(running, error)
            assert running.result is not None
            return running.result

    def run(self, plan: StepPlan, late: LateInputs | None = None) -> StepResult:
        """All three at once."""
        running = self.begin(plan)
        self.sample(running, late)
        return self.finish(running)

    def _fail(self, running: Running, error: Exception) -> None:
        self.failed_epoch = running.plan.epoch
        text = f"{type(error).__name__}: {error}"
        running.result = StepResult(plan_id=running.plan.id, failure=text.splitlines()[0][:300])

    def _forward(self, running: Running) -> None:
        plan, rows = running.plan, self.rows
        rows.apply(plan)
        for group in {copy.group for copy in plan.copies}:
            pairs = [(c.src, c.dst) for c in plan.copies if c.group == group]
            self.kernels.copy_blocks_(self.pool.group_views(group), [s for s, _ in pairs], [d for _, d in pairs])
        if plan.drafts:
            rows.write_drafts([plan.rows[i] for i in plan.drafts], list(plan.drafts.values()))
        batch = make_batch(plan, rows, self.pool, self.kernels)
        running.batch = batch
        running.hidden = self.model.forward(batch.tokens, batch.ctx)

    def _sample(self, running: Running, late: LateInputs) -> None:
        plan, batch, rows = running.plan, running.batch, self.rows
        assert batch is not None and running.hidden is not None
        self._score_prompts(running)
        places: list[int] = []
        for i, row in enumerate(plan.rows):
            if plan.samples[i] and row not in rows.pools:
                tried = len(plan.drafts[i]) if i in plan.drafts else 0
                end = batch.ends[i]
                places += range(end - 1 - tried, end)
                running.lines += [i] * (1 + tried)
        if places:
            every = len(places) == batch.tokens.shape[0]
            at = torch.tensor(places).to(rows.device, non_blocking=True)
            hidden = running.hidden if every else running.hidden[at]
            lines = Lines(
                rows=[plan.rows[i] for i in running.lines],
                row_ids=batch.token_rows if every else batch.token_rows[at],
                lengths=(batch.ctx.positions if every else batch.ctx.positions[at]) + 1,
                tokens=rows.tokens,
                masks=late.masks,
                processors=late.processors,
            )
            running.sampled = sample(self.model.logits(hidden, batch.ctx), lines, rows.sampling)
        self._advance(running)

    def _advance(self, running: Running) -> None:
        """Rows move on by what they computed; sampled tokens are appended where nothing is left to verify."""
        plan, batch, rows = running.plan, running.batch, self.rows
        assert batch is not None
        rows.computed.index_add_(0, batch.row_ids, batch.counts)
        if running.sampled is None:
            return
        plain = [
            n
            for n, i in enumerate(running.lines)
            if i not in plan.drafts and not rows.sampling.params[plan.rows[i]].num_candidates
        ]
        if not plain:
            return
        if len(plain) == len(plan.rows):
            row_ids, ids = batch.row_ids, running.sampled.ids
        else:
            at = torch.tensor(plain).to(rows.device, non_blocking=True)
            row_ids = torch.tensor([plan.rows[running.lines[n]] for n in plain]).to(rows.device, non_blocking=True)
            ids = running.sampled.ids[at]
        rows.tokens[row_ids, rows.length[row_ids]] = ids.to(torch.int32)
        rows.length.index_add_(0, row_ids, torch.ones_like(row_ids))

    def _collect(self, running: Running) -> StepResult:
        plan, rows = running.plan, self.rows
        result = StepResult(plan_id=plan.id, tokens=[[] for _ in plan.rows], prompt_logprobs=running.scores)
        if rows.pools:
            self._pool(running, result)
        sampled = running.sampled
        if sampled is None:
            return result
        ids = sampled.ids.tolist()
        sampled.collect()
        by_grant: dict[int, list[int]] = {}
        for n, i in enumerate(running.lines):
            by_grant.setdefault(i, []).append(n)
        for i, lines in by_grant.items():
            self._collect_grant(i, lines, [ids[n] for n in lines], running, result)
        return result

    def _collect_grant(self, i: int, lines: list[int], ids: list[int], running: Running, result: StepResult) -> None:
        plan, sampled, row = running.plan, running.sampled, running.plan.rows[i]
        assert sampled is not None
        if sampled.errors:
            bad = next((sampled.errors[n] for n in lines if n in sampled.errors), None)
            if bad is not None:
                result.errors[i] = bad
                return
        if self.rows.sampling.params[row].num_candidates:
            result.candidates[i] = sampled.candidates[lines[0]]
            return
        if i in plan.drafts:
            ids = accept([ids], [plan.drafts[i]])[0]
            self.rows.accept(row, ids)
        result.tokens[i] = ids
        if sampled.logprobs and lines[0] in sampled.logprobs:
            result.logprobs[i] = [sampled.logprobs[n] for n in lines[: len(ids)]]

    def _score_prompts(self, running: Running) -> None:
        """Prompt logprobs of the positions in this step, in bounded slices of logits."""
        plan, batch, rows = running.plan, running.batch, self.rows
        assert batch is not None and running.hidden is not None
        for i, row in enumerate(plan.rows):
            wanted = rows.sampling.params[row].num_prompt_logprobs
            if wanted < 0:
                continue
            start = batch.ends[i] - plan.counts[i]
            first = int(batch.ctx.positions[start])
            stop = min(first + plan.counts[i], rows.num_prompt[row] - 1)
            for at in range(first, stop, LOGITS_SLICE):
                end = min(at + LOGITS_SLICE, stop)
                logits = self.model.logits(running.hidden[start + at - first : start + end - first], batch.ctx)
                targets = rows.tokens[row, at + 1 : end + 1].long()
                running.scores.setdefault(i, []).extend(token_logprobs(logits, targets, wanted))

    def _pool(self, running: Running, result: StepResult) -> None:
        """Pooled hidden states of embedding rows: the last token's, or the mean over the prompt."""
        plan, batch, rows = running.plan, running.batch, self.rows
        assert batch is not None and running.hidden is not None
        for i, row in enumerate(plan.rows):
            kind = rows.pools.get(row)
            if kind is None:
                continue
            part = running.hidden[batch.ends[i] - plan.counts[i] : batch.ends[i]]
            if kind == "mean":
                total = part.double().sum(0)
                rows.sums[row] = rows.sums[row] + total if row in rows.sums else total
            if plan.samples[i]:
                pooled = rows.sums.pop(row) / rows.num_prompt[row] if kind == "mean" else part[-1]
                result.pooled[i] = torch.nn.functional.normalize(pooled.float(), dim=0).tolist()
