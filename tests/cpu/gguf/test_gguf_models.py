"""Whole GGUF models against Transformers with the weights that the file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.gguf.gguf_models_helpers import CONFIGS, MIXED, Unrounded, build, prompt
from tests.cpu.gguf.writing import Writer
from tests.cpu.models.parity import make, ours, theirs
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.kernels import make_kernels
from tokenmill.kernels.reference import ReferenceKernels


def written(name: str, folder: Path, kind: str | dict[str, str]) -> tuple[Any, Path]:
    """(the Transformers model with the weights that the file says, the file)."""
    reference, config, tensors = make(CONFIGS[name], folder)
    path = folder / "m.gguf"
    said = Writer(path, config, {key: value.float() for key, value in tensors.items()}, kind).write()
    replace_weights(reference, said, folder)
    return reference, path


def replace_weights(reference: Any, said: dict[str, Tensor], folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("*.safetensors")
    save_file({**load_file(file), **{k: v.contiguous() for k, v in said.items()}}, file, metadata={"format": "pt"})
    loaded = type(reference).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    reference.load_state_dict(loaded.state_dict())


def logits(model: Any, tokens: list[int], kernels: Any) -> Tensor:
    return ours(model, {"a": tokens}, [[("a", len(tokens))]], kernels)["a"]


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture(name: str, kind: str, tmp_path: Path) -> None:
    reference, path = written(name, tmp_path, kind)
    kernels = Unrounded()
    wanted = theirs(reference, prompt())
    error = (logits(build(path, kernels), prompt(), kernels) - wanted).abs().max()
    assert error <= 1e-4 * max(1.0, float(wanted.abs().max())), "libraries of two machines add up in different orders"


KINDS = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]


@pytest.mark.parametrize("kind", [*KINDS, "MXFP4", "NVFP4", "mixed"])
def test_every_type_keeps_its_own_numbers(kind: str, tmp_path: Path) -> None:
    reference, path = written("llama", tmp_path, MIXED if kind == "mixed" else kind)
    kernels = Unrounded()
    error = (logits(build(path, kernels), prompt(), kernels) - theirs(reference, prompt())).abs().max()
    assert error <= 1e-4


def test_factors_beside_nvfp4_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's converter keeps a checkpoint's scale of a whole matrix in a tensor of its own."""
    close = Writer.close

    def with_factor(writer: Writer) -> None:
        writer.vector("blk.0.attn_q.scale", torch.ones(1))
        close(writer)

    monkeypatch.setattr(Writer, "close", with_factor)
    _, path = written("llama", tmp_path, "NVFP4")
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.scale"):
        build(path, Unrounded())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_native_exact_forms(kind: str, tmp_path: Path) -> None:
    """Same integers, same scales: what differs from the reference is the order of additions."""
    pytest.importorskip("tokenmill._native", reason="the native kernels were not built")
    _, path = written("llama", tmp_path, kind)
    plain, native = ReferenceKernels(), make_kernels("cpu")
    model = build(path, native)
    want = logits(build(path, plain), prompt(), plain)
    got = logits(model, prompt(), native)
    assert model.spec.extras["changed"] == []
    assert (got - want).norm() / want.norm() < 1e-2  # a rounding of activations may fall the other way
    assert not native.counters()["linear"]["fallbacks"] and "int8_product" not in native.counters()
