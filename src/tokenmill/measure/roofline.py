"""How fast a step could be. Owns: what a step of given grants must compute and move, and the time that takes at best.

A step does one thing after the other: matrices, experts, attention, head, sums over ranks. Each of them takes at
least its operations over the device's operations per second, and at least its bytes over the bytes per second; the
larger of the two is its time. Activations are counted and left out of the time: they can stay in caches.
Must not know: models, engines. Counts come from `counting.py`, ceilings from `devices.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokenmill.core.forward import KVFormat
from tokenmill.measure.counting import Attended, Sheet

PARTS = ("matrices", "experts", "attention", "head")


@dataclass(frozen=True, slots=True)
class Grant:
    """`count` tokens of one sequence after `before` computed ones; does the last of them sample?"""

    count: int
    before: int
    samples: bool = True


@dataclass(slots=True)
class Cost:
    """What one step, or several, must do on each rank."""

    flops: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    weight_bytes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    kv_bytes: float = 0.0
    activation_bytes: float = 0.0
    reduced_bytes: float = 0.0
    reductions: int = 0
    tokens: int = 0
    lines: int = 0
    layers: int = 0
    rows_per_expert: float = 0.0

    @property
    def total_flops(self) -> float:
        """Operations of all parts."""
        return sum(self.flops.values())

    @property
    def total_bytes(self) -> float:
        """Weights, and keys and values read and written."""
        return sum(self.weight_bytes.values()) + self.kv_bytes

    def add(self, other: Cost) -> None:
        """Take another step's cost in."""
        for part in PARTS:
            self.flops[part] += other.flops[part]
            self.weight_bytes[part] += other.weight_bytes[part]
        self.kv_bytes += other.kv_bytes
        self.activation_bytes += other.activation_bytes
        self.reduced_bytes += other.reduced_bytes
        self.reductions += other.reductions


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds per weight of products with matrices of one format, by rows: points ascend."""

    bytes_per_weight: float
    points: tuple[tuple[float, float], ...]

    def seconds(self, rows: float) -> float:
        """Interpolated between the neighbours (both axes logarithmic); beyond the last point in proportion to rows."""
        (first, least), (last, most) = self.points[0], self.points[-1]
        if rows >= last:
            return most * rows / last
        before, after = (first, least), (first, least)
        for after in self.points:
            if after[0] > rows:
                break
            before = after
        if rows <= before[0] or before == after:
            return before[1]
        share = math.log(rows / before[0]) / math.log(after[0] / before[0])
        return math.exp(math.log(before[1]) + share * math.log(after[1] / before[1]))


@dataclass(frozen=True, slots=True)
class Calibration:
    """What this engine's kernels reached on a device, and what its host needs around them."""

    linear: tuple[Curve, ...]
    attention_bytes_per_s: float
    attention_flops_per_s: float
    step_s: float
    layer_s: float
    row_s: float

    def curve(self, bytes_per_weight: float) -> Curve:
        """The curve of the format that is nearest in size."""
        return min(self.linear, key=lambda curve: abs(math.log(curve.bytes_per_weight / bytes_per_weight)))


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a device reaches: bytes and operations per second, bytes per second between ranks; seconds around a step.

    A calibration replaces all of these but the link's.
    """

    bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float = 0.0
    link_s: float = 0.0
    step_s: float = 0.0
    calibration: Calibration | None = None


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time of a step and what sets it."""

    seconds: float
    limit: str


def step_cost(sheet: Sheet, grants: Sequence[Grant], kv: KVFormat) -> Cost:
    """What a step of these grants must do."""
    tokens = sum(grant.count for grant in grants)
    lines = sum(grant.samples for grant in grants)
    cost = Cost(activation_bytes=sheet.body.moved * tokens + sheet.head.moved * lines, tokens=tokens, lines=lines)
    cost.layers = len(sheet.spec.kv_specs)
    if not tokens:
        return cost
    cost.flops["matrices"] = sheet.body.flops * tokens
    cost.weight_bytes["matrices"] = sheet.body.weight_bytes
    for mixture in sheet.body.mixtures:
        cost.flops["experts"] += mixture.flops * mixture.top_k * tokens
        touched = experts_touched(mixture.experts, mixture.top_k, tokens)
        cost.weight_bytes["experts"] += mixture.bytes * touched
        cost.rows_per_expert = mixture.top_k * tokens / touched
    if lines:
        cost.flops["head"] = sheet.head.flops * lines
        cost.weight_bytes["head"] = sheet.head.weight_bytes
    for layer, times in layer_counts(sheet):
        seen, read = attention_work(layer.window, grants)
        cost.flops["attention"] += times * layer.flops * seen
        cost.kv_bytes += times * kv.bytes_per_token(layer.kv) * (read + tokens)
    cost.reduced_bytes = sheet.body.reduced * tokens + sheet.head.reduced * lines
    cost.reductions = sheet.body.reductions + (sheet.head.reductions if lines else 0)
    return cost


def experts_touched(experts: int, top_k: int, tokens: int) -> float:
    """How many different experts this many tokens are expected to choose, if every choice is equally likely."""
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens)


def layer_counts(sheet: Sheet) -> list[tuple[Attended, int]]:
    """Distinct attention layers and how often each occurs."""
    counts: dict[Attended, int] = {}
    for layer in sheet.body.attended:
        counts[layer] = counts.get(layer, 0) + 1
    return list(counts.items())


def attention_work(window: int, grants: Iterable[Grant]) -> tuple[float, float]:
    """-> (pairs of query and visible position, positions read once per grant)."""
    seen, read = 0, 0
    for grant in grants:
        last = grant.before + grant.count
        if not window or last <= window:
            seen += grant.count * grant.before + grant.count * (grant.count + 1) // 2
            read += last
            continue
        growing = max(0, window - grant.before)
        seen += growing * grant.before + growing * (growing + 1) // 2 + (grant.count - growing) * window
        read += min(last, window + grant.count - 1)
    return float(seen), float(read)


def floor(cost: Cost, speeds: Speeds) -> Floor:
    """The least time of this one step at these speeds (calibrated: its usual time), and what takes most of it."""
    if speeds.calibration is not None:
        return _usual(cost, speeds, speeds.calibration)
    spent = {"memory bandwidth (weights)": 0.0, "memory bandwidth (K/V)": 0.0, "compute": 0.0}
    for part in PARTS:
        moved = cost.kv_bytes if part == "attention" else cost.weight_bytes[part]
        memory, compute = moved / speeds.bytes_per_s, cost.flops[part] / speeds.flops_per_s
        if compute >= memory:
            spent["compute"] += compute
        else:
            spent["memory bandwidth (K/V)" if part == "attention" else "memory bandwidth (weights)"] += memory
    if cost.reductions:
        wire = cost.reduced_bytes / speeds.link_bytes_per_s if speeds.link_bytes_per_s else 0.0
        spent["sums over ranks"] = wire + cost.reductions * speeds.link_s
    spent["launching a step"] = speeds.step_s
    return Floor(sum(spent.values()), max(spent, key=lambda name: spent[name]))


def _usual(cost: Cost, speeds: Speeds, known: Calibration) -> Floor:
    """Every part at the speed that its kernels were measured to have."""
    spent = {"memory bandwidth (weights)": 0.0, "memory bandwidth (K/V)": 0.0, "compute": 0.0}
    rows = {"matrices": cost.tokens, "experts": cost.rows_per_expert, "head": cost.lines}
    for part, count in rows.items():
        if not cost.flops[part] or not count:
            continue
        weights = cost.flops[part] / 2 / count
        curve = known.curve(cost.weight_bytes[part] / weights)
        alone, seconds = curve.seconds(1) * weights, curve.seconds(count) * weights
        spent["compute" if seconds > 2 * alone else "memory bandwidth (weights)"] += seconds
    moved, computed = cost.kv_bytes / known.attention_bytes_per_s, cost.flops["attention"] / known.attention_flops_per_s
    spent["compute" if computed > moved else "memory bandwidth (K/V)"] += max(moved, computed)
    if cost.reductions:
        wire = cost.reduced_bytes / speeds.link_bytes_per_s if speeds.link_bytes_per_s else 0.0
        spent["sums over ranks"] = wire + cost.reductions * speeds.link_s
    spent["launching a step"] = known.step_s + cost.layers * known.layer_s + cost.lines * known.row_s
    return Floor(sum(spent.values()), max(spent, key=lambda name: spent[name]))
