"""From logits to tokens. Owns: the order of sampling's operations and what a call returns.

Must not know: models, plans, requests. The order is vLLM's:

    raw logprobs (of the logits as the model made them)
    edits.py    allowed ids, masks, bad words, min_tokens, logit_bias, processors, penalties
    candidates  (the most likely tokens now, for beams: after all edits, before temperature)
    steps.py    temperature, top-n-sigma, min-p, top-k, top-p, typical-p (transformers' definition), ..., or a row's own
                order
    noise.py    the choice (mirostat.py chooses for rows that ask for it); greedy rows take the most likely token after
    the edits, the lowest id of equal ones

choose.py picks between this and the short ways, where a backend does the usual all at once.

Lines never influence each other, whatever their number and order: on a CPU the same line gives the same bits.
Rows with neutral parameters pay for the maximum only. Nothing here waits for the device (Python processors excepted);
`Sampled.collect` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenmill.compute.forward import Kernels
from tokenmill.core.errors import OWN_FAULT
from tokenmill.core.step import RowLogprobs, RowSampling
from tokenmill.sampling import mirostat
from tokenmill.sampling import table as features
from tokenmill.sampling.arrays import to_device
from tokenmill.sampling.edits import ChangedLines, Lines, edit_, line_masks, pick, take
from tokenmill.sampling.few_allowed import FewAllowed, choose_allowed_, find_few_allowed
from tokenmill.sampling.logprobs import Chosen, Measured, look_up, measure, read_logprobs
from tokenmill.sampling.noise import noisy_, position_keys
from tokenmill.sampling.stable import first_max
from tokenmill.sampling.steps import BY_NAME, STEPS, Part, Step, wanted_steps
from tokenmill.sampling.table import SamplingTable

__all__ = ["Lines", "Sampled", "sample"]

NOT_FINITE = "The model's logits hold NaN or infinity, so no token can be chosen; the other requests are not affected."
NONE_LEFT = (
    f"{OWN_FAULT}no token is left to choose (by allowed_token_ids, bad_words, min_tokens, a grammar, "
    "no_repeat_ngram_size or a logits processor), or a logits processor returned NaN or infinity."
)


@dataclass(slots=True)
class Pending:
    """What `collect` reads: the largest logits before and after the edits [n], and measured lines with their line
    numbers. branches: for lines that have candidates and want logprobs, the measurements, the candidates by place, and
    how many likely tokens each line wants. mus: mirostat's states [m] behind their lines, with the line numbers; the
    runner stores them when it advances the rows."""

    before: Tensor
    after: Tensor
    logprobs: tuple[Measured, Chosen, dict[int, int]] | None = None
    candidates: tuple[Measured, dict[int, int]] | None = None
    branches: tuple[Measured, list[Chosen], dict[int, int]] | None = None
    mus: tuple[Tensor, list[int]] | None = None


@dataclass(slots=True)
class Sampled:
    """One token per line: ids [n] int64 and bad [n] bool, on the device; the rest, by line, after `collect`.

    The id of a bad line is a valid but meaningless token.
    """

    ids: Tensor
    bad: Tensor
    pending: Pending
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    branches: dict[int, list[RowLogprobs]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    def collect(self) -> None:
        """Wait for the device and fill logprobs, candidates, branches and errors; a bad line has an error only."""
        pending = self.pending
        bad = {i for i, flag in enumerate(self.bad.tolist()) if flag}
        if bad:
            before = pending.before.tolist()
            for i in bad:
                self.errors.setdefault(i, NONE_LEFT if math.isfinite(before[i]) else NOT_FINITE)
        if pending.logprobs is not None:
            measured, chosen, wanted = pending.logprobs
            found = zip(wanted, read_logprobs(measured, chosen, list(wanted.values())), strict=True)
            self.logprobs = {i: row for i, row in found if i not in bad}
        if pending.candidates is not None:
            best, wanted = pending.candidates
            lists = zip(wanted.items(), best.candidates(), strict=True)
            self.candidates = {i: tokens[:k] for (i, k), tokens in lists if i not in bad}
        if pending.branches is not None:
            measured, places, wanted = pending.branches
            rows = [read_logprobs(measured, chosen, list(wanted.values())) for chosen in places]
            self.branches = {i: list(found) for i, *found in zip(wanted, *rows, strict=True) if i not in bad}


def sample(
    logits: Tensor, lines: Lines, table: SamplingTable, *, consume: bool = False, kernels: Kernels | None = None
) -> Sampled:
    """logits [n, vocab] float32 (unchanged unless `consume`) -> one token per line. kernels: given if the backend can
    find cuts without sorting."""
    assert logits.shape == (len(lines.rows), table.vocab_size), "one line of the table's vocabulary per row"
    bits = _line_bits(lines, table)
    numbers = [i for i, b in enumerate(bits) if b & features.CHOICES]
    if len(numbers) == len(bits):
        ids, before = torch.empty_like(lines.row_ids), logits.amax(-1)
    else:
        before, ids = first_max(logits)
    pending = Pending(before, before)
    errors: dict[int, str] = {}
    masks = line_masks(lines.rows, lines.masks) if lines.masks else {}
    keys = None
    if any(b & features.SAMPLED for b in bits):
        keys = position_keys(table.stream[lines.row_ids], lines.lengths - table.num_prompt[lines.row_ids])
    allowed = _few_allowed(bits, masks, table) if masks and logits.device.type == "cpu" else None
    if allowed is not None:
        pending.after = before.clone()
        few = allowed.numbers
        rows = [lines.rows[i] for i in few]
        noise = None if keys is None else (keys, table.bases, [bool(bits[i] & features.SAMPLED) for i in few])
        choose_allowed_(logits, allowed, table.inverse_temperature[rows], noise, (pending.after, ids))
        numbers = sorted(set(numbers).difference(few))
    if numbers:
        picked = pick(numbers, len(bits), logits.device)
        x = take(logits, picked)
        kept = not consume or any(table.bits[row] & features.LOGPROBS for row in lines.rows)
        if picked is None and kept and any(b & features.EDITS for b in bits):
            x = x.clone()
        changed = ChangedLines(x, numbers, [bits[i] for i in numbers], lines, table, masks, keys, errors)
        after, new = _work_out(changed, take(before, picked), pending, kernels)
        pending.after = after if picked is None else pending.after.index_copy(0, picked, after)
        ids = new if picked is None else ids.index_copy_(0, picked, new)
    measure_logprobs(logits, ids, lines.rows, table, pending)
    bad = ~(before.isfinite() & pending.after.isfinite())
    return Sampled(ids, bad, pending, errors=errors)


def _line_bits(lines: Lines, table: SamplingTable) -> list[int]:
    bits = [table.bits[row] for row in lines.rows]
    if lines.masks or lines.processors:
        for i, row in enumerate(lines.rows):
            if row in lines.masks:
                bits[i] |= features.MASKED
            if row in lines.processors:
                bits[i] |= features.PROCESSED
    return bits


def _few_allowed(bits: list[int], masks: dict[int, bytes], table: SamplingTable) -> FewAllowed | None:
    """The lines that want no more than a mask, which leaves them few tokens."""
    plain = features.CHOICES | features.FILTERS
    numbers = [i for i in masks if bits[i] & plain & ~features.SAMPLED == features.MASKED]
    return find_few_allowed(numbers, [masks[i] for i in numbers], table.vocab_size) if numbers else None


def _work_out(
    changed: ChangedLines, largest: Tensor, pending: Pending, kernels: Kernels | None
) -> tuple[Tensor, Tensor]:
    """Edit these lines, note candidates and choose; returns the largest logits after the edits [m] and the ids [m]."""
    if changed.users(features.EDITS):
        edit_(changed)
        largest = changed.x.amax(-1)
    wanted = {j: changed.table.params[changed.row(j)].num_candidates for j in changed.users(features.CANDIDATES)}
    if wanted:
        lines = take(changed.x, pick(list(wanted), len(changed.numbers), changed.x.device))
        by_number = {changed.numbers[j]: k for j, k in wanted.items()}
        pending.candidates = measure(lines, max(wanted.values())), by_number
    sampled = changed.users(features.SAMPLED)
    if len(sampled) == len(changed.numbers):
        return largest, _draw(changed, sampled, (changed.x, largest), pending, kernels)
    ids = first_max(changed.x)[1]
    if sampled:
        picked = pick(sampled, len(changed.numbers), changed.x.device)
        drawn = _draw(changed, sampled, (take(changed.x, picked), take(largest, picked)), pending, kernels)
        ids.index_copy_(0, _some(picked), drawn)
    return largest, ids


def _some(picked: Tensor | None) -> Tensor:
    assert picked is not None
    return picked


def _draw(
    changed: ChangedLines,
    sampled: list[int],
    scores: tuple[Tensor, Tensor],
    pending: Pending,
    kernels: Kernels | None,
) -> Tensor:
    """Draw a token for each line of x [m, V] at its row's temperature -> ids [m]. The lines are the lines `sampled` of
    `changed`. scores: x and its largest logits [m]."""
    x, largest = scores
    table, lines = changed.table, changed.lines
    numbers = pick([changed.numbers[j] for j in sampled], len(lines.rows), x.device)
    rows, keys = take(lines.row_ids, numbers), take(_some(changed.keys), numbers)
    scaled = (x - largest[:, None]).mul_(table.inverse_temperature[rows][:, None])
    params = [table.params[changed.row(j)] for j in sampled]
    bits = [changed.bits[j] for j in sampled]
    for taken, users in steps_of(bits, params):
        picked = pick(users, len(bits), x.device)
        part = Part(
            take(scaled, picked),
            take(rows, picked),
            [params[i] for i in users],
            take(keys, picked),
            table.columns,
            kernels,
        )
        for step in taken:
            step.apply_(part)
        if picked is not None:
            scaled.index_copy_(0, picked, part.s)
    followers = [i for i, b in enumerate(bits) if b & features.MIROSTAT]
    if len(followers) == len(bits):
        return _follow(changed, [sampled[i] for i in followers], scaled, keys, pending)
    if not followers:
        return first_max(noisy_(scaled, keys, table.bases))[1]
    picked = _some(pick(followers, len(bits), x.device))
    part_of_it = scaled.index_select(0, picked)
    ids = first_max(noisy_(scaled, keys, table.bases))[1]
    found = _follow(changed, [sampled[i] for i in followers], part_of_it, keys.index_select(0, picked), pending)
    return ids.index_copy_(0, picked, found)


def steps_of(bits: list[int], params: list[RowSampling]) -> Iterator[tuple[list[Step], list[int]]]:
    """Groups of lines with the steps they take: first the usual order, then lines with orders of their own, equal ones
    together."""
    used = 0
    for some in bits:
        used |= some
    if not used & features.FILTERS:
        return
    for step in STEPS:
        bit = step.bit
        if used & bit:
            users = [i for i, b in enumerate(bits) if b & bit and not b & features.ORDERED]
            if users:
                yield [step], users
    if used & features.ORDERED:
        alike: dict[tuple[str, ...], list[int]] = {}
        for i, b in enumerate(bits):
            if b & features.ORDERED:
                alike.setdefault(tuple(step.name for step in wanted_steps(params[i])), []).append(i)
        for names, users in alike.items():
            yield [BY_NAME[name] for name in names], users


def _follow(changed: ChangedLines, users: list[int], scaled: Tensor, keys: Tensor, pending: Pending) -> Tensor:
    """Draw for rows with mirostat -> ids [m]. A row's lines are drawn one after the other."""
    table, numbers = changed.table, [changed.numbers[j] for j in users]
    rows = to_device([changed.lines.rows[i] for i in numbers], torch.int64, scaled.device)
    columns = table.columns
    targets = mirostat.Targets(
        columns["mirostat"][rows], columns["mirostat_tau"][rows], columns["mirostat_eta"][rows], keys, table.bases
    )
    first = any(table.params[changed.row(j)].mirostat == 1 for j in users)
    seen: dict[int, int] = {}
    rounds: list[list[int]] = []
    for i, number in enumerate(numbers):
        row = changed.lines.rows[number]
        depth = seen[row] = seen.get(row, -1) + 1
        rounds += [[]] if depth == len(rounds) else []
        rounds[depth].append(i)
    state, ids, mus = table.mu.clone(), torch.empty_like(rows), torch.empty_like(targets.tau)
    for members in rounds:
        at = to_device(members, torch.int64, scaled.device)
        some = rows[at]
        ids[at], mus[at] = mirostat.draw(scaled.index_select(0, at), state[some], targets.of(at), first)
        state[some] = mus[at]
    pending.mus = mus, numbers
    return ids


def measure_logprobs(logits: Tensor, ids: Tensor, rows: list[int], table: SamplingTable, pending: Pending) -> None:
    """Measure logprobs for lines whose rows want them, from the model's unedited logits: of the chosen tokens, or of
    each candidate of a beam."""
    wanted = {i: table.params[row].num_logprobs for i, row in enumerate(rows) if table.bits[row] & features.LOGPROBS}
    if pending.candidates is not None and wanted:
        best, lines = pending.candidates
        beams = {i: wanted.pop(i) for i in lines if i in wanted}
        if beams:
            raw = take(logits, pick(list(beams), len(rows), logits.device)).float()
            tried = best.ids[[n for n, i in enumerate(lines) if i in beams]].unbind(1)
            pending.branches = measure(raw, max(beams.values())), [look_up(raw, each) for each in tried], beams
    if wanted:
        picked = pick(list(wanted), len(rows), logits.device)
        raw = take(logits, picked).float()
        pending.logprobs = measure(raw, max(wanted.values())), look_up(raw, take(ids, picked)), wanted
