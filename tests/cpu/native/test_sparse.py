"""Matrices held without their zeros: the same bytes as with them, on each instruction set, in any company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.kernels.cpu import packed
from tokenmill.quant.dense import DenseWeight

FEW = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def expands(monkeypatch):
    """Machines that are slow at it must still be right."""
    monkeypatch.setattr(packed._native, "expands", lambda: True)


def pruned(rows: int, columns: int, dtype: torch.dtype, zeros: float = 0.6) -> torch.Tensor:
    weight = torch.randn(rows, columns)
    weight[torch.rand(rows, columns) < zeros] = 0.0
    weight[:, :1] *= -0.0  # zeros with a sign are zeros
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@FEW
@given(rows=st.integers(65, 200), columns=st.integers(40, 300), tokens=st.integers(1, 30), seed=st.integers(0, 99))
def test_products_and_rows_equal_those_with_zeros(kernels, dtype, rows, columns, tokens, seed):
    torch.manual_seed(seed)
    weight, bias = pruned(rows, columns, dtype), torch.randn(rows)
    sparse, dense = packed.pack_sparse(weight, bias), packed.pack_dense(weight, bias)
    assert sparse is not None and sparse.bytes() < 0.8 * dense.bytes()
    for kind in (torch.float32, torch.bfloat16):
        x = torch.randn(tokens, columns).to(kind)
        found = kernels.product(x, sparse)
        assert torch.equal(found, kernels.product(x, dense))
        assert torch.equal(found[-1:], kernels.product(x[-1:], sparse)), "a row depends on its company"
    ids = torch.randint(0, rows, (7,))
    assert torch.equal(sparse.rows(ids, torch.float32), weight[ids].float())


def test_gated_halves_and_whole_zeros(kernels):
    weight = pruned(256, 96, torch.bfloat16)
    weight[70:140] = 0.0
    x = torch.randn(5, 96).bfloat16()
    sparse, dense = packed.pack_sparse(weight), packed.pack_dense(weight)
    assert sparse is not None
    assert torch.equal(kernels.product(x, sparse, act="silu_mul"), kernels.product(x, dense, act="silu_mul"))
    nothing = packed.pack_sparse(torch.zeros(128, 64, dtype=torch.bfloat16))
    assert nothing is not None and not kernels.product(x[:, :64], nothing).any()


def test_weights_settle_without_zeros_where_these_are_many(kernels, monkeypatch):
    half, few = pruned(128, 256, torch.bfloat16, 0.5), pruned(128, 256, torch.bfloat16, 0.2)
    assert DenseWeight(half).settle(kernels).bytes() < 0.6 * half.nbytes
    assert DenseWeight(few).settle(kernels).bytes() >= few.nbytes
    assert DenseWeight(half.float()).settle(kernels).bytes() >= half.float().nbytes
    torch.testing.assert_close(DenseWeight(half).settle(kernels).dense(), half, rtol=0.0, atol=0.0)
    monkeypatch.setattr(packed._native, "expands", lambda: False)
    assert DenseWeight(half).settle(kernels).bytes() >= half.nbytes


def test_an_uneven_matrix_is_told_by_its_whole_size(kernels):
    """Rows that are looked at have zeros, the others have none."""
    weight = torch.ones(512, 64, dtype=torch.bfloat16)
    weight[:: 512 // packed._TRIED] = 0.0
    assert packed.pack_sparse(weight) is None
