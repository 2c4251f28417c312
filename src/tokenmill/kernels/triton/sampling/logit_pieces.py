"""A line of logits in pieces. Owns: what the programs that share a line tell each other, and which tokens masks allow.

The vocabulary is cut into pieces; the program that finishes a line last looks at what all of them found, in order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_best(values, ids):
    """The largest value, and the lowest of the ids that have it."""
    top = tl.max(values)
    return top, tl.min(tl.where(values == top, ids, 2147483647))


@triton.jit
def put(part_ptr, place, value, number):
    """What one piece found."""
    tl.store(part_ptr + place * 2, value, cache_modifier=".cg")
    tl.store(part_ptr + place * 2 + 1, number.to(tl.float32, bitcast=True), cache_modifier=".cg")


@triton.jit
def get(part_ptr, places):
    """What all pieces of a line found."""
    values = tl.load(part_ptr + places * 2, cache_modifier=".cg")
    return values, tl.load(part_ptr + places * 2 + 1, cache_modifier=".cg").to(tl.int32, bitcast=True)


@triton.jit
def is_last(count_ptr, line, PIECES: tl.constexpr):
    """Have the other pieces of this line stored what they found? The counter is ready for the next launch then."""
    tl.debug_barrier()
    last = tl.atomic_add(count_ptr + line, 1, sem="acq_rel") == PIECES - 1
    if last:
        tl.store(count_ptr + line, 0)
    return last


@triton.jit
def any_of(flags):
    return tl.max(flags.to(tl.int32)) > 0


@triton.jit
def allowed(words_ptr, masks_ptr, line, i, V, mask_words):
    """Which of the tokens i this line may say."""
    number = tl.load(words_ptr + line) & 0x3FFFFFFF
    mask = masks_ptr + (number - 1).to(tl.int64) * mask_words
    bits = tl.load(mask + (i >> 5), mask=(i < V) & (number > 0), other=-1)
    return (i < V) & (((bits >> (i & 31)) & 1) > 0)
