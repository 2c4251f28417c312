"""What continues a repetition. Owns: DRY and no-repeat n-grams, as limits of single tokens.

Both ask of every earlier place how many tokens up to there equal the last tokens of the row; the token behind that
place is the one that would repeat more. That is read from the rows' token buffer on the device, as penalties are: the
host may not know the latest tokens, an index that it kept would have to wait for them, and nothing is left to carry
over when a row is preempted, drafted for or replayed. The work is proportional to the tokens looked at, and to the
longest repetition. A GPU is not waited for: there it is the longest that counts, and windows of tokens are compared at
once, because small kernels for each length would cost more than all else of a step. Must not know: filters, noise,
results.

    DRY       logit -= multiplier * base ^ (length - allowed_length), where length >= allowed_length
    n-grams   logit = -inf, where length >= n - 1

Nothing repeats across a sequence breaker, which is a list of tokens. A repetition of SATURATED tokens more than allowed
counts as that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.core.step import RowSampling
from tokenmill.sampling.arrays import send, to_device

SATURATED = 64
HEAVIEST = 1e30
"""A penalty that no logit can make up for, and that keeps logits finite."""
BYTES = 40
"""How much memory the code here takes per known token of a line."""
FEW = 8
"""If fewer than one place in so many is left, a CPU compares the places one by one."""
WINDOW_BYTES = 32 << 20
"""How much memory comparing windows of tokens may take at once on a GPU."""


@dataclass(slots=True)
class Known:
    """The tokens of n lines: history [n, L] int32, of which lengths [n] are known (entries behind these are stale)."""

    history: Tensor
    lengths: Tensor
    places: Tensor


@dataclass(slots=True)
class Breakers:
    """The sequence breakers of a row. alone [V] bool: breakers of a single token. longer: for each longer breaker the
    tokens that it may begin with [k], and the tokens that then follow."""

    alone: Tensor
    longer: list[tuple[Tensor, list[int]]]

    @classmethod
    def of(cls, words: Sequence[tuple[list[int], list[int]]], vocab_size: int, device: torch.device) -> Breakers:
        """Make them from pairs: the tokens that a breaker may begin with, and the tokens that then follow, if any."""
        alone = torch.zeros(vocab_size, dtype=torch.bool)
        for heads, rest in words:
            if not rest:
                alone[[i for i in heads if 0 <= i < vocab_size]] = True
        longer = [(to_device(heads, torch.int32, device), list(rest)) for heads, rest in words if heads and rest]
        return cls(send(alone, device), longer)


def limit_(x: Tensor, known: Known, params: list[RowSampling], breakers: list[Breakers | None]) -> None:
    """Apply to x [n, V] the limits that the lines' parameters ask for."""
    if any(p.dry_multiplier > 0.0 for p in params):
        dry_(x, known, params, breakers)
    if any(p.no_repeat_ngram_size > 0 for p in params):
        no_repeat_(x, known, params)


def dry_(x: Tensor, known: Known, params: list[RowSampling], breakers: list[Breakers | None]) -> None:
    """Penalise in x [n, V] tokens that would make a repetition longer."""
    device = x.device
    allowed = to_device([p.dry_allowed_length for p in params], torch.int64, device)
    reach = to_device([_window(p.dry_penalty_last_n) for p in params], torch.int64, device)
    multiplier = to_device([p.dry_multiplier for p in params], torch.float32, device)
    base = to_device([p.dry_base for p in params], torch.float32, device)
    most = torch.minimum(_unbroken(known, breakers), allowed + SATURATED)
    rounds = max(p.dry_allowed_length for p in params) + SATURATED
    length = torch.minimum(_repeated(known, reach, rounds), most[:, None])
    over = (length - allowed[:, None]).clamp(min=0).float()
    penalty = (multiplier[:, None] * base[:, None].pow(over)).clamp(max=HEAVIEST)
    _lower_(x, known, torch.where((length >= allowed[:, None]) & (multiplier[:, None] > 0), penalty, -math.inf))


def no_repeat_(x: Tensor, known: Known, params: list[RowSampling]) -> None:
    """Forbid in x [n, V] tokens that would complete an n-gram which the row contains already."""
    size = to_device([p.no_repeat_ngram_size for p in params], torch.int64, x.device)
    rounds = max(p.no_repeat_ngram_size for p in params) - 1
    reach = torch.full_like(size, known.history.shape[1])
    length = _repeated(known, reach, rounds)
    _lower_(x, known, torch.where((length >= size[:, None] - 1) & (size[:, None] > 0), math.inf, -math.inf))
    if any(p.no_repeat_ngram_size == 1 for p in params):  # no token precedes the first one
        bans = torch.where((size == 1) & (known.lengths > 0), -math.inf, math.inf)[:, None]
        x.scatter_reduce_(1, known.history[:, :1].long(), bans, "amin")


def _window(last_n: int) -> int:
    return 1 << 40 if last_n < 0 else last_n


def _repeated(known: Known, reach: Tensor, rounds: int) -> Tensor:
    """lengths [n, L]: how many tokens up to each place equal the row's last tokens, at most `rounds`; -1 where no known
    token follows, or the place lies before the last `reach` [n] tokens."""
    last = known.lengths[:, None] - 1
    first = (known.lengths - reach).clamp(min=0)[:, None]
    alive = (known.places < last) & (known.places >= first)
    rounds = min(rounds, known.history.shape[1])
    if not rounds:
        return torch.where(alive, 0, -1)
    by = _equal_by_rounds if alive.device.type == "cpu" else _equal_by_windows
    return torch.where(alive, by(known, last, first, rounds), -1)


def _equal_by_rounds(known: Known, last: Tensor, first: Tensor, rounds: int) -> Tensor:
    """How many tokens up to each place (none before `first` [n, 1]) equal those up to `last` [n, 1]. Compares round by
    round until no place is equal; once few places are left, only these are compared."""
    history, places = known.history, known.places
    length = torch.zeros_like(history, dtype=torch.int64)
    alive = places >= first
    for k in range(rounds):
        tail = history.gather(1, (last - k).clamp(min=0))
        alive = alive[:, 1:] if k else alive  # place p is column p - k: earlier places have nothing to compare
        alive = alive & (history[:, : history.shape[1] - k] == tail) & (places[: history.shape[1] - k] >= first)
        left = int(alive.count_nonzero())
        length[:, k:] += alive
        if left * FEW < history.numel():
            lines, at = alive.nonzero(as_tuple=True)
            _count_on(known, (lines, at + k), last, first, length, range(k + 1, rounds))
            break
    return length


def _count_on(
    known: Known, left: tuple[Tensor, Tensor], last: Tensor, first: Tensor, length: Tensor, rounds: range
) -> None:
    """The same for these places of lines: continues to count from the lengths so far."""
    history, (lines, places) = known.history, left
    for k in rounds:
        if not len(lines):
            break
        tail = history[lines, (last[lines, 0] - k).clamp(min=0)]
        alive = (places - k >= first[lines, 0]) & (history[lines, (places - k).clamp(min=0)] == tail)
        lines, places = lines[alive], places[alive]
        length[lines, places] += 1


def _equal_by_windows(known: Known, last: Tensor, first: Tensor, rounds: int) -> Tensor:
    """The same without reading a value on the host: compares `rounds` tokens up to each place with the row's last
    ones."""
    history, places = known.history, known.places
    ahead = torch.arange(1 - rounds, 1, device=history.device)
    tail = history.gather(1, (last + ahead).clamp(min=0))[:, None]
    padded = torch.nn.functional.pad(history, (rounds - 1, 0))
    numbers = torch.arange(1, rounds + 1, dtype=torch.int16, device=history.device)
    nothing = numbers.new_zeros(())
    parts = []
    step = max(1, WINDOW_BYTES // (4 * rounds * len(history)))
    for start in range(0, history.shape[1], step):
        some = places[start : start + step, None]
        windows = padded[:, start : start + len(some) + rounds - 1].unfold(1, rounds, 1)
        equal = (windows == tail) & (some + ahead >= first[:, :, None])
        parts.append(rounds - torch.where(equal, nothing, numbers).amax(-1).long())
    return torch.cat(parts, dim=1)


def _unbroken(known: Known, breakers: list[Breakers | None]) -> Tensor:
    """How many tokens lie behind the last breaker of each line [n]; lines with the same breakers are handled
    together."""
    at = torch.full_like(known.lengths, -1)
    alike: dict[int, list[int]] = {}
    for line, found in enumerate(breakers):
        if found is not None:
            alike.setdefault(id(found), []).append(line)
    for lines in alike.values():
        which = breakers[lines[0]]
        assert which is not None
        some = to_device(lines, torch.int64, at.device)
        ends = _ends(known.history[some], which) & (known.places < known.lengths[some][:, None])
        at[some] = torch.where(ends, known.places, -1).amax(-1)
    return known.lengths - 1 - at


def _ends(history: Tensor, which: Breakers) -> Tensor:
    """Where a breaker ends [n, L]."""
    ends = which.alone[history.long().clamp(0, len(which.alone) - 1)]
    for heads, rest in which.longer:
        count = history.shape[1] - len(rest)
        if count <= 0:
            continue
        whole = torch.isin(history[:, :count], heads)
        for i, token in enumerate(rest, start=1):
            whole &= history[:, i : i + count] == token
        ends[:, len(rest) :] |= whole
    return ends


def _lower_(x: Tensor, known: Known, penalty: Tensor) -> None:
    """Lower the token behind each place by the penalty [n, L] there (-inf: none). A token is lowered once, by its
    largest penalty."""
    ids = torch.where(penalty > -math.inf, known.history.roll(-1, 1), 0).long()
    lowered = torch.where(penalty > -math.inf, x.gather(1, ids) - penalty, math.inf)
    x.scatter_reduce_(1, ids, lowered, "amin")
