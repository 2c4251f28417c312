"""Where a decode step's time goes on a GPU: kernels of a replayed step, by name, and what the host does meanwhile.

python bench/gpu_profile.py MODEL ROWSxPROMPTxSHARED...      (dummy weights; tables on stdout)
python bench/gpu_profile.py MODEL FILE.jsonl...              (how long steps take, by kind; kernels of two mixed ones)

Prompts of 4096 and more profile prefill steps. Clock and power are what the driver says every 20 ms while a case runs
(nvidia-ml-py, if it is there). With dependent launch a kernel's time includes its wait for the one
before it: the sum of all exceeds the time that the device was busy.
"""

from __future__ import annotations

import collections
import itertools
import json
import pathlib
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tokenmill import LLM, SamplingParams


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


def add(llm: LLM, rows: int, prompt: int, shared: int, output: int) -> None:
    ids = random.Random(0)
    head = [ids.randrange(1000, 100000) for _ in range(shared)]
    for _ in range(rows):
        tokens = head + [ids.randrange(1000, 100000) for _ in range(prompt)]
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


def profile(llm: LLM, steps: int) -> None:
    """Kernels and gaps of some steps."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(steps):
            llm.engine.step()
        torch.cuda.synchronize()
    kernels = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in kernels)
    total, calls, before = collections.Counter(), collections.Counter(), collections.Counter()
    covered, busy = spans[0][0], 0.0
    for start, end, name in spans:
        total[name] += end - start
        calls[name] += 1
        busy += max(0.0, end - max(start, covered))
        before[name] += max(0.0, start - covered)
        covered = max(covered, end)
    unit = steps * 1e3
    print(f"profiled {(covered - spans[0][0]) / unit:.3f} ms a step, device busy {busy / unit:.3f}")
    for name, us in total.most_common(14):
        print(f"{us / unit:8.4f} ms {calls[name] / steps:7.1f} calls {us / calls[name]:8.2f} us  {name[:80]}")
    print("gaps before:", [(f"{us / unit:.3f} ms", name[:40]) for name, us in before.most_common(6)])
    host = [(e.key, e.self_cpu_time_total / unit, e.count / steps) for e in found.key_averages()]
    for name, ms, count in sorted(host, key=lambda row: -row[1])[:8]:
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


def main() -> None:
    model, *cases = sys.argv[1:]
    llm = LLM(model=model, load_format="dummy", skip_tokenizer_init=True, max_model_len=32768, max_num_seqs=512)
    for case in cases:
        if case.endswith(".jsonl"):
            print("---", case)
            with clocks(case):
                workload(llm, case)
            llm.reset_prefix_cache()
            continue
        rows, prompt, shared = (int(n) for n in case.split("x"))
        print(f"--- {rows} rows, prompts of {prompt} after {shared} shared")
        add(llm, rows, prompt, shared, 40)
        if prompt >= 4096:
            llm.engine.step()
            profile(llm, 2)
        else:
            for _ in range(24):
                llm.engine.step()
            profile(llm, 8)
        while llm.engine.has_work:
            llm.engine.step()
        llm.reset_prefix_cache()
        if prompt < 4096:
            paces(llm, rows, prompt, shared)
            llm.reset_prefix_cache()
    llm.close()


if __name__ == "__main__":
    main()
