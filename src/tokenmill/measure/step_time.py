"""How long a step usually takes. Owns: turning what a step must do (roofline.py), and what was measured, into seconds.

Without a calibration, a step takes its roofline time at the assumed shares of the ceilings. Must not know: models,
engines.
"""

from __future__ import annotations

import math

from tokenmill.measure.calibration import Calibration, Speeds, between
from tokenmill.measure.roofline import Cost, Floor, floor

_WEIGHTS, _KV = "memory bandwidth (weights)", "memory bandwidth (K/V)"


def step_time(cost: Cost, speeds: Speeds) -> Floor:
    """The usual time of this one step and what takes most of it. Without a calibration: the least time."""
    return floor(cost, speeds) if speeds.calibration is None else _usual(cost, speeds, speeds.calibration)


def _usual(cost: Cost, speeds: Speeds, known: Calibration) -> Floor:
    """Every part at the measured speed of its kernels."""
    spent = {_WEIGHTS: 0.0, _KV: 0.0, "compute": 0.0}
    _products(cost, known, spent)
    _attention(cost, known, spent)
    if cost.reductions:
        wire = cost.reduced_bytes / speeds.link_bytes_per_s if speeds.link_bytes_per_s else 0.0
        spent["sums over ranks"] = wire + cost.reductions * speeds.link_s
    counts = cost.counts
    launched = known.launched if counts.prompts and known.launched and counts.tokens > known.launched.tokens else None
    # The layers of a launched step wait for one kernel after the other, as in any step. The host's work is counted
    # apart.
    host = known.host(counts.rows, prompts=counts.prompts > 0 and launched is None)
    launching = counts.layers * host.layer_s + counts.logits * known.logit_s
    launching += counts.mixtures * between(known.mixture_s, counts.rows)
    spent["launching a step"] = launching
    device = sum(spent.values())
    if launched is not None:
        spent["launching a step"] += launched.step_s + max(0.0, _launch(cost, known) - device)
    else:
        spent["launching a step"] += host.step_s
        spent["launching a step"] += max(0.0, host.least_s - device - host.step_s)  # the host takes longer
    return Floor(sum(spent.values()), max(spent, key=lambda name: spent[name]))


def _launch(cost: Cost, known: Calibration) -> float:
    """The host's seconds to launch a step that is not recorded. The GPU computes meanwhile."""
    assert known.launched is not None
    counts, usual = cost.counts, known.launch_s(2.0)
    size = 2 * counts.tokens * cost.weight_bytes["matrices"] / cost.flops["matrices"]
    pairs = 2 * counts.layers * (known.launch_s(size) - usual)  # two products of attention, and two others
    mixed = counts.mixtures * (known.launch_s(2.0, experts=True) - usual)
    return counts.layers * known.launched.layer_s + max(0.0, pairs) + max(0.0, mixed)


def _products(cost: Cost, known: Calibration, spent: dict[str, float]) -> None:
    """Matrices, experts, head. Those that take more than twice the time of a single row are limited by computing."""
    cycled = cost.total_bytes
    rows = {"matrices": cost.counts.tokens, "experts": cost.counts.rows_per_expert, "head": cost.counts.lines}
    for part, count in rows.items():
        if not cost.flops[part] or not count:
            continue
        weights = cost.flops[part] / 2 / count
        size, experts = cost.weight_bytes[part] / weights, part == "experts"
        alone = known.product_s(size, 1, cycled, experts=experts)
        each = known.product_s(size, count, cycled, experts=experts)
        spent["compute" if each > 2 * alone else _WEIGHTS] += each * weights


def _attention(cost: Cost, known: Calibration, spent: dict[str, float]) -> None:
    """Single tokens read their contexts, prompts compute. A prefix that all share is read once and used by all."""
    seen, attention = cost.seen, known.attention
    if rows := cost.counts.rows - cost.counts.prompts:
        length = max(1.0, seen.single_positions / max(1, cost.counts.layers) / rows)
        spent[_KV] += seen.single_bytes / attention.reading(seen.number_bytes, cost.total_bytes, rows, length)
    spent["compute"] += seen.shared_flops / between(attention.prompts, attention.prompts[-1][0])
    if not cost.counts.prompts:
        return
    tokens = cost.counts.prompt_tokens / cost.counts.prompts
    computed = (seen.prompt_flops - seen.behind_flops) / between(attention.prompts, tokens)
    if seen.behind_flops:
        # Not measured: timed as a prompt with as many pairs of positions as the chunk has, because short prompts lack
        # work.
        alike = tokens * math.sqrt(seen.prompt_flops / (seen.prompt_flops - seen.behind_flops))
        rate = between(attention.behind, tokens) if attention.behind else between(attention.prompts, alike)
        computed += seen.behind_flops / rate
    moved = seen.prompt_bytes / attention.fastest(seen.number_bytes, cost.total_bytes)
    spent["compute" if computed >= moved else _KV] += max(computed, moved)
