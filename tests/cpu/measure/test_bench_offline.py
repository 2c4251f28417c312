"""latency, startup, ablate, compare and plots, and how far a run is from its roofline."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from tokenmill.cli.verbs import app
from tokenmill.compute.forward import KVFormat
from tokenmill.core.config import make_config
from tokenmill.core.errors import UserError
from tokenmill.core.step import RowSampling, RowStart, StepPlan, TableEdit
from tokenmill.measure import ceilings, plots
from tokenmill.measure.ablate import ablate, switches
from tokenmill.measure.calibration import Speeds
from tokenmill.measure.ceilings import load_measured, measure
from tokenmill.measure.compare import compare, ratio_interval
from tokenmill.measure.devices import speeds
from tokenmill.measure.plan import read_model
from tokenmill.measure.plan_recorder import SharedPrefixes, grants_of
from tokenmill.measure.roofline import Grant, floor, step_cost
from tokenmill.measure.startup import STAGES
from tokenmill.measure.throughput import compare_run, thinned
from tokenmill.measure.throughput import measure as throughput
from tokenmill.measure.workloads import Uniform
from tokenmill.testing.tiny import make_tiny


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny") / "m", layers=1, hidden=32, heads=2, kv_heads=1)


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch):
    """Ceilings are measured with few bytes and short products: how high they are is not what is tested."""
    monkeypatch.setattr(ceilings, "_READ_BYTES", {"cpu": 4 << 20})
    monkeypatch.setattr(ceilings, "_SHAPE_S", 0.01)


SMALL = ("--device", "cpu", "--kv-cache-memory-bytes", 1 << 20, "--max-num-seqs", 4)


def test_latency_runs_one_batch_again_and_again(tiny, tmp_path):
    out = tmp_path / "out.json"
    done = bench(
        "latency", tiny, *SMALL, "--batch", 3, "--input-len", 8, "--output-len", 4, "--repeat", 3, "--json", out
    )
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert found["bench"] == "latency" and found["requests"] == 3 and found["output_tokens"] == 12
    seconds = sorted(run["seconds"] for run in found["runs"])
    assert found["seconds"] == seconds[1] and len(seconds) == 3
    assert found["latency_ms"]["p50"] == pytest.approx(1e3 * seconds[1], rel=1e-3)
    assert 0 < found["mbu"] < 1 and 0 < found["mfu"] < 1 and 0 < found["roofline"] < 1
    assert len(found["timeline"]) == found["steps"]
    assert sum(prompt for _, _, prompt in found["timeline"]) == 24
    assert len(found["samples"]["ttft_ms"]) == 3


def test_startup_starts_processes(tiny, tmp_path):
    out = tmp_path / "out.json"
    done = bench("startup", tiny, *SMALL, "--repeat", 1, "--json", out)
    assert done.exit_code == 0, done.output
    stages = list(json.loads(out.read_text())["stages_s"].values())
    assert stages == sorted(stages) and stages[0] > 0
    done = bench("startup", tmp_path / "nothing", "--repeat", 1)
    assert done.exit_code not in (0, None) and "nothing" in done.output and "Traceback" not in done.output


def test_ablate_switches_off_one_thing_at_a_time(tiny, tmp_path):
    out = tmp_path / "out.json"
    made = ("--input-len", 40, "--output-len", 3, "--num-prompts", 4)
    done = bench("ablate", tiny, *SMALL, *made, "--quantization", "int8", "--only", "fast-kernels",
                 "--only", "quantised weights", "--json", out)  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    names = [row["name"] for row in found["options"]]
    assert names == ["fast kernels", "quantised weights"]
    for row in found["options"]:
        assert row["worth"] == pytest.approx(found["output_tokens_per_s"] / row["output_tokens_per_s"], rel=1e-3)
    done = bench("ablate", tiny, *SMALL, *made, "--only", "magic")
    assert done.exit_code not in (0, None) and "what can be switched off here is prefix cache" in " ".join(
        done.output.split()
    )


class Stops:
    """A progress that presses Ctrl-C when a stage of this name begins for the last of so many times."""

    def __init__(self, name, times):
        self.name, self.left = name, times

    def start(self, name, total):
        self.left -= name == self.name
        if not self.left:
            raise KeyboardInterrupt

    def advance(self):
        pass


def test_what_was_measured_before_ctrl_c_is_kept(tiny, tmp_path, monkeypatch):
    options = {"model": str(tiny), "device": "cpu", "kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 4}
    load = Uniform(1, 4, 2)
    found = throughput(options, [load] * 3, progress=Stops(load.name, 3), roofline=False)
    assert len(found["runs"]) == 2 and found["stopped"]
    with pytest.raises(KeyboardInterrupt):
        throughput(options, [load] * 3, progress=Stops(load.name, 1))
    found = ablate(options, load, only=("fast kernels", "recorded steps"), progress=Stops("loading", 3))
    assert [row["name"] for row in found["options"]] == ["fast kernels"] and found["stopped"]
    monkeypatch.setattr("tokenmill.measure.throughput.measure", lambda *_, **__: {**found, "bench": "throughput"})
    out = tmp_path / "out.json"
    done = bench("throughput", tiny, *SMALL, "--json", out)
    assert done.exit_code == 130 and json.loads(out.read_text())["stopped"]


def test_starts_that_ended_before_ctrl_c_are_kept(tiny, tmp_path, monkeypatch):
    out, started = tmp_path / "out.json", []

    def child(options, prompt_tokens):
        if len(started) == runs:
            raise KeyboardInterrupt
        started.append(1)
        return {stage: 1.0 + len(started) for stage in STAGES}

    monkeypatch.setattr("tokenmill.measure.startup._child", child)
    for runs in (2, 3, 0):
        started.clear()
        out.unlink(missing_ok=True)
        done = bench("startup", tiny, "--device", "cpu", "--repeat", 3, "--json", out)
        assert done.exit_code == (0 if runs == 3 else 130), done.output
        assert out.exists() == (runs > 0)
        if runs:
            found = json.loads(out.read_text())
            assert len(found["runs"]) == runs and found.get("stopped", False) is (runs == 2)
            assert f"the median of {runs}" in done.output
            assert ("these are the runs that had ended" in done.output) is (runs == 2)


def test_only_what_is_on_can_be_switched_off():
    config = make_config({}, device="cpu", enable_prefix_caching=False, max_num_seqs=1, kernels="reference",
                         enable_chunked_prefill=False)  # fmt: skip
    assert switches(config) == []
    config = make_config({}, device="cpu", kv_cache_dtype="float32", executor="process", max_model_len=512,
                         pruned_weights="packed", mamba_ssm_cache_dtype="float16",
                         speculative_config={"method": "ngram"})  # fmt: skip
    assert {s.name: s.off for s in switches(config)} == {
        "prefix cache": {"enable_prefix_caching": False},
        "batching": {"max_num_seqs": 1},
        "continuous batching": {"batching": "static"},
        "paged K/V": {"block_size": 512, "enable_prefix_caching": False},
        "chunked prefill": {"enable_chunked_prefill": False},
        "fast kernels": {"kernels": "reference"},
        "recorded steps": {"enforce_eager": True},
        "overlapped planning": {"pipeline_depth": 1},
        "speculation": {"speculative_config": None},
        "zeros of pruned weights left out": {"pruned_weights": "dense"},
        "K/V type": {"kv_cache_dtype": "auto"},
        "type of recurrent states": {"mamba_ssm_cache_dtype": "auto"},
    }


def start(row, count, computed=0):
    return RowStart(row=row, tokens=[0] * count, num_prompt=count, computed=computed, sampling=RowSampling())


def test_grants_follow_plans():
    plans = [
        StepPlan(id=0, starts=[start(0, 10), start(1, 40, 16)], rows=[0, 1], counts=[10, 8], samples=[True, False]),
        StepPlan(id=1, jumps=[(1, 32)], rows=[0, 1], counts=[1, 8], samples=[True, True]),
        StepPlan(id=2, ended=[0], starts=[start(0, 3)], rows=[1, 0], counts=[1, 3], samples=[True, True]),
    ]
    assert grants_of(plans, {}) == [
        [Grant(10, 0), Grant(8, 16, False)],
        [Grant(1, 10), Grant(8, 32)],
        [Grant(1, 40), Grant(3, 0)],
    ]


def test_a_shared_prefix_is_read_once():
    """Counted where every row has one new token and enough of the first blocks are the same."""

    def edit(row, blocks, at=0):
        return TableEdit(row, 0, 0, at, blocks, [16 * (at + i) for i in range(len(blocks))])

    prefixes, common = SharedPrefixes(), list(range(10))
    prompts = StepPlan(id=0, edits=[edit(0, [*common, 20]), edit(1, [*common, 30])], rows=[0, 1], counts=[9, 9])
    single = StepPlan(id=1, rows=[0, 1], counts=[1, 1])
    assert [prefixes.positions(plan, 16) for plan in (prompts, single)] == [0, 160]
    assert prefixes.positions(StepPlan(id=2, edits=[edit(1, [7, 8], at=4)], rows=[0, 1], counts=[1, 1]), 16) == 0
    assert prefixes.positions(StepPlan(id=3, ended=[1], rows=[0], counts=[1]), 16) == 0


def test_mbu_and_mfu_sum_up_the_steps(tiny):
    planner = read_model(make_config({}, model=str(tiny)), "cpu")
    plans = [
        (0.0, StepPlan(id=0, starts=[start(0, 10)], rows=[0], counts=[10], samples=[True])),
        (0.1, StepPlan(id=1, rows=[0], counts=[1], samples=[True])),
    ]
    steps = [step_cost(planner.sheet, g, planner.kv_format) for g in ([Grant(10, 0)], [Grant(1, 10)])]
    limits = Speeds(bytes_per_s=1e9, flops_per_s=1e10)
    found = compare_run(planner, limits, plans, 0.5)
    assert planner.kv_format == KVFormat("float32")
    assert found["mbu"] == pytest.approx(sum(s.total_bytes for s in steps) / 0.5 / 1e9, abs=1e-6)
    assert found["mfu"] == pytest.approx(sum(s.total_flops for s in steps) / 0.5 / 1e10, abs=1e-6)
    assert found["roofline"] == pytest.approx(sum(floor(s, limits).seconds for s in steps) / 0.5, abs=1e-6)
    assert found["timeline"] == [[0.0, 0, 10], [0.1, 1, 0]]
    assert len(thinned([[i, 0, 0] for i in range(9999)])) <= 2000 and thinned([]) == []


def test_ratios_have_intervals_that_hold_the_truth():
    source = np.random.default_rng(0)
    inside = 0
    for _ in range(40):
        old, new = source.lognormal(0.0, 0.3, 200), source.lognormal(np.log(1.2), 0.3, 200)
        low, high = ratio_interval(old, new, 50)
        inside += low <= 1.2 <= high
        assert low < np.median(new) / np.median(old) < high
    assert 33 <= inside <= 40
    assert ratio_interval([0.0, 0.0], [1.0, 1.0], 50) is None


def test_comparisons_say_what_they_rest_on():
    def result(speed, shift, runs):
        one = {"workload": "w", "output_tokens_per_s": speed, "ttft_ms": {"p50": 10.0 * shift, "p99": 20.0 * shift}}
        return {**one, "samples": {"ttft_ms": [shift * x for x in range(8, 30)]}, "runs": [one] * runs}

    rows = {row["metric"]: row for row in compare(result(100.0, 1.0, 1), result(150.0, 3.0, 1))}
    assert rows["output_tokens_per_s"]["ratio"] == 1.5 and rows["output_tokens_per_s"]["low"] is None
    assert rows["ttft_ms p50"]["ratio"] == 3.0 and rows["ttft_ms p50"]["basis"] == "requests"
    assert rows["ttft_ms p50"]["low"] <= 3.0 <= rows["ttft_ms p50"]["high"] and rows["ttft_ms p50"]["sure"]
    rows = {row["metric"]: row for row in compare(result(100.0, 1.0, 3), result(100.0, 1.0, 3))}
    assert rows["output_tokens_per_s"]["low"] == 1.0 and rows["ttft_ms p99"]["basis"] == "runs"
    assert rows["ttft_ms p50"]["sure"] is False
    with pytest.raises(UserError, match="`bench throughput` and `bench serve`"):
        compare(result(1.0, 1.0, 1), {**result(1.0, 1.0, 1), "bench": "serve"})


def test_a_measured_machine_can_be_planned_for(tiny, tmp_path):
    found = measure("cpu", ("float32", "int8", "nonsense"))
    assert found["read_gb_per_s"] > 0 and found["copy_gb_per_s"] > 0 and found["tflops"]["float32"] > 0
    assert "nonsense" not in found["tflops"]
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({"measured": found}))
    device = load_measured(file)
    assert speeds(device, "float32").bytes_per_s == found["read_gb_per_s"] * 1e9
    done = CliRunner().invoke(app, ["plan", str(tiny), "--device", str(file), "--json"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert plan["fits"] and plan["usd_per_million_tokens"] is None and plan["ceilings"]["source"].startswith("measured")


RUN = {
    "bench": "serve", "workload": "w", "timeline": [[0.0, 1, 8], [0.1, 2, 0]], "output_tokens_per_s": 5.0,
    "samples": {"ttft_ms": [1.0, 2.0], "tpot_ms": [0.5, 0.7], "itl_ms": [0.0, 0.1], "e2e_ms": [3.0, 4.0]},
    "offered_rate": 3.0, **{name: {"p50": 1.0, "p99": 2.0} for name in ("ttft_ms", "tpot_ms", "e2e_ms")},
}  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is an extra")
@pytest.mark.parametrize("result", [
    RUN,
    {**RUN, "bench": "sweep", "runs": [RUN, {**RUN, "offered_rate": 6.0}], "knee_rate": 3.0},
    {**RUN, "bench": "ablate", "options": [{"name": "x", "worth": 2.0}, {"name": "y", "worth": None}]},
    {"bench": "plan", "model": "m", "ranks": 1, "device_title": "d",
     "points": [{"context": c, "batch": b, "tpot_ms": 9.0, "output_tokens_per_s": 3.0} for c in (1, 2) for b in (1, 8)],
     },
])  # fmt: skip
def test_every_kind_of_result_can_be_drawn(result, tmp_path):
    plots.check_plot(tmp_path / "x.png")
    plots.plot(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    for bad in (tmp_path / "x.txt", tmp_path / "none" / "x.png"):
        with pytest.raises(UserError, match="--plot"):
            plots.check_plot(bad)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="needs an absent matplotlib")
def test_plots_without_matplotlib_are_refused_before_the_run(tiny, tmp_path):
    done = bench("latency", tiny, *SMALL, "--plot", tmp_path / "x.png")
    assert done.exit_code not in (0, None) and "pip install 'tokenmill[bench]'" in done.output
