"""What this engine's kernels reach here, and predictions from it."""

from __future__ import annotations

import pytest

from tokenmill.core.config import make_config
from tokenmill.core.errors import ParameterError
from tokenmill.measure import calibrate
from tokenmill.measure.ceilings import read_measured
from tokenmill.measure.devices import efficiency_of, read_calibration, speeds
from tokenmill.measure.plan import Setup, read_model
from tokenmill.measure.roofline import Calibration, Cost, Curve, Speeds, floor
from tokenmill.measure.simulate import simulate
from tokenmill.measure.workloads import Uniform
from tokenmill.testing.tiny import make_tiny


def test_curves_go_through_their_points_and_on_in_proportion():
    curve = Curve(2.0, ((1, 1e-12), (4, 1e-12), (16, 4e-12)))
    assert curve.seconds(0.5) == curve.seconds(1) == 1e-12 == pytest.approx(curve.seconds(3))
    assert curve.seconds(8) == pytest.approx(2e-12)
    assert curve.seconds(16) == 4e-12 and curve.seconds(64) == pytest.approx(16e-12)


def test_a_calibrated_step_is_the_sum_of_its_parts():
    known = Calibration((Curve(2.0, ((1, 1e-9), (10, 2e-9))), Curve(0.5, ((1, 5e-10),))), 1e9, 1e12, 0.5, 0.1, 0.01)
    cost = Cost(tokens=10, lines=2, layers=3, kv_bytes=2e9)
    cost.flops |= {"matrices": 2 * 1e9 * 10, "head": 2 * 1e8 * 2, "attention": 1e9}
    cost.weight_bytes |= {"matrices": 2 * 1e9, "head": 0.56 * 1e8}
    found = floor(cost, Speeds(1.0, 1.0, calibration=known))
    head = 0.1 * 5e-10 * 2 * 1e9  # two lines, beyond the curve's only point
    assert found.seconds == pytest.approx(2.0 + head + 2.0 + 0.5 + 0.3 + 0.02)
    assert found.limit == "memory bandwidth (weights)"


def test_this_machine_is_measured_and_predicted_from(monkeypatch, tmp_path):
    monkeypatch.setattr(calibrate, "_SHAPE", {"cpu": (256, 128)})
    monkeypatch.setattr(calibrate, "_MISS_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(calibrate, "_ROWS", {"cpu": (1, 8, 32)})
    monkeypatch.setattr(calibrate, "_HOST_TOKENS", 6)
    found = calibrate.measure_calibrated("cpu", ("float32", "int8"))
    known = found["calibration"]
    assert set(known["linear"]) <= {"float32", "int8"} and "float32" in known["linear"]
    assert [rows for rows, _ in known["linear"]["float32"]["ps_per_weight"]] == [1, 8, 32]
    device = read_measured(found, "measured here")
    share = efficiency_of(device)
    assert share.calibrated and speeds(device, "float32", share).calibration is device.calibration
    assert speeds(device, "float32").calibration is None  # a ceiling is a ceiling
    assert not efficiency_of(device, "0.5").calibrated
    planner = read_model(make_config({}, model=str(make_tiny(tmp_path / "m")), device="cpu"), "cpu")
    told = simulate(planner, Setup(device, 1, share), Uniform(3, 20, 5))
    assert min(known["host"].values()) >= 0 < max(known["host"].values())
    assert told["output_tokens"] == 15 and told["seconds"] > 5e-3 * known["host"]["step_ms"]


def test_broken_calibrations_are_named():
    assert read_calibration(None) is None
    for wrong in ({}, {"linear": 3}, {"linear": {}, "attention": {}, "host": {}}):
        with pytest.raises(ParameterError, match="doctor --measure"):
            read_calibration(wrong)
