"""One of two ranks that send each other long sums: python gpu_exchange_rank.py RANK MEETING"""

from __future__ import annotations

import os
import random
import sys

import torch
from torch import Tensor

from tokenmill.compute.forward import NormSpec
from tokenmill.compute.model import Addition
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.parallel.distributed import World
from tokenmill.parallel.pushed import PushGroup
from tokenmill.parallel.stages import Place

PIECES = {(4096, 4096): 1, (8190, 4096): 2, (5001, 8192): 3, (12289, 4096): 4, (8192, 8192): 4}
"""Rows and columns, and in how many pieces they are sent."""


def made(seed: int, rows: int, width: int) -> Tensor:
    """The same numbers on both devices."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


def run(rank: int, meeting: str) -> None:
    """Sums in pieces, and sums of what these give, while now one rank is late and now the other."""
    torch.cuda.set_device(rank)
    group = PushGroup(World(meeting, Place(), rank, 2, f"cuda:{rank}"), pdl=True, exchanges=True)
    assert group.exchanges is not None
    both, own = random.Random(1), random.Random(2 + rank)
    for turn in range(24):
        rows, width = both.choice(list(PIECES))
        parts, residual = [made(3 * turn + n, rows, width) for n in (0, 1)], made(3 * turn + 2, rows, width)
        count = group.pieces(residual)
        assert count == PIECES[rows, width], (rows, width, count)
        norm = both.choice([None, NormSpec(torch.ones(width, device="cuda").bfloat16(), 1e-5)])
        wanted = (parts[0].float() + parts[1].float() + residual.float()).bfloat16()
        again = (2 * wanted.float() + wanted.float()).bfloat16()  # both ranks send what they have got
        pieces = zip(parts[rank].chunk(count), residual.chunk(count), strict=True)
        sent = [(rest, group.exchange(part.clone())) for part, rest in pieces]
        torch.cuda._sleep(own.randrange(1, 4_000_000))
        got, then = [], []
        for rest, one in sent:
            out, normed = torch.empty_like(rest), None if norm is None else torch.empty_like(rest)
            one.end(rest, Addition(norm), out, normed)
            got.append((out, normed))
            then.append((out, group.exchange(out.clone())))
        finished = torch.empty_like(residual)
        for place, (out, one) in zip(finished.chunk(count), then, strict=True):
            one.end(out, Addition(), place, None)
        assert torch.equal(torch.cat([out for out, _ in got]), wanted), turn
        assert torch.equal(finished, again), turn
        if norm is not None:
            normed = torch.cat([each for _, each in got if each is not None])
            assert (normed.float() - ReferenceKernels().norm(wanted, norm).float()).abs().max() <= 0.04
    torch.cuda.synchronize()
    print("EXCHANGED", flush=True)
    os._exit(0)


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2])
