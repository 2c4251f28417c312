"""Runs plans on one device. Owns: the order forward -> logits of the sampled lines -> sampling -> verification of
drafts -> rows -> new drafts -> result.

Must not know: requests, scheduling, text. `begin` and `sample` enqueue work without waiting for the device; `finish`
reads the results. A failed plan fails every later plan of its epoch. Decode steps and other short steps are replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenmill.compute.adapters import AdapterStore, NoAdapters
from tokenmill.compute.drafting import DeviceDrafter, Drafting, Seen
from tokenmill.compute.forward import Kernels
from tokenmill.compute.model import CausalLM
from tokenmill.core.experts import Movers, NoMovers
from tokenmill.core.sleeping import NoSleep, Sleeper
from tokenmill.core.step import LateInputs, StepPlan, StepResult
from tokenmill.device.graphs import Readback, Recorder
from tokenmill.device.untracked import untracked
from tokenmill.kvcache.pool import KVPool
from tokenmill.parallel.link import Link, NoLink
from tokenmill.runner.batch import Batch, make_batch
from tokenmill.runner.drafted_states import settle_states
from tokenmill.runner.drafts import GrantResults, NoDeviceDrafter
from tokenmill.runner.nodes import TreeTokens
from tokenmill.runner.prompts import pool_states, score_prompts
from tokenmill.runner.ragged import RaggedMembers, RaggedTokens
from tokenmill.runner.recorder import Graphs, Layout, RecordedSteps, StepRecorder, Tapes
from tokenmill.runner.rows import Rows
from tokenmill.runner.single import ROOM, SingleTokens
from tokenmill.runner.trees import make_tree_batch, move_path
from tokenmill.runner.verdict import Verdict, verify
from tokenmill.runner.words import logits_of, words_of
from tokenmill.sampling.arrays import send_columns, to_device
from tokenmill.sampling.choose import Ask, Way, choose, take_largest, way
from tokenmill.sampling.sampler import Sampled


@dataclass(slots=True)
class Left:
    """What sampling leaves for the operations after it. `places`: the token in the batch of each sampled line.
    `verdict`: which lines stand, if drafts were tried; it is read together with the sampled tokens. `told`: grants
    whose new drafts the host must know."""

    places: list[int] = field(default_factory=list)
    verdict: Verdict | None = None
    told: tuple[list[int], Readback] | None = None

    @property
    def stand(self) -> tuple[list[int], Tensor] | None:
        """The verified grants, and how many samples of each stand; None: no drafts were tried."""
        return None if self.verdict is None else (self.verdict.grants, self.verdict.kept)


@dataclass(slots=True)
class Running:
    """A plan on the device: its batch, its hidden states, and the grant of each sampled line (`lines`)."""

    plan: StepPlan
    batch: Batch | None = None
    hidden: Tensor | None = None
    logits: Tensor | None = None
    best: tuple[Tensor, Tensor, Tensor] | None = None
    lines: list[int] = field(default_factory=list)
    left: Left = field(default_factory=Left)
    sampled: Sampled | None = None
    read: Readback | None = None
    mus: tuple[list[int], Readback] | None = None
    result: StepResult | None = None
    scores: dict[int, list] = field(default_factory=dict)


class Runner:
    """One model on one device. record: replay decode steps and other short steps. drafter: guesses after sampling."""

    def __init__(
        self,
        model: CausalLM,
        kernels: Kernels,
        pool: KVPool,
        max_rows: int,
        max_len: int,
        *,
        record: bool = False,
        drafter: DeviceDrafter | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        self.link: Link = NoLink()
        """Exchanges hidden states with the stages before and after this one."""
        self.to_logits = model.spec.ends[1]
        self.tells_drafts = self.to_logits and not model.spec.ends[0]
        """Must the stages before this one be told what its drafter leaves?"""
        self.adapters: AdapterStore = adapters or NoAdapters()
        self.sleeper: Sleeper = NoSleep()
        self.experts: Movers = NoMovers()
        self.model = model
        self.kernels = kernels
        self.pool = pool
        device = pool.storage[0].device
        scratch = [pool.num_blocks[group.pool] for group in pool.layout.groups]
        self.drafter = drafter or NoDeviceDrafter()
        self.rows = Rows(
            max_rows, max_len, pool.layout, model.spec.vocab_size, str(device), scratch, room=self.drafter.most,
            levels=self.drafter.levels,
        )  # fmt: skip
        # Deterministic GPU steps run the same code with and without adapters: a row's bytes must not depend on others.
        launch = getattr(kernels, "launch", None)
        self.rows.always_adapted = adapters is not None and bool(getattr(launch, "steady", False))
        self.recorders: list[StepRecorder] = self._recorders() if record else []
        self.drops_states = "own_caches" in model.spec.extras
        """A row's state is what holds its cache (models/foreign_caches.py): rows that end let go of it."""
        self.epoch = self.failed_epoch = -1
        self.translate: Callable[[StepPlan], None] = lambda plan: None
        """Changes a plan for the whole model into a plan for this stage, in place."""
        self.on_all: Callable[[bool], bool] = bool
        """Is it so on all ranks of this stage? They must record the same."""
        self.drafter.bind(self.rows, pool)

    def _recorders(self) -> list[StepRecorder]:
        """Recorders for steps of one token a row, for short ragged steps and for steps with trees."""
        parts = self.model, self.kernels, self.rows, self.pool
        if self.kernels.records:
            made: list[StepRecorder] = [RecordedSteps(SingleTokens(*parts, exact=True), Tapes(self.kernels, ROOM))]
            if self.pool.states is None or self.pool.states.trail:
                ragged = RaggedTokens(*parts)
                made.append(RecordedSteps(ragged, Tapes(self.kernels, ragged.room_bytes)))
            return made
        recorder = Recorder()
        layouts: list[Layout] = [SingleTokens(*parts, exact=False), RaggedMembers(*parts)]
        if self.rows.levels:
            layouts.append(TreeTokens(*parts))
        if not isinstance(self.adapters, NoAdapters):
            for layout in layouts:
                layout.kinds = (True,) if self.rows.always_adapted else (False, True)
        return [RecordedSteps(layout, Graphs(self.kernels, recorder, lambda so: self.on_all(so))) for layout in layouts]

    @torch.inference_mode()
    def warm(self) -> None:
        """Record ahead what can be; the largest steps first, because smaller ones can use their memory."""
        for recorder in reversed(self.recorders):
            recorder.warm()
        if self.pool.states is not None:
            spare = torch.tensor([self.rows.spare], device=self.rows.device)
            self.pool.states.move(spare, spare)  # compiles what copies states
        if self.drafter.most:
            self._compile_drafts()
            self.drafter.warm()

    def _compile_drafts(self) -> None:
        """Compile what follows sampling if there are drafts. It runs on the spare row, which is reset afterwards."""
        rows, device = self.rows, self.rows.device
        grants = torch.tensor([[rows.spare], [0], [1]], device=device)
        marked = torch.zeros(2, dtype=torch.int64, device=device)
        self.kernels.accept_(grants, 1, None, marked, *rows.state())
        if rows.levels:
            grants, parents = torch.cat((grants, grants[2:])), rows.parents[rows.spare :]
            path, _ = self.kernels.accept_(grants, 1, parents[:, :1].contiguous(), marked, *rows.state())
            assert path is not None
            for group in range(len(rows.tables)):
                self.kernels.move_kv_(self.pool.group_views(group), torch.zeros_like(path), torch.zeros_like(path))
        rows.length[rows.spare] = 0
        rows.computed[rows.spare] = 0

    def forget_weights(self) -> None:
        """Weights were changed in place: everything made from the old numbers must be made again."""
        self.kernels.forget_weights()
        for recorder in self.recorders:
            recorder.forget_weights()
        self.drafter.forget_weights()
        self.sleeper.changed()

    @untracked
    def begin(self, plan: StepPlan) -> Running:
        """Apply the plan and enqueue its forward pass."""
        running = Running(plan)
        try:
            self.link.begin(plan.num_tokens)
            if plan.epoch != self.epoch:
                self.epoch = plan.epoch
                for recorder in self.recorders:
                    recorder.start_anew()
            try:
                if plan.epoch == self.failed_epoch:
                    raise RuntimeError("an earlier step failed")
                self._forward(running)
            finally:
                self.link.end()
        except Exception as error:
            self._fail(running, error)
        return running

    @untracked
    def sample(self, running: Running, late: LateInputs | None) -> None:
        """Choose tokens and write them into the rows."""
        if running.result is not None:
            return
        if not self.to_logits:  # the last stage samples, and `learn` brings its choice
            assert running.batch is not None
            self.rows.computed.index_add_(0, running.batch.row_ids, running.batch.counts)
            settle_states(self.pool.states, running.plan, running.batch, self.rows, running.left.stand)
            return
        try:
            self._sample(running, late or LateInputs())
            settle_states(self.pool.states, running.plan, running.batch, self.rows, running.left.stand)
        except Exception as error:
            self._fail(running, error)

    @torch.inference_mode()
    def learn(self, chosen: dict[int, list[int]], drafts: dict[int, list[int]]) -> None:
        """Take in what the last stage has chosen: by row, the tokens that stand and the drafts behind them. No plan
        since then has contained these rows."""
        self.rows.learn(chosen, drafts)

    def ready(self, running: Running) -> bool:
        """Is everything computed that `finish` waits for?"""
        return running.result is not None or running.read is None or running.read.ready()

    @untracked
    def finish(self, running: Running) -> StepResult:
        """Wait for the device and collect the result for the host."""
        if running.result is not None:
            return running.result
        try:
            return self._collect(running)
        except Exception as error:
            self._fail(running, error)
            assert running.result is not None
            return running.result

    @untracked
    def run_plan(self, plan: StepPlan, late: LateInputs | None = None) -> StepResult:
        """Run `begin`, `sample` and `finish`."""
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
        if plan.loads and self.adapters.load(plan.loads):
            for steps in self.recorders:
                steps.forget_adapted()
        for group, pairs in self.pool.turns(plan.copies) if plan.copies else ():
            self.pool.copy_blocks(group, *send_columns(pairs, rows.device))
        if self.drops_states and plan.ended and self.pool.states is not None:
            self.pool.states.drop(plan.ended)
        if plan.restores and self.pool.states is not None:
            into, slots = send_columns(plan.restores, rows.device)
            self.pool.states.restore(slots, into)
        if plan.drafts:
            rows.write_drafts([plan.rows[i] for i in plan.drafts], list(plan.drafts.values()))
        self.link.take()
        step = None
        if not self.adapters.eager(rows.slots[row] for row in plan.rows):
            recorder = next((r for r in self.recorders if r.fits(plan)), None)
            step = recorder.replay_step(plan) if recorder is not None else None
        if step is not None:
            running.batch, running.hidden = step.batch, step.hidden
            running.logits, running.best = step.logits, step.best
        else:
            batch = (make_tree_batch if plan.nodes else make_batch)(plan, rows, self.pool, self.kernels)
            running.batch = batch
            running.hidden = self.model.forward(batch.tokens, batch.ctx)
        self.link.give(running.hidden)

    def _sample(self, running: Running, late: LateInputs) -> None:
        plan, batch, rows = running.plan, running.batch, self.rows
        assert batch is not None and running.hidden is not None
        extra = late.masks, late.processors
        if running.best is not None and way(plan.rows, extra, rows.sampling) is not Way.LARGEST:
            running.best = None
        if running.best is not None and not plan.guesses:
            self._take(running, running.best)
            return self._leave_drafts(running)
        running.scores = score_prompts(self.model, rows, plan, batch, running.hidden)
        places = running.left.places
        for i, row in enumerate(plan.rows):
            if plan.samples[i] and row not in rows.pools:
                tried = plan.tried(i)
                end = batch.ends[i]
                places += range(end - 1 - tried, end)
                running.lines += [i] * (1 + tried)
        if not places:
            rows.computed.index_add_(0, batch.row_ids, batch.counts)
            self._leave_drafts(running)
            return
        at = to_device(places, torch.int64, rows.device) if len(places) < batch.tokens.shape[0] else None
        logits = running.logits
        if logits is None:
            ctx = batch.ctx if at is None else batch.ctx.of(at)
            logits = logits_of(self.model, self.kernels, running.hidden if at is None else running.hidden[at], ctx)
        running.sampled, marked = self._choose(running, logits, at, late)
        if plan.guesses:
            verdict = running.left.verdict = verify(batch, running.lines, marked, rows, self.kernels)
            running.read = Readback(verdict.beside(marked))
            self._move_mus(running, verdict)
        else:
            running.read = Readback(marked)
            self._move_mus(running, None)
            self._advance(running)
        self._leave_drafts(running)

    def _take(self, running: Running, best: tuple[Tensor, Tensor, Tensor]) -> None:
        """Do the work of `_sample` in a few operations: the recorded step has already chosen (see single.py)."""
        batch, rows = running.batch, self.rows
        assert batch is not None
        running.lines = list(range(len(running.plan.rows)))
        running.left.places = running.lines
        running.sampled, marked = take_largest(best)
        running.read = Readback(marked)
        self.kernels.advance_(batch.row_ids, running.sampled.ids, *rows.state())

    def _choose(self, running: Running, logits: Tensor, at: Tensor | None, late: LateInputs) -> tuple[Sampled, Tensor]:
        """Choose a token per line; also its id, or ~id if bad. `at` [n]: each line's token in the batch (None: all)."""
        if running.best is not None:
            return take_largest(running.best)
        batch, table = running.batch, self.rows.sampling
        assert batch is not None
        row_ids, positions = batch.token_rows, batch.ctx.positions[: batch.token_rows.shape[0]]
        chosen = [running.plan.rows[i] for i in running.lines]
        ask = Ask(
            chosen,
            self.rows.tokens,
            lambda: (row_ids, positions) if at is None else (row_ids[at], positions[at]),
            lambda: self.rows.longest(chosen),
            _split_masks(late.masks, running.plan) if late.masks else {},
            late.processors,
            lambda: batch.paths(at),
        )
        return choose(logits, ask, table, self.kernels, words_of(self.model, self.kernels))

    def _advance(self, running: Running) -> None:
        """Count what the rows have computed, and append the sampled tokens."""
        plan, batch, rows = running.plan, running.batch, self.rows
        assert batch is not None and running.sampled is not None
        counts = batch.counts
        if running.logits is not None and not self._candidates(plan):
            if plan.num_tokens > len(plan.rows):  # all but each row's last token, which `advance_` counts
                rows.computed.index_add_(0, batch.row_ids, counts - 1)
            self.kernels.advance_(batch.row_ids, running.sampled.ids, *rows.state())
            return
        rows.computed.index_add_(0, batch.row_ids, counts)
        chosen = [n for n, i in enumerate(running.lines) if not rows.sampling.params[plan.rows[i]].num_candidates]
        if not chosen:
            return
        if len(chosen) == len(plan.rows):
            row_ids, ids = batch.row_ids, running.sampled.ids
        else:
            at = to_device(chosen, torch.int64, rows.device)
            row_ids = to_device([plan.rows[running.lines[n]] for n in chosen], torch.int64, rows.device)
            ids = running.sampled.ids[at]
        rows.tokens[row_ids, rows.length[row_ids]] = ids.to(torch.int32)
        rows.length.index_add_(0, row_ids, torch.ones_like(row_ids))

    def _move_mus(self, running: Running, verdict: Verdict | None) -> None:
        """Give each row with mirostat (its drafts are chains) the state behind its last token that stands."""
        assert running.sampled is not None
        if running.sampled.pending.mus is None:
            return
        mus, lines = running.sampled.pending.mus
        grants: dict[int, int] = {}
        for place, line in enumerate(lines):
            grants.setdefault(running.lines[line], place)  # the grant's first line; its lines lie together
        rows = to_device([running.plan.rows[i] for i in grants], torch.int64, mus.device)
        at = to_device(list(grants.values()), torch.int64, mus.device)
        if verdict is not None:
            at = at + verdict.kept[to_device([verdict.grants.index(i) for i in grants], torch.int64, mus.device)] - 1
        left = mus[at]
        self.rows.sampling.mu[rows] = left
        running.mus = list(grants), Readback(left)

    def _leave_drafts(self, running: Running) -> None:
        """Let a DeviceDrafter do what the plan says; a later plan decides which of its drafts are tried."""
        plan, rows, left = running.plan, self.rows, running.left
        assert running.batch is not None and running.hidden is not None
        if plan.follows or plan.proposes:
            self.drafter.follow(plan.follows, Seen(running.batch.ctx, running.hidden))
        if left.verdict is not None and left.verdict.path is not None:  # moves the drafter's keys, too
            first = to_device(
                [left.places[running.lines.index(i)] for i in left.verdict.grants], torch.int64, rows.device
            )
            move_path(self.kernels, self.pool, running.batch, first, left.verdict.kept, left.verdict.path)
        if not plan.proposes:
            return
        row_list = [plan.rows[i] for i in plan.proposes]
        row_ids = to_device(row_list, torch.int64, rows.device)
        last = None if left.verdict is None else left.verdict.last
        outcome = GrantResults(plan, running.lines, left.places, left.stand, rows.device, last)
        ids = None if running.sampled is None else running.sampled.ids
        longest, samples = rows.longest(row_list), lambda: outcome.samples(ids)
        self.drafter.propose(Drafting(rows, row_list, row_ids, plan.depth, longest, outcome.newest, samples))
        late = set(row_list if self.tells_drafts else plan.late)
        told = [n for n, row in enumerate(row_list) if row in late] if late else []
        if told:
            chosen = row_ids if len(told) == len(row_list) else row_ids[to_device(told, torch.int64, rows.device)]
            running.left.told = [plan.proposes[n] for n in told], Readback(rows.drafts_of(chosen, plan.depth))

    def _candidates(self, plan: StepPlan) -> bool:
        return any(self.rows.sampling.params[row].num_candidates for row in plan.rows)

    def _collect(self, running: Running) -> StepResult:
        plan, rows = running.plan, self.rows
        result = StepResult(plan_id=plan.id, tokens=[[] for _ in plan.rows], prompt_logprobs=running.scores)
        if not self.to_logits:
            return result
        if rows.pools:
            assert running.batch is not None and running.hidden is not None
            pool_states(rows, plan, running.batch, running.hidden, result)
        sampled = running.sampled
        if sampled is None:
            return result
        assert running.read is not None
        read = running.read.wait().tolist()
        marked = read[: len(running.lines)]
        verdict = running.left.verdict
        stand = {} if verdict is None else verdict.read(read[len(marked) :])
        bad = min(marked) < 0
        more = sampled.pending.logprobs or sampled.pending.candidates or running.mus
        if running.left.told is not None:
            drafts = running.left.told[1].wait().tolist()
            result.drafts = {i: [t for t in d if t >= 0] for i, d in zip(running.left.told[0], drafts, strict=True)}
        if verdict is None and len(marked) == len(plan.rows) and not bad and not more:  # one line for each row
            result.tokens = [[n] for n in marked]
            return result
        ids = [~n if n < 0 else n for n in marked]
        if sampled.pending.logprobs is not None or sampled.pending.candidates is not None or bad:
            sampled.bad = torch.tensor([n < 0 for n in marked])
            sampled.collect()
        by_grant: dict[int, list[int]] = {}
        for n, i in enumerate(running.lines):
            by_grant.setdefault(i, []).append(n)
        if running.mus is not None:
            result.mus = dict(zip(running.mus[0], running.mus[1].wait().tolist(), strict=True))
        for i, lines in by_grant.items():
            lines = [lines[n] for n in stand[i]] if i in stand else lines
            self._collect_grant(i, lines, [ids[n] for n in lines], running, result)
        return result

    def _collect_grant(self, i: int, lines: list[int], ids: list[int], running: Running, result: StepResult) -> None:
        sampled, row = running.sampled, running.plan.rows[i]
        assert sampled is not None
        if lines[0] in sampled.errors:
            result.errors[i] = sampled.errors[lines[0]]
            return
        if self.rows.sampling.params[row].num_candidates:
            result.candidates[i] = sampled.candidates[lines[0]]
            if lines[0] in sampled.branches:
                result.branches[i] = sampled.branches[lines[0]]
            return
        result.tokens[i] = ids
        if sampled.logprobs and lines[0] in sampled.logprobs:
            result.logprobs[i] = [sampled.logprobs[n] for n in lines]


def _split_masks(masks: dict[int, bytes], plan: StepPlan) -> dict[int, bytes | list[bytes]]:
    """Split the masks by line: a row with drafts brings one for each line that it samples, joined."""
    split: dict[int, bytes | list[bytes]] = dict(masks)
    for i, drafts in plan.drafts.items():
        packed = masks.get(plan.rows[i])
        if packed is not None:
            size = len(packed) // (1 + len(drafts))
            split[plan.rows[i]] = [packed[n * size : (n + 1) * size] for n in range(1 + len(drafts))]
    return split
