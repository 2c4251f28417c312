"""Sizes and numbers that no model of the other tests has: what would be wrong in silence, or end an engine."""

from __future__ import annotations

import mmap
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.cpu.kernels.paged_batch import PagedBatch
from tests.cpu.triton.triton_attention_helpers import REFERENCE, make_spec

from tokenmill.compute.forward import Act, KVSpec, Mixture, NormSpec, RouteSpec
from tokenmill.kernels.triton import multiply
from tokenmill.kernels.triton.attention import gathered, latent, prefill
from tokenmill.kernels.triton.common import Scratch
from tokenmill.kernels.triton.experts import mixture
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kernels.triton.products.adapters import _expand_kernel
from tokenmill.kernels.triton.quantised.narrow import pack8
from tokenmill.kernels.triton.quantised.narrow_gemv import SpreadRows
from tokenmill.kernels.triton.quantised.narrow_linear import narrow_way
from tokenmill.quant.grid import GridWeight

FP8 = torch.float8_e4m3fn
NAN = float("nan")


def rows_of(kind: str, rows: int, columns: int) -> Any:
    """A packed matrix with a scale for each row, or for each block."""
    if kind == "int8":
        return pack8(torch.randint(-127, 128, (rows, columns), dtype=torch.int8), torch.rand(rows, 1) / 64, None)
    scales = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
    return pack8(torch.randn(rows, columns).to(FP8), scales, None, blocks=True)


# ------------------------------------------------------------ dependent launches


@pytest.mark.parametrize(
    ("kind", "shape", "act", "rows"),
    [("int8", (20, 130), None, 1), *(("blocks", (80, 128), "silu_mul", rows) for rows in (1, 3, 65))],
)
def test_weights_that_are_widened_now_are_not_read_before_the_launch_that_widens_them_ends(
    monkeypatch: pytest.MonkeyPatch, kind: str, shape: tuple[int, int], act: Act | None, rows: int
) -> None:
    weight, x, kernels = rows_of(kind, *shape), torch.randn(rows, shape[1]), TritonKernels()
    assert narrow_way(kernels.launch, x, weight, act) == ("widen",)
    for early in ("gemv", "thin"):
        monkeypatch.setattr(multiply, early, lambda *_, **__: pytest.fail("it reads weights before it waits"))
    residual = torch.randn(rows, shape[0] // 2 if act else shape[0])
    dense = weight.rows(torch.arange(shape[0]), torch.float32)
    found = kernels.product(x, weight, act=act, residual=residual)
    torch.testing.assert_close(found, REFERENCE.product(x, dense, act=act, residual=residual), atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------ NaN


@pytest.mark.parametrize("act", ["relu", "relu2", "silu", "gelu", "gelu_tanh", "silu_mul", "gelu_mul", "oai_swiglu",
                                 "clipped_silu_mul"])  # fmt: skip
@pytest.mark.parametrize("place", [0, 5])
def test_activations_keep_nan(act: Act, place: int) -> None:
    x = torch.randn(2, 8)
    x[1, place] = NAN
    found = TritonKernels().activate(x, act)
    assert torch.equal(found.isnan(), REFERENCE.activate(x, act).isnan())
    assert found.isnan().any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of numbers that are none
@pytest.mark.parametrize("wrong", [NAN, -NAN, float("inf")])
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("rows", [1, 3])
def test_rounding_activations_keeps_what_is_no_number(kind: str, rows: int, wrong: float) -> None:
    kernels = TritonKernels()
    if kind == "int4":
        q, scales = REFERENCE.quantise(torch.randn(32, 128), 4)
        weight = kernels.pack(GridWeight(q, scales, bits=4, group=32, dtype=torch.float32).stored())
    else:
        data = torch.randn(32, 128).to(FP8) if kind == "fp8" else torch.randint(-127, 128, (32, 128), dtype=torch.int8)
        weight = pack8(data, torch.rand(32, 1), None)
    x = torch.randn(rows, 128)
    x[-1, 77] = wrong
    found = kernels.product(x, weight)
    assert not found[-1].isfinite().any() and found[:-1].isfinite().all()


def test_a_gated_row_that_is_spread_on_the_way_keeps_nan() -> None:
    kernels, up, down = TritonKernels(), rows_of("int8", 64, 32), rows_of("int8", 16, 32)
    x = torch.randn(1, 32)
    x[0, 3] = NAN
    kernels.launch.narrow_ways = {"int8/rows 1 64x32 silu_mul": ("gemv", 4, 16, 1, 0)}
    inner = kernels.product(x, up, act="silu_mul")
    assert isinstance(inner, SpreadRows) and kernels.product(inner, down).isnan().all()


# ------------------------------------------------------------ float16


def test_norms_of_large_numbers_in_float16() -> None:
    """Times the norm's weight they would pass 65504, until they are divided."""
    x, norm = torch.randn(3, 64).half(), NormSpec(torch.full((64,), 8.0).half(), 1e-5)
    x[:, 5] = 30000.0
    weight = torch.randn(24, 64).half()
    found = TritonKernels().product(x, weight, norm=norm)
    wanted = REFERENCE.product(x.float(), weight.float(), norm=replace(norm, weight=norm.weight.float()))
    torch.testing.assert_close(found.float(), wanted, atol=0.5, rtol=2e-3)


def test_routers_round_no_large_numbers_to_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        def __init__(self, *shape: int) -> None:
            self.table = torch.randn(*shape).half()

        def pieces(self) -> Any:
            return "dense", {"table": self.table, "bias": None}

    monkeypatch.setattr(mixture, "pick_few", lambda *_, **__: pytest.fail("it multiplies by the weight first"))
    ups, downs = ([Plain(*shape) for _ in range(4)] for shape in ((64, 32), (32, 32)))
    made = Mixture(route=RouteSpec(4, 2), router=Plain(4, 32), ups=ups, downs=downs, act="silu_mul")  # type: ignore[arg-type]
    kernels, norm, x = TritonKernels(), NormSpec(torch.full((32,), 8.0).half(), 1e-5), torch.randn(20, 32).half()
    x[:, 5] = 30000.0
    layer = mixture.pack_mixture(kernels.launch, made)
    assert layer is not None and layer.router is not None
    ids, gates, h = layer._pick(x, None, norm, None, keep=True)  # type: ignore[arg-type]
    normed = REFERENCE.norm(x.float(), replace(norm, weight=norm.weight.float()))
    wanted = REFERENCE.route(normed @ layer.router[0].float().T, made.route)
    assert torch.equal(ids.long(), wanted[0]) and torch.allclose(gates, wanted[1], atol=1e-3)
    assert torch.allclose(h.float(), normed, rtol=2e-3, atol=1e-5)


# ------------------------------------------------------------ more than counters


def test_more_heads_of_sequences_than_counters() -> None:
    spec, kernels = make_spec(), TritonKernels()
    kernels.launch.scratch = Scratch(counters=5)
    batches = [PagedBatch((spec.kv,), each) for each in (kernels, REFERENCE)]
    for grants in ([(name, 40) for name in "abc"], [(name, 1) for name in "abc"]):
        x = torch.randn(sum(n for _, n in grants), 8 * 16)
        found, wanted = (
            each.attention(each.prepare_qkv(x, spec, ctx), spec, ctx)
            for each, ctx in ((kernels, batches[0].step(grants)), (REFERENCE, batches[1].step(grants)))
        )
        assert torch.allclose(found, wanted, atol=1e-5)


def test_more_lines_than_counters() -> None:
    kernels, logits = TritonKernels(), torch.randn(6, 40)
    kernels.launch.scratch = Scratch(counters=5)
    assert torch.equal(kernels.greedy(logits)[0], logits.argmax(-1))
    assert kernels.counters()["greedy"]["fallbacks"] == 1
    assert kernels.choose(logits, None, None, None) is None
    assert kernels.least_kept(logits - 5.0, torch.full((6,), 3), None) is None


# ------------------------------------------------------------ grids and addresses


class Grids:
    """In a kernel's place: notes what it is launched with."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.seen.append(grid)
        return lambda *_, **__: None


def test_tiles_of_single_queries_fit_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """70 query heads share one key head, and a step has 70000 tokens: a tile has one query of them."""
    grids, tokens = Grids(), 70000
    for module, name in ((prefill, "_prefill_kernel"), (gathered, "_gathered_kernel"), (latent, "_latent_kernel")):
        monkeypatch.setattr(module, name, grids)
    spec = make_spec(heads=70, kv_heads=1)
    ctx = PagedBatch((spec.kv,), REFERENCE).step([("a", 2)])
    q = torch.empty(1, 70, 16).expand(tokens, -1, -1)
    prefill.attend_many(q, q, spec, ctx, Scratch(), pdl=False, steady=True)
    keys = torch.empty(1, 64, 16)
    places = torch.zeros(2, dtype=torch.int32), torch.zeros(tokens + 1, dtype=torch.int32)
    gathered.attend_gathered(q, q, spec, ctx, places, gathered.Gathered(keys, keys), pdl=False)
    narrow = replace(spec, kv=KVSpec("latent", 1, 24, 16))
    ctx = PagedBatch((narrow.kv,), REFERENCE).step([("a", 2)])
    q = torch.empty(1, 70, 24).expand(2 * tokens, -1, -1)
    latent.attend_vectors(q, q, narrow, ctx, Scratch(), pdl=False, config=(32, 16, 1, 4, 1))
    assert len(grids.seen) == 3 and all(grid[0] > tokens and max((0, *grid[1:])) < 1 << 16 for grid in grids.seen)


@pytest.mark.skipif(not hasattr(mmap, "MAP_PRIVATE"), reason="no address space without memory here")
def test_lanes_of_adapters_beyond_two_to_the_31st() -> None:
    """Two parts of sums of 2^21 tokens and 1024 lanes; 16 of the tokens are looked at."""
    tokens, lanes = 1 << 21, 1024
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    room = mmap.mmap(-1, 2 * tokens * lanes * 4, flags=flags)
    low = torch.from_numpy(np.frombuffer(room, dtype=np.float32)).view(2, tokens, lanes)
    low[:, :16, :16] = torch.randn(2, 16, 16)
    y, up, slots = torch.randn(16, 32), torch.randn(2, 16, 32), 1 - torch.arange(16, dtype=torch.int32) % 2
    out = torch.empty(16, 32)
    _expand_kernel[(1, 1)](
        y, low, up, torch.tensor([0, 16], dtype=torch.int32), slots, None, None, None, out,
        tokens, 32, 32, 16, 32, 32, 32, 1, 1, 1, PARTS=1, SPLITS=2, LANES=lanes, GAINS=False, RESIDUAL=False,
        ACT="none", GATED=False, BM=16, BN=32, BR=16, IEEE=True, PDL=False,
    )  # fmt: skip
    wanted = y + low[:, :16, :16].sum(0) @ up[1] * (slots == 1)[:, None]
    assert torch.allclose(out, wanted, atol=1e-4)


# ------------------------------------------------------------ how weights lie


@pytest.mark.parametrize("rows", [1, 3])
def test_a_matrix_that_is_a_part_of_wider_rows(rows: int) -> None:
    weight, x = torch.randn(24, 96)[:, 32:96], torch.randn(rows, 64)
    assert weight.stride(1) == 1 and not weight.is_contiguous()
    torch.testing.assert_close(TritonKernels().product(x, weight), x @ weight.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("inner", "taken"), [(128, True), (96, False)])
def test_gates_and_what_they_let_through_share_no_block_of_scales(inner: int, taken: bool) -> None:
    class Weight:
        def __init__(self, rows: int, columns: int) -> None:
            self.packed = rows_of("blocks", rows, columns)

        def pieces(self) -> Any:
            return self.packed.pieces()

    ups, downs = ([Weight(*shape) for _ in range(2)] for shape in ((2 * inner, 128), (128, inner)))
    made = Mixture(route=RouteSpec(2, 1), router=None, ups=ups, downs=downs, act="silu_mul")  # type: ignore[arg-type]
    assert (mixture.pack_mixture(TritonKernels().launch, made) is not None) == taken
