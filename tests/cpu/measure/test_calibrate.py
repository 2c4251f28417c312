"""What this engine's kernels reach here, and predictions from it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from tokenmill.core.config import make_config
from tokenmill.core.errors import ParameterError
from tokenmill.device.memory import describe
from tokenmill.measure import calibrate, calibrate_compile, calibrate_host, ceilings
from tokenmill.measure.calibration import (
    Attending,
    Calibration,
    Curve,
    Hosted,
    Launched,
    Speeds,
    between,
    read_calibration,
)
from tokenmill.measure.ceilings import read_measured
from tokenmill.measure.devices import Device, Efficiency, efficiency_of, speeds
from tokenmill.measure.plan import Setup, read_model
from tokenmill.measure.roofline import AttentionWork, Cost, Grant, StepCounts, step_cost
from tokenmill.measure.simulate import predict, simulate
from tokenmill.measure.step_time import step_time
from tokenmill.measure.workloads import Uniform
from tokenmill.testing.tiny import make_tiny

KNOWN = Calibration(
    linear=(Curve(2.0, ((1, 1e-9), (10, 2e-9))), Curve(0.5, ((1, 5e-10),))),
    experts=(),
    attention=Attending(decode=((1.0, 1e9),), prompts=((1.0, 1e12),)),
    decoding=(Hosted(1, 0.5, 0.1), Hosted(3, 0.7, 0.3)),
    prompting=(Hosted(1, 5.0, 1.0),),
    mixture_s=((1.0, 0.25),),
    logit_s=1e-3,
)


def test_curves_go_through_their_points_and_on_in_proportion():
    curve = Curve(2.0, ((1, 1e-12), (4, 1e-12), (16, 4e-12)))
    assert [curve.seconds(rows) for rows in (0.5, 1, 3)] == pytest.approx([1e-12] * 3)
    assert curve.seconds(8) == pytest.approx(2e-12)
    assert curve.seconds(16) == 4e-12 and curve.seconds(64) == pytest.approx(16e-12)
    assert between(((1, 2.0), (100, 200.0)), 10) == pytest.approx(20.0)
    assert between(((1, 0.0), (100, 200.0)), 10) == 0.0 and between(((4, 3.0),), 1) == 3.0


def test_what_is_cycled_through_chooses_between_caches_and_memory():
    known = replace(KNOWN, linear=(Curve(2.0, ((1, 1e-12),), 1e6), Curve(2.0, ((1, 4e-12),), 1e8)))
    assert known.product_s(2.0, 1, 1e5) == 1e-12 and known.product_s(2.0, 1, 1e9) == 4e-12
    assert known.product_s(2.0, 1, 1e7) == pytest.approx(2e-12)
    assert known.product_s(1.0, 1, 1e9) == pytest.approx(2e-12)  # half the bytes of the nearest format


def test_around_a_step_more_rows_cost_more_and_prompts_something_else():
    assert KNOWN.host(1, prompts=False).step_s == 0.5 and KNOWN.host(3, prompts=False).layer_s == pytest.approx(0.3)
    assert KNOWN.host(2, prompts=False).step_s == pytest.approx(0.6)
    assert KNOWN.host(5, prompts=False).step_s == pytest.approx(0.9)
    assert KNOWN.host(2, prompts=True) == KNOWN.prompting[0]


def test_a_calibrated_step_is_the_sum_of_its_parts():
    cost = Cost(
        counts=StepCounts(tokens=10, lines=2, rows=1, layers=3, logits=20), seen=AttentionWork(single_bytes=2e9)
    )
    cost.flops |= {"matrices": 2 * 1e9 * 10, "head": 2 * 1e8 * 2}
    cost.weight_bytes |= {"matrices": 2 * 1e9, "head": 0.5 * 1e8}
    found = step_time(cost, Speeds(1.0, 1.0, calibration=KNOWN))
    head = 2 * 5e-10 * 1e8  # two lines, beyond the curve's only point
    assert found.seconds == pytest.approx(2.0 + head + 2.0 + 0.5 + 0.3 + 0.02)
    assert found.limit == "memory bandwidth (weights)"
    cost.counts.mixtures = 2
    assert step_time(cost, Speeds(1.0, 1.0, calibration=KNOWN)).seconds == pytest.approx(found.seconds + 0.5)
    slow = replace(KNOWN, decoding=(Hosted(1, 0.5, 0.1, 60.0),))
    assert step_time(cost, Speeds(1.0, 1.0, calibration=slow)).seconds == pytest.approx(60.0)  # the host takes longer


def test_prompts_compute_and_single_tokens_read(tmp_path):
    planner = read_model(make_config({}, model=str(make_tiny(tmp_path / "m")), device="cpu"), "cpu")
    alone = step_cost(planner.sheet, [Grant(1, 63)], planner.kv_format)
    both = step_cost(planner.sheet, [Grant(1, 63), Grant(16, 0)], planner.kv_format)
    assert both.seen.single_bytes == alone.seen.single_bytes > 0 and alone.seen.prompt_flops == 0
    assert both.seen.prompt_flops > 0 and (both.counts.rows, both.counts.prompts) == (2, 1)
    same = step_cost(planner.sheet, [Grant(1, 63)] * 4, planner.kv_format)
    shared = step_cost(planner.sheet, [Grant(1, 63)] * 4, planner.kv_format, 32)
    assert same.kv_bytes == 4 * alone.kv_bytes
    chunk, own = (step_cost(planner.sheet, [Grant(16, before)], planner.kv_format).seen for before in (40, 0))
    assert own.behind_flops == 0.0 < chunk.behind_flops
    assert chunk.prompt_flops - chunk.behind_flops == pytest.approx(own.prompt_flops)
    assert shared.kv_bytes == pytest.approx(same.kv_bytes - 3 * 32 * alone.kv_bytes / 65)
    assert shared.seen.shared_flops > 0 == same.seen.shared_flops


def test_keys_in_eight_bits_are_read_at_a_speed_of_their_own():
    attention = Attending(((1e3, 1e9), (1e6, 4e9)), ((1.0, 1e12),), eight=((1e3, 5e8),))
    assert attention.reading(2, 1e6, 1, 1) == 4e9 and attention.reading(1, 1e6, 1, 1) == 5e8
    assert replace(attention, eight=()).reading(1, 1e3, 1, 1) == pytest.approx(1e9)  # an older calibration
    shaped = replace(attention, shapes=((1, 100), (64, 100)), eight=())
    assert shaped.reading(1, 1e3, 1, 100) == pytest.approx(1e9)
    assert shaped.reading(2, 1e3, 64, 100) == pytest.approx(4e9) == shaped.fastest(2, 1e3)
    assert shaped.reading(2, 1e3, 8, 100) == pytest.approx(2e9)
    cost = Cost(
        counts=StepCounts(tokens=2, rows=2, layers=2), seen=AttentionWork(single_bytes=2e6, single_positions=256)
    )

    def seconds(attention):
        known = replace(KNOWN, attention=attention, decoding=(Hosted(1, 0.0, 0.0),))
        return step_time(cost, Speeds(1.0, 1.0, calibration=known)).seconds

    assert seconds(replace(shaped, shapes=((64, 100), (2, 64)))) == pytest.approx(2e6 / 4e9)
    cost.seen.number_bytes = 1
    assert seconds(attention) == pytest.approx(2e6 / 5e8)


def test_a_prefix_that_all_share_is_read_once_on_a_gpu(tmp_path):
    model = str(make_tiny(tmp_path / "m"))
    device = Device("this", "here", "gpu", 8 << 30, 1e6, {"float32": 1e12, "bfloat16": 1e12}, 0.0, "given")
    setup = Setup(device, 1, Efficiency(1.0, 1.0, 0.0, "given"))
    planner = read_model(make_config({}, model=model, kv_cache_memory_bytes=1 << 22, dtype="float32"), "gpu")
    same = [([*[3] * 160, 10 + i], 8) for i in range(6)]
    apart = [([20 + i] * 161, 8) for i in range(6)]
    one, other = (predict(planner, setup, jobs)["itl_ms"]["p50"] for jobs in (same, apart))
    each = step_cost(planner.sheet, [Grant(1, 164)], planner.kv_format).kv_bytes / 166
    assert other - one == pytest.approx(1e3 * 5 * 160 * each / 1e6, rel=0.02)


def test_this_machine_is_measured_and_predicted_from(monkeypatch, tmp_path):
    small = calibrate.CalibrationSizes(
        layers=((64, 128, 1 << 16), (128, 128, 1 << 18)),
        rows=(1, 8),
        mixture=(4, 2, 64, 64),
        mixture_rows=(1, 8),
        contexts=((2, 64),),
        prompts=((1, 32),),
        heads=(4, 2, 16),
        behind=((2, 16, 32),),
        timing=calibrate.Timing(rounds=2, round_s=1e-4, warm_s=1e-4, lasting_s=1e-4, passes=2),
    )
    monkeypatch.setattr(calibrate, "SIZES", {"cpu": small, "short": replace(small, rows=(1,))})
    for module, few in ((calibrate, {"_READ_S": 0.0}), (ceilings, {"_READ_BYTES": {"cpu": 4 << 20}, "_SHAPE_S": 0.01})):
        for name, value in few.items():
            monkeypatch.setattr(module, name, value)
    host = calibrate_host.HostSizes(1, 2, (1, 2), 6, 1)
    monkeypatch.setattr(calibrate_host, "SIZES", {"cpu": host, "short": replace(host, rows=(1,), words=False)})
    found = calibrate.measure_calibrated("cpu", ("float32", "int8"))
    known = found["calibration"]
    assert {curve["format"] for curve in known["linear"]} <= {"float32", "int8"}
    assert [rows for rows, _ in known["linear"][0]["ps_per_weight"]] == [1, 8]
    device = read_measured(found, "measured here")
    share = efficiency_of(device)
    assert share.calibrated and speeds(device, "float32", share).calibration is device.calibration
    assert speeds(device, "float32").calibration is None  # a ceiling is a ceiling
    assert not efficiency_of(device, "0.5").calibrated
    assert known["process_bytes"] > 50 << 20 and known["attention"]["behind_tflops"][0][0] == 16
    moved = 2 * 2 * 64 * 2  # keys and values of two sequences and two heads
    assert known["attention"]["decode_gb_per_s"][0][0] == moved * 16 * 2
    assert known["attention"]["decode_8bit_gb_per_s"][0][0] == moved * (16 + 2)
    planner = read_model(make_config({}, model=str(make_tiny(tmp_path / "m")), device="cpu"), "cpu")
    told = simulate(planner, Setup(device, 1, share), Uniform(3, 20, 5))
    assert told["output_tokens"] == 15 and told["seconds"] > 0
    doing: list[str] = []
    known = calibrate.measure_calibrated("cpu", ("float32",), mixture=False, short=True, now=doing.append)[
        "calibration"
    ]
    assert known["short"] and read_calibration(known).short and not known["unfinished"]
    assert [rows for rows, _ in known["linear"][0]["ps_per_weight"]] == [1] and known["host"]["logit_ns"] == 0.0
    assert "float32, part 1 of 3: size 1 of 2, 1 rows" in doing and doing[-1] == "host, part 3 of 3: a deeper one"


def test_broken_calibrations_are_named():
    assert read_calibration(None) is None
    for wrong in ({}, {"linear": 3}, {"linear": {}, "attention": {}, "host": {}}):
        with pytest.raises(ParameterError, match="doctor --measure"):
            read_calibration(wrong)


def test_what_was_measured_until_the_end_of_patience_is_kept(monkeypatch):
    def part(device, sizes, name, *, mixture, now):
        now("at work")
        if name == "attention":
            raise KeyboardInterrupt
        if name == "int8":
            raise RuntimeError("out of memory")
        return [{"format": name}]

    monkeypatch.setattr(calibrate, "measure_part", part)
    monkeypatch.setattr(calibrate, "process_bytes", lambda: 1)
    monkeypatch.setattr(calibrate, "measure", lambda device, dtypes: {"title": "here", "link": None})
    found, lines, doing = {}, [], []
    with pytest.raises(KeyboardInterrupt):
        calibrate.measure_calibrated("cpu", ("float32", "int8"), told=lines.append, now=doing.append, found=found)
    assert doing[:3] == ["reads and products", "float32, part 1 of 5", "float32, part 1 of 5: at work"]
    known = found["calibration"]
    assert found["title"] == "here" and known["linear"] == [{"format": "float32"}]
    assert known["unfinished"] == ["int8", "attention", "experts", "host"]
    assert lines[-1] == "int8: not measured (out of memory)"
    with pytest.raises(ParameterError, match="ended before attention and host"):
        read_calibration(known)


def test_kernels_are_compiled_by_processes_that_may_fail(monkeypatch):
    ways = {"good": "pass", "bad": "raise SystemExit(3)", "endless": "import time; time.sleep(1000)"}

    def process(device, part):
        return subprocess.Popen([sys.executable, "-S", "-c", ways[part]])

    monkeypatch.setattr(calibrate_compile, "_process", process)
    monkeypatch.setattr(calibrate_compile, "free_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(calibrate_compile.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(calibrate_compile, "_LONGEST_S", 3.0)
    lines = []
    with calibrate_compile.Compiling("cuda", list(ways)) as compiling:
        left = compiling.running["endless"]
        compiling.wait(lines.append)
    assert lines[0] == "bad: kernels were not compiled beforehand (status 3)"
    assert lines[1].startswith("endless: ") and "good, bad, endless" in lines[2]
    assert left.poll() is not None
    with calibrate_compile.Compiling("cuda", ["endless"]) as compiling:
        left = compiling.running["endless"]
    assert left.poll() is not None
    monkeypatch.setattr(calibrate_compile, "free_bytes", lambda device: 2 << 30)
    assert not calibrate_compile.Compiling("cuda", list(ways)).running


def test_a_gpu_computes_while_a_long_prompt_is_launched():
    known = replace(
        KNOWN,
        linear=(Curve(2.0, ((1, 1e-9),), launch_s=0.1), Curve(1.0, ((1, 1e-9),), launch_s=0.3)),
        prompting=(Hosted(1, 5.0, 0.01),),
        launched=Launched(512, 0.5, 2.0),
    )

    def seconds(tokens, size=2.0):
        cost = Cost(counts=StepCounts(tokens=tokens, rows=1, prompts=1, prompt_tokens=tokens, layers=3))
        cost.flops["matrices"], cost.weight_bytes["matrices"] = 2.0 * 1e6 * tokens, size * 1e6
        return step_time(cost, Speeds(1.0, 1.0, calibration=known)).seconds

    assert seconds(512) == pytest.approx(512e-3 + 3 * 0.01 + 5.0)  # recorded
    assert seconds(1000) == pytest.approx(0.5 + 3 * 2.0)  # the host takes longer
    assert seconds(1000, 1.0) == pytest.approx(0.5 + 3 * (2.0 + 2 * 0.2))  # and longer where there is more to launch
    assert seconds(100_000) == pytest.approx(100.0 + 3 * 0.1 + 0.5)  # hidden; latencies are those of any step


def test_what_waits_for_memory_follows_the_reads_of_this_moment():
    memory = Curve(2.0, ((1, 40e-12), (16, 60e-12), (64, 140e-12)), 2e8, read=50e9)
    slow = memory.while_reading(25e9)
    assert [t * 1e12 for _, t in slow.points] == pytest.approx([80, 80, 140])  # all, half, nothing waits for memory
    assert slow.read == 25e9 and slow.while_reading(50e9).points[0][1] == pytest.approx(40e-12)
    cached = Curve(2.0, ((1, 20e-12), (64, 140e-12)), 1e6, read=50e9)  # 100 GB/s: not from memory
    assert cached.while_reading(25e9).points == cached.points
    assert Curve(2.0, ((1, 40e-12),)).while_reading(25e9).points == ((1, 40e-12),)  # not known then
    assert memory.while_reading(1e9).points[0][1] == pytest.approx(100e-12)  # memory does not become 50 times slower
    known = replace(KNOWN, linear=(memory, replace(memory, read=100e9)))
    assert known.reads == [50e9, 100e9] and KNOWN.while_reading(1.0) is KNOWN
    assert known.while_reading(12e9).linear[0].read == pytest.approx(30e9)  # of 75 and 12, half of the way


def test_a_calibration_of_this_machine_is_read_as_the_machine_is_now(monkeypatch):
    known = replace(KNOWN, linear=tuple(replace(curve, read=50e9) for curve in KNOWN.linear))
    device = Device("this", describe("cpu"), "cpu", 1 << 30, 60e9, {}, 0.0, "measured here", calibration=known)
    monkeypatch.setattr(ceilings, "reading", lambda where: 25e9)
    found = ceilings.now_here(device)
    assert found.bytes_per_s == 25e9 and "25 GB/s now, and 50 while" in found.note
    for other in (replace(device, title="another"), replace(device, kind="gpu"), replace(device, calibration=None)):
        assert ceilings.now_here(other) is other
    monkeypatch.undo()
    assert 1e9 < ceilings.reading("cpu", 0.0) < 1e13


def test_tokens_before_a_chunk_are_attended_at_a_speed_of_their_own():
    seen = AttentionWork(prompt_flops=4e12, behind_flops=3e12)
    cost = Cost(counts=StepCounts(tokens=16, rows=1, prompts=1, prompt_tokens=16), seen=seen)

    def seconds(known):
        return step_time(cost, Speeds(1.0, 1.0, calibration=known)).seconds - 5.0

    assert seconds(KNOWN) == pytest.approx(4.0)
    behind = replace(KNOWN.attention, behind=((1.0, 6e12),))
    assert seconds(replace(KNOWN, attention=behind)) == pytest.approx(1.0 + 0.5)
    grown = replace(KNOWN, attention=replace(behind, behind=(), prompts=((16.0, 1e12), (32.0, 3e12))))
    assert seconds(grown) == pytest.approx(1.0 + 1.0)  # four times the pairs: twice as long
