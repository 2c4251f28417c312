"""Families that only Transformers' own caches can continue: states, compressed keys, own masks. Owns: the cache
object of each sequence, and the proof that a model continues from it.

A row's state is, for the engine, the number of a cache here: rows that fork, drafts that are taken back and rows that
move copy the number, as they copy the states of recurrent layers. Caches never change while two rows name them: who
goes on from such a one takes a copy. A cache that no row names is dropped. Sequences are computed one after the other.
What goes on from no cache at all is computed anew from its tokens at every step. Must not know: pages.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, ModelSpec, StateSpec
from tokenmill.core.errors import ModelError
from tokenmill.layers.build import Build
from tokenmill.models.decoder import STAND_IN
from tokenmill.models.foreign_parts import Halves, Stub, check_equal, failing_as

STATE = StateSpec((("float32", (4,)),))
"""The number of a cache, and what fills up sixteen bytes."""
_NUMBERS = 1 << 24
"""Whole numbers that a float32 holds."""
_NAMES = ("cache", "past_key_values", "cache_params", "state")
"""What models call the cache that they take and give back."""


class How(NamedTuple):
    """How a model goes on. cached: from its cache, else from all tokens; whole: it takes several tokens behind a cache
    at once; placed: it is told positions."""

    cached: bool
    whole: bool
    placed: bool


WAYS = (How(True, True, True), How(True, True, False), How(True, False, True), How(True, False, False),
        How(False, True, False))  # fmt: skip


@dataclass(slots=True)
class Held:
    """A sequence's cache (or its tokens), and how many it has seen."""

    cache: Any
    length: int


class OwnCaches(Halves):
    """A causal language model of Transformers whose sequences keep its own caches."""

    def __init__(self, halves: tuple[Any, Any, Stub]) -> None:
        super().__init__(*halves)
        self.how = WAYS[0]
        self.caches: dict[int, Held] = {}
        self.last = 0
        taken = inspect.signature(self.body.forward).parameters
        if "input_ids" not in taken:  # a shell that hands all on
            taken = inspect.signature(self.body.decoder.forward).parameters
        self.takes_positions = "position_ids" in taken
        self.name = next((name for name in _NAMES if name in taken), "")
        self.spec: ModelSpec  # once the model is proven

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """tokens [T] -> hidden states [T, hidden]."""
        ctx.kernels.waits += 1  # so that such a step is never recorded
        rows = ctx.rows
        assert rows is not None, "the engine gives rows to models with states"
        states, borders = rows.states[0][0], ctx.borders().tolist()
        numbers = [int(number) for number in states[:, 0].nan_to_num().tolist()]  # unused rows may hold anything
        named = Counter(numbers)
        self.caches = {number: held for number, held in self.caches.items() if number in named}
        left = [-1] * len(tokens) if rows.left is None else rows.left.tolist()
        found = []
        for row, begin, end in zip(rows.sequences.tolist(), borders, borders[1:], strict=False):
            if begin == end:
                continue
            held = self._before(numbers[row], int(ctx.positions[begin]), named)
            kept = [at for at in range(begin, end - 1) if left[at] >= 0] + [end - 1]
            for at in kept:
                hidden, held = self.run(tokens[begin : at + 1], held)
                states[left[at] if left[at] >= 0 else row, 0] = self._name(held)
                found.append(hidden)
                begin = at + 1
                if at != end - 1:
                    held = copy.deepcopy(held)
        padding = len(tokens) - sum(map(len, found))
        return torch.cat([*found, found[0].new_zeros(padding, found[0].shape[1])])

    def _before(self, number: int, at: int, named: Counter[int]) -> Held:
        """What a sequence goes on from at this position, for it to change."""
        if at == 0 or not self.caches:  # where nobody has a cache, a step is made up to be measured
            return Held(None, at)
        if number not in self.caches:
            raise RuntimeError(f"a row has no cache, and its next token has position {at}")
        held = self.caches[number]
        if held.length != at:
            raise RuntimeError(f"a row's cache has seen {held.length} tokens, and its next one has position {at}")
        return self.caches.pop(number) if named[number] == 1 else copy.deepcopy(held)

    def _name(self, held: Held) -> int:
        """A number for a cache."""
        self.last = self.last % (_NUMBERS - 1) + 1
        while self.last in self.caches:
            self.last = self.last % (_NUMBERS - 1) + 1
        self.caches[self.last] = held
        return self.last

    def run(self, tokens: Tensor, held: Held) -> tuple[Tensor, Held]:
        """The hidden states of the next tokens of a sequence, and what it goes on from."""
        if not self.how.cached:
            every = tokens if held.cache is None else torch.cat((held.cache, tokens))
            return self.body(input_ids=every[None], use_cache=False)[0][0, -len(tokens) :], Held(every, len(every))
        found = []
        for part in tokens.split(len(tokens) if self.how.whole or held.cache is None else 1):
            given: dict[str, Any] = {"input_ids": part[None], "use_cache": True}
            if held.cache is not None:
                given[self.name] = held.cache
            if self.takes_positions and self.how.placed:
                given["position_ids"] = torch.arange(held.length, held.length + len(part), device=part.device)[None]
            made = self.body(**given)
            cache = next((one for name in _NAMES if (one := getattr(made, name, None)) is not None), None)
            if cache is None:
                raise ModelError("it gives no cache back")
            held = Held(cache, held.length + len(part))
            found.append(made[0][0])
        return torch.cat(found), held


def prove_own_caches(
    made: OwnCaches, b: Build, vocab: int, ids: Tensor, expected: Tensor, pieces: tuple[int, ...]
) -> None:
    """Find how the model goes on from its caches: a prompt in pieces, beside another one that has gone as far, gives
    Transformers' own result."""
    why = ModelError("")
    for made.how in WAYS:
        try:
            with failing_as("it does not go on from its tokens"):
                found, held, sizes = [], Held(None, 0), []
                for part in _cut(ids, pieces):
                    made.run(ids[: held.length + 1].flip(0), Held(None, 0))  # nothing may be left of other sequences
                    hidden, held = made.run(part, copy.deepcopy(held))
                    found.append(made.logits(hidden, None).float())  # type: ignore[arg-type]
                    sizes.append((held.length, _bytes(held.cache)))
                check_equal(f"a prompt of {len(pieces)} pieces", torch.cat(found), expected, b)
        except ModelError as error:
            why = error
        else:
            each, start = _growth(sizes)
            made.spec = made.describe(b, vocab, hidden.shape[1], (STAND_IN,), (STATE,), stand_in=True,
                                      own_caches=each, own_cache_start=start, anew=not made.how.cached)  # fmt: skip
            return
    raise why


def _cut(ids: Tensor, pieces: tuple[int, ...]) -> list[Tensor]:
    """The prompt in pieces; shorter than these if the model's context is."""
    borders = [0, *accumulate(pieces)]
    return [ids[a:b] for a, b in pairwise(borders) if a < len(ids)]


def _growth(sizes: list[tuple[int, int]]) -> tuple[float, float]:
    """Of lengths and bytes of a cache that grows: the bytes of a token, and those that are there whatever its length
    (states)."""
    (short, few), (long, many) = sizes[0], sizes[-1]
    each = max(0.0, (many - few) / (long - short)) if long > short else many / long
    return each, max(0.0, many - each * long)


def _bytes(cache: Any) -> int:
    """The bytes of all tensors of a cache."""
    found: dict[int, int] = {}
    todo, seen = [cache], set()
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (str, int, float, bool, type(None), torch.nn.Module)):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found[one.data_ptr()] = one.nbytes
        elif isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, (list, tuple, set)):
            todo += one
        else:
            todo += getattr(one, "__dict__", {}).values()
    return sum(found.values())
