"""Quantising and pruning with tensors on another device: nothing mixes tensors of two devices, and files hold what the
host makes. (distant_device.py is the device.)"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.quant.distant_device import distant_device
from torch import Tensor

from tokenmill.quantize import forward, recipes
from tokenmill.quantize.gguf_importance import measure
from tokenmill.quantize.inputs import Inputs
from tokenmill.quantize.prune_model import Cut, prune_model
from tokenmill.quantize.quantize_model import QuantizeJob, quantize_model
from tokenmill.quantize.recipes import Recipe, complete_recipe
from tokenmill.testing.tiny import make_tiny

KINDS: list[tuple[str, dict[str, Any]]] = [
    *((method, {}) for method in recipes.METHODS),
    ("rtn", {"form": "gptq"}), ("rtn", {"form": "awq"}),
    ("sparsegpt", {"form": "compressed-tensors"}), ("magnitude", {"form": "compressed-tensors", "sparsity": "0.5"}),
    ("nf4", {"double": False}),
]  # fmt: skip
WHOLE: list[tuple[str, dict[str, Any], bool]] = [
    ("gptq", {"kv_scales": True}, True), ("gptq", {"form": "gptq"}, False), ("gptq", {"form": "awq"}, True),
    ("rtn", {"bits": 4.5}, True), ("smoothquant", {}, False), ("sparsegpt", {"form": "compressed-tensors"}, True),
    ("squeezellm", {}, True),
    *([("awq", {"form": "awq"}, True)] if os.environ.get("TOKENMILL_QUANTISE") else []),  # seconds of searching
]  # fmt: skip
"""Between them all readers of forms that calibration goes on from, folds, mixed bits, and scales of K/V. The last says
whether there is room on the device for the hidden states between layers."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), hidden=32, heads=2, kv_heads=1)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, 200, (3, 9), generator=torch.Generator().manual_seed(0))


def test_tensors_of_two_devices_are_seen() -> None:
    with distant_device() as name:
        x, far = torch.randn(3, 4), torch.randn(3, 4, device=name)
        assert str(far.device) == name and torch.equal((x.to(name) + far).cpu(), x + far.cpu())
        for wrong in (lambda: x + far, lambda: torch.cat((x, far)), lambda: far.addmm_(far, torch.eye(4))):
            with pytest.raises(RuntimeError, match="two devices"):
                wrong()


@pytest.mark.parametrize(("method", "more"), KINDS)
def test_every_method_makes_the_same_there(method: str, more: dict[str, Any]) -> None:
    random, recipe = torch.Generator().manual_seed(1), complete_recipe(Recipe(method=method, group=32, **more))
    weight, x = torch.randn(16, 64, generator=random), torch.randn(100, 64, generator=random)
    wanted, found = [], []
    for made, device in ((wanted, "cpu"), (found, "")):
        with distant_device() as name:
            inputs = Inputs(64, torch.device(device or name))
            inputs.add(x.to(device or name))
            held = recipes.hold(recipe, weight.to(device or name), 4, inputs)
            made += [("dense", held.dense.cpu()), *((part, tensor.cpu()) for part, tensor in held.tensors.items())]
            assert held.dense.device == torch.device(device or name), "the error is measured there"
    assert [part for part, _ in found] == [part for part, _ in wanted]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("method", "more", "near"), WHOLE)
def test_whole_models(
    method: str, more: dict[str, Any], near: bool, tiny: Path, tokens: Tensor, tmp_path: Path, monkeypatch: Any
) -> None:
    if not near:
        monkeypatch.setattr(forward, "free_bytes", lambda device: 0)
    recipe = complete_recipe(Recipe(method=method, group=32, **more))
    with distant_device() as name:
        made = quantize_model(QuantizeJob(tiny, tmp_path / "out", recipe, tokens=tokens, device=name))
    assert len(made.errors) == 14 and max(each.error for each in made.errors) < 1.0


@pytest.mark.parametrize("cut", [Cut(layers=1), Cut(channels=0.5, multiple=8)])
def test_pruning(cut: Cut, tmp_path: Path, tokens: Tensor) -> None:
    source = make_tiny(tmp_path / "tiny", hidden=32, heads=2, kv_heads=1, layers=3)
    with distant_device() as name:
        left = prune_model(source, tmp_path / "out", cut, tokens, name)
    assert len(left.layers) == 3 - cut.layers


def test_importance(tiny: Path, tokens: Tensor) -> None:
    with distant_device() as name:
        found = measure(tiny, tokens, name)
    wanted = measure(tiny, tokens)
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name].squares, wanted[name].squares, rtol=1e-3) for name in found)
