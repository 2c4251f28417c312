"""Which experts lie on which rank. Owns: where they lie at first, where they should lie for given counts of tokens, and
the steps from one to the other. Needs no torch.

A rank has so many slots, each with one whole expert; slots are numbered over all ranks, a rank's own ones lie together.
A placement is the expert in each slot. An expert may lie in several slots: its tokens are then shared out. Everything
here follows from its arguments alone. Must not know: layers, devices, how weights get from rank to rank.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.core.errors import NotSharedError

Placement = list[int]
WORTH = 1.02
"""A placement stays unless another is better balanced by this factor."""


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the expert in slot `source` to slot `to`. swap: exchange the two."""

    to: int
    source: int
    swap: bool


def slots_of(experts: int, ranks: int, redundant: int) -> int:
    """The number of slots of each rank; refuses numbers that do not divide."""
    if redundant > experts * (ranks - 1):
        raise NotSharedError(
            f"num_redundant_experts {redundant}: {ranks} ranks already hold all {experts} experts each."
        )
    if (experts + redundant) % ranks:
        raise NotSharedError(
            f"--enable-eplb: {experts} experts and {redundant} redundant ones do not divide by {ranks} ranks "
            f"(num_redundant_experts {-experts % ranks} would do)."
        )
    return (experts + redundant) // ranks


def first_placement(experts: int, ranks: int, redundant: int) -> Placement:
    """Experts in the order of their numbers, repeated until all slots are filled."""
    return [slot % experts for slot in range(slots_of(experts, ranks, redundant) * ranks)]


def loads(counts: Sequence[int], placement: Placement, ranks: int) -> list[float]:
    """How many tokens each rank computes, if an expert's tokens are spread evenly over its slots."""
    copies, slots = Counter(placement), len(placement) // ranks
    return [
        sum(counts[expert] / copies[expert] for expert in placement[rank * slots : (rank + 1) * slots])
        for rank in range(ranks)
    ]


def balance_of(counts: Sequence[int], placement: Placement, ranks: int) -> float:
    """Mean / maximum of the ranks' loads: 1 is best, 1 / ranks is worst."""
    found = loads(counts, placement, ranks)
    most = max(found)
    return sum(found) / ranks / most if most else 1.0


def place(counts: Sequence[int], present: Placement, ranks: int) -> Placement:
    """A better placement for these counts of tokens per expert, or the present one.

    Each spare slot goes to the expert with the most tokens per slot. Then copies are placed, the heaviest first, each
    on the rank with the least load so far. If possible, a rank has an expert only once."""
    slots = len(present) // ranks
    copies = _copies(counts, len(present), ranks)
    ranking = sorted(range(len(counts)), key=lambda e: (-counts[e] / copies[e], e))
    held: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for expert in ranking:
        for _ in range(copies[expert]):
            free = [rank for rank in range(ranks) if len(held[rank]) < slots]
            new = [rank for rank in free if expert not in held[rank]]
            rank = min(new or free, key=lambda r: (load[r], r))
            held[rank].append(expert)
            load[rank] += counts[expert] / copies[expert]
    wanted = _in_place(held, present, slots)
    better = balance_of(counts, wanted, ranks) >= WORTH * balance_of(counts, present, ranks)
    return wanted if better else list(present)


def _copies(counts: Sequence[int], slots: int, ranks: int) -> list[int]:
    """How many slots each expert gets: one, and then spare ones."""
    copies = [1] * len(counts)
    queue = [(-float(count), expert) for expert, count in enumerate(counts)] if ranks > 1 else []
    heapq.heapify(queue)
    for _ in range(slots - len(counts)):
        _, expert = heapq.heappop(queue)
        copies[expert] += 1
        if copies[expert] < ranks:
            heapq.heappush(queue, (-counts[expert] / copies[expert], expert))
    return copies


def _in_place(held: list[list[int]], present: Placement, slots: int) -> Placement:
    """Put each heap of experts on the rank that already has most of them, and keep an expert that lies there in its
    slot."""
    ranks = len(held)
    now = [Counter(present[rank * slots : (rank + 1) * slots]) for rank in range(ranks)]
    alike = sorted(
        (-sum((now[rank] & Counter(heap)).values()), rank, number)
        for rank in range(ranks)
        for number, heap in enumerate(held)
    )
    heap_of: dict[int, int] = {}
    for _, rank, number in alike:
        if rank not in heap_of and number not in heap_of.values():
            heap_of[rank] = number
    wanted: Placement = []
    for rank in range(ranks):
        left, own = Counter(held[heap_of[rank]]), present[rank * slots : (rank + 1) * slots]
        stays = [left[expert] > 0 and not left.subtract([expert]) for expert in own]
        rest = sorted(left.elements())
        wanted += [expert if stay else rest.pop() for expert, stay in zip(own, stays, strict=True)]
    return wanted


def moves_between(present: Placement, wanted: Placement) -> list[Move]:
    """The moves from one placement to the other; after each move every expert lies in some slot."""
    now, made = list(present), []
    for slot in range(len(now)):
        while now[slot] != wanted[slot]:
            move = _next_move(now, wanted, slot)
            made.append(move)
            apply_move(now, move)
    return made


def _next_move(now: Placement, wanted: Placement, slot: int) -> Move:
    """The move that brings `slot` its expert; or, if the slot holds the only copy of an expert, the move that brings
    that one to its place."""
    sources = [other for other, expert in enumerate(now) if expert == wanted[slot]]
    astray = [other for other in sources if wanted[other] != now[other]]
    if now.count(now[slot]) > 1:
        return Move(slot, (astray or sources)[0], swap=False)
    if astray:
        return Move(slot, astray[0], swap=True)
    home = next(other for other, expert in enumerate(wanted) if expert == now[slot] and now[other] != expert)
    return Move(slot, home, swap=True)


def apply_move(placement: Placement, move: Move) -> None:
    """Change the placement as the move does."""
    came, went = placement[move.source], placement[move.to]
    placement[move.to] = came
    if move.swap:
        placement[move.source] = went


def rounds(moves: Sequence[Move], slots: int) -> list[list[Move]]:
    """Group moves that can be made at one time: each rank takes part in one of them. A rank's moves keep their
    order."""
    last: dict[int, int] = {}
    found: list[list[Move]] = []
    for move in moves:
        ranks = {move.to // slots, move.source // slots}
        at = 1 + max(last.get(rank, -1) for rank in ranks)
        last.update(dict.fromkeys(ranks, at))
        if at == len(found):
            found.append([])
        found[at].append(move)
    return found


def routes(placement: Placement, experts: int, columns: int) -> list[int]:
    """For every expert, `columns` numbers: the slots that take its tokens in turn."""
    found: list[list[int]] = [[] for _ in range(experts)]
    for slot, expert in enumerate(placement):
        found[expert].append(slot)
    return [slots[(column + expert) % len(slots)] for expert, slots in enumerate(found) for column in range(columns)]
