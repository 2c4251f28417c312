"""What changes logits before temperature. Owns: forbidden tokens, biases, Python processors, penalties.

Must not know: filters, noise, results. `edit_` applies them in this order: allowed ids, masks, bad words, min_tokens,
logit_bias, processors, penalties (repetition, frequency, presence), repetitions (DRY, n-grams). Histories are read on
the device, from the rows' token buffer, because the host may not know the latest tokens yet; only Python processors
make the host wait.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import Paths
from tokenmill.sampling import repeats
from tokenmill.sampling import table as features
from tokenmill.sampling.arrays import send, to_device
from tokenmill.sampling.table import BadWords, SamplingTable

CACHED_BYTES = 2 << 20
PENALTY_BYTES = 64 << 20
"""How much memory penalties may take for histories and counts at one time."""
HISTORY_BYTES, COUNTS_BYTES = 28, 20
"""How many bytes one line takes per known token, and per word of the vocabulary."""


@dataclass(slots=True)
class Lines:
    """What is sampled: n lines of logits.

    rows[i], row_ids[i] (int64, on the device): the row of line i. lengths [n] int64, on the device: tokens known
    before the sample: prompt, output and drafts up to here. tokens [max_rows, max_len] int32: the rows' token
    buffer. masks: packed allowed bits by row (little-endian, 1 = allowed, ids past the end are forbidden), or a list
    of them, one per line of the row. processors: a callable, or a list of them, by row. longest: an upper bound
    of `lengths` known to the host, 0 if there is none; it only saves work. paths: where the newest tokens of each line
    lie in its row's buffer, if some are nodes of trees (compute/descriptors.py).
    """

    rows: list[int]
    row_ids: Tensor
    lengths: Tensor
    tokens: Tensor
    masks: Mapping[int, bytes | list[bytes]]
    processors: Mapping[int, Any]
    longest: int = 0
    paths: Paths | None = None

    def history(self, picked: Tensor | None, longest: int) -> Tensor:
        """The tokens [m, longest] of the picked lines; entries behind their lengths are stale."""
        found = self.tokens[:, :longest].index_select(0, take(self.row_ids, picked))
        if self.paths is None:
            return found
        roots, places = take(self.paths.roots, picked)[:, None], take(self.paths.places, picked)
        at = torch.arange(longest, device=found.device).repeat(found.shape[0], 1)
        ahead = torch.arange(places.shape[1], device=found.device)
        at.scatter_(1, (roots + ahead).clamp(max=longest - 1), (roots + places).clamp(max=longest - 1))
        return found.gather(1, at)


@dataclass(slots=True)
class ChangedLines:
    """Logits lines that are being changed: `x` [m, V] is owned; line j of `x` is line `numbers[j]` of the call.

    masks: packed allowed bits by line of the call. keys [n] int64: the noise keys of all lines of the call, if any is
    sampled."""

    x: Tensor
    numbers: list[int]
    bits: list[int]
    lines: Lines
    table: SamplingTable
    masks: Mapping[int, bytes]
    keys: Tensor | None
    errors: dict[int, str]

    def users(self, feature: int) -> list[int]:
        """The lines of `x` that use any of these features."""
        return [j for j, bits in enumerate(self.bits) if bits & feature]

    def row(self, j: int) -> int:
        """The row of line j of `x`."""
        return self.lines.rows[self.numbers[j]]


def pick(numbers: list[int], total: int, device: torch.device) -> Tensor | None:
    """Line numbers as a device tensor; None if they are all `total` lines."""
    return None if len(numbers) == total else to_device(numbers, torch.int64, device)


def take(x: Tensor, picked: Tensor | None) -> Tensor:
    """The picked lines of x: a copy, or x itself if all."""
    return x if picked is None else x.index_select(0, picked)


def edit_(changed: ChangedLines) -> None:
    """Change `changed.x` as its rows' parameters say; a failing processor leaves NaN and a sentence in `errors`."""
    used = 0
    for bits in changed.bits:
        used |= bits
    if used & features.ALLOWED:
        _allowed_ids_(changed)
    if used & features.MASKED:
        _masks_(changed)
    if used & features.BAD_WORDS:
        _bad_words_(changed)
    if used & features.MIN_TOKENS:
        _min_tokens_(changed)
    if used & features.BIASED:
        _biases_(changed)
    if used & features.PROCESSED:
        _processors_(changed)
    if used & features.PENALISED:
        _penalties_(changed)
    if used & features.REPEATS:
        _repeats_(changed)


def _allowed_ids_(changed: ChangedLines) -> None:
    for j in changed.users(features.ALLOWED):
        forbidden = changed.table.lists[changed.row(j)].forbidden
        assert forbidden is not None
        changed.x[j].masked_fill_(forbidden, -math.inf)


def _masks_(changed: ChangedLines) -> None:
    users = changed.users(features.MASKED)
    packed = [changed.masks[changed.numbers[j]] for j in users]
    size, limits = changed.x.shape[1], changed.table.byte_limits

    def apply_(x: Tensor) -> None:
        # On a CPU a few lines at a time: their limits stay in the CPU's cache, and no new memory is touched.
        lines = max(1, CACHED_BYTES // (4 * size)) if x.device.type == "cpu" else len(packed)
        for i in range(0, len(packed), lines):
            part = x[i : i + lines]
            torch.minimum(part, mask_limits(packed[i : i + lines], size, limits), out=part)

    _on_lines_(changed, users, apply_)


def line_masks(rows: list[int], masks: Mapping[int, bytes | list[bytes]]) -> dict[int, bytes]:
    """The packed mask of each line that has one."""
    found: dict[int, bytes] = {}
    seen: dict[int, int] = {}
    for number, row in enumerate(rows):
        mask = masks.get(row)
        if mask is not None and not isinstance(mask, bytes):
            seen[row] = seen.get(row, -1) + 1
            mask = mask[seen[row]]
        if mask is not None:
            found[number] = mask
    return found


def mask_limits(packed: list[bytes], size: int, byte_limits: Tensor) -> Tensor:
    """m packed little-endian masks -> [m, size] float32: inf where a token is allowed, -inf elsewhere and past the end.

    byte_limits [256, 8]: the limits that each byte stands for. On a CPU, copying eight floats per byte is ten times
    faster than making booleans. On a GPU it needs one transfer and one kernel."""
    num_bytes = (size + 7) // 8
    data = bytearray(b"".join(p[:num_bytes].ljust(num_bytes, b"\0") for p in packed))
    host = torch.frombuffer(data, dtype=torch.uint8)
    places = send(host, byte_limits.device).int()
    return byte_limits.index_select(0, places).view(len(packed), num_bytes * 8)[:, :size]


def _bad_words_(changed: ChangedLines) -> None:
    for j in changed.users(features.BAD_WORDS):
        words = changed.table.lists[changed.row(j)].bad_words
        if words is None:
            continue
        number = changed.numbers[j]
        lines, row = changed.lines, changed.lines.row_ids[number : number + 1]
        tokens, at = lines.tokens, row
        if lines.paths is not None:
            tokens = lines.history(to_device([number], torch.int64, row.device), _longest(lines))
            at = torch.zeros_like(row)
        bans = _bans(words, (tokens, at), lines.lengths[number], changed.table.num_prompt[row])
        changed.x[j].scatter_reduce_(0, words.last, bans, "amin")


def _bans(words: BadWords, known: tuple[Tensor, Tensor], length: Tensor, num_prompt: Tensor) -> Tensor:
    """For each word -inf if the row's output ends with the word's prefix, else +inf; prompts do not count, as in vLLM.
    known: tokens [R, L], and the line of these that belongs to the row."""
    tokens, row = known
    reach = words.prefix.shape[1]
    places = length - reach + torch.arange(reach, device=tokens.device)
    recent = tokens[row, places.clamp(0, tokens.shape[1] - 1)].long()
    equal = (recent == words.prefix) & (places >= num_prompt)
    complete = (equal | (words.prefix < 0)).all(-1)
    return torch.where(complete, -math.inf, math.inf)


def _min_tokens_(changed: ChangedLines) -> None:
    users = changed.users(features.MIN_TOKENS)
    picked = pick([changed.numbers[j] for j in users], len(changed.lines.rows), changed.x.device)
    rows = take(changed.lines.row_ids, picked)
    table = changed.table
    young = take(changed.lines.lengths, picked) - table.num_prompt[rows] < table.min_tokens[rows]
    ids = table.end_ids[rows]
    bans = torch.where(young[:, None] & (ids >= 0), -math.inf, math.inf)
    _on_lines_(changed, users, lambda x: x.scatter_reduce_(1, ids.clamp(min=0), bans, "amin"))


def _on_lines_(changed: ChangedLines, users: list[int], change_: Callable[[Tensor], object]) -> None:
    """Apply an in-place change to some lines of `changed.x`."""
    picked = pick(users, len(changed.numbers), changed.x.device)
    part = take(changed.x, picked)
    change_(part)
    if picked is not None:
        changed.x.index_copy_(0, picked, part)


def _biases_(changed: ChangedLines) -> None:
    for j in changed.users(features.BIASED):
        lists = changed.table.lists[changed.row(j)]
        if lists.bias_ids is not None and lists.bias is not None:
            changed.x[j].index_add_(0, lists.bias_ids, lists.bias)


def _processors_(changed: ChangedLines) -> None:
    lines = changed.lines
    for j in changed.users(features.PROCESSED):
        number = changed.numbers[j]
        row = lines.rows[number]
        known: list[int] = lines.tokens[row, : int(lines.lengths[number])].tolist()
        border = int(changed.table.num_prompt[row])
        try:
            changed.x[j] = _processed(lines.processors[row], known[:border], known[border:], changed.x[j].clone())
        except Exception as error:
            changed.errors[number] = f"A logits processor failed: {type(error).__name__}: {error}"
            changed.x[j] = math.nan


def _processed(processors: Any, prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
    size = logits.shape
    for processor in processors if isinstance(processors, (list, tuple)) else [processors]:
        if len(inspect.signature(processor).parameters) >= 3:
            logits = processor(list(prompt), list(output), logits)
        else:
            logits = processor(list(output), logits)
        if not isinstance(logits, Tensor) or logits.shape != size:
            raise TypeError(f"it must return a tensor of shape {tuple(size)}, the logits of one sequence.")
    return logits


def _longest(lines: Lines) -> int:
    """An upper bound of the number of known tokens of these lines."""
    longest = lines.longest
    if not longest:
        longest = int(lines.lengths.max()) if lines.lengths.device.type == "cpu" else lines.tokens.shape[1]
    return min(longest, lines.tokens.shape[1])


def _penalties_(changed: ChangedLines) -> None:
    """Apply penalties, to a few lines at a time if histories are long or the vocabulary is large: this bounds the
    memory."""
    users, longest = changed.users(features.PENALISED), _longest(changed.lines)
    together = max(1, PENALTY_BYTES // (HISTORY_BYTES * longest + COUNTS_BYTES * changed.x.shape[1]))
    for start in range(0, len(users), together):
        _penalise_(changed, users[start : start + together], longest)


def _repeats_(changed: ChangedLines) -> None:
    """Apply limits on repetition, to a few lines at a time as with penalties."""
    table, lines, longest = changed.table, changed.lines, _longest(changed.lines)
    users = changed.users(features.REPEATS)
    together = max(1, PENALTY_BYTES // (repeats.BYTES * longest))
    for start in range(0, len(users), together):
        some = users[start : start + together]
        picked = pick([changed.numbers[j] for j in some], len(lines.rows), changed.x.device)
        history = lines.history(picked, longest)
        places = torch.arange(longest, device=history.device)
        known = repeats.Known(history, take(lines.lengths, picked), places)
        params = [table.params[changed.row(j)] for j in some]
        breakers = [table.lists[changed.row(j)].breakers for j in some]
        _on_lines_(changed, some, partial(repeats.limit_, known=known, params=params, breakers=breakers))


def _penalise_(changed: ChangedLines, users: list[int], longest: int) -> None:
    lines, table = changed.lines, changed.table
    picked = pick([changed.numbers[j] for j in users], len(lines.rows), changed.x.device)
    rows, lengths = take(lines.row_ids, picked), take(lines.lengths, picked)
    history = lines.history(picked, longest)
    places = torch.arange(longest, device=rows.device)
    known = (places < lengths[:, None]) & (places >= (lengths - table.window[rows])[:, None])
    # Entries behind a length are stale and may have any value: they count as zero times token 0.
    ids = torch.where(known, history, 0).long()
    new = known & (places >= table.num_prompt[rows][:, None])
    shape = (len(users), changed.x.shape[1])
    seen = torch.zeros(shape, device=rows.device).scatter_add_(1, ids, known.float()) > 0
    counts = torch.zeros(shape, device=rows.device).scatter_add_(1, ids, new.float())
    repetition, frequency, presence = (t[rows][:, None] for t in (table.repetition, table.frequency, table.presence))
    limits = torch.finfo(changed.x.dtype)
    repetition = repetition.clamp(min=limits.tiny)  # a penalty next to 0 must not make infinity or NaN

    def penalise_(x: Tensor) -> None:
        raised = (x / repetition).clamp(max=limits.max)
        x.copy_(torch.where(seen, torch.where(x > 0, raised, x * repetition), x))
        x.sub_(frequency * counts).sub_(presence * (counts > 0))

    _on_lines_(changed, users, penalise_)
