"""Predicted workloads run through the real scheduler on a clock of roofline time."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tokenmill.cli.verbs import app
from tokenmill.core.config import make_config
from tokenmill.core.errors import ParameterError
from tokenmill.measure.calibration import Speeds
from tokenmill.measure.devices import Device, Efficiency
from tokenmill.measure.plan import Setup, read_model
from tokenmill.measure.roofline import Grant, floor, step_cost
from tokenmill.measure.simulate import simulate
from tokenmill.measure.throughput import measure
from tokenmill.measure.workloads import Uniform, read_workload
from tokenmill.testing.tiny import make_tiny

OPTIONS = {"kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 3, "max_num_batched_tokens": 32, "device": "cpu"}
HERE = Device("this", "here", "cpu", 8 << 30, 1e9, {"float32": 1e10}, 0.0, "measured here")
SETUP = Setup(HERE, 1, Efficiency(0.5, 0.25, 0.001, "given"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp("tiny") / "m", layers=1, hidden=32, heads=2, kv_heads=1))


def test_one_request_takes_the_sum_of_its_steps(tiny):
    planner = read_model(make_config({}, model=tiny, **OPTIONS), "cpu")
    found = simulate(planner, SETUP, Uniform(1, 40, 4))
    reach = Speeds(0.5e9, 0.25e10, step_s=0.001)
    grants = [Grant(32, 0, False), Grant(8, 32), Grant(1, 40), Grant(1, 41), Grant(1, 42)]
    each = [floor(step_cost(planner.sheet, [g], planner.kv_format), reach).seconds for g in grants]
    assert found["steps"] == 5
    assert found["seconds"] == pytest.approx(sum(each), abs=1e-6)
    assert found["ttft_ms"]["p50"] == pytest.approx(1e3 * sum(each[:2]), abs=1e-3)
    assert found["tpot_ms"]["p50"] == pytest.approx(1e3 * sum(each[2:]) / 3, abs=1e-3)


def test_steps_are_those_of_the_real_engine(tiny, tmp_path):
    file = tmp_path / "w.jsonl"
    shared = list(range(20, 60))
    rows = [{"prompt_token_ids": [*shared, 100 + i, 7], "max_tokens": 3 + i} for i in range(7)]
    file.write_text("\n".join(map(json.dumps, rows)))
    workload = read_workload(file)
    planner = read_model(make_config({}, model=tiny, **OPTIONS), "cpu")
    predicted = simulate(planner, SETUP, workload)
    run = measure({"model": tiny, **OPTIONS}, [workload], roofline=False)
    for name in ("requests", "prompt_tokens", "output_tokens", "steps", "cached_tokens", "preemptions"):
        assert predicted[name] == run[name], name
    assert predicted["cached_tokens"] > 0


def test_texts_are_counted_by_the_models_tokenizer(tmp_path):
    file, planner = tmp_path / "w.jsonl", read_model(make_config({}, model="demo", dtype="float32", **OPTIONS), "cpu")
    file.write_text('{"prompt": "Once upon a time, Gloria", "max_tokens": 4}\n')
    workload = read_workload(file)
    run = measure({"model": "demo", "dtype": "float32", **OPTIONS}, [workload], roofline=False)
    assert simulate(planner, SETUP, workload)["prompt_tokens"] == run["prompt_tokens"] > 1
    planner = read_model(make_config({}, model="demo", dtype="float32", skip_tokenizer_init=True, **OPTIONS), "cpu")
    with pytest.raises(ParameterError, match="line 1: text needs a tokenizer"):
        simulate(planner, SETUP, workload)


def test_the_command_predicts_workloads(tiny, tmp_path):
    file = tmp_path / "w.jsonl"
    file.write_text('{"prompt_token_ids": [1, 2, 3], "max_tokens": 4}\n')
    call = ["plan", tiny, "--device", "epyc-9654", "--workload", str(file)]
    done = CliRunner().invoke(app, [*call, "--json"])
    assert done.exit_code == 0, done.output
    (run,) = json.loads(done.stdout)["workloads"]
    assert run["output_tokens"] == 4 and run["seconds"] > 0
    assert "w.jsonl is predicted to take" in " ".join(CliRunner().invoke(app, call).output.split())
    file.write_text('{"prompt": "text", "max_tokens": 4}\n')
    done = CliRunner().invoke(app, [*call, "--skip-tokenizer-init"])
    assert done.exit_code not in (0, None) and "needs a tokenizer" in " ".join(done.output.split())
