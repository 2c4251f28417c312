"""Which drafts stand. Owns: asking the backend, once a step is sampled, and reading its answer.

Noise depends on the position alone. If the tokens before a position are right, its sample is the token that plain
decoding would have taken there. So a draft is right if it equals the sample of its position. Must not know: who
guesses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.compute.forward import Kernels
from tokenmill.runner.batch import Batch
from tokenmill.runner.rows import Rows
from tokenmill.runner.trees import all_parents
from tokenmill.sampling.arrays import send


@dataclass(slots=True)
class Verdict:
    """How many samples of each verified grant stand [S]. path [S, W]: if drafts are trees, the lines that stand;
    otherwise the first lines stand."""

    grants: list[int]
    kept: Tensor
    path: Tensor | None = None

    @property
    def last(self) -> Tensor | None:
        """[S]: the last line that stands of each grant, if drafts are trees."""
        return None if self.path is None else self.path.gather(1, self.kept[:, None] - 1)[:, 0]

    def beside(self, marked: Tensor) -> Tensor:
        """The samples and the verdict behind them in one tensor, so that they are read at once."""
        return torch.cat((marked, self.kept) if self.path is None else (marked, self.kept, self.path.flatten()))

    def read(self, told: list[int]) -> dict[int, list[int]]:
        """The numbers read behind the samples -> by grant the lines that stand, counted from the grant's first line."""
        count = len(self.grants)
        if self.path is None:
            return {i: list(range(n)) for i, n in zip(self.grants, told, strict=True)}
        width = self.path.shape[1]
        return {i: told[count + n * width :][: told[n]] for n, i in enumerate(self.grants)}


def verify(batch: Batch, lines: list[int], marked: Tensor, rows: Rows, kernels: Kernels) -> Verdict:
    """Verify drafts and advance the rows by the samples that stand. lines: the grant of each sampled line. marked [n]:
    each line's sample, ~id if it is bad."""
    plan, params = batch.plan, rows.sampling.params
    firsts = {i: n for n, i in reversed(list(enumerate(lines))) if not params[plan.rows[i]].num_candidates}
    grants = list(firsts)
    if len(grants) < len(plan.rows):  # of the others, `accept_` says how far they are
        rows.computed.index_add_(0, batch.row_ids, batch.counts)
    tried = [plan.guesses.get(i, 0) for i in grants]
    told = [[plan.rows[i] for i in grants], list(firsts.values()), tried]
    if not plan.nodes:
        sent = send(torch.tensor(told, dtype=torch.int64), rows.device)
        return Verdict(grants, kernels.accept_(sent, max(tried), None, marked, *rows.state())[1])
    told[2:] = [[plan.tried(i) for i in grants], tried]
    sent = send(torch.tensor(told, dtype=torch.int64), rows.device)
    parents = all_parents(plan, rows, grants, sent[0])
    path, kept = kernels.accept_(sent, max(tried), parents, marked, *rows.state())
    return Verdict(grants, kept, path)
