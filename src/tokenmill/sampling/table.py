"""Sampling parameters of all rows. Owns: SamplingTable, the device's numbers and the host's feature bits per row.

Must not know: logits, plans, what the features do. Numbers that every sampled row needs lie in two small tensors, so
that a step gathers them by row; lists (biases, bad words, ...) become one tensor per row when the row is set. The
host keeps one integer of feature bits per row: features that no row of a step uses cost nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from tokenmill.core.step import RowSampling
from tokenmill.sampling import steps
from tokenmill.sampling.arrays import send, to_device
from tokenmill.sampling.noise import stream_of, token_bases
from tokenmill.sampling.repeats import Breakers

GREEDY_BELOW: Final = 1e-5
STATE: Final = ("mirostat", "mirostat_tau", "mirostat_eta", "mu")
"""The columns of rows with mirostat; the last one is not a parameter."""
MOST_BREAKERS: Final = 32
"""How many sets of sequence breakers are kept after their rows have ended."""

SAMPLED: Final = 1 << 0
ALLOWED: Final = 1 << 1
MASKED: Final = 1 << 2
BAD_WORDS: Final = 1 << 3
MIN_TOKENS: Final = 1 << 4
BIASED: Final = 1 << 5
PROCESSED: Final = 1 << 6
PENALISED: Final = 1 << 7
REPEATS: Final = 1 << 8
CANDIDATES: Final = 1 << 9
LOGPROBS: Final = 1 << 10
ORDERED: Final = 1 << 11
"""The row has its own order of steps."""
MIROSTAT: Final = 1 << 12

TEMPERED: Final = steps.BY_NAME["temperature"].bit | ORDERED
"""The row takes temperature as a separate step."""
EDITS: Final = ALLOWED | MASKED | BAD_WORDS | MIN_TOKENS | BIASED | PROCESSED | PENALISED | REPEATS
FILTERS: Final = steps.FILTERS | ORDERED | MIROSTAT
CHOICES: Final = SAMPLED | EDITS | CANDIDATES
"""Any of these: the line is not a plain argmax over the model's logits."""


@dataclass(slots=True)
class BadWords:
    """W forbidden words of one row: word i forbids `last[i]` after `prefix[i]` (right-aligned, -1 = nothing)."""

    prefix: Tensor
    last: Tensor


@dataclass(slots=True)
class RowLists:
    """The lists of one row, ready on the device; never changed."""

    forbidden: Tensor | None = None
    bad_words: BadWords | None = None
    bias_ids: Tensor | None = None
    bias: Tensor | None = None
    breakers: Breakers | None = None


class SamplingTable:
    """Each row's sampling parameters as tensors on the device, and on the host which row uses which feature."""

    def __init__(self, max_rows: int, vocab_size: int, device: str) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.bits = [0] * max_rows
        self.params = [RowSampling() for _ in range(max_rows)]
        self.lists: dict[int, RowLists] = {}
        self._known_breakers: dict[object, Breakers] = {}
        self.bases = send(token_bases(np.arange(vocab_size)), self.device)
        self._floats = torch.zeros(max_rows, 7, dtype=torch.float32, device=self.device)
        self._ints = torch.zeros(max_rows, 5, dtype=torch.int64, device=self.device)
        self._rare = torch.zeros(max_rows, len(steps.NUMBERS) + len(STATE), dtype=torch.float32, device=self.device)
        self.inverse_temperature, self.log_min_p, self.top_p, self.typical_p = self._floats[:, :4].unbind(1)
        self.repetition, self.frequency, self.presence = self._floats[:, 4:].unbind(1)
        self.stream, self.num_prompt, self.min_tokens, self.top_k, self.window = self._ints.unbind(1)
        self.columns = dict(zip((*steps.NUMBERS, *STATE), self._rare.unbind(1), strict=True))
        self.columns |= {"log_min_p": self.log_min_p, "top_p": self.top_p, "typical_p": self.typical_p}
        self.columns["top_k"] = self.top_k
        self.mu = self.columns["mu"]
        self.end_ids = torch.full((max_rows, 4), -1, dtype=torch.int64, device=self.device)
        self.byte_limits = _byte_limits().to(self.device)

    def set_row(self, row: int, params: RowSampling, num_prompt: int, mu: float | None = None) -> None:
        """Row `row` samples with `params`; its first `num_prompt` tokens are the prompt. mu: mirostat's state."""
        self.lists[row] = _row_lists(params, self.vocab_size, self.device)
        if params.dry_breakers and params.dry_multiplier > 0.0:
            self.lists[row].breakers = self._breakers(params.dry_breakers)
        self._write(row, params, num_prompt)
        if self.bits[row] & FILTERS:
            state = {"mu": 2 * params.mirostat_tau if mu is None else mu}
            values = [state.get(name, getattr(params, name, 0.0)) for name in (*steps.NUMBERS, *STATE)]
            self._rare[row].copy_(to_device(values, torch.float32, self.device), non_blocking=True)

    def clear_row(self, row: int) -> None:
        """Row `row` is free: its lists are dropped and it uses no feature."""
        self.lists.pop(row, None)
        self.params[row] = RowSampling()
        self.bits[row] = 0

    def _write(self, row: int, params: RowSampling, num_prompt: int) -> None:
        self.params[row] = params
        self.bits[row] = _feature_bits(params, self.vocab_size)
        floats = [
            1.0 / params.temperature if self.bits[row] & SAMPLED and not self.bits[row] & TEMPERED else 1.0,
            math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
            params.top_p,
            params.typical_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        ]
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        window = params.repeat_last_n if params.repeat_last_n >= 0 else 1 << 40
        ints = [stream_of(params.seed), num_prompt, params.min_tokens, top_k, window]
        self._floats[row].copy_(to_device(floats, torch.float32, self.device), non_blocking=True)
        self._ints[row].copy_(to_device(ints, torch.int64, self.device), non_blocking=True)
        if self.bits[row] & MIN_TOKENS:
            self._write_end_ids(row, sorted({i for i in params.end_ids if 0 <= i < self.vocab_size}))

    def _breakers(self, words: list[tuple[list[int], list[int]]]) -> Breakers:
        """One object for all rows with these words, so that these are searched for together."""
        key = tuple((tuple(heads), tuple(rest)) for heads, rest in words)
        found = self._known_breakers.pop(key, None) or Breakers.of(words, self.vocab_size, self.device)
        self._known_breakers[key] = found  # the most recently used is dropped last
        if len(self._known_breakers) > MOST_BREAKERS:
            del self._known_breakers[next(iter(self._known_breakers))]
        return found

    def _write_end_ids(self, row: int, end_ids: list[int]) -> None:
        if len(end_ids) > self.end_ids.shape[1]:
            wider = self.end_ids.new_full((len(self.bits), 2 * len(end_ids)), -1)
            wider[:, : self.end_ids.shape[1]] = self.end_ids
            self.end_ids = wider
        padded = end_ids + [-1] * (self.end_ids.shape[1] - len(end_ids))
        self.end_ids[row].copy_(to_device(padded, torch.int64, self.device), non_blocking=True)


def _byte_limits() -> Tensor:
    """[256, 8]: inf for each bit that is set, -inf for the others; the lowest bit first."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(bits.bool(), math.inf, -math.inf)


def _feature_bits(p: RowSampling, vocab_size: int) -> int:
    uses = {
        ALLOWED: p.allowed_ids is not None,
        BAD_WORDS: bool(p.bad_words),
        MIN_TOKENS: p.min_tokens > 0 and bool(p.end_ids),
        BIASED: bool(p.logit_bias),
        PENALISED: p.repeat_last_n != 0
        and (p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0),
        REPEATS: p.no_repeat_ngram_size > 0 or (p.dry_multiplier > 0.0 and p.dry_penalty_last_n != 0),
        CANDIDATES: p.num_candidates > 0,
        LOGPROBS: p.num_logprobs >= 0,
    }
    if p.temperature >= GREEDY_BELOW:
        uses |= {SAMPLED: True, ORDERED: p.order is not None, MIROSTAT: p.mirostat > 0}
        uses |= {step.bit: True for step in steps.wanted_steps(p)}
        if p.top_k >= vocab_size:
            uses[steps.BY_NAME["top_k"].bit] = False
    return sum(bit for bit, used in uses.items() if used)


def _row_lists(p: RowSampling, vocab_size: int, device: torch.device) -> RowLists:
    lists = RowLists()
    if p.allowed_ids is not None:
        forbidden = torch.ones(vocab_size, dtype=torch.bool)
        forbidden[[i for i in p.allowed_ids if 0 <= i < vocab_size]] = False
        lists.forbidden = send(forbidden, device)
    words = [w for w in p.bad_words if w and 0 <= w[-1] < vocab_size]
    if words:
        longest = max(len(w) for w in words) - 1
        prefix = [[-1] * (longest - len(w) + 1) + w[:-1] for w in words]
        lists.bad_words = BadWords(
            to_device(prefix, torch.int64, device), to_device([w[-1] for w in words], torch.int64, device)
        )
    bias = {i: b for i, b in p.logit_bias.items() if 0 <= i < vocab_size}
    if bias:
        lists.bias_ids = to_device(list(bias), torch.int64, device)
        lists.bias = to_device(list(bias.values()), torch.float32, device)
    return lists
