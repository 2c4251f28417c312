"""Native norms, activations, sums, embeddings and choices against float64 and against their own bytes elsewhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.compute.forward import NormSpec
from tokenmill.kernels.reference import ReferenceKernels

REFERENCE = ReferenceKernels()
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 9e-3}
ACTS = ["silu", "gelu", "gelu_tanh", "relu", "relu2", "silu_mul", "gelu_mul", "gelu_tanh_mul", "oai_swiglu",
        "clipped_silu_mul"]  # fmt: skip
FEW = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), wanted.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(
    rows=st.integers(1, 20),
    width=st.integers(1, 300),
    layer=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 9),
)
def test_norm(kernels, dtype, rows, width, layer, biased, seed):
    x = random(rows, width, dtype=dtype, seed=seed) * 3
    bias = random(width, dtype=dtype, seed=2) if biased else None
    spec = NormSpec(random(width, dtype=dtype, seed=1), 1e-5, "layer" if layer else "rms", bias, offset=0.5)
    y = x.double() - (x.double().mean(-1, keepdim=True) if layer else 0)
    y = y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-5) * (spec.weight.double() + 0.5)
    got = kernels.norm(x, spec)
    close(got, y + (bias.double() if biased else 0))
    assert torch.equal(kernels.norm(x[-1:], spec), got[-1:])


def test_norm_of_other_shapes_and_types(kernels):
    spec = NormSpec(random(48, seed=1), 1e-6)
    x = random(3, 5, 48, dtype=torch.bfloat16)
    close(kernels.norm(x, spec), REFERENCE.norm(x, spec))
    wide = random(7, 100)
    close(kernels.norm(wide[:, 10:58], spec), REFERENCE.norm(wide[:, 10:58], spec))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ACTS)
def test_activation(kernels, dtype, act):
    x = torch.cat([random(9, 134), torch.linspace(-100, 100, 134)[None], torch.zeros(1, 134)]).to(dtype) * 3
    got = kernels.activate(x, act)
    close(got, REFERENCE.activate(x.double().float(), act))
    assert torch.equal(torch.cat([kernels.activate(row[None], act) for row in x]), got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ["oai_swiglu", "clipped_silu_mul"])
def test_clipped_numbers(kernels, dtype, act):
    """On both sides of each limit, endless ones, and NaN, which no limit hides."""
    edges = torch.tensor([-torch.inf, -30.0, -10.0, -7.0, -6.9, 0.0, 6.9, 7.0, 9.9, 10.0, 10.1, 30.0, torch.inf])
    gate, up = (side.flatten() for side in torch.meshgrid(edges[1:], edges, indexing="ij"))
    x = torch.cat([gate, up])[None].to(dtype)
    got = kernels.activate(x, act)
    close(got, REFERENCE.activate(x, act))
    assert got.isfinite().all() and kernels.counters()["activate"]["fallbacks"] == 0
    half, columns = x.shape[1] // 2, torch.tensor([3, 40])
    for side in (0, half):
        bad = x.clone()
        bad[0, side + columns] = torch.nan
        assert torch.equal(kernels.activate(bad, act).isnan()[0].nonzero().flatten(), columns)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 77), (50, 1025)])
@pytest.mark.parametrize("scale", [1.0, -0.37])
def test_add(kernels, dtype, shape, scale):
    x, y = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    close(kernels.add(x, y, scale), x.double() + scale * y.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("streams", "width"), [(1, 5), (4, 64), (3, 77), (4, 2500)])
def test_streams_are_joined_and_added_to(kernels, dtype, streams, width):
    x, y = random(9, streams * width, dtype=dtype), random(9, width, dtype=dtype, seed=1)
    factors = random(9, 2 * streams, seed=2)[:, streams:]
    added, wide = kernels.add(x, y, factors), x.double().view(9, streams, width)
    close(added, (wide + y.double()[:, None] * factors.double()[:, :, None]).flatten(1))
    assert torch.equal(kernels.add(x[4:5], y[4:5], factors[4:5]), added[4:5])
    for into in {dtype, torch.float32}:
        joined = kernels.add_experts(x.view(-1, width), factors, into)
        close(joined, (wide * factors.double()[:, :, None]).sum(1).to(into))
        assert torch.equal(kernels.add_experts(x[4:5].view(-1, width), factors[4:5], into), joined[4:5])
    assert kernels.counters()["add"] == {"calls": 2, "fallbacks": 0}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_embed(kernels, dtype, scale):
    table, ids = random(31, 70, dtype=dtype), torch.tensor([30, 0, 5, 5])
    assert torch.equal(kernels.embed(table, ids, scale), REFERENCE.embed(table, ids, scale))
    with pytest.raises(ValueError, match="out of range"):
        kernels.embed(table, torch.tensor([31]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 1000, 8192, 8193, 50000])
def test_greedy_takes_the_first_of_equals(kernels, width, dtype):
    logits = random(5, width, dtype=dtype).round()
    ids, marked, largest = kernels.greedy(logits)
    assert ids.tolist() == [row.tolist().index(max(row.tolist())) for row in logits]
    assert torch.equal(ids, marked) and torch.equal(largest, logits.amax(-1).float())
    ids, marked, _ = kernels.greedy(torch.full((2, width), float("-inf")))
    assert ids.tolist() == [0, 0] and marked.tolist() == [~0, ~0]


@FEW
@given(st.data())
def test_greedy_marks_what_is_not_finite(kernels, data):
    """NaN counts as the largest, wherever it is; a line's verdict does not depend on the others."""
    width = data.draw(st.sampled_from([3, 40, 9000, 20000]))
    logits = random(4, width, seed=data.draw(st.integers(0, 99)))
    odd = st.sampled_from([float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 50.0])
    for row in logits:
        for place in data.draw(st.lists(st.integers(0, width - 1), max_size=4)):
            row[place] = data.draw(odd)
    found, wanted = kernels.greedy(logits), REFERENCE.greedy(logits)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.nan_to_num(nan=7e9), b.nan_to_num(nan=7e9))
    part = kernels.greedy(logits[1:, : max(2, width // 2)])
    assert all(torch.equal(a[:1].nan_to_num(), b.nan_to_num()) for a, b in zip(
        part, kernels.greedy(logits[1:2, : max(2, width // 2)]), strict=True
    ))  # fmt: skip


def test_the_ends_of_a_step(kernels):
    """Rows gathered and moved on, as the reference does it; what lies outside is refused before anything is written."""
    make = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 1000, (6, 50), generator=make, dtype=torch.int32)
    tables = [torch.randint(0, 99, (6, 13), generator=make, dtype=torch.int32) for _ in range(2)]
    computed, row_ids = torch.tensor([0, 7, 48, 3, 4, 16]), torch.tensor([5, 0, 2])
    ids, positions, kv_len, groups = kernels.gather_rows(row_ids, tokens, computed, tables, 4)
    wanted = REFERENCE.gather_rows(row_ids, tokens, computed, tables, 4)
    assert all(torch.equal(a, b) for a, b in zip((ids, positions, kv_len), wanted[:3], strict=True))
    for (table, entries, slots), (full, counted, places) in zip(groups, wanted[3], strict=True):
        assert torch.equal(entries, counted) and torch.equal(slots, places)
        for row, count in enumerate(entries.tolist()):
            assert torch.equal(table[row, :count], full[row, :count])
    later = [
        backend.gather_rows(torch.tensor([5, 5, 1]), tokens, computed, tables, 4, torch.tensor([0, 2, 40]))
        for backend in (kernels, REFERENCE)
    ]
    assert all(torch.equal(a, b) for a, b in zip(later[0][:3], later[1][:3], strict=True))
    assert later[0][1].tolist() == [16, 18, 47]
    for offset, message in ((43, "beyond"), (-8, "before")):
        with pytest.raises(ValueError, match=message):
            kernels.gather_rows(torch.tensor([1]), tokens, computed, tables, 4, torch.tensor([offset]))
    length = computed + 1
    states = [(tokens.clone(), length.clone(), computed.clone()) for _ in range(2)]
    for backend, state in zip((kernels, REFERENCE), states, strict=True):
        backend.advance_(row_ids, torch.tensor([11, 12, 13]), *state)
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    for row, message in ((6, "no such row"), (-1, "no such row"), (1, "beyond")):
        computed[1] = 50
        with pytest.raises(ValueError, match=message):
            kernels.gather_rows(torch.tensor([0, row]), tokens, computed, tables, 4)
    computed[1] = 49
    with pytest.raises(ValueError, match="beyond the table"):
        kernels.gather_rows(torch.tensor([1]), tokens, computed, [tables[0][:, :12].contiguous()], 4)
    length[1], before = 50, tokens.clone()
    with pytest.raises(ValueError, match="full"):
        kernels.advance_(torch.tensor([0, 1]), torch.tensor([1, 2]), tokens, length, computed)
    assert torch.equal(tokens, before) and computed[0] == 0


def test_counters_tell_calls_from_fallbacks(kernels):
    kernels.add(random(2, 3), random(2, 3))
    kernels.add(random(2, 3), random(1, 3))
    kernels.activate(random(2, 4).half(), "silu")
    assert kernels.counters()["add"]["fallbacks"] == 1
    assert kernels.counters()["activate"]["fallbacks"] == 1
