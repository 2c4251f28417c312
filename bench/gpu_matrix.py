"""Public geometries x weight formats x K/V formats x GPU generations: what each launches is compiled, once. No GPU.

python bench/gpu_matrix.py --results FILE [--jobs N] [--seconds N] [--only TEXT] [--again TEXT] [--each N]
    [--summary OUT]

Owns: which combinations are run (every pair of a geometry with a format, and of each with a device, at least once),
what has been compiled already (kernels are told apart by source, specialisation and target), and the results, one JSON
line each. It may be ended at any time and goes on where it was; `--again` runs cases once more that have TEXT in their
name or a problem. `--each N` compiles only so many specialisations of a kernel for a
device (0: none, which shows what falls back or fails). tools/hardware.py makes
docs/hardware.md of FILE.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from geometries import FAMILIES, GEOMETRIES, family_config
from gpu_compile import CHOICES, Case, Requests, compiled, serve
from gpu_standin import DEVICES, Kernel, Standin, installed

WEIGHTS: dict[str, dict[str, Any]] = {
    "bf16": {}, "fp8": {"quantization": "fp8"}, "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"},
    "int4-g64": {"quantization": "int4-g64"}, "int4-g128": {"quantization": "int4-g128"},
    "int4-zeros": {"quantization": "int4-g128"}, "fp8-blocks": {"quantization": "fp8"}, "f16": {"dtype": "float16"},
    "f32": {"dtype": "float32"}, "deterministic": {"deterministic": True},
}  # fmt: skip
"""Weight format -> options; of the two that no option makes, files are stood in for by `_stored`."""
KEYS: dict[str, dict[str, Any]] = {
    "kv16": {},
    "kv-fp8": {"kv_cache_dtype": "fp8"},
    "kv-int8": {"kv_cache_dtype": "int8"},
}
SERVED: dict[str, Requests] = {
    "alone": [(n, 0, 2) for n in (1, 3, 12, 60, 200, 513, 1025)], "choices": [(64, 0, 3)] * len(CHOICES),
    "batch32": [(128, 0, 4)] * 32, "prefix": [(700 + 3 * i, 600, 3) for i in range(40)],
    "mixed": [(128 + 97 * i % 897, 0, 3) for i in range(130)],
}  # fmt: skip
OPTIONS = {"max_model_len": 2048, "max_num_seqs": 128}
INTERWOVEN = ("falcon", "gpt-neox", "pythia", "bloom", "persimmon", "codegen")
"""Heads of q, k and v lie among each other there: no such file is in blocks."""
ROUNDS_OF_FAMILIES = len(DEVICES)


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination."""

    geometry: str
    weights: str
    keys: str
    device: str

    @property
    def name(self) -> str:
        return f"{self.geometry} {self.weights} {self.keys} {self.device}"


def cells(geometries: list[str], families: list[str]) -> Iterator[Cell]:
    """Round by round: each has every geometry once; after as many rounds as there are formats, every pair was there."""
    weights, keys, devices = list(WEIGHTS), list(KEYS), list(DEVICES)
    for turn in range(len(weights)):
        every = geometries + (families if turn < ROUNDS_OF_FAMILIES else [])
        for i, geometry in enumerate(every):
            cell = Cell(
                geometry,
                weights[(i + turn) % len(weights)],
                keys[(2 * turn + i) % len(keys)],
                devices[(turn + i // len(weights)) % len(devices)],
            )
            woven = cell.weights == "fp8-blocks" and geometry.startswith(INTERWOVEN)
            if not woven:
                yield cell


def case_of(cell: Cell) -> Case:
    """What is loaded and served."""
    config = GEOMETRIES.get(cell.geometry) or family_config(cell.geometry)
    drafts = {"speculative_config": {"method": "ngram"}} if cell.weights == "bf16" else {}
    return Case(config, SERVED, {**OPTIONS, **WEIGHTS[cell.weights], **KEYS[cell.keys], **drafts})


def _stored(weights: str) -> None:
    """Have matrices come as files hold them that are not made at load: with zero points, in blocks of fp8."""
    if weights not in ("int4-zeros", "fp8-blocks"):
        return
    import torch

    from tokenmill.quant import detect
    from tokenmill.quant.fp8 import Fp8Weight
    from tokenmill.quant.grid import GridWeight

    plain = detect.from_dense

    def from_dense(weight: torch.Tensor, bias: torch.Tensor | None, scheme: str | None, *more: Any) -> Any:
        rows, columns = weight.shape
        if scheme is None or columns % 128 or (weights == "fp8-blocks" and rows % 128):
            return plain(weight, bias, scheme, *more)
        if weights == "fp8-blocks":
            scales = torch.empty(rows // 128, columns // 128, dtype=torch.float32, device=weight.device)
            return Fp8Weight(weight.to(torch.float8_e4m3fn), scales, weight.dtype, bias, blocks=True)
        codes = torch.empty(rows, columns, dtype=torch.int8, device=weight.device)
        zeros = torch.empty(rows, columns // 128, dtype=torch.int8, device=weight.device)
        return GridWeight(codes, zeros.half(), bits=4, group=128, dtype=weight.dtype, bias=bias, zeros=zeros)

    setattr(detect, "from_dense", from_dense)  # noqa: B010


def expected(operation: str, cell: Cell) -> bool:
    """Is it known, and said in docs/hardware.md, that plain torch computes this there?"""
    return operation == "unpacked_product" and cell.device == "sm_80" and cell.weights.startswith("fp8")


def place_of(kernel: Kernel, device: str) -> str:
    """What tells compiled kernels apart."""
    text = f"{kernel.function.cache_key} {kernel.key} {device}"
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def serve_cell(cell: Cell) -> tuple[Standin, set[Any]]:
    """-> what happened, and which kernels the load had compiled."""
    _stored(cell.weights)
    with installed(device=DEVICES[cell.device]) as standin:
        ready: set[Any] = set()
        try:
            ready = serve(standin, case_of(cell), 0 if cell.geometry in FAMILIES else 2)
        except Exception as error:  # the case has ended, what it launched until then counts
            where = traceback.extract_tb(error.__traceback__)[-1]
            standin.problem(f"{type(error).__name__}: {str(error)[:300]} ({where.filename}:{where.lineno})")
    return standin, ready


def run_cell(cell: Cell, seen: dict[str, str], each: int) -> Iterator[dict[str, Any]]:
    """Lines of the results: kernels that are not in `seen` (place -> kernel and device), then the case."""
    began = time.perf_counter()
    standin, ready = serve_cell(cell)
    served_s = time.perf_counter() - began
    counts = Counter(seen.values())
    room, places = DEVICES[cell.device].shared_memory, []
    for kernel in standin.kernels.values():
        place = place_of(kernel, cell.device)
        places.append(place)
        kind = f"{kernel.name} {cell.device}"
        if place in seen or counts[kind] >= each:
            continue
        counts[kind] += 1
        line: dict[str, Any] = {"kernel": place, "name": kernel.name, "device": cell.device}
        try:
            line |= compiled(kernel)
            if line.pop("waits"):
                line["problem"] = f"products wait for each other: {kernel.known()}"
            if line["shared"] > room or line["registers"] * line["threads"] > 1 << 16:
                line["problem"] = f"does not fit: {kernel.known()}"
        except Exception as error:
            line["problem"] = f"does not compile: {str(error)[-300:]} {kernel.known()}"
        yield line
    late = sorted({k.name for place, k in standin.kernels.items() if place not in ready and ready})
    told = {f"{op} fell back to plain torch" for op in standin.fallbacks if expected(op, cell)}
    yield {
        "case": cell.name, "each": each, "kernels": places, "late": late,
        "launches": standin.launches, "fallbacks": standin.fallbacks,
        "problems": [problem for problem in standin.problems if problem not in told],
        "served_s": round(served_s, 1), "s": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def _child(cell: Cell, seen: dict[str, str], each: int, out: pathlib.Path) -> int:
    """A process for one case, because the stand-in stays for the life of one; -> its id."""
    process = os.fork()
    if process:
        return process
    status = 1
    cache = tempfile.mkdtemp()
    try:
        import triton

        triton.knobs.cache.dir = cache
        with out.open("w") as file, open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
            for line in run_cell(cell, seen, each):
                file.write(json.dumps(line) + "\n")
                file.flush()
        status = 0
    finally:
        shutil.rmtree(cache, ignore_errors=True)
        os._exit(status)


class Results:
    """The file of lines."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.cases: dict[str, dict[str, Any]] = {}
        self.kernels: dict[str, dict[str, Any]] = {}
        if path.exists():
            for text in path.read_text().splitlines():
                self._take(json.loads(text))

    def _take(self, line: dict[str, Any]) -> None:
        if "case" in line:
            self.cases[line["case"]] = line
        else:
            self.kernels[line["kernel"]] = line

    def add(self, lines: list[dict[str, Any]]) -> None:
        with self.path.open("a") as file:
            for line in lines:
                self._take(line)
                file.write(json.dumps(line) + "\n")

    def seen(self) -> dict[str, str]:
        """Place -> kernel and device."""
        return {place: f"{line['name']} {line['device']}" for place, line in self.kernels.items()}

    def again(self, text: str) -> None:
        """Forget these cases, and kernels that had problems."""
        self.cases = {n: c for n, c in self.cases.items() if text not in n and not c["problems"]}
        self.kernels = {n: k for n, k in self.kernels.items() if "problem" not in k}


def summary(results: Results) -> dict[str, Any]:
    """What tools/hardware.py tells: by device and kernel how many were compiled, what they take at most; cases."""
    import triton

    devices: dict[str, dict[str, dict[str, int]]] = {device: {} for device in DEVICES}
    for line in results.kernels.values():
        found = devices[line["device"]].setdefault(
            line["name"], dict.fromkeys(("compiled", "shared", "spilled", "failed"), 0)
        )
        found["compiled"] += 1
        found["failed"] += "problem" in line
        for name in ("shared", "spilled"):
            found[name] = max(found[name], line.get(name, 0))
    names = [name.split() for name in results.cases]
    return {
        "triton": triton.__version__, "cases": len(names),
        **{part: len({name[i] for name in names}) for i, part in enumerate(("geometries", "weights", "keys"))},
        "specialisations": {
            device: len({k for name, case in results.cases.items() if name.endswith(device) for k in case["kernels"]})
            for device in DEVICES
        },
        "failed": sorted(name for name, case in results.cases.items() if case["problems"]),
        "fallbacks": {
            name: sorted(case["fallbacks"]) for name, case in sorted(results.cases.items()) if case["fallbacks"]
        },
        "devices": {device: dict(sorted(kernels.items())) for device, kernels in devices.items()},
    }  # fmt: skip


def run_all(todo: list[Cell], results: Results, jobs: int, seconds: float, each: int) -> None:
    """Cases side by side until the time is up."""
    import torch._dynamo  # noqa: F401  before the children, so that each has it

    import tokenmill.engine.running.build
    import tokenmill.kernels.triton.kernels  # noqa: F401

    began = time.perf_counter()
    running: dict[int, tuple[Cell, pathlib.Path]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while todo or running:
            while todo and len(running) < jobs and time.perf_counter() - began < seconds:
                cell = todo.pop(0)
                out = pathlib.Path(folder) / hashlib.blake2b(cell.name.encode(), digest_size=8).hexdigest()
                running[_child(cell, results.seen(), each, out)] = cell, out
            if not running:
                return
            process, status = os.wait()
            if process not in running:
                continue
            cell, out = running.pop(process)
            lines = [json.loads(text) for text in out.read_text().splitlines()] if out.exists() else []
            if status or not lines or "case" not in lines[-1]:
                lines.append(
                    {
                        "case": cell.name,
                        "each": each,
                        "kernels": [],
                        "problems": ["the case ended early"],
                        "fallbacks": {},
                    }
                )
            results.add(lines)
            last = lines[-1]
            wrong = [f"{line['name']} {line['problem']}" for line in lines[:-1] if "problem" in line]
            print(f"{len(results.cases)} {cell.name}: {len(last['kernels'])} kernels, {len(lines) - 1} new, "
                  f"{last.get('served_s')} of {last.get('s')} s", *last["problems"], *wrong,
                  sep="\n  PROBLEM ", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--only", default="", help="cases whose names hold this")
    parser.add_argument("--again", help="run these and all that had problems once more")
    parser.add_argument("--summary", type=pathlib.Path, help="write here what docs/hardware.md is made of")
    parser.add_argument("--each", type=int, default=1 << 30)
    options = parser.parse_args()
    every = list(cells(list(GEOMETRIES), list(FAMILIES)))
    results = Results(options.results)
    results.cases = {cell.name: results.cases[cell.name] for cell in every if cell.name in results.cases}
    if options.again is not None:
        results.again(options.again or "\n")
    done = {name for name, case in results.cases.items() if case.get("each", 0) >= options.each}
    todo = [cell for cell in every if cell.name not in done and options.only in cell.name]
    run_all(todo, results, options.jobs, options.seconds, options.each)
    if options.summary:
        options.summary.write_text(json.dumps(summary(results), indent=1) + "\n")
    left = [cell for cell in every if cell.name not in results.cases]
    wrong = [name for name, case in results.cases.items() if case["problems"]]
    unfit = [kernel for kernel in results.kernels.values() if "problem" in kernel]
    print(f"{len(results.cases)} cases, {len(left)} left; {len(results.kernels)} kernels compiled, "
          f"{len(unfit)} of them with a problem; {len(wrong)} cases with a problem")  # fmt: skip
    sys.exit(bool(wrong or unfit))


if __name__ == "__main__":
    main()
