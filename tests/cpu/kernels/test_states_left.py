"""Where states are left behind several tokens of a row, each is the one that these tokens alone would have left."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.cpu.kernels.paged_batch import PagedBatch

from tokenmill.compute.forward import ConvSpec, DeltaSpec, ScanSpec, SpaceSpec, StateSpec
from tokenmill.kernels.reference import ReferenceKernels


def backends():
    made = [ReferenceKernels()]
    try:
        from tokenmill.kernels.cpu.kernels import CpuKernels

        return [*made, CpuKernels()]
    except ImportError:
        return made


def operations():
    """Name -> (shape of a state, what a kernel makes of tokens [T, 64])."""
    torch.manual_seed(0)
    taps, bias, gates = torch.randn(4, 24), torch.randn(24), torch.randn(64, 8)
    delta = DeltaSpec(2, 4, 8, 4, rate=torch.rand(4), shift=torch.randn(4))
    keyed = replace(delta, shift=torch.randn(32))
    space = SpaceSpec(4, 6, 2, 5, *torch.rand(3, 4))
    fixed = ScanSpec(torch.rand(5, 20), torch.rand(20))
    return {
        "conv": ((3, 24), lambda k, x, s, c: k.recur_((x[:, :24],), ConvSpec(taps, bias), s, c)),
        "delta": ((4, 8, 4), lambda k, x, s, c: k.recur_((x[:, :48], x @ gates), delta, s, c)),
        "keyed": ((4, 8, 4), lambda k, x, s, c: k.recur_((x[:, :48], x[:, 28:]), keyed, s, c)),
        "space": ((4, 5, 6), lambda k, x, s, c: k.recur_((x[:, :44], x[:, 50:54]), space, s, c)),
        "scan": ((5, 20), lambda k, x, s, c: k.recur_((x[:, :20], x[:, 20:40], x[:, 40:50]), fixed, s, c)),
    }


@pytest.mark.parametrize("kernels", backends(), ids=lambda kernels: type(kernels).__name__)
@pytest.mark.parametrize("name", ["conv", "delta", "keyed", "space", "scan"])
def test_a_left_state_is_that_of_the_tokens_before_it(name, kernels):
    shape, compute = operations()[name]
    given = torch.randn(12, 64)

    def after(count):
        """What 5 and then `count` more tokens of one row give, and leave with it."""
        batch = PagedBatch((), kernels, states=(StateSpec((("float32", shape),)),))
        state = batch.states[0][0]
        compute(kernels, given[:5], state, batch.step([("a", 5)]))
        out = compute(kernels, given[5 : 5 + count], state, batch.step([("a", count)]))
        return out, state[0].clone()

    batch = PagedBatch((), kernels, states=(StateSpec((("float32", shape),)),))
    state = batch.states[0][0]
    compute(kernels, torch.cat((given[:5], given[7:8])), state, batch.step([("a", 5), ("b", 1)]))
    other = state[1].clone()
    ctx = batch.step([("b", 2), ("a", 4)])
    assert ctx.rows is not None
    ctx.rows.left = torch.tensor([-1, 1, 5, -1, 7, 0])
    ctx.rows.borders, ctx.query_start = ctx.query_start, torch.arange(7, dtype=torch.int32)  # as attention may see it
    out = compute(kernels, torch.cat((given[9:11], given[5:9])), state, ctx)
    for count, place in ((1, 5), (3, 7), (4, 0)):
        wanted, left = after(count)
        assert torch.equal(state[place], left) and torch.equal(out[2 : 2 + count], wanted)
    assert not torch.equal(state[1], other) and state[[3, 4, 6, 8]].isnan().all()
