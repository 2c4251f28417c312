"""Programs of one launch that wait for each other. Owns: arriving and meeting.

All of them must be on the chip at once: a launch has no more than fit, and starts no earlier than the whole launch
before it. The counter only grows, and may overflow: a power of two of programs divides what it can hold. Not for the
interpreter, which runs one program after the other: there each part between meetings is a launch of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def arrive(count_ptr, PROGRAMS: tl.constexpr):
    """What this program has stored may be read after the meeting -> the count at which all have come."""
    tl.debug_barrier()
    return (tl.atomic_add(count_ptr, 1, sem="acq_rel") | (PROGRAMS - 1)) + 1


@triton.jit
def meet(count_ptr, goal):
    """Wait for all. What they stored must be read past the first cache (".cg")."""
    # One thread looks: thousands would keep those from arriving who are waited for.
    while tl.atomic_add(count_ptr, 0, sem="acquire") - goal < 0:
        pass
