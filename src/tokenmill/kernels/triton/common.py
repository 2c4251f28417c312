"""What all Triton kernels share. Owns: dependent launches, activations in registers, block sizes, scratch memory.

Dependent launch: a kernel may start while the one before it ends. So each program first issues what does not depend
on that one (weights), then waits, and only then touches activations. Some program of every kernel here waits before it
ends, so that "my predecessor is complete" always means "everything before it is, too".
Must not know: models, plans, layers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""No GPU: kernels run in Triton's interpreter, where dots of bf16 are wrong and dependent launch does not exist."""


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the next kernel start its own preparations."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """From here on the results of earlier kernels are visible."""
    if PDL:
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Ask for 128-byte lines to be brought into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0.0, 1.0, e) / (1.0 + e)


@triton.jit
def softplus(x):
    """Right to its last bits however small it is, as row_stable's."""
    small = tl.exp(-tl.abs(x))
    whole = 1.0 + small
    return tl.maximum(x, 0.0) + (tl.log(whole) + (small - (whole - 1.0)) / whole)


@triton.jit
def tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x >= 0.0, y, -y)


@triton.jit
def most_of(x, least):
    """The larger one; NaN stays, as it does in torch."""
    return tl.maximum(x, least, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def least_of(x, most):
    """The smaller one; NaN stays."""
    return tl.minimum(x, most, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def size_bits(x):
    """|x| of float32 as an integer in the same order, in which NaN is the largest: a maximum of floats would leave it
    out."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def plain_act(x, ACT: tl.constexpr):
    """x in float32; ACT: an Act without its `_mul`, or "none"."""
    if ACT == "silu":
        x = x * sigmoid(x)
    elif ACT == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        x = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACT == "relu":
        x = most_of(x, 0.0)
    elif ACT == "relu2":
        x = most_of(x, 0.0)
        x = x * x
    else:
        tl.static_assert(ACT == "none", "unknown activation")
    return x


@triton.jit
def gated_act(gate, up, ACT: tl.constexpr):
    """ACT: the plain activation of the gate, "clipped_silu" or "oai_swiglu"."""
    if ACT == "oai_swiglu":
        gate = least_of(gate, 7.0)
        up = least_of(most_of(up, -7.0), 7.0)
        y = (up + 1.0) * (gate * sigmoid(1.702 * gate))
    elif ACT == "clipped_silu":
        y = plain_act(least_of(gate, 10.0), "silu") * least_of(most_of(up, -10.0), 10.0)
    else:
        y = plain_act(gate, ACT) * up
    return y


def act_parts(act: str | None) -> tuple[str, bool]:
    """An Act -> (what kernels call it, whether it takes [gate | up])."""
    if act is None:
        return "none", False
    if act == "oai_swiglu":
        return act, True
    return act.removesuffix("_mul"), act.endswith("_mul")


@functools.cache
def _properties(device: int) -> Any:
    """What torch says of a GPU. It asks the driver each time, which takes as long as three launches."""
    return torch.cuda.get_device_properties(device)


def properties() -> Any:
    """What torch says of this thread's GPU."""
    return _properties(torch.cuda.current_device())


def capability() -> tuple[int, int]:
    """This GPU's compute capability."""
    found = properties()
    return found.major, found.minor


def shared_memory() -> int:
    """Bytes of shared memory that one program can have."""
    return int(properties().shared_memory_per_block_optin)


def multiprocessors() -> int:
    """How many programs run truly beside each other."""
    return int(properties().multi_processor_count)


def asynchronous() -> bool:
    """Do products of four warps read shared memory while their program goes on? (Hopper's do.)"""
    return capability()[0] == 9


def driver_version() -> str:
    """Of the driver, as far as torch says it."""
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    return str(ask()) if ask is not None else ""


def copy_engine() -> bool:
    """Can programs have whole tiles copied (Hopper and later)?"""
    return INTERPRETED or capability()[0] >= 9


def has_fp8() -> bool:
    """Has it numbers of 8 bits with a point (Ada, Hopper and later)?"""
    return INTERPRETED or capability() >= (8, 9)


def pow2(n: int) -> int:
    """The smallest power of two that is not less."""
    return triton.next_power_of_2(n)


def _not_while_recording(device: torch.device) -> None:
    """What is kept for all steps must not lie in the memory of one recording, nor be filled by its replay."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("scratch is taken before steps are recorded")


_TURNS, _SIGNS = 4, 4


class Scratch:
    """Memory that kernels of one stream share: partial results, and counters that every kernel leaves at zero.

    Taken whole before steps are recorded, because a recorded step keeps its addresses.
    """

    def __init__(self, floats: int = 1 << 23, counters: int = 1 << 16) -> None:
        self.floats = floats
        self.num_counters = counters
        self._partial: dict[torch.device, Tensor] = {}
        self._counters: dict[torch.device, Tensor] = {}
        self._turn = 0

    def partial(self, device: torch.device) -> Tensor:
        """Float32 scratch, contents undefined."""
        found = self._partial.get(device)
        if found is None:
            _not_while_recording(device)
            found = self._partial[device] = torch.empty(self.floats, dtype=torch.float32, device=device)
        return found

    def counters(self, device: torch.device) -> Tensor:
        """Int32 zeros."""
        found = self._counters.get(device)
        if found is None:
            _not_while_recording(device)
            size = self.num_counters + _TURNS * _SIGNS
            found = self._counters[device] = torch.zeros(size, dtype=torch.int32, device=device)
        return found

    def turn(self, device: torch.device) -> Tensor:
        """Int32 zeros [4] for two launches that run at once, while those before them still have counters of theirs."""
        self._turn = (self._turn + 1) % _TURNS
        first = self.num_counters + self._turn * _SIGNS
        return self.counters(device)[first : first + _SIGNS]


@triton.jit
def product(a, b, acc, WIDE: tl.constexpr):
    """acc + a @ b; WIDE: in float32 throughout."""
    if WIDE:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc
