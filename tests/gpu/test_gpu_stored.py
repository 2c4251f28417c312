"""Weights as other tools store them, on the device: each form's product against the matrix that its file means.

The files are those of tests/cpu/quant/test_stored_forms.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from tests.cpu.models.parity import DictCheckpoint
from tests.cpu.quant.stored_forms_helpers import FORMS

from tokenmill.kernels import make_kernels
from tokenmill.quant.detect import WeightRequest, check_config, load_weight

CODED = ("mxfp4", "nvfp4", "modelopt nvfp4", "nf4", "nf4 nested")
"""Forms with codes of a table."""


@pytest.mark.parametrize("name", FORMS)
def test_products_on_the_device(name):
    tensors, dense, config = FORMS[name][0]()
    shape = (dense.shape[0], dense.shape[1])
    kernels = make_kernels("cuda")
    ckpt = DictCheckpoint({f"w.{part}": tensor for part, tensor in tensors.items()})
    how = check_config({"quantization_config": config})
    request = WeightRequest("w", shape)
    weight = load_weight(ckpt, request, torch.bfloat16, torch.device("cuda"), None, how).settle(kernels)
    assert name not in CODED or (weight.packed.bits == 4 and weight.packed.table), "half a byte a weight"
    dense = dense.cuda()
    for rows in (1, 5, 33, 100, 200):
        x = torch.randn(rows, shape[1], device="cuda").bfloat16()
        found = weight.matmul(x, SimpleNamespace(kernels=kernels)).float()
        expected = x.float() @ dense.T
        assert float((found - expected).norm() / expected.norm()) < (0.035 if name == "2:4 fp8" else 0.03)
    ids = torch.tensor([3, 1, 3], device="cuda")
    assert float((weight.rows(ids).float() - dense[ids]).norm() / dense[ids].norm()) < 0.01
