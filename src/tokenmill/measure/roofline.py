"""How fast a step could be. Owns: what a step of given grants must compute and move, and the time that takes at best.

A step does one thing after the other: matrices, experts, attention, head, sums over ranks. Each of them takes at
least its operations over the device's operations per second, and at least its bytes over the bytes per second; the
larger of the two is its time. Activations are counted and left out of the time: they can stay in caches.
Must not know: models, engines. Counts come from `counting.py`, ceilings from `devices.py`; `step_time.py` has the
time that a step usually takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokenmill.compute.forward import KVFormat
from tokenmill.measure.calibration import Speeds
from tokenmill.measure.counting import Attended, Sheet

PARTS = ("matrices", "experts", "attention", "head")


@dataclass(frozen=True, slots=True)
class Grant:
    """`count` tokens of one sequence after `before` computed ones. samples: is the last of them sampled?"""

    count: int
    before: int
    samples: bool = True


@dataclass(slots=True)
class StepCounts:
    """What a step consists of: tokens, sampled lines, rows (grants), and the prompts among them."""

    tokens: int = 0
    lines: int = 0
    rows: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    layers: int = 0
    mixtures: int = 0
    logits: int = 0
    rows_per_expert: float = 0.0


@dataclass(slots=True)
class AttentionWork:
    """What attention reads and computes, apart for rows with a single token, a prefix that all of them share, and
    prompts. behind_flops: of prompts' tokens with earlier ones. number_bytes: of one number of K/V. single_positions:
    how many are read, in all layers and rows together."""

    single_bytes: float = 0.0
    single_positions: float = 0.0
    shared_flops: float = 0.0
    prompt_bytes: float = 0.0
    prompt_flops: float = 0.0
    behind_flops: float = 0.0
    number_bytes: float = 2.0


@dataclass(slots=True)
class Cost:
    """What one step or several steps must do on each rank. `counts` and `seen` are those of one step."""

    flops: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    weight_bytes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    kv_bytes: float = 0.0
    activation_bytes: float = 0.0
    reduced_bytes: float = 0.0
    reductions: int = 0
    counts: StepCounts = field(default_factory=StepCounts)
    seen: AttentionWork = field(default_factory=AttentionWork)

    @property
    def total_flops(self) -> float:
        """Operations of all parts."""
        return sum(self.flops.values())

    @property
    def total_bytes(self) -> float:
        """The bytes of weights, and of keys and values that are read and written."""
        return sum(self.weight_bytes.values()) + self.kv_bytes

    def add(self, other: Cost) -> None:
        """Add another step's cost."""
        for part in PARTS:
            self.flops[part] += other.flops[part]
            self.weight_bytes[part] += other.weight_bytes[part]
        self.kv_bytes += other.kv_bytes
        self.activation_bytes += other.activation_bytes
        self.reduced_bytes += other.reduced_bytes
        self.reductions += other.reductions


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time of a step and what limits it."""

    seconds: float
    limit: str


def step_cost(sheet: Sheet, grants: Sequence[Grant], kv: KVFormat, shared: int = 0) -> Cost:
    """What a step of these grants must do. The first `shared` positions are the same in all sequences and are read
    once."""
    cost = Cost()
    counts = cost.counts = _count(sheet, grants)
    cost.seen.number_bytes = kv.element_bytes
    tokens, lines = counts.tokens, counts.lines
    cost.activation_bytes = sheet.body.moved * tokens + sheet.head.moved * lines
    if not tokens:
        return cost
    cost.flops["matrices"] = sheet.body.flops * tokens
    cost.weight_bytes["matrices"] = sheet.body.weight_bytes
    for mixture in sheet.body.mixtures:
        cost.flops["experts"] += mixture.flops * mixture.top_k * tokens
        touched = experts_touched(mixture.experts, mixture.top_k, tokens)
        cost.weight_bytes["experts"] += mixture.bytes * touched
        counts.rows_per_expert = mixture.top_k * tokens / touched
    if lines:
        cost.flops["head"] = sheet.head.flops * lines
        cost.weight_bytes["head"] = sheet.head.weight_bytes
    for layer, times in layer_counts(sheet):
        _attend(cost, layer, times, grants, kv, 0 if layer.window else shared)
    _recur(cost, sheet, grants)
    cost.reduced_bytes = sheet.body.reduced * tokens + sheet.head.reduced * lines
    cost.reductions = sheet.body.reductions + (sheet.head.reductions if lines else 0)
    return cost


def _count(sheet: Sheet, grants: Sequence[Grant]) -> StepCounts:
    prompts = [grant.count for grant in grants if grant.count > 1]
    lines = sum(grant.samples for grant in grants)
    return StepCounts(
        tokens=sum(grant.count for grant in grants),
        lines=lines,
        rows=len(grants),
        prompts=len(prompts),
        prompt_tokens=sum(prompts),
        layers=len(sheet.spec.kv_specs) + len(sheet.spec.states),
        mixtures=len(sheet.body.mixtures),
        logits=lines * sheet.spec.vocab_size,
    )


def _attend(cost: Cost, layer: Attended, times: int, grants: Sequence[Grant], kv: KVFormat, shared: int) -> None:
    """Add what `times` layers like this one read and compute."""
    each = times * kv.bytes_per_token(layer.kv)
    for several in (False, True):
        rows = [grant for grant in grants if (grant.count > 1) == several]
        seen, read = attention_work(layer.window, rows)
        once = shared * (len(rows) - 1) if shared and not several and len(rows) > 1 else 0
        flops = times * layer.flops(prompts=several)
        moved, computed = each * (read - once + sum(r.count for r in rows)), flops * seen
        cost.kv_bytes += moved
        cost.flops["attention"] += computed
        if several:
            cost.seen.prompt_bytes += moved
            cost.seen.prompt_flops += computed
            cost.seen.behind_flops += flops * sum(r.count * _seen_before(layer.window, r) for r in rows)
        else:
            cost.seen.single_bytes += moved
            cost.seen.single_positions += times * (read - once)
            cost.seen.shared_flops += flops * shared * len(rows) if once else 0.0


def _recur(cost: Cost, sheet: Sheet, grants: Sequence[Grant]) -> None:
    """Add that recurrent layers read and write each row's states once, however many tokens the row has."""
    each = 2.0 * sum(spec.size_bytes for spec in sheet.spec.states)
    prompts = sum(grant.count > 1 for grant in grants)
    cost.kv_bytes += each * len(grants)
    cost.seen.prompt_bytes += each * prompts
    cost.seen.single_bytes += each * (len(grants) - prompts)


def _seen_before(window: int, grant: Grant) -> float:
    """The number of earlier positions that a token of this grant can see, on average."""
    return max(0.0, min(grant.before, window - (grant.count + 1) / 2)) if window else grant.before


def experts_touched(experts: int, top_k: int, tokens: int) -> float:
    """The expected number of different experts for this many tokens, if every choice is equally likely."""
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens)


def layer_counts(sheet: Sheet) -> list[tuple[Attended, int]]:
    """Distinct attention layers and how often each occurs."""
    counts: dict[Attended, int] = {}
    for layer in sheet.body.attended:
        counts[layer] = counts.get(layer, 0) + 1
    return list(counts.items())


def attention_work(window: int, grants: Iterable[Grant]) -> tuple[float, float]:
    """(pairs of query and visible position, positions read once per grant)."""
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
    """The least time of this one step at these speeds, and what takes most of it."""
    spent = {"memory bandwidth (weights)": 0.0, "memory bandwidth (K/V)": 0.0, "compute": 0.0}
    rate = speeds.reading(cost.total_bytes)
    for part in PARTS:
        moved = cost.kv_bytes if part == "attention" else cost.weight_bytes[part]
        memory, compute = moved / rate, cost.flops[part] / speeds.flops_per_s
        if compute >= memory:
            spent["compute"] += compute
        else:
            spent["memory bandwidth (K/V)" if part == "attention" else "memory bandwidth (weights)"] += memory
    if cost.reductions:
        wire = cost.reduced_bytes / speeds.link_bytes_per_s if speeds.link_bytes_per_s else 0.0
        spent["sums over ranks"] = wire + cost.reductions * speeds.link_s
    spent["launching a step"] = speeds.step_s
    return Floor(sum(spent.values()), max(spent, key=lambda name: spent[name]))
