"""What this engine's own kernels reach on this machine, measured within seconds. Owns: what is measured, in which
sizes.

A plain read and one large product (ceilings.py) bound what is possible; a prediction needs what is usual. Nothing here
depends on a model that will be predicted. The cost of calling a kernel is subtracted, because whole steps of tiny
models, run by the engine itself (calibrate_host.py), include it as real steps do. On a GPU calls are replayed, so that
a kernel's latency is measured, and long enough for the clock that the GPU's power limit allows. Run as a module with
DEVICE PART, this is a process that runs every kernel of a part once (calibrate_compile.py).
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import (
    AttentionSpec,
    ForwardContext,
    GroupPlan,
    Kernels,
    KVFormat,
    KVSpec,
    KVView,
    NormSpec,
    RouteSpec,
    Weight,
)
from tokenmill.core.errors import TokenmillError
from tokenmill.device.graphs import Recorder
from tokenmill.device.memory import release
from tokenmill.kernels import make_kernels
from tokenmill.layers.build import Build
from tokenmill.layers.experts import Experts
from tokenmill.measure.calibrate_compile import Compiling
from tokenmill.measure.calibrate_host import host, process_bytes, rehearse
from tokenmill.measure.calibrate_sizes import SIZES, CalibrationSizes, Timing
from tokenmill.measure.ceilings import measure, read_measured, reading
from tokenmill.measure.devices import Device
from tokenmill.quant.detect import from_dense
from tokenmill.quant.shape_checkpoint import ShapeCheckpoint

FORMATS = ("float32", "bfloat16", "fp8", "int8", "int4")
_COMPUTE = "bfloat16"
_BLOCK = 16
_DISTURBED = 0.8
"""If another pass is faster by this factor, something else disturbed the slower one."""
Told = Callable[[str], None]
"""A function that gets a line about what has been done."""


_SCHEMES = {"gpu": {"int4": "int4-g128"}, "cpu": {}}
_LASTING_ROWS = 1024
_LAUNCHES, _FEW = 8, 32
_READ_S = 0.03


def measure_calibrated(
    device: str,
    dtypes: tuple[str, ...],
    *,
    mixture: bool = True,
    short: bool = False,
    told: Told | None = None,
    now: Told | None = None,
    found: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything that `doctor --measure --json` prints. `found` is filled during the work, for callers that stop it.

    short: on a CPU in seconds, with fewer sizes and rounds. now: gets what is being measured."""
    found, told, now = {} if found is None else found, told or _silent, now or _silent
    kind = "gpu" if device != "cpu" else ("short" if short else "cpu")
    parts = parts_of(dtypes, mixture=mixture)
    known: dict[str, Any] = {"linear": [], "experts": [], "unfinished": list(parts), "short": kind == "short"}
    with Compiling(device, parts if device != "cpu" else []) as compiling:
        compiling.wait(told)  # until the end, because another process on the device would disturb the times
        start = time.perf_counter()
        now("reads and products")
        found |= measure(device, tuple(t for t in dtypes if t != "fp8"))
        found["calibration"] = known | {"link_us": (found["link"] or {"us": 0.0})["us"]}
        told(f"ceilings: {time.perf_counter() - start:.1f} s")
        _calibrate(device, SIZES[kind], parts, found["calibration"], (told, now))
    return found


def calibrated(device: str, dtypes: tuple[str, ...], now: Told | None = None) -> Device:
    """This machine's device, measured briefly: its ceilings, and the speed of this engine's kernels."""
    return read_measured(measure_calibrated(device, dtypes, short=True, now=now), f"measured on {device}")


def parts_of(dtypes: tuple[str, ...], *, mixture: bool = True) -> list[str]:
    """The parts of a calibration, in the order in which they are measured."""
    return [*(dtype for dtype in dtypes if dtype in FORMATS), "attention", *(["experts"] if mixture else []), "host"]


def _silent(line: str) -> None:
    """The default of `now`."""


def _calibrate(
    device: str, sizes: CalibrationSizes, parts: list[str], known: dict[str, Any], tell: tuple[Told, Told]
) -> None:
    """Measure one part after the other, in the form that calibration.py reads. Types that cannot be multiplied are left
    out."""
    told, now = tell
    known["process_bytes"] = process_bytes() if device == "cpu" and not known["short"] else 0
    for number, part in enumerate(parts, 1):
        start = time.perf_counter()

        def doing(what: str, place: str = f"{part}, part {number} of {len(parts)}") -> None:
            now(f"{place}{what and ': '}{what}")

        doing("")
        try:
            made = measure_part(device, sizes, part, mixture="experts" in parts, now=doing)
        except (RuntimeError, TokenmillError) as error:  # for example out of memory; the other parts are still useful
            told(f"{part}: not measured ({str(error).strip()[:200] or type(error).__name__})")
            continue
        finally:
            release(device)
        if part in FORMATS:
            known["linear"] += made
        else:
            known[part] = made
        known["unfinished"].remove(part)
        told(f"{part}: {time.perf_counter() - start:.1f} s")


def measure_part(device: str, sizes: CalibrationSizes, part: str, *, mixture: bool = True, now: Told = _silent) -> Any:
    """Measure one part of the calibration: a format's products, experts, attention, or the host."""
    if part == "host":
        short = device == "cpu" and sizes is SIZES.get("short")
        return host(device, mixture=mixture, short=short, now=now) if sizes.timing.rounds else rehearse(device)
    bench = Bench(device, "cpu" if device == "cpu" else "gpu", sizes, make_kernels(device), now)
    with torch.inference_mode():
        if part == "experts":
            return [bench.experts(_COMPUTE)]
        if part == "attention":
            eight = bench.stored()
            return {
                "decode_shapes": sorted(sizes.contexts, key=math.prod) if sizes.kv_cycled else [],
                "decode_gb_per_s": sorted(bench.decoding(_COMPUTE, *size) for size in sizes.contexts),
                "decode_8bit_gb_per_s": sorted(bench.decoding(eight, *size) for size in sizes.contexts),
                "prefill_tflops": sorted(bench.prompt(_COMPUTE, *size) for size in sizes.prompts),
                "behind_tflops": sorted(bench.behind(_COMPUTE, *size) for size in sizes.behind),
            }
        return list(bench.products(part))


@dataclass(slots=True)
class Bench:
    """One device's kernels, and the sizes in which they are measured."""

    device: str
    kind: str
    sizes: CalibrationSizes
    kernels: Kernels
    now: Told = _silent
    calls: dict[tuple[str, int], float] = field(default_factory=dict)

    def products(self, dtype: str) -> Iterator[dict[str, Any]]:
        """Picoseconds per weight of feed-forward layers (norm, activation, residual), by rows, one curve per set of
        weights."""
        for number, (hidden, inner, cycled) in enumerate(self.sizes.layers, 1):
            first = self._layer(dtype, hidden, inner)
            if first is None:
                return
            held = sum(w.bytes() for w in first)
            weights = 3 * hidden * inner
            layers = [first] + [self._layer(dtype, hidden, inner) for _ in range(max(1, -(-cycled // held)) - 1)]
            nothing = self._layer(dtype, *self.sizes.nothing)
            reads = [self._reading()]
            best: dict[int, float] = {}
            calls: dict[int, float] = {}
            for rows in self.sizes.rows * self.sizes.timing.passes:
                self.now(f"size {number} of {len(self.sizes.layers)}, {rows} rows")
                some = layers if rows <= 64 else layers[:2]
                like = self._like(rows)
                if nothing is not None and (like not in calls or self.kind == "cpu"):
                    small = [nothing] * len(some)
                    calls[like] = self._pass(dtype, like, small, self.sizes.nothing[0], 0.0) / len(some)
                each = self._pass(dtype, rows, some, hidden, self._warm(rows)) / len(some)
                taken = round(1e12 * _beyond(each, calls.get(like, 0.0)) / weights, 6)
                if rows == self.sizes.rows[0]:
                    reads.append(self._reading())
                if rows not in best or taken < _DISTURBED * best[rows]:
                    best[rows] = taken
            yield {
                "format": dtype,
                "bytes_per_weight": round(held / weights, 4),
                "set_bytes": held * len(layers),
                "ps_per_weight": list(best.items()),
                "read_gb_per_s": round(statistics.median([*reads, self._reading()]), 3),
                "launch_us": self._launch_us(self._work(dtype, [first], _LASTING_ROWS, hidden)),
            }
            del layers, first, nothing

    def _layer(self, dtype: str, hidden: int, inner: int) -> tuple[Weight, Weight] | None:
        """gate and up, and down. None: there is no kernel for such weights."""
        compute = getattr(torch, dtype) if hasattr(torch, dtype) and dtype.startswith(("float", "bfloat")) else None
        scheme = None if compute is not None else _SCHEMES[self.kind].get(dtype, dtype)
        made = []
        for shape in ((2 * inner, hidden), (hidden, inner)):
            dense = torch.empty(shape, dtype=compute or torch.bfloat16, device=self.device).normal_(0.0, 0.02)
            weight = from_dense(dense, None, scheme).settle(self.kernels)
            if scheme is not None and getattr(weight, "packed", None) is None:
                return None
            made.append(weight)
        return made[0], made[1]

    def _reading(self) -> float:
        """The GB/s that plain reads reach at this time. Only on a CPU: a GPU's memory is shared with nobody."""
        return 1e-9 * reading(self.device, _READ_S) if self.kind == "cpu" else 0.0

    def _like(self, rows: int) -> int:
        """The rows for which the smallest layer is timed. On a GPU a kernel's latency hardly depends on them."""
        return rows if self.kind == "cpu" else (_FEW if rows > 1 else 1)

    def _warm(self, rows: int) -> float:
        """Seconds of work before the timing. Models run single rows and full steps for long."""
        return self.sizes.timing.lasting_s if rows == 1 or rows >= _LASTING_ROWS else self.sizes.timing.warm_s

    def _pass(self, dtype: str, rows: int, layers: list[Any], hidden: int, warm_s: float) -> float:
        """Seconds for all these layers, one after the other."""
        return self._seconds(self._work(dtype, layers, rows, hidden), warm_s)

    def _work(self, dtype: str, layers: list[Any], rows: int, hidden: int) -> Callable[[], Tensor]:
        compute = getattr(torch, dtype) if dtype in ("float32", "float16", "bfloat16") else torch.bfloat16
        ctx = self._context()
        norm = NormSpec(torch.ones(hidden, dtype=compute, device=self.device), 1e-6)
        x = torch.randn(rows, hidden, device=self.device).to(compute)

        def work() -> Tensor:
            y = x
            for up, down in layers:
                y = down.matmul(up.matmul(y, ctx, norm=norm, act="silu_mul"), ctx, residual=y)
            return y

        return work

    def experts(self, dtype: str) -> dict[str, Any]:
        """The same for mixtures of experts: per weight of the chosen experts, by rows of each."""
        (count, chosen, hidden, inner), nothing = self.sizes.mixture, self.sizes.nothing
        mixture, small, dense = self._mixture(dtype, hidden, inner), self._mixture(dtype, *nothing), None
        weights, points, more = 3 * hidden * inner, [], []
        if self.device != "cpu":
            dense = self._layer(dtype, *nothing)
        for rows in self.sizes.mixture_rows:
            touched = count * (1.0 - (1.0 - chosen / count) ** rows)
            call = self._seconds(self._route(dtype, small, self._like(rows), nothing[0]))
            taken = _beyond(self._seconds(self._route(dtype, mixture, rows, hidden), self._warm(rows)), call)
            points.append((round(chosen * rows / touched, 4), round(1e12 * taken / touched / weights, 6)))
            if dense is not None and rows <= _FEW:
                more.append((rows, round(1e3 * max(0.0, call - self._pass(dtype, rows, [dense], nothing[0], 0.0)), 6)))
        size = getattr(torch, dtype).itemsize
        return {
            "format": dtype,
            "bytes_per_weight": size,
            "set_bytes": count * weights * size,
            "ps_per_weight": points,
            "launch_us": self._launch_us(self._route(dtype, mixture, _LASTING_ROWS, hidden)),
            "more_ms": more,
        }

    def _mixture(self, dtype: str, hidden: int, inner: int) -> Experts:
        compute, (count, chosen, _, _) = getattr(torch, dtype), self.sizes.mixture
        b = Build(ShapeCheckpoint(), compute, torch.device(self.device), self.kernels, 0)

        def weight(*shape: int) -> Weight:
            return from_dense(torch.empty(shape, dtype=compute, device=self.device).normal_(0.0, 0.02), None, None)

        ups, downs = ([weight(*shape) for _ in range(count)] for shape in ((2 * inner, hidden), (hidden, inner)))
        return Experts(b, weight(count, hidden), RouteSpec(count, chosen), (ups, downs), "silu_mul")

    def _route(self, dtype: str, mixture: Experts, rows: int, hidden: int) -> Callable[[], Tensor]:
        compute, ctx = getattr(torch, dtype), self._context()
        norm = NormSpec(torch.ones(hidden, dtype=compute, device=self.device), 1e-6)
        x = torch.randn(rows, hidden, device=self.device).to(compute)
        return lambda: mixture(x, ctx, norm=norm, residual=x)

    def stored(self) -> str:
        """The type of 8-bit K/V that this device's kernels read."""
        wanted = self.sizes.stored
        return wanted if wanted == "int8" or self._layer("fp8", *self.sizes.nothing) is not None else "int8"

    def decoding(self, stored: str, seqs: int, length: int) -> tuple[int, float]:
        """(bytes read, GB/s) for one new token of each sequence, over K/V of this type."""
        _, kv_heads, dim = self.sizes.heads
        moved = 2 * seqs * length * kv_heads * KVFormat(stored).head_bytes(dim)
        layers = max(1, -(-self.sizes.kv_cycled // moved)) if self.sizes.timing.rounds else 1
        like = seqs if self.sizes.kv_cycled else 1
        taken = _beyond(self._attend(stored, seqs, 1, length, layers), self._call(stored, like))
        return moved, round(1e-9 * moved / taken, 3)

    def prompt(self, dtype: str, seqs: int, length: int) -> tuple[int, float]:
        """(new tokens, TFLOP/s) for these prompts at once."""
        heads, _, dim = self.sizes.heads
        computed = 4.0 * seqs * (length * (length + 1) // 2) * heads * dim
        taken = _beyond(self._attend(dtype, seqs, length, length), self._call(dtype, 1))
        return length, round(1e-12 * computed / taken, 5)

    def behind(self, dtype: str, seqs: int, count: int, before: int) -> tuple[int, float]:
        """(new tokens, TFLOP/s with the earlier tokens) for these chunks at once."""
        heads, _, dim = self.sizes.heads
        taken = _beyond(self._attend(dtype, seqs, count, before + count), self._attend(dtype, seqs, count, count))
        return count, round(1e-12 * 4.0 * seqs * count * before * heads * dim / taken, 5)

    def _call(self, stored: str, seqs: int) -> float:
        """Seconds of a call for this many sequences without earlier tokens."""
        if (stored, seqs) not in self.calls:
            self.calls[stored, seqs] = self._attend(stored, seqs, 1, 1)
        return self.calls[stored, seqs]

    def _attend(self, stored: str, seqs: int, queries: int, length: int, layers: int = 1) -> float:
        """Seconds of a call over made-up pages: `queries` new tokens for each of `seqs` sequences of `length`. It goes
        through this many layers in turn, each with K/V of its own."""
        (heads, kv_heads, dim), on = self.sizes.heads, self.device
        used = -(-length // _BLOCK)
        blocks = seqs * used
        kv = KVSpec("full", kv_heads, dim, dim)
        specs = [AttentionSpec(i, 0, heads, kv, dim**-0.5) for i in range(layers)]
        tables = torch.arange(blocks, dtype=torch.int32, device=on).view(seqs, used)
        entries = torch.full((seqs,), used, dtype=torch.int32, device=on)
        slots = torch.zeros(seqs * queries, dtype=torch.int64, device=on)
        reach = seqs * length if queries > 1 else 0
        context = ForwardContext(
            self.kernels,
            torch.arange(length - queries, length, device=on).repeat(seqs),
            torch.arange(seqs + 1, dtype=torch.int32, device=on) * queries,
            torch.full((seqs,), length, dtype=torch.int32, device=on),
            queries,
            [self._pages(stored, blocks) for _ in specs],
            [GroupPlan(tables, None, entries, slots, reach=reach)],
            spans=[(i * queries, queries, length) for i in range(seqs)] if on == "cpu" else None,
            block_size=_BLOCK,
        )
        q = torch.randn(seqs * queries, heads, dim, device=on).to(getattr(torch, _COMPUTE))

        def work() -> None:
            for spec in specs:
                self.kernels.attend(q, spec, context)

        return self._seconds(work, self._warm(seqs * queries)) / layers

    def _pages(self, stored: str, blocks: int) -> KVView:
        """Made-up keys and values in 8 bits, with a scale per token and head."""
        _, kv_heads, dim = self.sizes.heads
        pages = [torch.randn(blocks, kv_heads, _BLOCK, dim, device=self.device) for _ in range(2)]
        if not KVFormat(stored).scaled:
            return KVView(*(numbers.to(getattr(torch, stored)) for numbers in pages))
        scales = [torch.full((blocks, kv_heads, _BLOCK, 1), 0.03, device=self.device).bfloat16() for _ in pages]
        return KVView(*((32 * numbers).to(getattr(torch, stored)) for numbers in pages), *scales)

    def _context(self) -> ForwardContext:
        """A context for layers that read no K/V."""
        nothing = torch.zeros(1, dtype=torch.int64, device=self.device)
        return ForwardContext(self.kernels, nothing, nothing, nothing, 1, [], [])

    def _seconds(self, work: Callable[[], Any], warm_s: float = 0.0) -> float:
        """The median of a few rounds. On a GPU a recording is timed, so that launching costs nothing."""
        work()
        if not self.sizes.timing.rounds:
            return 1.0
        run, probe, count = work, torch.ones(1, device=self.device), 1
        if self.device != "cpu":
            run = Recorder().record(work).replay
        if self.sizes.timing.round_s:
            self._round(run, probe, 1)
            count = 1 + int(self.sizes.timing.round_s / self._round(run, probe, 1))
            begin = time.perf_counter()
            while time.perf_counter() - begin < warm_s:
                self._round(run, probe, count)
        return statistics.median(self._round(run, probe, count) for _ in range(self.sizes.timing.rounds))

    def _launch_us(self, work: Callable[[], Any]) -> float:
        """Microseconds that the host takes to enqueue this on a GPU, without waiting for it."""
        if self.device == "cpu":
            return 0.0
        work()
        probe, times = torch.ones(1, device=self.device), []
        for _ in range(self.sizes.timing.rounds or 1):
            probe.item()
            start = time.perf_counter()
            for _ in range(_LAUNCHES):
                work()
            times.append(time.perf_counter() - start)
        probe.item()
        return round(1e6 * statistics.median(times) / _LAUNCHES, 3)

    def _round(self, run: Callable[[], Any], probe: Tensor, count: int) -> float:
        """Seconds of one run, from a round of this many."""
        probe.item()
        start = time.perf_counter()
        for _ in range(count):
            run()
        probe.item()  # waits for everything before it
        return (time.perf_counter() - start) / count


def _beyond(whole: float, call: float) -> float:
    """The time without the cost of the call. This cost is never taken as more than half of the time."""
    return whole - min(call, 0.5 * whole)


def _main(device: str, part: str) -> None:
    """Run everything of a part once, in small sizes."""
    sizes = SIZES["gpu"]
    layers = tuple((hidden, inner, 0) for hidden, inner, _ in sizes.layers)
    measure_part(device, replace(sizes, layers=layers, timing=Timing(rounds=0)), part)


if __name__ == "__main__":
    _main(*sys.argv[1:])
