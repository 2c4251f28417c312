"""A model on several devices. Owns: what pipeline stages hold, what they wait for, and what whole experts cost.

Slices (tensor parallel) are counted from the layers themselves (counting.py); here is what follows from formulae:

    stages      each of p stages holds its share of the layers; the batch goes through them in p parts. A token takes
                the time of all layers for its part, and p - 1 hops; a prompt of m chunks (m + p - 1) / (m p) of its
                time.
    experts     whole ones on e ranks: the same bytes on average, but the busiest rank sets the pace; sums are exchanged
                as those of slices are.
    engines     n of them, each with the whole model on devices of its own: n times the requests, in the same time.
    a CPU       ranks and engines are processes on the same cores and memory: each has its part of both, so that n
                engines together do what one would.
Must not know: terminals, devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.measure.calibration import Speeds
from tokenmill.measure.counting import Sheet
from tokenmill.measure.roofline import Cost
from tokenmill.parallel.experts import slots_of


@dataclass(frozen=True, slots=True)
class Spread:
    """`ranks` slices of each layer, `stages` runs of layers. whole_experts: experts are distributed, not sliced.
    engines: how many copies of all this."""

    ranks: int = 1
    stages: int = 1
    whole_experts: bool = False
    engines: int = 1

    @property
    def devices(self) -> int:
        """The devices of one engine."""
        return self.ranks * self.stages

    @property
    def everywhere(self) -> int:
        """The devices of all engines."""
        return self.devices * self.engines

    def sharers(self, kind: str) -> int:
        """How many processes share one device of this kind."""
        return self.everywhere if kind == "cpu" else 1


def check_combined(spread: Spread, also: Mapping[str, bool]) -> None:
    """Refuse combinations that cannot be predicted. also: which of --slo and --workload were given."""
    given = {
        "--data-parallel-size": spread.engines > 1,
        "--pipeline-parallel-size": spread.stages > 1,
        "--enable-expert-parallel": spread.whole_experts,
    }
    for name, why in (
        ("--slo", "looks for devices and ranks itself, of one engine without stages"),
        ("--workload", "is predicted for one engine without stages, whose experts lie in slices"),
    ):
        if also.get(name) and (wrong := [flag for flag, here in given.items() if here]):
            raise ParameterError(f"{name} {why}: leave out {' and '.join(wrong)}.")


def check_spread(sheet: Sheet, spread: Spread) -> None:
    """Refuse a spread that the model's sizes do not allow."""
    layers = len(sheet.spec.kv_specs) + len(sheet.spec.states)
    if spread.stages > layers:
        raise ParameterError(
            f"{layers} layers cannot be distributed over {spread.stages} stages; choose a smaller --pp."
        )
    if spread.whole_experts and not sheet.body.mixtures:
        raise ParameterError("This model has no experts to distribute: leave out --ep.")
    if spread.whole_experts and any(mixture.experts < spread.ranks for mixture in sheet.body.mixtures):
        count = sheet.body.mixtures[0].experts
        raise ParameterError(f"{count} experts cannot be distributed over {spread.ranks} ranks; change --tp.")


def stage_of(sheet: Sheet, stages: int) -> Sheet:
    """The memory of the largest stage: its layers, and the larger one of embedding and head."""
    if stages == 1:
        return sheet
    layers = len(sheet.spec.kv_specs) + len(sheet.spec.states)
    share = -(-layers // stages)
    mixed = sum(mixture.experts * mixture.bytes for mixture in sheet.body.mixtures)
    body = sheet.body.weight_bytes + mixed
    ends = max(sheet.head.weight_bytes, sheet.held_bytes - body - sheet.head.weight_bytes)
    paged, recurrent = (-(-len(each) // stages) for each in (sheet.spec.kv_specs, sheet.spec.states))
    spec = replace(sheet.spec, kv_specs=sheet.spec.kv_specs[:paged], states=sheet.spec.states[:recurrent])
    return replace(sheet, spec=spec, held_bytes=int(body * share / layers + ends))


def with_copies(sheet: Sheet, ranks: int, redundant: int) -> Sheet:
    """The memory of a rank whose experts may move: every mixture has so many further copies of experts on all ranks
    together. Refuses numbers that do not divide."""
    for mixture in sheet.body.mixtures:
        slots_of(mixture.experts, ranks, redundant)
    copies = redundant * sum(mixture.bytes for mixture in sheet.body.mixtures)
    return replace(sheet, held_bytes=sheet.held_bytes + int(copies))


def spread_cost(cost: Cost, sheet: Sheet, spread: Spread) -> Cost:
    """With whole experts: the work of the busiest rank. Otherwise the cost is unchanged."""
    if not spread.whole_experts or spread.ranks == 1 or not cost.counts.tokens:
        return cost
    mixture, tokens = sheet.body.mixtures[0], cost.counts.tokens
    worst = imbalance(tokens * mixture.top_k, spread.ranks)
    cost.flops["experts"] *= worst
    cost.weight_bytes["experts"] *= min(worst, mixture.experts / max(1.0, _touched(cost, mixture.bytes)))
    return cost


def _touched(cost: Cost, each: float) -> float:
    """Experts that are read per layer."""
    return cost.weight_bytes["experts"] / each / max(1, cost.counts.mixtures)


def imbalance(choices: float, ranks: int) -> float:
    """How much more than the average the busiest of `ranks` gets if this many choices fall at random."""
    mean = choices / ranks
    return min(float(ranks), 1.0 + math.sqrt(2.0 * math.log(ranks) / mean)) if ranks > 1 else 1.0


def in_all(found: dict[str, Any], spread: Spread, kind: str) -> dict[str, Any]:
    """What all engines hold and reach together, from the figures of each. All stages count as the largest one."""
    count = spread.engines
    points = [
        {
            "context": point["context"],
            "batch": point["batch"] * count,
            "output_tokens_per_s": round(point["output_tokens_per_s"] * count, 4),
        }
        for point in found["points"]
    ]
    return {
        "engines": count,
        "devices": spread.everywhere // spread.sharers(kind),
        "weights": found["memory"]["weights"] * spread.everywhere,
        "kv": found["memory"]["kv"] * spread.everywhere,
        "max_batch": found["max_batch"] * count,
        "output_tokens_per_s": max((point["output_tokens_per_s"] for point in points), default=0.0),
        "points": points,
    }


def state_bytes(sheet: Sheet) -> int:
    """The bytes of one token between two layers, in 16 bits."""
    return 2 * sheet.spec.hidden_size


def hop_seconds(sheet: Sheet, spread: Spread, tokens: int, reach: Speeds) -> float:
    """Seconds that a step's states take across all borders between stages."""
    if spread.stages == 1:
        return 0.0
    wire = tokens * state_bytes(sheet) / spread.ranks / reach.link_bytes_per_s if reach.link_bytes_per_s else 0.0
    return (spread.stages - 1) * (wire + reach.link_s)


def bubbles(batch: int, chunks: int, stages: int) -> dict[str, float]:
    """The share of time in which devices wait for each other: during prompts of this many chunks, and between the
    tokens of a batch."""
    rows = -(-batch // stages)
    return {
        "prompt": round((stages - 1) / (chunks + stages - 1), 4),
        "decode": round(1.0 - batch / (stages * rows), 4),
    }
