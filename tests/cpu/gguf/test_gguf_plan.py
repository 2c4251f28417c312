"""Plans for GGUF files: memory and speed follow the types that the file has, on a CPU in their own bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.cpu.gguf.writing import Writer

from tokenmill.core.config import make_config
from tokenmill.measure.devices import efficiency_of, find_device
from tokenmill.measure.plan import Setup, plan, read_model, speed_types
from tokenmill.quant.shape_checkpoint import AS_STORED
from tokenmill.testing.tiny import make_tiny


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_NL"])
def test_a_file_is_planned_from_its_header(tmp_path: Path, kind: str) -> None:
    made = make_tiny(tmp_path / "m", hidden=256, heads=4, kv_heads=2)
    weights = load_file(made / "model.safetensors")
    path = tmp_path / "m.gguf"
    Writer(path, json.loads((made / "config.json").read_text()), weights, kind).write()
    config = make_config({}, model=str(path), dtype="bfloat16")
    assert ("int4" in speed_types(config)) and "int4" not in speed_types(make_config({}, model=str(made)))
    matrices = sum(w.numel() for name, w in weights.items() if w.dim() == 2 and "embed" not in name)
    for name in ("desktop-cpu", "h100"):
        device = find_device(name)
        planner = read_model(config, device.kind)
        found = plan(planner, Setup(device, 1, efficiency_of(device)))
        assert found["fits"] and all(point["tpot_ms"] > 0 for point in found["points"])
        each = (planner.sheet.body.weight_bytes + planner.sheet.head.weight_bytes) / matrices
        own = {"F32": 2.0, "Q8_0": 34 / 32, "Q4_0": 18 / 32, "Q4_K": 144 / 256, "Q6_K": 210 / 256, "IQ4_NL": 18 / 32}[
            kind
        ]
        held = own if device.kind == "cpu" or kind in ("F32", "Q8_0", "Q4_0", "IQ4_NL") else 34 / 32
        assert each == pytest.approx(held, rel=0.15)  # norms come to it
        assert planner.compute_type == ("int8" if device.kind == "cpu" and kind != "F32" else "bfloat16")


def test_what_a_cpu_multiplies_as_stored_is_what_its_kernels_say() -> None:
    packed = pytest.importorskip("tokenmill.kernels.cpu.packed", exc_type=ImportError)
    assert set(AS_STORED) == set(packed.BLOCKS)
