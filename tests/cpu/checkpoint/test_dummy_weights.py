"""Invented weights: deterministic, of sensible size, quick."""

from __future__ import annotations

import pytest
import torch
from tests.cpu_time import least_cpu_time

from tokenmill.checkpoint.dummy import DummyCheckpoint
from tokenmill.core.errors import ModelError

NAME = "model.layers.3.mlp.up_proj.weight"


def test_same_name_and_seed_same_values() -> None:
    one = DummyCheckpoint(1).tensor(NAME, (300, 200), torch.bfloat16)
    assert torch.equal(one, DummyCheckpoint(1).tensor(NAME, (300, 200), torch.bfloat16))
    assert not torch.equal(one, DummyCheckpoint(2).tensor(NAME, (300, 200), torch.bfloat16))
    assert not torch.equal(one, DummyCheckpoint(1).tensor(NAME + "x", (300, 200), torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_weights_are_spread_as_promised(dtype: torch.dtype) -> None:
    weight = DummyCheckpoint().tensor(NAME, (3000, 1000), dtype)
    assert weight.dtype == dtype and weight.is_contiguous()
    values = weight.float()
    assert abs(values.mean().item()) < 1e-3 and 0.018 < values.std().item() < 0.022
    # No two rows are equal although the block repeats.
    assert len(torch.unique(values, dim=0)) == 3000


def test_rows_differ_beyond_the_block() -> None:
    weight = DummyCheckpoint().tensor(NAME, (2100, 1024))
    assert len({row.numpy().tobytes() for row in weight}) == 2100


@pytest.mark.parametrize(
    "name",
    ["model.norm.weight", "model.layers.0.input_layernorm.weight", "h.0.ln_1.weight", "ln_f.weight", "q_norm.weight"],
)
def test_norms_are_one(name: str) -> None:
    assert (DummyCheckpoint().tensor(name, (7,), torch.bfloat16) == 1).all()


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "gate.e_score_correction_bias", "ln_f.bias"])
def test_biases_are_zero(name: str) -> None:
    assert (DummyCheckpoint().tensor(name, (7,)) == 0).all()


def test_projections_near_norm_names_are_random() -> None:
    for name in ("model.layers.0.linear.weight", "normal_proj.up.weight", "lm_head.weight", "mlp.down_proj.weight"):
        assert DummyCheckpoint().tensor(name, (9, 9)).std() > 0


def test_packed_integers_and_their_scales() -> None:
    dummy = DummyCheckpoint()
    packed = dummy.tensor("q_proj.qweight", (64, 64), torch.int32)
    assert packed.dtype == torch.int32 and packed.unique().numel() > 4000 and packed.min() < 0 < packed.max()
    assert dummy.tensor("q_proj.weight", (64, 64), torch.int8).unique().numel() > 200
    assert (dummy.tensor("q_proj.weight_scale", (64,)) > 0).all()
    assert set(dummy.tensor("mask", (50,), torch.bool).tolist()) == {True, False}


def test_parts_fit_together() -> None:
    dummy = DummyCheckpoint()
    whole = dummy.tensor(NAME, (10, 6))
    parts = [dummy.part(NAME, 1, start, start + 3, (10, 6)) for start in (0, 3)]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_everything_exists_but_a_shape_is_needed() -> None:
    dummy = DummyCheckpoint()
    assert dummy.has("anything") and list(dummy.names()) == [] and dummy.shape("anything") is None
    assert dummy.tensor("x", (0, 3)).shape == (0, 3) and dummy.tensor("x", ()).shape == ()
    with pytest.raises(ModelError, match="shape of 'x'"):
        dummy.tensor("x")


def test_many_small_tensors_cost_no_random_numbers_each() -> None:
    dummy = DummyCheckpoint()
    dummy.tensor("first", (1,))

    def draw() -> None:
        for number in range(2000):
            dummy.tensor(f"experts.{number}.weight", (16, 16))

    assert least_cpu_time(draw, 2.0) < 2.0  # drawing a block for each would take many
