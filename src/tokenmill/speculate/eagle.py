"""EAGLE heads: one layer that guesses the target's next hidden state from its previous ones.

At position p, the head's K/V joins the target's hidden state of position p with the token at p + 1. So the head runs
behind each step of the target, over the same batch. From there it goes on alone, with its own states in place of the
target's. It cannot make up for steps that it has missed. Must not know: plans, verification, checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from tokenmill.compute.drafting import Drafting, Seen
from tokenmill.compute.forward import ForwardContext, Kernels, KVSpec, NormSpec, Weight
from tokenmill.compute.model import CausalLM
from tokenmill.kvcache.pool import KVPool
from tokenmill.runner.batch import apart, bare_context, single_tokens
from tokenmill.runner.drafter_rows import Side, side_of
from tokenmill.runner.replays import Replays
from tokenmill.runner.rows import Rows
from tokenmill.speculate.choice import Choosing, FilledRows
from tokenmill.speculate.eagle_tree import Growth, TreeHead, grow

Embed = Callable[[Tensor, ForwardContext], Tensor]


class Net(Protocol):
    """A network that guesses. hidden: numbers in a state. taps: the target's layers that it reads, side by side. norm
    and head (None: the target's) turn its states into logits; words: the token that each of its own words means (None:
    the same id)."""

    @property
    def hidden(self) -> int: ...
    @property
    def taps(self) -> tuple[int, ...]: ...
    @property
    def norm(self) -> NormSpec | None: ...
    @property
    def head(self) -> Weight | None: ...
    @property
    def words(self) -> Tensor | None: ...

    def begin(self, tokens: Tensor, taps: Tensor, ctx: ForwardContext) -> Tensor:
        """tokens [T], each behind the token of its taps [T, hidden of all taps] -> states [T, hidden]."""
        ...

    def go_on(self, tokens: Tensor, states: Tensor, ctx: ForwardContext) -> Tensor:
        """tokens [T], each behind the token of a state [T, hidden] that the network itself made -> states [T,
        hidden]."""
        ...


class EagleHead:
    """A DeviceDrafter that reads the target's layers."""

    follows = True
    catches_up = ""
    ways = 1
    """How many of a row's first guesses are each computed by a different procedure (LaterSteps has more than one)."""

    def __init__(
        self,
        net: Net,
        specs: tuple[KVSpec, ...],
        target: CausalLM,
        kernels: Kernels,
        most: int,
        dtype: torch.dtype,
        *,
        record: bool,
        trees: bool = False,
    ) -> None:
        """dtype: what the target computes in; trees: of `most` nodes."""
        self.growth = Growth.of(most) if trees else None
        self.levels = 0 if self.growth is None else self.growth.levels
        self.net = net
        self.specs = specs
        self.target = target
        self.kernels = kernels
        self.most = most
        self.dtype = dtype
        self.replays = Replays(kernels, record=record and not kernels.records)  # much of it is plain torch
        self.states: dict[int, Tensor] = {}
        self.out: Tensor | None = None
        self.rows: Rows
        self.side: Side
        self.choosing: Choosing

    def bind(self, rows: Rows, pool: KVPool) -> None:
        """Take the rows and the pool, whose last layers are the head's."""
        self.rows, self.side = rows, side_of(rows, pool, self.specs)
        self.choosing = Choosing(self.kernels, rows, exact=rows.device.type == "cpu")

    def warm(self) -> None:
        """Record the passes with the spare row."""
        if self.choosing.exact:
            return
        for rung in reversed(self.choosing.ladder):
            placed, _ = self.choosing.place([self.rows.spare] * rung)
            self._states(rung, None)
            for drawn in (False, True):
                for n in range(self.ways):
                    self._guess(placed, n, drawn=drawn)
                    self._pass(placed, 1 + n)

    def follow(self, spans: list[tuple[int, int, int]], seen: Seen) -> None:
        """Run over the target's whole batch. What verification rejects is overwritten in the next step."""
        ctx, mine = seen.ctx, self._mine(seen.ctx)
        assert ctx.rows is not None and ctx.taps is not None
        taps = [ctx.taps[tap] for tap in self.net.taps]
        tokens = self.rows.tokens[ctx.rows.tokens, ctx.positions + 1].long()
        self.out = self.net.begin(tokens, taps[0] if len(taps) == 1 else torch.cat(taps, -1), mine)

    def _mine(self, ctx: ForwardContext) -> ForwardContext:
        """The context of a target's step, for the drafter's own layers."""
        side = self.side
        return replace(ctx, kv=side.views, groups=[ctx.groups[g] for g in side.groups], taps=None)

    def propose(self, step: Drafting) -> None:
        """Guess for each row: the step's states give the first guess; each guess gives a state, and that the next
        guess."""
        assert self.out is not None
        side = self.side
        placed, drawn = self.choosing.place(step.row_list)
        row_ids = placed.row_ids
        length = self.rows.length[row_ids]
        side.length[row_ids] = length
        side.computed[row_ids] = (length - 2).clamp_(min=0)
        self._states(row_ids.shape[0], self.out[step.places()])
        if self.growth is not None:
            self._grow(step, placed, length, drawn=drawn)
            return
        real = slice(len(step.row_list))  # the spare row would move on once for each place of the rung that it fills
        for n in range(step.count):
            if n:
                self._pass(placed, n)
            ids = self._guess(placed, n, drawn=drawn)
            self.kernels.advance_(row_ids[real], ids[real], side.tokens, side.length, side.computed)

    def _grow(self, step: Drafting, placed: FilledRows, length: Tensor, *, drawn: bool) -> None:
        """Guess a tree for each row instead of a chain."""
        assert self.growth is not None
        net, sampled, rows = self.net, placed.words > 0, step.rows

        def scores(states: Tensor, row_ids: Tensor, positions: Tensor) -> Tensor:
            some = sampled.repeat_interleave(states.shape[0] // sampled.shape[0]) if drawn else None
            return self.choosing.scores(self._logits(states), row_ids, positions, some, net.words)

        head = TreeHead(scores, net.words, net.go_on, self.side, self._shifted(), self.kernels)
        growth = replace(self.growth, nodes=step.count)
        tokens, parents = grow(head, growth, placed.row_ids, length, self.states[placed.row_ids.shape[0]])
        ahead = torch.arange(step.count, device=length.device)
        rows.tokens[placed.row_ids[:, None], length[:, None] + ahead] = tokens.to(torch.int32)
        rows.parents[placed.row_ids, : step.count] = parents

    def _net(self, n: int) -> Net:
        """The network that makes the n-th guess."""
        return self.net

    def _logits(self, states: Tensor) -> Tensor:
        """Logits of the words that follow states [n, hidden]."""
        net, ctx = self.net, bare_context(self.kernels, states.shape[0], states.device)
        x = states if net.norm is None else self.kernels.norm(states, net.norm)
        return self.target.logits(x, ctx) if net.head is None else net.head.matmul(x, ctx).float()

    def forget_weights(self) -> None:
        """Drop what was made from the old weights; it is made again from the new ones."""
        self.replays.forget_weights()

    def _states(self, rung: int, found: Tensor | None) -> Tensor:
        """The tensor in which passes of this rung read and write their states."""
        if rung not in self.states:
            shape = rung, self.net.hidden
            self.states[rung] = torch.zeros(shape, dtype=self.dtype, device=self.rows.device)
        if found is not None:
            self.states[rung][: found.shape[0]].copy_(found)
        return self.states[rung]

    def _guess(self, placed: FilledRows, n: int, *, drawn: bool) -> Tensor:
        """From states to the n-th token for each row [rung]."""
        rung, net = placed.row_ids.shape[0], self._net(n)
        states = self.states[rung]

        def computing() -> Callable[[], Tensor]:
            ctx = bare_context(self.kernels, rung, states.device)

            def compute() -> Tensor:
                x = states if net.norm is None else self.kernels.norm(states, net.norm)
                logits = self.target.logits(x, ctx) if net.head is None else net.head.matmul(x, ctx)
                positions = self.side.computed[placed.row_ids] + 1 if drawn else placed.row_ids
                return self.choosing.choose(logits, placed, positions, drawn=drawn, words=net.words)

            return compute

        return self.replays.make_or_replay(("guess", rung, drawn, min(n, self.ways - 1)), computing)

    def _pass(self, placed: FilledRows, n: int) -> None:
        """Compute each row's next state from the newest of its n guesses and the state that this was guessed from."""
        rung, side, row_ids = placed.row_ids.shape[0], self.side, placed.row_ids
        states, shifted = self.states[rung], self._shifted()

        def computing() -> Callable[[], Tensor]:
            starts = apart(side.computed[row_ids] + 1)

            def compute() -> Tensor:
                _, ctx = single_tokens(self.kernels, side, side, row_ids, starts, kinds=(shifted, ()))
                tokens = side.tokens[row_ids, ctx.positions + 1].long()
                return self.net.go_on(tokens, states, ctx)

            return compute

        made = computing()() if any(shifted) else self.replays.make_or_replay(("pass", rung), computing)
        states.copy_(made)

    def _shifted(self) -> tuple[bool, ...]:
        """For each of its KV groups: has any row's table lost its first entries?"""
        return tuple(bool(self.rows.shifted[g]) for g in self.side.groups)
