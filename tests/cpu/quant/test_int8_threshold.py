"""bitsandbytes' int8: from which magnitude on activations are not rounded, as config.json says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.quant.stored_forms_helpers import bitsandbytes_eight, read
from typer.testing import CliRunner

from tokenmill import LLM, SamplingParams
from tokenmill.cli.verbs import app
from tokenmill.core.errors import ModelError
from tokenmill.kernels.triton.quantised.narrow import PACKERS
from tokenmill.quant.grid import GridWeight
from tokenmill.testing.tiny import make_tiny


@pytest.mark.parametrize(
    ("said", "apart"), [({}, 6.0), ({"llm_int8_threshold": 4}, 4.0), ({"llm_int8_threshold": 0.0}, 0.0)]
)
def test_read_from_the_configuration(said: dict[str, Any], apart: float) -> None:
    tensors, _, config = bitsandbytes_eight()
    assert read(tensors, config | said).apart == apart


@pytest.mark.parametrize("said", [-1, "6", True, float("nan"), float("inf"), [6.0]])
def test_no_number_is_refused(said: object) -> None:
    tensors, _, config = bitsandbytes_eight()
    with pytest.raises(ModelError, match=r"llm_int8_threshold is .*must be a number from 0 on"):
        read(tensors, config | {"llm_int8_threshold": said})


@pytest.mark.parametrize("columns", [128, 256, 100])
def test_on_a_gpu_no_matrix_of_them_rounds_rows_whole(columns: int) -> None:
    weight = GridWeight(
        torch.ones(64, columns, dtype=torch.int8), torch.ones(64, 1).half(), bits=8, group=columns, dtype=torch.float32
    )
    assert PACKERS["int8"](weight.stored()).plain
    weight.apart = 6.0
    found = PACKERS["int8"](weight.stored())
    assert found is None if columns == 100 else not found.plain


def test_our_own_files_say_it_and_it_changes_answers(tmp_path: Path) -> None:
    """With a threshold below all activations nothing is rounded, so a product is that of the dense numbers."""
    tiny, out = make_tiny(tmp_path / "tiny", hidden=128), tmp_path / "out"
    done = CliRunner().invoke(app, ["quantize", str(tiny), str(out), "--method", "llm.int8"])
    assert done.exit_code == 0, done.output
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["llm_int8_threshold"] == 6.0
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    found = []
    for threshold in (1e-30, 1e-20, 0.0):
        config["quantization_config"]["llm_int8_threshold"] = threshold
        (out / "config.json").write_text(json.dumps(config))
        with LLM(str(out), executor="inprocess", dtype="float32") as llm:
            lines = llm.generate("mill and stream", asked)[0].prompt_logprobs
            found.append([next(iter(line.values())).logprob for line in lines if line])
    assert found[0] == found[1] != found[2]
    assert found[0] == pytest.approx(found[2], abs=0.3)
