"""Where a decode step's time goes on a GPU: kernels of a replayed step, by name, and what the host does meanwhile.

python bench/gpu_profile.py MODEL ROWSxPROMPTxSHARED...      (dummy weights; tables on stdout)
python bench/gpu_profile.py MODEL FILE.jsonl...              (how long steps take, by kind; kernels of two mixed ones)
python bench/gpu_profile.py llama-3-8b lora:none lora:1 lora:32     (decode steps of 32 rows with adapters)

MODEL is a folder, or GEOMETRY[:FORMAT] of geometries.py. Prompts of 4096 and more profile prefill steps. Clock and
power are what the driver says every 20 ms while a case runs (nvidia-ml-py, if it is there). With dependent launch a
kernel's whole time includes its wait for the one before it; its own part does not.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import pathlib
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from geometries import GEOMETRIES
from gpu_geometries import STORED
from gpu_lora import chosen, write_adapters
from tokenmill import LLM, LoRARequest, SamplingParams


@contextmanager
def clocks(name: str) -> Iterator[None]:
    """Print the median and the lowest clock, and the power, of what runs meanwhile."""
    try:
        import pynvml
    except ImportError:
        yield
        return
    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    found: list[tuple[int, float]] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.02):
            clock = pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM)
            found.append((clock, pynvml.nvmlDeviceGetPowerUsage(device) / 1e3))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if found:
            speeds, watts = zip(*found, strict=True)
            print(f"clock of {name}: median {statistics.median(speeds):.0f} MHz, least {min(speeds)}; "
                  f"power median {statistics.median(watts):.0f} W, most {max(watts):.0f}")  # fmt: skip


def add(llm: LLM, rows: int, prompt: int, shared: int, output: int, most: int = 100000) -> None:
    """Requests of random tokens; most: ids are below it."""
    ids = random.Random(0)
    head = [ids.randrange(1000, most) for _ in range(shared)]
    for _ in range(rows):
        tokens = head + [ids.randrange(1000, most) for _ in range(prompt)]
        llm.engine.add(llm._request(None, tokens, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)))


def paces(llm: LLM, rows: int, prompt: int, shared: int) -> None:
    """How long steps take as the context grows."""
    add(llm, rows, prompt, shared, 256)
    marks = []
    while llm.engine.has_work:
        llm.engine.step()
        marks.append(time.perf_counter())
    gaps = [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]
    print("ms a step:", [round(statistics.median(gaps[i : i + 32]), 3) for i in range(0, len(gaps) - 8, 32)])


@dataclass(slots=True)
class Kernel:
    """One launch, in microseconds."""

    name: str
    begin: float
    end: float


def kernels_of(found: torch.profiler.profile) -> list[Kernel]:
    """All launches by their end; a name has the grid, too, as a product's launches differ by nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = []
    for event in events:
        if event.get("cat") == "kernel":
            grid = "x".join(str(n) for n in event["args"].get("grid", []))
            name = f"{event['name'][:60]} {grid}"
            kernels.append(Kernel(name, event["ts"], event["ts"] + event["dur"]))
    return sorted(kernels, key=lambda kernel: kernel.end)


def profile(llm: LLM, steps: int, shown: int = 16) -> None:
    """Kernels and gaps of some steps. A kernel's own part: from the end of whatever ended before it to its end, which
    add up to the whole however launches overlap."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    engine = llm.engine
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    kernels = kernels_of(found)
    whole, own = collections.defaultdict[str, float](float), collections.defaultdict[str, float](float)
    calls = collections.Counter[str]()
    before = kernels[0].begin
    for kernel in kernels:
        whole[kernel.name] += kernel.end - kernel.begin
        own[kernel.name] += kernel.end - before
        calls[kernel.name] += 1
        before = kernel.end
    unit = steps * 1e3
    print(f"profiled {(kernels[-1].end - kernels[0].begin) / unit:.3f} ms a step")
    print("   own part, ms a step; us a call; whole us a call")
    for name, us in sorted(own.items(), key=lambda each: -each[1])[:shown]:
        each = us / calls[name], whole[name] / calls[name]
        print(f"{us / unit:8.4f} {calls[name] / steps:7.1f} x {each[0]:8.2f} {each[1]:8.2f}  {name}")
    host = [(e.key, e.self_cpu_time_total / unit, e.count / steps) for e in found.key_averages()]
    for name, ms, count in sorted(host, key=lambda row: -row[1])[:6]:
        print(f"  host {ms:8.3f} ms {count:6.1f} x {name[:60]}")


def workload(llm: LLM, path: str) -> None:
    """Steps of a workload by kind: how many, how many rows and tokens, how long; kernels of two steps of each kind."""
    for line in pathlib.Path(path).read_text().splitlines():
        asked = json.loads(line)
        params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True)
        llm.engine.add(llm._request(None, asked["prompt_token_ids"], params))
    kinds: dict[tuple[str, int], list[tuple[int, int, float]]] = collections.defaultdict(list)
    mark = time.perf_counter()
    while llm.engine.has_work:
        if llm.engine.flying:
            plan = llm.engine.flying[0][0]
            rows, tokens = len(plan.rows), plan.num_tokens
            kind = ("prefill", tokens // 4096) if tokens > rows else ("decode", rows // 64)
            if len(kinds[kind]) == 3:
                print("kernels of", kind, rows, "rows", tokens, "tokens")
                profile(llm, 2)
                kinds[kind].append((rows, tokens, 0.0))
                mark = time.perf_counter()
                continue
            llm.engine.step()
            kinds[kind].append((rows, tokens, (time.perf_counter() - mark) * 1e3))
        else:
            llm.engine.step()
        mark = time.perf_counter()
    for (kind, _), found in sorted(kinds.items()):
        ms = [t for *_, t in found]
        rows, tokens = (statistics.mean(column) for column in list(zip(*found, strict=True))[:2])
        print(f"{kind:8s} {len(found):4d} steps, {rows:6.1f} rows {tokens:7.1f} tokens: {sum(ms):8.1f} ms in all, "
              f"median {statistics.median(ms):7.2f}, most {max(ms):7.2f}")  # fmt: skip


def with_adapters(root: pathlib.Path, config: dict[str, Any], llm: LLM, kind: str, rows: int) -> None:
    """A decode step of so many rows that have adapters of rank 16: none, 1, 8, 32 distinct, or zipf."""
    adapters = write_adapters(root / "adapters", config, 16) if not (root / "adapters").exists() else []
    adapters = adapters or [LoRARequest(f"a{n}", n + 1, str(root / "adapters" / f"a{n}")) for n in range(100)]
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    for row, adapter in enumerate(chosen(adapters, kind, rows)):
        engine.add_request(f"r{row}", {"prompt_token_ids": [row + 5] * 128}, params, lora_request=adapter)
    for _ in range(24):
        engine.step()
    print(f"--- {rows} rows, adapters: {kind}")
    profile(llm, 8)
    while engine.has_unfinished_requests():
        engine.step()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with config.json, or GEOMETRY[:FORMAT] of geometries.py")
    parser.add_argument("cases", nargs="+", help="ROWSxPROMPTxSHARED, FILE.jsonl, or lora:KIND")
    return parser.parse_args()


def main() -> None:
    """Print the tables of each case."""
    given = parse()
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 512}
    adapted = any(case.startswith("lora:") for case in given.cases)
    options |= {"enable_lora": True, "max_loras": 32, "max_lora_rank": 16} if adapted else {}
    with tempfile.TemporaryDirectory() as folder:
        root, (name, _, form) = pathlib.Path(folder), given.model.partition(":")
        config = GEOMETRIES.get(name)
        if config is not None:
            (root / "config.json").write_text(json.dumps(config | STORED.get(form, {})))
            options |= {"quantization": form} if form not in ("", "bf16", *STORED) else {}
        model = given.model if config is None else folder
        llm = LLM(model=model, max_model_len=32768, **options)
        for case in given.cases:
            if case.startswith("lora:"):
                assert config is not None
                with_adapters(root, config, llm, case.removeprefix("lora:"), 32)
            else:
                one_case(llm, case)
        llm.close()


def one_case(llm: LLM, case: str) -> None:
    """A workload, or prefill or decode steps of equal rows."""
    if case.endswith(".jsonl"):
        print("---", case)
        with clocks(case):
            workload(llm, case)
        llm.reset_prefix_cache()
        return
    rows, prompt, shared = (int(n) for n in case.split("x"))
    print(f"--- {rows} rows, prompts of {prompt} after {shared} shared")
    add(llm, rows, prompt, shared, 40)
    prefills = prompt >= 4096
    for _ in range(1 if prefills else 24):
        llm.engine.step()
    profile(llm, 2 if prefills else 8)
    while llm.engine.has_work:
        llm.engine.step()
    llm.reset_prefix_cache()
    if not prefills:
        paces(llm, rows, prompt, shared)
        llm.reset_prefix_cache()


if __name__ == "__main__":
    main()
