"""Recurrent layers on Triton kernels, in the interpreter, against plain torch."""

from __future__ import annotations

import pytest
import torch
from tests.cpu.kernels.paged_batch import PagedBatch
from tests.thinned import covering

from tokenmill.compute.forward import ConvSpec, DeltaSpec, NormSpec, ScanSpec, SpaceSpec, StateSpec
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kernels.triton.states import chunks

STEPS = [
    [("a", 20)],
    [("b", 1), ("a", 70), ("c", 2)],
    [("a", 1), ("b", 1), ("c", 1)],
    [("c", 17), ("b", 3)],
]
HEADS = [(2, 4, 16, 16), (1, 1, 20, 40)]


def delta(heads: tuple[int, int, int, int], paces: int = 1) -> DeltaSpec:
    """paces: how many a head has."""
    floor = -5.0 if heads[0] == 1 and paces > 1 else 0.0
    return DeltaSpec(*heads, rate=torch.rand(heads[1]) * 4, shift=torch.randn(heads[1] * paces), tiled=heads[0] == 2,
                     most_beta=2.0 if heads[0] == 2 else 1.0, floor=floor)  # fmt: skip


def run(kernels, compute, parts, steps=STEPS, kept_as="float32"):
    """What `compute(ctx, state, count, name)` gives in each step, and the states that it leaves with the rows and
    behind some of the last step's tokens."""
    batch = PagedBatch((), kernels, states=(StateSpec(((kept_as, parts),)),), rows=20)
    found = []
    for grants in steps:
        ctx, count = batch.step(grants), sum(n for _, n in grants)
        if grants is steps[-1] and len(grants) == 2:
            assert ctx.rows is not None
            ctx.rows.left = torch.full((count,), -1)
            ctx.rows.left[-6:-1] = torch.tensor([4, 5, int(ctx.rows.sequences[0]), 7, 6])
            ctx.rows.left[-1] = ctx.rows.sequences[1]
            assert ctx.rows.left[count - 4] == ctx.rows.sequences[0] and grants[1][1] == 3
        found.append(compute(ctx, batch.states[0][0], count))
    kept = batch.states[0][0]
    return found, kept[[*range(len(batch.seqs)), *((4, 5, 6, 7) if len(steps[-1]) == 2 else ())]]


@pytest.fixture(params=[chunks.BASE, chunks.EXACT_BASE])
def base(request, monkeypatch):
    """A chunk's triangle is cut as devices cut it for 16 bits, and for 32: here all is in float32."""
    monkeypatch.setattr(chunks, "EXACT_BASE", request.param)


@pytest.mark.usefixtures("base")
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize(("heads", "steady"), [(HEADS[0], False), (HEADS[1], False), (HEADS[1], True)])
def test_delta_rule(heads, steady, by_key):
    paces, (hk, hv, dk, dv) = heads[2] if by_key else 1, heads
    spec = delta(heads, paces)
    given = [torch.randn(sum(n for _, n in grants), 2 * hk * dk + hv * dv + 5) for grants in STEPS]
    gates = [torch.randn(len(one), hv * (1 + paces)) for one in given]

    def compute(kernels):
        left = iter(zip(given, gates, strict=True))

        def step(ctx, state, count):
            mixed, gate = next(left)
            return kernels.recur_((mixed[:, :-5], gate), spec, state, ctx)

        return step

    kernels = TritonKernels(steady=steady)
    mine, states = run(kernels, compute(kernels), (hv, dk, dv))
    theirs, expected = run(ReferenceKernels(), compute(ReferenceKernels()), (hv, dk, dv))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(states, expected, atol=2e-5, rtol=2e-5)
    assert kernels.counters()["delta_rule"]["fallbacks"] == 0


@pytest.mark.usefixtures("base")
def test_delta_rule_with_keys_that_hardly_differ():
    """What each token writes then depends on all before it, and nothing is forgotten."""
    spec = DeltaSpec(1, 1, 16, 16, rate=torch.full((1,), 1e-3), shift=torch.full((1,), -5.0))
    mixed = torch.randn(1, 48).expand(100, 48) + 0.05 * torch.randn(100, 48)
    gates = torch.tensor([[4.0, 0.0]]).expand(100, 2).contiguous()
    found = []
    for kernels in (TritonKernels(), ReferenceKernels()):
        made = run(kernels, lambda ctx, state, n, k=kernels: k.recur_((mixed, gates), spec, state, ctx), (1, 16, 16),
                   [[("a", 100)]])  # fmt: skip
        found.append(made[0][0])
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("base")
def test_delta_rule_whose_lines_keep_all_or_nothing():
    """Sums of logarithms between 0 and -40,000: no exponent may be above 0."""
    rate, shift = torch.tensor([1e-3, 20.0]), torch.cat((torch.linspace(-5, 5, 16), torch.linspace(-20, 30, 16)))
    spec = DeltaSpec(2, 2, 16, 24, rate=rate, shift=shift)
    mixed, gates = torch.randn(150, 2 * 32 + 48), torch.randn(150, 2 + 32)
    found = []
    for kernels in (TritonKernels(), ReferenceKernels()):
        made = run(kernels, lambda ctx, state, n, k=kernels: k.recur_((mixed, gates), spec, state, ctx), (2, 16, 24),
                   [[("a", 150)]])  # fmt: skip
        found.append(made)
    assert torch.isfinite(found[0][0][0]).all()
    torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=2e-5)


def test_the_same_bytes_however_it_is_cut_if_steady():
    spec, mixed, gates = delta((1, 2, 8, 8)), torch.randn(40, 32), torch.randn(40, 4)

    def cut(counts):
        at = 0

        def step(ctx, state, count):
            nonlocal at
            at += count
            given = mixed[at - count : at], gates[at - count : at]
            return TritonKernels(steady=True).recur_(given, spec, state, ctx)

        return torch.cat(run(None, step, (2, 8, 8), [[("a", n)] for n in counts])[0])

    assert torch.equal(cut([40]), cut([1, 20, 17, 2]))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("taps", "silu", "bias"), [(4, True, False), (3, False, True), (2, True, True)])
def test_short_conv(taps, silu, bias, parts):
    """With three parts, two are gates."""
    weight, more = torch.randn(taps, 37), torch.randn(37) if bias else None
    given = [torch.randn(sum(n for _, n in grants), 37 * parts + 3) for grants in STEPS]

    def compute(kernels):
        left, spec = iter(given), ConvSpec(weight, more, silu)
        return lambda ctx, state, count: kernels.recur_(next(left)[:, :-3].chunk(parts, 1), spec, state, ctx)

    kernels = TritonKernels()
    mine, states = run(kernels, compute(kernels), (taps - 1, 37))
    theirs, expected = run(ReferenceKernels(), compute(ReferenceKernels()), (taps - 1, 37))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert torch.equal(states, expected)
    assert kernels.counters()["short_conv"]["fallbacks"] == 0


@pytest.mark.parametrize(("width", "size", "weights"), [(48, 12, 12), (48, 24, 48), (40, 40, 40)])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("act", ["silu", "sigmoid", "softplus"])
def test_gated_norm(width, size, weights, first, act):
    spec = NormSpec(torch.randn(weights), 1e-5)
    x, gate = torch.randn(7, width + 3)[:, :width], torch.randn(7, width)
    mine = TritonKernels().gated_norm(x, gate, spec, size, first=first, act=act)
    torch.testing.assert_close(mine, ReferenceKernels().gated_norm(x, gate, spec, size, first=first, act=act))


@pytest.mark.parametrize("act", ["silu", "sigmoid", "softplus", "relu2", "gelu_tanh"])
@pytest.mark.parametrize("numbers", [36, 9, 1])
def test_gate(act, numbers):
    kernels, x, gate = TritonKernels(), torch.randn(5, 40)[:, :36], torch.randn(5, 40)[:, :numbers]
    torch.testing.assert_close(kernels.activate(x, act, gate), ReferenceKernels().activate(x, act, gate))
    assert kernels.counters() == {"activate": {"calls": 1, "fallbacks": 0}}


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize(("shape", "fast"), [((4, 12, 2, 8), False), ((2, 40, 1, 20), True)])
def test_state_space(shape, fast, steady):
    """Token by token, and in chunks; fast: a state is all but gone after a few tokens."""
    heads, dim, groups, keys = shape
    rate, shift, skip = torch.rand(3, heads)
    spec = SpaceSpec(
        heads,
        dim,
        groups,
        keys,
        rate * (80 if fast else 1),
        shift,
        skip,
        0.2,
        0.9,
        *((1.0, 1.0) if fast else (1.3, 0.7)),
    )
    given = [torch.randn(sum(n for _, n in grants), heads * dim + 2 * groups * keys + heads) for grants in STEPS]

    def compute(kernels):
        left = iter(given)

        def step(ctx, state, count):
            mixed, rates = next(left).split((heads * dim + 2 * groups * keys, heads), dim=-1)
            return kernels.recur_((mixed, rates), spec, state, ctx)

        return step

    kernels = TritonKernels(steady=steady)
    mine, states = run(kernels, compute(kernels), (heads, keys, dim))
    theirs, expected = run(ReferenceKernels(), compute(ReferenceKernels()), (heads, keys, dim))
    # Chunks take differences of summed paces, and of large sums float32 keeps few digits behind the point.
    near = 5e-4 if fast and not steady else 5e-5
    torch.testing.assert_close(torch.cat(mine), torch.cat(theirs), atol=near, rtol=near)
    torch.testing.assert_close(states, expected, atol=near, rtol=near)
    assert kernels.counters()["state_space"]["fallbacks"] == 0


@pytest.mark.parametrize("normed", [False, True])
def test_selective_scan(normed):
    channels, keys = 70, 6
    norms = (NormSpec(torch.randn(keys), 1e-5), NormSpec(torch.randn(keys), 1e-2)) if normed else None
    fixed = torch.rand(keys, channels) * 3, torch.randn(channels)
    given = [torch.randn(sum(n for _, n in grants), 2 * channels + 2 * keys) for grants in STEPS]

    def compute(kernels):
        left = iter(given)

        def step(ctx, state, count):
            x, rates, mixed = next(left).split((channels, channels, 2 * keys), dim=-1)
            return kernels.recur_((x, rates, mixed), ScanSpec(*fixed, norms), state, ctx)

        return step

    kernels = TritonKernels()
    mine, states = run(kernels, compute(kernels), (keys, channels))
    theirs, expected = run(ReferenceKernels(), compute(ReferenceKernels()), (keys, channels))
    torch.testing.assert_close(torch.cat(mine), torch.cat(theirs), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)
    assert kernels.counters()["selective_scan"]["fallbacks"] == 0


KEPT_AS = ["float32", "bfloat16", "float16"]
CROWD = [[(f"s{n}", 1 + n % 2) for n in range(18)], *[[(f"s{n}", 1) for n in range(18)]] * 2]
"""So many sequences of one token that programs take more columns."""
KINDS = {
    "delta": (delta((1, 2, 16, 128)), (32 + 256, 4), (2, 16, 128)),
    "space": (SpaceSpec(2, 64, 1, 8, *torch.rand(3, 2)), (128 + 16, 2), (2, 8, 64)),
    "scan": (ScanSpec(torch.rand(6, 70), torch.randn(70)), (70, 70, 12), (6, 70)),
}
"""Spec, widths of what is given, and the shape of a state."""


CASES = [*(("cut", kind, kept_as) for kind in KINDS for kept_as in KEPT_AS),
         *(("crowd", *each) for each in covering(KINDS, KEPT_AS))]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "kept_as"), CASES)
def test_states_that_are_kept_in_16_bits(name, kind, kept_as):
    steps = CROWD if name == "crowd" else STEPS
    spec, widths, parts = KINDS[kind]
    given = [torch.randn(sum(n for _, n in grants), sum(widths)).split(widths, dim=-1) for grants in steps]

    def compute(kernels):
        left = iter(given)
        return lambda ctx, state, count: kernels.recur_(next(left), spec, state, ctx)

    kernels = TritonKernels()
    mine, states = run(kernels, compute(kernels), parts, steps, kept_as)
    theirs, expected = run(ReferenceKernels(), compute(ReferenceKernels()), parts, steps, kept_as)
    exact, _ = run(ReferenceKernels(), compute(ReferenceKernels()), parts, steps)
    near = {"float32": 5e-5, "bfloat16": 1.0 / 128, "float16": 1.0 / 1024}[kept_as]  # a last bit here and there
    assert states.dtype == getattr(torch, kept_as)
    torch.testing.assert_close(states.float(), expected.float(), atol=near, rtol=near)
    for one, other, whole in zip(mine, theirs, exact, strict=True):
        torch.testing.assert_close(one, other, atol=8 * near, rtol=2 * near)  # last bits of a state's lines add up
        assert float((other - whole).norm()) <= 8 * near * float(whole.norm())
    assert not any(count["fallbacks"] for count in kernels.counters().values())


@pytest.mark.parametrize("kernels", [TritonKernels(), ReferenceKernels()], ids=("triton", "reference"))
def test_paces_that_are_hardly_any(kernels):
    """What a token leaves where its pace is too small to be added to 1, as in a gate that is shut."""
    rates = torch.linspace(-80, 2, 33)[None]
    pace = torch.log1p(torch.exp(rates.double()))
    value, ones = (1 / pace).float(), torch.ones(1, 2)
    spec = ScanSpec(torch.ones(1, 33), torch.zeros(33))
    made, states = run(kernels, lambda ctx, state, n: kernels.recur_((value, rates, ones), spec, state, ctx), (1, 33),
                       [[("a", 1)]])  # fmt: skip
    torch.testing.assert_close(made[0], torch.ones(1, 33), atol=0, rtol=1e-5)
    torch.testing.assert_close(states[0, 0], torch.ones(33), atol=0, rtol=1e-5)
