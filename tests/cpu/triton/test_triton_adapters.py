"""Adapters' kernels in the interpreter against plain torch: parts, ranks, gains, activations, blocks without any."""

from __future__ import annotations

import pytest
import torch
from tests.cpu.triton.bounds import Bounds
from tests.cpu.triton.triton_adapters_helpers import make_site
from torch import Tensor

from tokenmill.compute.adapters import AdapterSite, Delta
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.common import Scratch
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kernels.triton.products.adapted import adapted

PLAIN = ReferenceKernels()


def both(
    site: AdapterSite, tokens: int, given: list[int], act: str | None, *, residual: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What plain torch makes, what the kernels make, and which rows have adapters."""
    made = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, site.inputs, generator=made)
    weight = torch.randn(site.columns, site.inputs, generator=made)
    slots = torch.tensor(given, dtype=torch.int32)[torch.arange(tokens) % len(given)]
    width = site.columns // 2 if act == "silu_mul" else site.columns
    beside = torch.randn(tokens, width, generator=made) if residual else None
    found = []
    for kernels in (PLAIN, TritonKernels()):
        delta = Delta(site, x, kernels.adapt(x, site, slots), slots)
        found.append(kernels.product(x, weight, act=act, residual=beside, delta=delta))  # type: ignore[arg-type]
    return found[0], found[1], slots > 0


@pytest.mark.parametrize(
    ("widths", "ranks", "act", "residual", "gains"),
    [
        ([96, 32, 32], [4, 16, 1], None, False, False),
        ([64], [8, 3], None, True, False),
        ([48, 48], [5, 16], "silu_mul", False, True),
        ([96], [16], "silu_mul", True, False),
        ([32, 80], [2, 33], "gelu", True, True),
    ],
    ids=["q, k, v", "one part", "gate and up", "a fused gate_up", "a rank above a tile"],
)
def test_kernels_agree_with_plain_torch(
    widths: list[int], ranks: list[int], act: str | None, residual: bool, gains: bool
) -> None:
    site = make_site(widths, 80, ranks, gains=gains)
    given = [0, *range(1, len(ranks) + 1), 0]
    plain, ours, _ = both(site, 19, given, act, residual=residual)
    scale = plain.abs().max()
    assert float((plain - ours).abs().max() / scale) < 1e-5


def test_a_product_that_an_adapter_leaves_alone_stays() -> None:
    site = make_site([32, 32], 64, [4, 4], gains=False)
    site.host_ranks[1] = 0
    assert site.ranks is not None
    site.ranks[1] = 0
    plain, ours, _ = both(site, 5, [1, 0], None, residual=False)
    assert torch.allclose(plain, ours, rtol=1e-5, atol=1e-4)


def test_long_sums_and_many_tokens() -> None:
    site = make_site([64], 700, [4, 7], gains=False)
    plain, ours, _ = both(site, 70, [2, 1, 0], None, residual=False)
    assert float((plain - ours).abs().max() / plain.abs().max()) < 1e-5


@pytest.mark.parametrize("gains", [False, True], ids=["plain", "with gains"])
@pytest.mark.parametrize(
    ("widths", "act"), [([64, 32, 32], None), ([64], "gelu"), ([32, 32], "silu_mul")], ids=["q, k, v", "one", "gated"]
)
def test_more_adapters_than_one_tile_takes(widths: list[int], act: str | None, gains: bool) -> None:
    """Nine adapters of different ranks in 33 rows, and sums that several programs share."""
    site = make_site(widths, 600, [4, 16, 1, 9, 16, 2, 16, 3, 7], gains=gains)
    plain, ours, _ = both(site, 33, [3, 0, 1, 9, 2, 8, 4, 7, 5, 6, 6], act, residual=True)
    assert float((plain - ours).abs().max() / plain.abs().max()) < 1e-5


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_few_tokens_have_one_launch_behind_their_product_and_leave_counters_at_zero(tokens: int) -> None:
    site, kernels = make_site([64], 600, [4, 16, 8], gains=False), TritonKernels()
    x, weight = torch.randn(tokens, 600), torch.randn(64, 600)
    slots = torch.arange(tokens, dtype=torch.int32) % 4
    assert kernels.adapt(x, site, slots) is None
    delta = Delta(site, x, None, slots)
    kernels.product(x, weight, delta=delta)
    counted = {op: n["calls"] for op, n in kernels.counters().items() if n["calls"]}
    assert counted == {"adapt": 1, "linear": 1, "add_delta": 1}
    assert not kernels.launch.scratch.counters(x.device).any()
    found = kernels.add_delta(x @ weight.t(), delta)
    expected = PLAIN.add_delta(x @ weight.t(), Delta(site, x, PLAIN.adapt(x, site, slots), slots))
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
    assert not kernels.launch.scratch.counters(x.device).any()


@pytest.mark.parametrize("gains", [False, True], ids=["plain", "with gains"])
@pytest.mark.parametrize(("widths", "act"), [([64, 32, 19], None), ([67], "relu2"), ([45, 45], "silu_mul")])
def test_odd_sizes_stay_within_their_tensors(widths: list[int], act: str | None, gains: bool) -> None:
    """Lanes, ranks, rows, columns and sums that fill no tile; memory that nobody wrote is NaN."""
    site = make_site(widths, 603, [70, 3, 0, 21], gains=gains)
    with Bounds().watching() as bounds:
        plain, ours, _ = both(site, 21, [3, 0, 1, 2, 4, 4, 0], act, residual=True)
    assert float((plain - ours).abs().max() / plain.abs().max()) < 1e-5
    assert bounds.launches.keys() & {"_adapted_kernel"}


@pytest.mark.parametrize("tokens", [1, 21, 64])
@pytest.mark.parametrize(("widths", "act", "gains"), [
    ([64, 32, 19], None, False), ([67], "relu2", True), ([45, 45], "silu_mul", False), ([32, 32], "silu_mul", True),
])  # fmt: skip
def test_in_the_shade_of_a_product_that_lies_in_parts(
    widths: list[int], act: str | None, gains: bool, tokens: int
) -> None:
    """Such a product has room for one part more: either that becomes what adapters add, or the sum is ended."""
    site = make_site(widths, 603, [70, 3, 0, 21], gains=gains)
    x, parts = torch.randn(tokens, 603), torch.randn(4, tokens, site.columns)
    slots = torch.tensor([3, 0, 1, 2, 4, 4, 0], dtype=torch.int32)[torch.arange(tokens) % 7]
    whole = Delta(site, x, PLAIN.adapt(x, site, slots), slots)
    delta = Delta(site, x, None, slots)
    y, scratch = parts[:3].sum(0), Scratch()
    beside = torch.randn(tokens, site.columns // (2 if act == "silu_mul" else 1))

    def there() -> torch.Tensor:
        turn = scratch.turn(x.device)
        turn[0] = 1  # as the product does it
        return turn

    with Bounds().watching():
        found = adapted(parts, delta, act, beside, scratch, there(), pdl=False, shade=True)
        if not gains:
            opened = adapted(parts.clone(), delta, None, None, scratch, there(), pdl=False, shade=True, open_=True)
    expected = PLAIN.add_delta(y, whole)
    ended = (expected if act is None else PLAIN.activate(expected, act)) + beside  # type: ignore[arg-type]
    assert float((found - ended).abs().max() / ended.abs().max()) < 1e-5
    if not gains:
        assert torch.equal(opened[:3], parts[:3])
        assert float((opened.sum(0) - expected).abs().max() / expected.abs().max()) < 1e-5
    alone = Delta(site, x, None, torch.zeros_like(slots))
    if not gains:
        assert not adapted(parts.clone(), alone, None, None, scratch, there(), pdl=False, shade=True, open_=True)[
            3
        ].any()
    assert not scratch.counters(x.device).any(), "all signs are taken down, also where no row has an adapter"
