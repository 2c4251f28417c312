"""Sums over GPUs: microseconds of the own kernel and of NCCL, in recordings of many calls, and how right they are.

python bench/gpu_sums.py [--devices 2]

Each device has a process. A line per size: bytes, own kernel with the residual, the one that norms rows of 4096 as
well, NCCL and the residual's addition behind it, the largest difference from the sum in float32. bench/gpu_parallel.py
runs it as `sums`.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial

ROOT = pathlib.Path(__file__).resolve().parent
SIZES = tuple(1 << n for n in range(13, 28))
WIDTH = 4096
CALLS, REPLAYS = 50, 20


def measure(rank: int, devices: int, meeting: str) -> None:
    """One rank; the first one tells."""
    import torch

    from tokenmill.compute.forward import NormSpec
    from tokenmill.parallel.distributed import TorchGroup, World
    from tokenmill.parallel.pushed import PushGroup
    from tokenmill.parallel.stages import Place

    torch.cuda.set_device(rank)
    group = PushGroup(World(meeting, Place(), rank, devices, f"cuda:{rank}"), pdl=True, exchanges=False)
    if rank == 0:
        print(f"SUMS own kernel: {'yes' if group.buffers is not None else 'NO, NCCL alone'}", flush=True)

    def timed(sum_: Callable[[], torch.Tensor]) -> float:
        for _ in range(3):
            sum_()
        torch.cuda.synchronize()
        group.agree([0])
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(CALLS):
                sum_()
            graph.capture_end()
        graph.replay()
        torch.cuda.synchronize()
        group.agree([0])
        began = time.perf_counter()
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / REPLAYS / CALLS * 1e6

    norm = NormSpec(torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16), 1e-5)
    for size in SIZES:
        count = size // 2
        every = []
        for number in range(devices):
            source = torch.Generator(device="cuda").manual_seed(size + number)
            every.append(torch.randn(1, count, generator=source, device="cuda").bfloat16())
        residual = torch.randn(1, count, generator=torch.Generator(device="cuda").manual_seed(7), device="cuda")
        residual, x = residual.bfloat16(), every[rank]
        wanted = sum(part.float() for part in every) + residual.float()
        worst = 0.0
        for _ in range(7):
            worst = max(worst, (group.all_reduce(x.clone(), residual).float() - wanted).abs().max().item())
        own = normed = float("nan")
        if group.buffers is not None and (devices == 2 or count <= group.slot):
            own = timed(partial(group.all_reduce, x, residual))
            rows = x.view(-1, WIDTH), residual.view(-1, WIDTH)
            both = group.all_reduce_norm(*rows, norm)
            assert both is not None
            worst = max(worst, (both[0].float() - wanted.view(-1, WIDTH)).abs().max().item())
            normed = timed(partial(group.all_reduce_norm, *rows, norm))
        nccl = timed(partial(TorchGroup.all_reduce, group, torch.zeros_like(x), residual))
        if rank == 0:
            figures = f"own {own:7.2f} us, with a norm {normed:7.2f}, NCCL + add {nccl:7.2f}, off by {worst:.3g}"
            print(f"SUMS {size:8d} bytes: {figures}", flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--meeting")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT.parent / "src"))
    if options.rank is not None:
        return measure(options.rank, options.devices, options.meeting)
    from tokenmill.core.config import LINKS, environment_with

    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            "--devices",
            str(options.devices),
            "--meeting",
            f"{folder}/ranks",
            "--rank",
        ]
        ranks = [subprocess.Popen([*command, str(n)], env=environment_with(LINKS)) for n in range(options.devices)]
        try:
            while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
                time.sleep(0.2)
        finally:
            for rank in ranks:
                rank.kill()


if __name__ == "__main__":
    main()
