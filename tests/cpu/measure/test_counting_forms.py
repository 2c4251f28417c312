"""Every form of quantised files can be counted without its numbers, and takes the room that a load then takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.cpu.quant import stored_model
from tests.cpu.quant.stored_forms_helpers import FORMS

from tokenmill.checkpoint.folder import open_checkpoint, read_config
from tokenmill.kernels import make_kernels
from tokenmill.measure.counting import Sheet, count_model
from tokenmill.measure.live_memory import held_bytes
from tokenmill.models.registry import build_model

NUMBERS_TELL = ("torchao 2", "torchao 4", "torchao 5", "2:4")
"""Forms whose numbers, which are not read, say that they need less room."""


def counted(folder: Path, kind: str, ranks: int = 1) -> Sheet:
    checkpoint = open_checkpoint(folder)
    try:
        said = read_config(folder)
        return count_model(said, dtype=torch.bfloat16, checkpoint=checkpoint, kind=kind, ranks=ranks, step=(64, 4))
    finally:
        checkpoint.close()


def loaded(folder: Path) -> int:
    checkpoint = open_checkpoint(folder)
    try:
        return held_bytes(build_model(
            read_config(folder), checkpoint, dtype=torch.bfloat16, device="cpu", kernels=make_kernels("cpu")
        ))  # fmt: skip
    finally:
        checkpoint.close()


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, tmp_path: Path) -> None:
    folder = stored_model.write(form, stored_model.DENSE, tmp_path)
    sheet = counted(folder, "cpu")
    found = loaded(folder)
    assert 0.9 < sheet.held_bytes / found < (3.0 if form in NUMBERS_TELL else 1.1)
    assert 0.4 < counted(folder, "cpu", 2).held_bytes / sheet.held_bytes < 0.7, "one of two ranks"
    plain = 2 * sum(rows * columns for rows, columns in stored_model.shapes(stored_model.DENSE).values())
    assert counted(folder, "gpu").weight_bytes <= plain + 2 * 68 * 512 + 8192


@pytest.mark.parametrize("form", ["gptq 4", "awq gemm", "nf4 nested", "nvfp4", "hqq 4", "packed 4 zero", "fp8 blocks"])
def test_mixtures(form: str, tmp_path: Path) -> None:
    folder = stored_model.write(form, stored_model.MIXTURE, tmp_path)
    for kind in ("cpu", "gpu"):
        sheet = counted(folder, kind)
        assert len(sheet.body.mixtures) == 1 and 0 < sheet.held_bytes < 6 * 512 * 512 * 2 * 4
