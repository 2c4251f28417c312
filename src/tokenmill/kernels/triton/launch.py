"""What launches on one device share. Owns: how they are made there, scratch memory, and what one tells the next.

`TritonKernels` makes one; products of packed weights and mixtures of experts are given it in place of the kernels.
Must not know: which kernel serves which operation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.common import Scratch
from tokenmill.kernels.triton.products.ways import Way


@dataclass(slots=True)
class Experts:
    """What a mixture of experts learns from the product behind it."""

    following: Tensor | None = None
    """The weight that was multiplied after these experts the last time."""


@dataclass(slots=True)
class Launch:
    """How kernels are launched on one device.

    operations: the backend itself, for what is composed of other operations, and counted. pdl: kernels may start while
    the one before ends. hopper: it is one. small: little shared memory. steady: a row's bytes do not depend on its
    company. fuses: operations may be joined. narrow_ways: measured ways of packed weights.
    """

    operations: ReferenceKernels
    pdl: bool = False
    hopper: bool = False
    small: bool = False
    steady: bool = False
    fuses: bool = True
    scratch: Scratch = field(default_factory=Scratch)
    narrow_ways: dict[str, Way] = field(default_factory=dict)
    ended: Experts | None = None
    """Experts that have just run: they want to know which weight follows."""
    spread: tuple[Tensor, Tensor, torch.dtype] | None = None
    """The row that a packed weight has just made, and the same as a next weight of that type will want it."""
