"""What all launches on one device share. Owns: how launches are made there, and scratch memory.

`TritonKernels` makes one object of it. Products of packed weights and mixtures of experts are given this object and
need not know the backend. What one launch leaves for a later one is not here: it is a result, or an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch

from tokenmill.kernels.triton import quick
from tokenmill.kernels.triton.common import INTERPRETED, Scratch, capability, shared_memory

_ROOMY = 160 << 10
"""Shared memory of a program from which the largest tiles fit (data centre GPUs)."""


@dataclass(slots=True)
class Launch:
    """How kernels are launched on one device.

    count: notes one call of an operation. pdl: kernels may start while the one before ends. hopper: it is one. small:
    little shared memory. steady: a row's bytes do not depend on its company. fuses: operations may be joined.
    few_rows: products of few rows may go through stream.py. narrow_ways: measured ways of packed weights.
    """

    count: Callable[[str], None]
    pdl: bool = False
    hopper: bool = False
    small: bool = False
    steady: bool = False
    fuses: bool = True
    few_rows: bool = True
    scratch: Scratch = field(default_factory=Scratch)
    narrow_ways: dict[str, tuple[str | int, ...]] = field(default_factory=dict)


def launch_here(
    count: Callable[[str], None],
    without: Collection[str],
    *,
    steady: bool,
    narrow_ways: Callable[[str], dict[str, tuple[str | int, ...]]],
) -> Launch:
    """For the current device; without: see TritonKernels; narrow_ways: what was measured on a device of some name."""
    generation = 0 if INTERPRETED else capability()[0]
    if not INTERPRETED:
        quick.install(wanted="quick-launch" not in without)
    return Launch(
        count=count,
        pdl="dependent-launch" not in without and generation >= 9,
        hopper=generation == 9,
        small=not INTERPRETED and shared_memory() < _ROOMY,
        steady=steady,
        fuses="fusion" not in without,
        few_rows="few-rows" not in without,
        narrow_ways={} if INTERPRETED else narrow_ways(torch.cuda.get_device_name()),
    )
