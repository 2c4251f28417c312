"""GGUF files of hybrids, their tensors changed as the format's converter changes them, against Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cpu.gguf.gguf_hybrids_helpers import CONFIGS, write
from tests.cpu.gguf.gguf_models_helpers import build, prompt
from tests.cpu.models.parity import make, ours, theirs

from tokenmill.kernels import make_kernels
from tokenmill.kernels.reference import ReferenceKernels


@pytest.mark.parametrize("arch", CONFIGS)
def test_like_transformers(arch: str, tmp_path: Path) -> None:
    reference, config, tensors = make(CONFIGS[arch], tmp_path)
    write(tmp_path / "m.gguf", arch, config, tensors)
    tokens = prompt()
    for kernels in (ReferenceKernels(), make_kernels("cpu")):
        model = build(tmp_path / "m.gguf", kernels)
        found = ours(model, {"a": tokens}, [[("a", 30)], [("a", len(tokens) - 30)]], kernels)["a"]
        assert (found - theirs(reference, tokens)).abs().max() <= 1e-4
