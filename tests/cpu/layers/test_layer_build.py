"""Pulling tensors by name, and weights: concatenating, splitting, taking apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.cpu.kernels.paged_batch import PagedBatch
from tests.cpu.models.parity import DictCheckpoint

from tokenmill.compute.forward import KVSpec, NormSpec, RouteSpec
from tokenmill.core.errors import ModelError
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.layers.build import Build
from tokenmill.layers.experts import Experts
from tokenmill.quant.base import MixedWeight, WeightBase
from tokenmill.quant.dense import DenseWeight


def build(tensors: dict[str, torch.Tensor], **options) -> Build:
    return Build(DictCheckpoint(tensors), torch.float32, torch.device("cpu"), ReferenceKernels(), 64, **options)


def context():
    return PagedBatch((), ReferenceKernels()).step([("a", 1)])


def test_a_missing_tensor_names_its_full_path():
    with pytest.raises(ModelError, match=r"'model\.layers\.3\.mlp\.up_proj\.weight'"):
        build({}).at("model").at("layers.3.mlp").weight("up_proj", (2, 2))


def test_a_wrong_shape_names_both_shapes():
    with pytest.raises(ModelError, match=r"'a\.weight' has shape \[2, 3\], but the config asks for \[3, 2\]"):
        build({"a.weight": torch.ones(2, 3)}).weight("a", (3, 2))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e8m0fnu])
@pytest.mark.parametrize("rank", [0, 1])
def test_codes_are_not_taken_for_numbers(dtype, rank):
    """Codes without scales would be read as the numbers themselves, as a matrix, a part of one, a bias or a norm."""

    class Stored(DictCheckpoint):
        def tensor(self, name, shape=None, dtype=None):
            return self.tensors[name]  # as files give it

    plain, codes = torch.ones(4, 4), torch.ones(4, 4, dtype=dtype)
    share = (0, 0, 2) if rank else None
    refused = {
        "a.weight": lambda b: b.weight("a", (4, 4), share=share),
        "a.bias": lambda b: b.weight("a", (4, 4), bias=True, share=share),
        "n.weight": lambda b: b.norm("n", 4, 1e-6),
        "e": lambda b: b.numbers("e", (4, 4)),
    }
    for name, read in refused.items():
        stored = codes if name in ("a.weight", "e") else codes[0]
        with pytest.raises(ModelError, match=f"'{name}' holds {str(dtype).removeprefix('torch.')}"):
            read(replace(build({}), checkpoint=Stored({"a.weight": plain, "a.bias": plain[0], name: stored})))


def test_leftovers_are_listed_but_for_computed_buffers():
    tensors = {
        name: torch.ones(1) for name in ("used", "x.rotary_emb.inv_freq", "h.0.attn.masked_bias", "h.0.attn.bias")
    }
    b = build(tensors)
    b.tensor("used", (1,))
    b.check_leftovers()
    for other in ("stranger", "h.0.attn.c_attn.bias"):
        b = build({**tensors, other: torch.ones(1)})
        b.tensor("used", (1,))
        with pytest.raises(ModelError, match=other):
            b.check_leftovers()


def test_equal_specs_form_a_group():
    b = build({})
    full, window = KVSpec("full", 2, 8, 8), KVSpec("window", 2, 8, 8, 16)
    assert [b.at("x").add_kv(spec) for spec in (window, full, window, full)] == [(0, 0), (1, 1), (2, 0), (3, 1)]


def test_transposed_storage():
    stored = torch.randn(3, 5)
    weight = build({"c.weight": stored, "c.bias": torch.ones(5)}).weight("c", (5, 3), bias=True, transposed=True)
    assert torch.equal(weight.dense(), stored.t())
    x = torch.randn(2, 3)
    assert torch.allclose(weight.matmul(x, context()), x @ stored + 1, atol=1e-6)


def test_matmul_composes_in_order():
    x, residual, norm = torch.randn(4, 6), torch.randn(4, 3), NormSpec(torch.randn(6), 1e-6)
    weight, ctx = DenseWeight(torch.randn(6, 6), torch.randn(6)), context()
    y = weight.matmul(x, ctx, norm=norm, act="silu_mul", residual=residual)
    h = torch.nn.functional.rms_norm(x, (6,), norm.weight, 1e-6) @ weight.dense().t() + weight.bias
    assert torch.allclose(y, residual + torch.nn.functional.silu(h[:, :3]) * h[:, 3:], atol=1e-5)


class Halved(WeightBase):
    """A stand-in format: stores half of every entry."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.half, self.shape = weight / 2, tuple(weight.shape)

    def linear(self, x, ctx, norm):
        return ctx.kernels.product(x, self.half) * 2

    def take(self, index):
        return Halved(self.half[index] * 2)

    def split(self, dim, part, parts):
        start, stop = self.part_range(dim, part, parts)
        return Halved((self.half[start:stop] if dim == 0 else self.half[:, start:stop]) * 2)

    def dense(self):
        return self.half * 2

    def bytes(self):
        return self.half.nbytes


def test_formats_mix():
    q, k, v = torch.randn(6, 8), torch.randn(2, 8), torch.randn(4, 8)
    mixed = DenseWeight(q).concat([Halved(k), DenseWeight(v, torch.ones(4))])
    assert isinstance(mixed, MixedWeight) and mixed.shape == (12, 8)
    x, ctx, whole = torch.randn(3, 8), context(), torch.cat([q, k, v])
    bias = torch.cat([torch.zeros(8), torch.ones(4)])
    assert torch.allclose(mixed.matmul(x, ctx), x @ whole.t() + bias, atol=1e-5)
    assert torch.equal(mixed.dense(), whole)
    assert torch.equal(mixed.rows(torch.tensor([7, 0])), whole[[7, 0]])
    assert mixed.bytes() == q.nbytes + k.nbytes + v.nbytes + 16
    second = mixed.split(0, 1, 2)
    assert torch.allclose(second.matmul(x, ctx), x @ whole[6:].t() + bias[6:], atol=1e-5)
    halves = [mixed.split(1, i, 2).matmul(x[:, 4 * i : 4 * i + 4], ctx) for i in range(2)]
    assert torch.allclose(halves[0] + halves[1], x @ whole.t() + bias, atol=1e-5)
    assert mixed.concat([DenseWeight(q)]).shape == (18, 8)


def test_dense_weights_join_with_and_without_bias():
    one, two = DenseWeight(torch.randn(2, 4)), DenseWeight(torch.randn(3, 4), torch.ones(3))
    joined = one.concat([two])
    assert isinstance(joined, DenseWeight)
    assert joined.bias is not None and joined.bias.tolist() == [0, 0, 1, 1, 1]
    assert torch.equal(joined.take(torch.tensor([4, 0])).dense(), torch.stack([two.dense()[2], one.dense()[0]]))


def test_weights_split_only_evenly_and_keep_the_bias_once():
    weight = DenseWeight(torch.randn(6, 4), torch.ones(6))
    with pytest.raises(ModelError, match=r"--tensor-parallel-size: .*6 rows cannot be split over 4"):
        weight.split(0, 0, 4)
    assert weight.split(0, 1, 2).bias is not None
    assert weight.split(1, 0, 2).bias is not None and weight.split(1, 1, 2).bias is None
    assert weight.bytes() == 6 * 4 * 4 + 6 * 4


def test_a_mixture_names_what_is_multiplied_after_it():
    named = []

    class Whole(ReferenceKernels):
        def pack_mixture(self, mixture):
            def fused(x, ctx, *, norm=None, residual=None, ahead=None):
                return named.append(ahead) or x

            fused.takes = False
            return fused

    b = Build(DictCheckpoint({}), torch.float32, torch.device("cpu"), Whole(), 64)

    def layer():
        lists = [[DenseWeight(torch.randn(*shape)) for _ in range(2)] for shape in ((8, 4), (4, 4))]
        return Experts(b, DenseWeight(torch.randn(2, 4)), RouteSpec(2, 1), (lists[0], lists[1]), "silu_mul")

    first, product, last = layer(), b.settled(DenseWeight(torch.randn(4, 4))), layer()
    head = DenseWeight(torch.randn(9, 4))
    b.comes_next(head)
    b.settled(DenseWeight(torch.randn(4, 4)))
    for mixture in (first, last):
        mixture(torch.randn(1, 4), context())
    assert named[0] is product and named[1] is head
