"""What launches on one device share. Owns: how they are made there, and scratch memory.

`TritonKernels` makes one; products of packed weights and mixtures of experts are given it, and know nothing of the
backend. What a launch leaves for a later one is not here: it is in the result, or an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tokenmill.kernels.triton.common import Scratch
from tokenmill.kernels.triton.products.ways import Way


@dataclass(slots=True)
class Launch:
    """How kernels are launched on one device.

    count: notes one call of an operation. pdl: kernels may start while the one before ends. hopper: it is one. small:
    little shared memory. steady: a row's bytes do not depend on its company. fuses: operations may be joined.
    narrow_ways: measured ways of packed weights.
    """

    count: Callable[[str], None]
    pdl: bool = False
    hopper: bool = False
    small: bool = False
    steady: bool = False
    fuses: bool = True
    scratch: Scratch = field(default_factory=Scratch)
    narrow_ways: dict[str, Way] = field(default_factory=dict)
