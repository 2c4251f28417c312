"""Plans for several devices: what each holds, sends, and waits for."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
from tests.cpu.measure.counting_helpers import LLAMA_8B
from typer.testing import CliRunner

from tokenmill.cli.verbs import app
from tokenmill.core.config import make_config
from tokenmill.measure import plan as planning
from tokenmill.measure.ceilings import link, read_measured
from tokenmill.measure.devices import efficiency_of, find_device, speeds
from tokenmill.measure.roofline import Grant, step_cost
from tokenmill.measure.several_devices import Spread, bubbles, hop_seconds, imbalance, spread_cost, stage_of

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 32,
    "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "vocab_size": 96, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def folder(path, config):
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def planned(path, config, ranks=1):
    options = make_config({}, model=folder(path, config), load_format="dummy")
    return planning.read_model(options, "gpu", ranks)


def test_stages_hold_their_layers_and_one_end(tmp_path):
    sheet = planned(tmp_path, LLAMA_8B).sheet
    half = stage_of(sheet, 2)
    assert len(half.spec.kv_specs) == 16
    ends = sheet.head.weight_bytes  # the embedding is as large; tables of angles come on top
    assert half.held_bytes == pytest.approx(sheet.body.weight_bytes / 2 + ends, rel=0.01)
    assert stage_of(sheet, 5).spec.kv_specs == sheet.spec.kv_specs[:7] and stage_of(sheet, 1) is sheet


def test_stages_wait_and_hop(tmp_path):
    assert bubbles(1, 1, 4) == {"prompt": 0.75, "decode": 0.75}
    assert bubbles(8, 5, 4) == {"prompt": 0.375, "decode": 0.0}
    planner = planned(tmp_path, LLAMA_8B)
    device = find_device("h100")
    shares = efficiency_of(device)
    reach = speeds(device, "bfloat16", shares)
    expected = 3 * (10 * 2 * 4096 / 2 / reach.link_bytes_per_s + reach.link_s)
    assert hop_seconds(planner.sheet, Spread(2, 4), 10, reach) == pytest.approx(expected)
    alone = planning.Setup(device, 1, shares)
    staged = replace(alone, stages=4)
    one, four = (planning.point(planner, setup, reach, 1000, 8) for setup in (alone, staged))
    pair = planning.point(planner, alone, reach, 1000, 2)
    hops = 1e3 * hop_seconds(planner.sheet, Spread(1, 4), 2, reach)
    assert four["tpot_ms"] == pytest.approx(pair["tpot_ms"] + hops, abs=1e-3)
    assert four["ttft_ms"] > one["ttft_ms"]  # one chunk passes stage after stage
    assert four["output_tokens_per_s"] > one["output_tokens_per_s"]


def test_whole_experts_are_summed_and_the_busiest_rank_sets_the_pace(tmp_path):
    planner = planned(tmp_path, MIXTURE, ranks=2)
    spread = Spread(2, 1, True)
    grants = [Grant(1, 10)] * 64
    sliced = step_cost(planner.sheet, grants, planner.kv_format)
    whole = spread_cost(step_cost(planner.sheet, grants, planner.kv_format), planner.sheet, spread)
    assert whole.reduced_bytes == sliced.reduced_bytes
    assert whole.flops["experts"] == pytest.approx(sliced.flops["experts"] * imbalance(128, 2))
    assert whole.weight_bytes["experts"] <= 4 * 8 * planner.sheet.body.mixtures[0].bytes * 1.0001
    assert whole.flops["matrices"] == sliced.flops["matrices"]
    assert imbalance(1e9, 8) == pytest.approx(1.0, abs=1e-3) and imbalance(1, 4) <= 4 and imbalance(5, 1) == 1.0
    assert spread_cost(sliced, planner.sheet, Spread(2)) is sliced


def test_the_command_takes_ranks_stages_and_experts(tmp_path):
    dense, mixed = folder(tmp_path / "a", LLAMA_8B), folder(tmp_path / "b", MIXTURE)
    call = ["plan", mixed, "--device", "h100", "--load-format", "dummy", "--tp", "2", "--pp", "2", "--ep"]
    done = CliRunner().invoke(app, [*call, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["ranks"], found["stages"], found["devices"]) == (2, 2, 4)
    assert min(found["traffic"].values()) > 0 and set(found["points"][0]["bubbles"]) == {"prompt", "decode"}
    shown = " ".join(CliRunner().invoke(app, call).output.split())
    assert "on each of 4 devices" in shown and "Each rank sends per token" in shown and "at 450 GB/s" in shown
    cores = ["plan", dense, "--device", "epyc-9654", "--load-format", "dummy", "--tp", "2"]
    assert "which counts as no time" in " ".join(CliRunner().invoke(app, cores).output.split())
    for model, more, said in (
        (dense, ["--ep", "--tp", "2"], "no experts"),
        (dense, ["--pp", "33"], "33 stages"),
        (mixed, ["--ep", "--tp", "3"], "heads"),
    ):
        done = CliRunner().invoke(app, ["plan", model, "--device", "h100", "--load-format", "dummy", *more])
        assert done.exit_code not in (0, None) and said in " ".join(done.output.split())


def test_copies_of_experts_are_held_and_must_divide(tmp_path):
    call = ["plan", folder(tmp_path, MIXTURE), "--device", "h100", "--load-format", "dummy", "--tp", "2", "--ep"]

    def held(*more):
        done = CliRunner().invoke(app, [*call, *more, "--json"])
        return json.loads(done.stdout) if done.exit_code == 0 else done.output

    copies = ["--enable-eplb", "--eplb-config", json.dumps({"num_redundant_experts": 4})]
    alone, more = held(), held(*copies)
    expert = 3 * 64 * 32 * 2  # three matrices in bfloat16
    assert more["memory"]["weights"] - alone["memory"]["weights"] == 4 * 4 * expert // 2
    assert "--enable-eplb" in more["flags"] and """--eplb-config '{"num_redundant_experts": 4}'""" in more["flags"]
    assert "do not divide by 2 ranks" in held(*copies[:2], json.dumps({"num_redundant_experts": 3}))


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Llama, counted once for each kind of device and number of ranks."""
    made = folder(tmp_path_factory.mktemp("counted"), LLAMA_8B)

    @cache
    def count(kind: str, ranks: int) -> planning.Planner:
        return planning.read_model(make_config({}, model=made, load_format="dummy", dtype="bfloat16"), kind, ranks)

    return count


COMBINED = [(tp, pp, dp) for tp in (1, 2) for pp in (1, 2) for dp in (1, 2, 3)]


@pytest.mark.parametrize(("tp", "pp", "dp"), COMBINED)
def test_engines_do_what_one_does_so_many_times(tp, pp, dp, counted):
    """On devices of their own, in every combination."""
    planner, device = counted("gpu", tp), find_device("h100")
    one = planning.Setup(device, tp, efficiency_of(device), contexts=(1000,), stages=pp)
    alone, many = planning.plan(planner, one), planning.plan(planner, replace(one, engines=dp))
    own = {"in_all", "flags"}
    assert {k: v for k, v in many.items() if k not in own} == {k: v for k, v in alone.items() if k not in own}
    assert ("--data-parallel-size 3" in many["flags"]) == (dp == 3)
    whole = many["in_all"]
    assert (whole["engines"], whole["devices"]) == (dp, tp * pp * dp)
    assert whole["max_batch"] == dp * many["max_batch"] and whole["kv"] == dp * tp * pp * many["memory"]["kv"]
    for each, all_of_them in zip(many["points"], whole["points"], strict=True):
        assert all_of_them["batch"] == dp * each["batch"]
        assert all_of_them["output_tokens_per_s"] == pytest.approx(dp * each["output_tokens_per_s"])


@pytest.mark.parametrize(("tp", "pp", "dp"), COMBINED)
def test_processes_on_one_cpu_share_it(tp, pp, dp, counted):
    """Whatever they are, together they do no more than one, and have no more memory."""
    here = read_measured(
        {"title": "t", "kind": "cpu", "memory_bytes": 256 << 30, "read_gb_per_s": 50.0, "tflops": {"bfloat16": 1.0}},
        "x",
    )
    planner, single = counted("cpu", tp), counted("cpu", 1)
    base = planning.Setup(here, 1, efficiency_of(here, "1"), contexts=(1000,))
    setup = replace(base, ranks=tp, stages=pp, engines=dp)
    count = tp * pp * dp
    assert setup.own.memory_bytes == here.memory_bytes // count
    found = planning.plan(planner, setup)
    assert found["in_all"]["devices"] == 1 and found["shared"] == (count > 1)
    assert found["memory"]["kv"] <= (2 << 30) // count
    reach = speeds(here, "bfloat16", base.efficiency)
    alone = planning.point(single, base, reach, 1000, 8)
    point = planning.point(planner, setup, reach, 1000, 8)
    together = dp * point["output_tokens_per_s"]
    assert together < 1.05 * alone["output_tokens_per_s"]
    if pp == 1:
        assert together > 0.85 * alone["output_tokens_per_s"]
        assert point["tpot_ms"] == pytest.approx(dp * alone["tpot_ms"], rel=0.15)


def test_the_command_tells_of_each_engine_and_of_all(tmp_path):
    call = ["plan", folder(tmp_path, LLAMA_8B), "--device", "h100", "--load-format", "dummy", "--tp", "2", "--dp", "3"]
    found = json.loads(CliRunner().invoke(app, [*call, "--json"]).stdout)
    assert found["devices"] == 2 and found["in_all"]["devices"] == 6
    shown = " ".join(CliRunner().invoke(app, call).output.split())
    assert "figures of one of 3 engines. In all: 6 devices" in shown and "--data-parallel-size 3" in shown


def test_links_are_measured_where_there_is_another_device():
    assert link("cpu") is None
    found = link("cpu", "cpu")
    assert found is not None and min(found.values()) > 0
    plain = {"title": "t", "kind": "gpu", "memory_bytes": 1, "read_gb_per_s": 1.0, "tflops": {}}
    assert read_measured({**plain, "link": {"gb_per_s": 3.0, "us": 9.0}}, "here").link_bytes_per_s == 3e9
    assert read_measured({**plain, "link": None}, "here").link_bytes_per_s == 0
