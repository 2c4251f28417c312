"""Triton matmuls with what is fused around them, in the interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch

from tokenmill.compute.forward import NormSpec, Xielu
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.common import Scratch
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kernels.triton.products.gemv import gemv
from tokenmill.kernels.triton.products.thin import thin
from tokenmill.kernels.triton.products.ways_by_shape import wide_way

REFERENCE = ReferenceKernels()


def relative(found, expected):
    assert found.shape == expected.shape and found.dtype == expected.dtype
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def operands(rows, width, inner, *, norm, gated, bias, residual):
    out = width // 2 if gated else width
    spec = NormSpec(torch.rand(inner) + 0.5, 1e-5, offset=0.25) if norm else None
    return (
        torch.randn(rows, inner),
        torch.randn(width, inner) / inner**0.5,
        torch.randn(width) if bias else None,
        spec,
        torch.randn(rows, out) if residual else None,
    )


CASES = [
    # norm, act, bias, residual
    (False, None, False, False),
    (True, "silu_mul", False, False),
    (False, None, True, True),
    (True, "gelu_tanh", True, True),
    (True, "oai_swiglu", True, False),
]


@pytest.mark.parametrize(("norm", "act", "bias", "residual"), CASES)
@pytest.mark.parametrize(("rows", "width", "inner"), [(1, 38, 96), (1, 24, 256), (1, 26, 200)])
def test_gemv(rows, width, inner, norm, act, bias, residual):
    gated = act is not None and (act.endswith("_mul") or act == "oai_swiglu")
    x, w, b, spec, r = operands(rows, width, inner, norm=norm, gated=gated, bias=bias, residual=residual)
    for config in ((1, 64, 1), (4, 256, 2)):
        found = gemv(x, w, b, spec, act, r, pdl=False, config=config)
        assert relative(found, REFERENCE.product(x, w, b, norm=spec, act=act, residual=r)) < 1e-5


@pytest.mark.parametrize(("norm", "act", "bias", "residual"), CASES)
@pytest.mark.parametrize(("rows", "width", "inner"), [(3, 70, 256), (20, 64, 200)])
def test_thin(rows, width, inner, norm, act, bias, residual):
    gated = act is not None and (act.endswith("_mul") or act == "oai_swiglu")
    x, w, b, spec, r = operands(rows, width, inner, norm=norm, gated=gated, bias=bias, residual=residual)
    scratch = Scratch(1 << 18, 64)
    for config in ((32, 64, 1, 1, 4, 0), (32, 32, 2, 1, 4, 0)):
        found = thin(x, w, b, spec, act, r, scratch=scratch, pdl=False, config=config)
        assert relative(found, REFERENCE.product(x, w, b, norm=spec, act=act, residual=r)) < 1e-5
    assert not scratch.counters(x.device).any(), "counters are left as they were found"


@pytest.mark.parametrize(("norm", "act", "bias", "residual"), CASES)
def test_steady_products(norm, act, bias, residual):
    gated = act is not None and (act.endswith("_mul") or act == "oai_swiglu")
    x, w, b, spec, r = operands(20, 70 if gated else 38, 200, norm=norm, gated=gated, bias=bias, residual=residual)
    kernels = TritonKernels(steady=True)
    found = kernels.product(x, w, b, norm=spec, act=act, residual=r)
    assert relative(found, REFERENCE.product(x, w, b, norm=spec, act=act, residual=r)) < 1e-5
    part = kernels.product(x[3:4], w, b, norm=spec, act=act, residual=None if r is None else r[3:4])
    assert torch.allclose(part, found[3:4], atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 5, 70])
def test_every_row_count_has_a_way(rows):
    kernels = TritonKernels()
    x, w, b, spec, r = operands(rows, 48, 64, norm=True, gated=True, bias=True, residual=True)
    found = kernels.product(x, w, b, norm=spec, act="silu_mul", residual=r)
    expected = REFERENCE.product(x, w, b, norm=spec, act="silu_mul", residual=r)
    assert torch.allclose(found, expected, atol=1e-4)


def test_bf16_one_row():
    x, w, b, spec, r = operands(1, 32, 128, norm=True, gated=False, bias=True, residual=True)
    low = [t.bfloat16() for t in (x, w, b, r)]
    spec.weight = spec.weight.bfloat16()
    found = gemv(low[0], low[1], low[2], spec, "silu", low[3], pdl=False, config=(2, 64, 1))
    exact = REFERENCE.product(*(t.float() for t in low[:3]), norm=spec, act="silu", residual=low[3].float())
    assert relative(found, exact.bfloat16()) < 1e-2


def test_layer_norms_are_done_before():
    kernels = TritonKernels()
    x, w = torch.randn(2, 40), torch.randn(30, 40)
    spec = NormSpec(torch.rand(40), 1e-5, "layer", torch.randn(40))
    assert torch.allclose(kernels.product(x, w, norm=spec), REFERENCE.product(x, w, norm=spec), atol=1e-4)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm(kind):
    kernels, x = TritonKernels(), torch.randn(3, 5, 70)
    spec = NormSpec(torch.randn(70), 1e-5, kind, torch.randn(70), offset=1.0)
    assert torch.allclose(kernels.norm(x, spec), REFERENCE.norm(x, spec), atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("within", [None, "rms", "layer"])
def test_a_sum_and_its_norm_are_one_launch(within, scale):
    kernels, x, y = TritonKernels(), torch.randn(5, 70), torch.randn(5, 140)[:, ::2]
    norm = NormSpec(torch.randn(70), 1e-5, "layer", torch.randn(70), offset=1.0)
    inner = None if within is None else NormSpec(torch.randn(70), 1e-6, within, offset=0.5)
    found = kernels.add_norm(x, y, norm, scale, within=inner)
    for one, other in zip(found, REFERENCE.add_norm(x, y, norm, scale, within=inner), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    for one, other in zip(kernels.add_norm(x[2:3], y[2:3], norm, scale, within=inner), found, strict=True):
        assert torch.equal(one, other[2:3]), "whatever rows a recorded step is filled up with"
    assert kernels.counters()["add_norm"] == {"calls": 2, "fallbacks": 0} and "norm" not in kernels.counters()
    factor = torch.tensor([0.3])
    expected = REFERENCE.add_norm(x, y, norm, scale, within=inner, times=factor)
    for one, other in zip(kernels.add_norm(x, y, norm, scale, within=inner, times=factor), expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert torch.allclose(kernels.add(x, y, scale, within=inner, times=factor), expected[0], atol=1e-5)
    if inner is not None:
        assert torch.equal(kernels.add(x, y, scale, within=inner), found[0])
        assert torch.equal(kernels.norm(found[0], norm), found[1]), "the same bytes as by themselves"


@pytest.mark.parametrize(("within", "scale"), [(None, 1.0), (None, 0.5), ("rms", 1.0)])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_of_a_sum_are_added_up_before_they_are_rounded(parts, within, scale):
    kernels, x = TritonKernels(), torch.randn(5, 70).bfloat16()
    y = torch.randn(parts, 5, 70)
    norm = NormSpec(torch.randn(70), 1e-5, "rms", torch.randn(70), offset=1.0)
    inner = None if within is None else NormSpec(torch.randn(70), 1e-6, within, offset=0.5)
    total, normed = kernels.add_norm(x, y, norm, scale, within=inner)
    exact = y.double().sum(0)
    if within is None and scale == 1.0:
        assert torch.equal(total, (x.double() + exact).bfloat16()), "rounded once, as in a product with a residual"
    for found, wanted in zip(
        (total, normed), REFERENCE.add_norm(x, exact.bfloat16(), norm, scale, within=inner), strict=True
    ):
        assert relative(found.double(), wanted.double()) < 1e-2
    assert torch.equal(kernels.add(x, y, scale, within=inner), total)
    assert kernels.counters()["add_norm"] == {"calls": 1, "fallbacks": 0}
    for found, wanted in zip(REFERENCE.add_norm(x, y, norm, scale, within=inner), (total, normed), strict=True):
        assert relative(found.double(), wanted.double()) < 1e-2, "plain torch takes parts, too"


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu2", "silu_mul", "gelu_tanh_mul", "oai_swiglu",
                                 "clipped_silu_mul"])  # fmt: skip
def test_activations(act):
    x = torch.linspace(-30, 30, 400).view(4, 100)
    assert torch.allclose(TritonKernels().activate(x, act), REFERENCE.activate(x, act), atol=1e-4)


def test_greedy_takes_the_lowest_of_equal_ids_and_shows_nan():
    kernels = TritonKernels()
    x = torch.randn(4, 3000)
    x[0, 2999] = x[0, 17] = 9.0
    x[1, 5] = float("nan")
    x[2] = float("-inf")
    ids, marked, largest = kernels.greedy(x)
    assert ids[0] == 17 and ids[3] == x[3].argmax() and 0 <= ids[1] < 3000 and ids[2] == 0
    assert marked.tolist() == [17, ~int(ids[1]), ~0, int(ids[3])]
    assert largest[0] == 9.0 and torch.isnan(largest[1]) and largest[2] == float("-inf")
    assert not kernels.launch.scratch.counters(x.device).any()


@pytest.mark.parametrize("lines", [3, 20, 70, 300])
def test_greedy_whatever_the_number_of_pieces(lines):
    """A line is cut into fewer pieces the more lines there are."""
    logits = torch.randn(lines, (66 if lines < 70 else 18) * 1024 + 5)
    ids, marked, largest = TritonKernels("cpu").greedy(logits)
    assert torch.equal(ids, logits.argmax(-1)) and torch.equal(marked, ids)
    assert torch.equal(largest, logits.amax(-1))


def test_only_products_that_fill_whole_rounds_are_wide():
    """132 programs: 8192 rows make 1024 tiles of 4096 columns (7.8 rounds), 1111 rows 144 (1.1 rounds)."""
    assert wide_way(8192, 4096, 132, fused=True) == ("wide",)
    assert wide_way(8192, 4096, 132, fused=False) == ("blas",)
    assert wide_way(2048, 4096, 132, fused=False) == ("wide",)
    assert wide_way(1111, 4096, 132, fused=True) == ("blas",)
    assert wide_way(512, 4096, 132, fused=True) == ("blas",)


def test_rows_are_gathered_and_moved_on():
    kernels = TritonKernels()
    tokens = torch.randint(0, 99, (5, 700), dtype=torch.int32)
    tables = [torch.randint(0, 99, (5, 40), dtype=torch.int32), torch.randint(0, 99, (5, 44), dtype=torch.int32)]
    computed, row_ids = torch.tensor([0, 15, 16, 600, 37]), torch.tensor([3, 0, 2])
    ours = kernels.gather_rows(row_ids, tokens, computed, tables, 16)
    theirs = REFERENCE.gather_rows(row_ids, tokens, computed, tables, 16)
    for a, b in zip(ours[:3], theirs[:3], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(ours[3], theirs[3], strict=True):
        assert torch.equal(a[1], b[1]) and torch.equal(a[2], b[2])
        for i, count in enumerate(a[1].tolist()):
            assert torch.equal(a[0][i, :count], b[0][i, :count])
    length, ids = computed + 1, torch.tensor([7, 8, 9])
    state = [t.clone() for t in (tokens, length, computed)]
    kernels.advance_(row_ids, ids, tokens, length, computed)
    REFERENCE.advance_(row_ids, ids, *state)
    assert all(torch.equal(a, b) for a, b in zip((tokens, length, computed), state, strict=True))


@pytest.mark.parametrize("counts", [[1], [7], [1, 1, 1], [5, 1, 0, 0, 130], [0, 0, 3, 1], [2] * 33, [1] * 300])
def test_rows_that_compute_several_tokens_are_gathered(counts):
    """Also rows that compute none, as many as no kernel takes, and tables of which only a part is wanted."""
    kernels, rows, make = TritonKernels(), len(counts) + 4, torch.Generator().manual_seed(len(counts))
    tokens = torch.randint(0, 99, (rows, 900), generator=make, dtype=torch.int32)
    computed = torch.randint(0, 500, (rows,), generator=make)
    held = ((computed + 150) // 16).to(torch.int32)
    tables = [
        (torch.randint(0, 1 << 20, (rows, width), generator=make, dtype=torch.int32), held, wanted)
        for width, wanted in ((320, 320), (64, 45))
    ]
    size = sum(counts), max(counts)
    given = (
        torch.randperm(rows, generator=make)[: len(counts)],
        torch.tensor(counts),
        size,
        tokens,
        computed,
        tables,
        16,
    )
    ours, theirs = kernels.gather_spans(*given), REFERENCE.gather_spans(*given)
    for a, b in zip(ours[:5], theirs[:5], strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    for (table, entries, slots), (wanted, known, places) in zip(ours[5], theirs[5], strict=True):
        assert torch.equal(entries, known) and torch.equal(slots, places) and table.shape == wanted.shape
        for i, count in enumerate(known.tolist()):
            assert torch.equal(table[i, :count], wanted[i, :count])
    assert kernels.counters()["gather_spans"]["fallbacks"] == 0


def test_rows_move_on_by_the_samples_that_stand():
    """As the reference has it, which tests/cpu/kernels/test_accept.py holds to its words."""
    kernels, make = TritonKernels(), torch.Generator().manual_seed(6)
    for most in (0, 1, 4, 16, 40):
        tried = torch.randint(0, most + 1, (9,), generator=make)
        tokens = torch.randint(0, 2, (20, 120), generator=make, dtype=torch.int32)
        length = torch.randint(1, 60, (20,), generator=make)
        computed, row_ids = torch.zeros_like(length), torch.randperm(20, generator=make)[:9]
        first = (tried + 1).cumsum(0) - tried - 1
        marked = torch.randint(-2, 2, (int(tried.sum()) + 9,), generator=make)
        if most > 4:  # the first three rows are right all the way
            for row, at, n in zip(row_ids[:3].tolist(), first[:3].tolist(), tried[:3].tolist(), strict=True):
                marked[at : at + n] = tokens[row, int(length[row]) : int(length[row]) + n]
        state = [t.clone() for t in (tokens, length, computed)]
        grants = torch.stack([row_ids, first, tried])
        _, kept = kernels.accept_(grants, most, None, marked, tokens, length, computed)
        _, wanted = REFERENCE.accept_(grants, most, None, marked, *state)
        assert torch.equal(kept, wanted) and torch.equal(length, state[1]) and torch.equal(computed, state[2])
        for row in row_ids.tolist():
            assert torch.equal(tokens[row, : length[row]], state[0][row, : length[row]])
    assert kernels.counters()["accept_"] == {"calls": 5, "fallbacks": 0}


def test_xielu():
    """Near zero, too, where a difference of exponentials would lose its digits."""
    kernels, act = TritonKernels(), Xielu(torch.tensor([0.8, 1.3, 0.5, -1e-6]))
    x = torch.cat((torch.randn(3, 70) * 4, torch.randn(1, 70) * 1e-3, torch.randn(1, 70) * 1e-6, -torch.rand(1, 70)))
    found, expected = kernels.activate(x, act), REFERENCE.activate(x, act)
    assert ((found - expected).abs() <= 1e-5 * x.abs()).all()
    assert kernels.counters()["activate"] == {"calls": 1, "fallbacks": 0}
