"""What this engine's kernels reached on a device, as curves. Owns: a calibration's shape, reading between points.

`calibrate.py` measures it, `step_time.py` makes times of it. Must not know: models, devices, how anything was measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.core.errors import ParameterError

_SWING = 2.5
"""The factor by which a machine's memory speed may change."""
_MEMORY_BYTES = float(256 << 20)
"""A set of this size does not fit into caches, so it is read from memory."""
Points = tuple[tuple[float, float], ...]
"""(place, value) pairs, ascending."""


def between(points: Points, at: float) -> float:
    """Interpolate between the neighbours (both axes logarithmic). Beyond the ends the first or the last value
    counts."""
    before = points[0]
    for after in points:
        if after[0] > at:
            if after is points[0] or min(before[1], after[1]) <= 0:
                return before[1]
            share = math.log(at / before[0]) / math.log(after[0] / before[0])
            return math.exp(math.log(before[1]) + share * math.log(after[1] / before[1]))
        before = after
    return before[1]


def reading_of(sets: Points, memory: float, set_bytes: float) -> float:
    """The bytes per second at which sets of this size are read. Sets that fit into caches may be read faster than
    memory."""
    return max(memory, between((*sets, (_MEMORY_BYTES, memory)), set_bytes)) if sets else memory


def _near(square: float) -> float:
    """The weight of a point at this squared distance."""
    return 1.0 / (1e-9 + square * square)


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds per weight in products with matrices of one format, by rows, while a step cycles through `set_bytes`.
    launch_s: the time that a host needs to launch a feed-forward layer of them on a GPU. read: the bytes per second
    that plain reads reached at that time; 0: not known."""

    bytes_per_weight: float
    points: Points
    set_bytes: float = math.inf
    launch_s: float = 0.0
    read: float = 0.0

    def while_reading(self, rate: float) -> Curve:
        """The curve for a time when plain reads reach this many bytes per second. Times that wait for memory change
        with it. Sets that are read faster than plain reads come from caches, and rows that take twice the time of one
        are limited by computing."""
        if not self.read:
            return self
        one = self.points[0][1]
        waits = min(1.0, max(0.0, 2.0 - self.bytes_per_weight / one / self.read)) if one else 0.0
        more = one * waits * (min(_SWING, max(1 / _SWING, self.read / rate)) - 1.0)
        points = tuple((rows, t + more * min(1.0, max(0.0, 2.0 - t / one))) for rows, t in self.points)
        return replace(self, points=points, read=rate)

    def seconds(self, rows: float) -> float:
        """Interpolated between the points. Beyond the last one it grows in proportion to rows."""
        last, most = self.points[-1]
        return most * rows / last if rows >= last else between(self.points, rows)


@dataclass(frozen=True, slots=True)
class Hosted:
    """What a step with this many rows costs besides its arithmetic: once per step, and per layer; and the least time of
    any step."""

    rows: float
    step_s: float
    layer_s: float
    least_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Launched:
    """Steps with more prompt tokens than are recorded: the time around such a step, and the host's time to launch a
    layer."""

    tokens: int
    step_s: float
    layer_s: float


@dataclass(frozen=True, slots=True)
class Attending:
    """What attention reaches. Rates are per second. `decode`: of single tokens, (bytes that are cycled through, K/V
    bytes per second); `eight`: the same for K/V in 8 bits, if known. `shapes`: on a GPU, the (sequences, length) of
    each of these points, because the number of programs matters more than bytes. `prompts`: (new tokens of a sequence,
    operations per second); `behind`: the same with earlier tokens, if known."""

    decode: Points
    prompts: Points
    behind: Points = ()
    eight: Points = ()
    shapes: Points = ()

    def reading(self, number_bytes: float, step_bytes: float, rows: float, length: float) -> float:
        """K/V bytes per second for this many sequences of this length, in a step that cycles through this many
        bytes."""
        points = self.eight if self.eight and number_bytes <= 1 else self.decode
        if not self.shapes:
            return between(points, step_bytes)
        shares = [_near(math.log(rows / r) ** 2 + math.log(length / n) ** 2) for r, n in self.shapes]
        rates = [math.log(rate) for _, rate in points]
        return math.exp(sum(s * rate for s, rate in zip(shares, rates, strict=True)) / sum(shares))

    def fastest(self, number_bytes: float, step_bytes: float) -> float:
        """K/V bytes per second of prompts, which read in large tiles."""
        points = self.eight if self.eight and number_bytes <= 1 else self.decode
        return max(rate for _, rate in points) if self.shapes else between(points, step_bytes)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The curves of one device. `decoding`, `prompting`: steps of single tokens, and steps with prompts, by rows.
    `mixture_s`: what a layer of experts takes more than another layer, by rows. `logit_s`: the time to choose, per
    logit. `launched`: on a GPU. `short`: measured within seconds, in few sizes."""

    linear: tuple[Curve, ...]
    experts: tuple[Curve, ...]
    attention: Attending
    decoding: tuple[Hosted, ...]
    prompting: tuple[Hosted, ...]
    mixture_s: Points = ((1.0, 0.0),)
    logit_s: float = 0.0
    process_bytes: int = 0
    link_s: float = 0.0
    launched: Launched | None = None
    short: bool = False

    @property
    def reads(self) -> list[float]:
        """The bytes per second that plain reads reached during the calibration, ascending."""
        return sorted(curve.read for curve in self.linear if curve.read)

    def while_reading(self, rate: float) -> Calibration:
        """The calibration to expect when plain reads have just reached this many bytes per second. The memory speed of
        a shared host changes within moments, so it is expected to return half of the way (of the ratio) to its value
        during the calibration."""
        if not self.reads:
            return self
        rate = math.sqrt(rate * statistics.median(self.reads))
        return replace(self, linear=tuple(curve.while_reading(rate) for curve in self.linear))

    def launch_s(self, bytes_per_weight: float, *, experts: bool = False) -> float:
        """The host's seconds to launch a feed-forward layer, of the format nearest in size."""
        curves = self.experts if experts and self.experts else self.linear
        return min(curves, key=lambda c: abs(math.log(c.bytes_per_weight / bytes_per_weight))).launch_s

    def product_s(self, bytes_per_weight: float, rows: float, set_bytes: float, *, experts: bool = False) -> float:
        """Seconds per weight, of the format nearest in size and corrected for the difference in bytes, by the bytes
        that are cycled through."""
        curves = self.experts if experts and self.experts else self.linear
        nearest = min((c.bytes_per_weight for c in curves), key=lambda size: abs(math.log(size / bytes_per_weight)))
        family = sorted((c for c in curves if c.bytes_per_weight == nearest), key=lambda c: c.set_bytes)
        more = bytes_per_weight / nearest - 1.0
        points = tuple((c.set_bytes, c.seconds(rows) + more * c.seconds(1)) for c in family)
        return points[0][1] if len(points) == 1 else between(points, set_bytes)

    def host(self, rows: float, *, prompts: bool) -> Hosted:
        """Interpolated between the two measured row counts around this one. Beyond them, the last slope continues."""
        known = self.prompting if prompts and self.prompting else self.decoding
        if len(known) == 1:
            return known[0]
        high = next((i for i, point in enumerate(known) if i and point.rows >= rows), len(known) - 1)
        a, b = known[high - 1], known[high]
        share = max(0.0, (rows - a.rows) / (b.rows - a.rows))
        return Hosted(
            rows,
            max(0.0, a.step_s + share * (b.step_s - a.step_s)),
            max(0.0, a.layer_s + share * (b.layer_s - a.layer_s)),
            max(0.0, a.least_s + share * (b.least_s - a.least_s)),
        )


def read_calibration(found: Any) -> Calibration | None:
    """Read the result of `calibrate`. None: the file has none."""
    if found is None:
        return None
    missing = [part for part in ("attention", "host") if part in found.get("unfinished", ())]
    if missing:
        raise ParameterError(f"The calibration ended before {' and '.join(missing)} could be measured: measure again.")
    try:
        host, experts = found["host"], found.get("experts") or []
        return Calibration(
            linear=_curves(found["linear"]),
            experts=_curves(experts) if experts else (),
            attention=_attending(found["attention"]),
            decoding=_hosted(host["decoding"]),
            prompting=_hosted(host["prompting"]),
            mixture_s=_points(host.get("mixture_ms") or (experts and experts[0].get("more_ms")) or [[1, 0.0]], 1e-3),
            logit_s=1e-9 * float(host["logit_ns"]),
            process_bytes=int(found.get("process_bytes", 0)),
            link_s=1e-6 * float(found.get("link_us", 0.0)),
            launched=_launched(host.get("launching")),
            short=bool(found.get("short")),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ParameterError(
            f"The calibration is not what this version's `doctor --measure --json` prints ({error!r}): measure again."
        ) from error


def _curves(found: Sequence[Mapping[str, Any]]) -> tuple[Curve, ...]:
    curves = [
        Curve(
            float(f["bytes_per_weight"]),
            _points(f["ps_per_weight"], 1e-12),
            float(f["set_bytes"]),
            1e-6 * float(f.get("launch_us", 0.0)),
            1e9 * float(f.get("read_gb_per_s", 0.0)),
        )
        for f in found
    ]
    if not curves:
        raise ValueError("no products")
    return tuple(curves)


def _attending(found: Mapping[str, Any]) -> Attending:
    behind, eight = found.get("behind_tflops"), found.get("decode_8bit_gb_per_s")
    return Attending(
        decode=_points(found["decode_gb_per_s"], 1e9),
        prompts=_points(found["prefill_tflops"], 1e12),
        behind=_points(behind, 1e12) if behind else (),
        eight=_points(eight, 1e9) if eight else (),
        shapes=_points(found["decode_shapes"], 1.0) if found.get("decode_shapes") else (),
    )


def _points(found: Sequence[Sequence[float]], scale: float) -> Points:
    points = tuple((float(at), scale * float(value)) for at, value in found)
    if not points:
        raise ValueError("no points")
    return points


def _hosted(found: Sequence[Mapping[str, float]]) -> tuple[Hosted, ...]:
    return tuple(
        Hosted(float(f["rows"]), 1e-3 * f["step_ms"], 1e-3 * f["layer_ms"], 1e-3 * f["least_ms"]) for f in found
    )


def _launched(found: Mapping[str, float] | None) -> Launched | None:
    return None if found is None else Launched(int(found["tokens"]), 1e-3 * found["step_ms"], 1e-3 * found["layer_ms"])


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a device reaches: bytes and operations per second, bytes per second between ranks; seconds around a step. A
    calibration replaces all of these except the link's (step_time.py). sets: as in Device."""

    bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float = 0.0
    link_s: float = 0.0
    step_s: float = 0.0
    calibration: Calibration | None = None
    sets: Points = ()

    def reading(self, set_bytes: float) -> float:
        """Bytes per second while a step goes through this many bytes."""
        return reading_of(self.sets, self.bytes_per_s, set_bytes)
