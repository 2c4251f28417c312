"""Plans: every field, every architecture, memory as the engine shares it, and bad input."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file
from tests.cpu.measure.counting_helpers import LLAMA_8B
from typer.testing import CliRunner

from tokenmill.cli.verbs import app
from tokenmill.core.config import make_config
from tokenmill.core.errors import ParameterError, UserError
from tokenmill.engine.interfaces.llm import LLM
from tokenmill.measure import plan as planning
from tokenmill.measure.devices import Device, efficiency_of, find_device, recognise, speeds, table
from tokenmill.measure.slo import cheapest, read_slo
from tokenmill.models import config_fields
from tokenmill.models.registry import architectures
from tokenmill.testing.tiny import make_tiny

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "n_embd": 64, "n_layer": 2, "n_head": 4,
    "n_positions": 512, "ffn_dim": 96, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "hidden_act": "silu", "n_routed_experts": 4, "word_embed_proj_dim": 64, "sliding_window": 64,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "alibi": False, "rotary_dim": 8, "moe_num_experts": 4,
    "shared_expert_intermediate_size": 32, "moe_k": 2, "moe_topk": 2, "d_model": 64, "n_heads": 4, "n_layers": 2,
    "max_seq_len": 512, "num_layers": 2, "num_heads": 4, "attention_heads": 4, "attention_types": [[["global"], 2]],
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}, "attn_config": {},
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "global_head_dim": 16, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
ACTS = {"GPT2LMHeadModel": "gelu", "BloomForCausalLM": "gelu", "FalconForCausalLM": "gelu", "OPTForCausalLM": "relu",
        "GPTNeoXForCausalLM": "gelu", "GemmaForCausalLM": "gelu"}  # fmt: skip
STATES = {
    "RecurrentGemmaForCausalLM": {"block_types": ["recurrent", "attention"]},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 1},
    "LongcatFlashForCausalLM": {"num_hidden_layers": 4, "head_dim": 8, "num_key_value_heads": 4},
    "Mamba2ForCausalLM": {"num_heads": 2, "n_groups": 1},
    "Zamba2ForCausalLM": {"tie_word_embeddings": True, "layers_block_type": ["mamba", "hybrid"]},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M*", "mamba_num_heads": 2, "mamba_head_dim": 64,
                             "n_groups": 1},
}  # fmt: skip
FIELDS = {"device", "fits", "memory", "max_context", "max_batch", "points", "usd_per_million_tokens", "flags"}
POINT = {"batch", "context", "ttft_ms", "tpot_ms", "output_tokens_per_s", "limit"}


def write(folder, config):
    """A config without the sizes in SMALL that its architecture does not know."""
    folder.mkdir(parents=True, exist_ok=True)
    if row := config_fields.FIELDS.get(config.get("architectures", [""])[0]):
        strange = {key for key in (*SMALL, "activation_function") if not row.knows(key)} - {"torch_dtype"}
        latent = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "minicpm3", "youtu",
                  "sarvam_mla", "mistral4", "kimi_linear", "axk1", "axk2", "hy_v4")  # fmt: skip
        strange |= {"num_key_value_heads"} if row.model_type in latent else set()
        if row.model_type in latent[1:]:
            config = {**config, "num_key_value_heads": 4}
            strange -= {"num_key_value_heads"}
        config = {key: value for key, value in config.items() if key not in strange}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def make(model, device="h200", ranks=1, options=None, **setup):
    found = find_device(device) if isinstance(device, str) else device
    config = make_config({}, model=model, **(options or {}))
    planner = planning.read_model(config, found.kind, ranks)
    return planning.plan(planner, planning.Setup(found, ranks, efficiency_of(found), **setup))


@pytest.mark.parametrize("name", architectures())
def test_every_architecture_can_be_planned(name, tmp_path):
    kind = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel").lower()
    act = ACTS.get(name)
    config = {**SMALL, "architectures": [name], "model_type": kind}
    if act:
        config |= {"hidden_act": act, "activation_function": act}
    if name.startswith(("Qwen3Next", "Qwen3_5")):
        config |= {"full_attention_interval": 2}
    config |= STATES.get(name, {})
    found = make(write(tmp_path, config), options={"max_model_len": 384})
    assert found["fits"] and found["max_context"] == 384
    assert found["per_token"]["flops"] > 2 * 64 * 64 and found["memory"]["weights"] > 0
    assert {p["limit"] for p in found["points"]} and all(p["tpot_ms"] > 0 for p in found["points"])


def test_json_has_the_promised_fields(tmp_path):
    folder = write(tmp_path / "m", LLAMA_8B)
    done = CliRunner().invoke(app, ["plan", folder, "--device", "h200", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found.keys() >= FIELDS and all(point.keys() == POINT for point in found["points"])
    memory = found["memory"]
    assert memory.keys() >= {"weights", "kv", "activations", "free"}
    assert found["device"] == "h200" and found["fits"] is True and found["max_context"] == 131072
    best = max(point["output_tokens_per_s"] for point in found["points"])
    assert found["usd_per_million_tokens"] == pytest.approx(
        find_device("h200").usd_per_hour / 3600 / best * 1e6, rel=1e-3
    )
    text = CliRunner().invoke(app, ["plan", folder, "--device", "h200", "--efficiency", "0.9,0.7"]).output
    assert "It fits" in text and "90% of the memory bandwidth, 70% of the products" in " ".join(text.split())


def test_what_does_not_fit_says_what_would(tmp_path):
    folder = write(tmp_path / "m", LLAMA_8B)
    done = CliRunner().invoke(app, ["plan", folder, "--device", "t4", "--dtype", "float16", "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == 1 and found["fits"] is False and found["points"] == []
    assert found["instead"] == "--quantization int8" and found["usd_per_million_tokens"] is None
    done = CliRunner().invoke(app, ["plan", folder, "--device", "t4", "--dtype", "float16"])
    assert "It would fit with --quantization int8." in " ".join(done.output.split())


def test_points_follow_the_roofline(tmp_path):
    folder = write(tmp_path, LLAMA_8B)
    found = make(folder, contexts=(128,), output=256, options={"max_num_seqs": 32})
    one, many = found["points"][0], found["points"][-1]
    assert (one["batch"], many["batch"]) == (1, 32)
    share = efficiency_of(find_device("h200"))
    least = 15.01e9 / 4.8e12 / share.memory + share.step_s
    assert one["tpot_ms"] == pytest.approx(1e3 * least, rel=0.01) and one["limit"] == "memory bandwidth (weights)"
    assert many["tpot_ms"] > one["tpot_ms"]
    busy = 32 * many["ttft_ms"] + 256 * many["tpot_ms"]
    assert many["output_tokens_per_s"] == pytest.approx(32 * 256 / busy * 1e3, rel=1e-3)
    half = make(folder, ranks=2, contexts=(128,))
    assert 0.5 < half["points"][0]["tpot_ms"] / one["tpot_ms"] < 0.8
    assert half["memory"]["weights"] < 0.55 * found["memory"]["weights"]


def test_a_cache_of_a_size_that_is_given_is_planned_so_and_its_flags_are_told(tmp_path):
    folder = write(tmp_path, LLAMA_8B)
    sized = {"kv_cache_memory_bytes": 1 << 30}
    few = {"num_gpu_blocks_override": 32, "max_num_seqs": 3}
    for options in (sized, few, {**sized, **few}):
        found = make(folder, options={"enable_prefix_caching": False, **options})
        blocks = options.get("num_gpu_blocks_override", (1 << 30) // (16 * 2 * 8 * 128 * 2 * 32))
        assert found["memory"]["kv"] == blocks * 16 * 2 * 8 * 128 * 2 * 32
        assert found["fits"] and found["max_context"] <= blocks * 16
        typed = {f"--{name.replace('_', '-')} {value}" for name, value in options.items()}
        assert typed | {"--no-enable-prefix-caching"} <= set(found["flags"])
        assert any("not --kv-cache-memory-bytes" in note for note in found["notes"]) == (len(options) == 3)


def test_less_precise_caches_hold_more(tmp_path):
    folder = write(tmp_path, LLAMA_8B)
    wide = make(folder, "rtx4090", options={"kv_cache_dtype": "float32"})
    plain = make(folder, "rtx4090", options={"kv_cache_dtype": "bfloat16"})
    small = make(folder, "rtx4090", options={"kv_cache_dtype": "int8"})
    assert small["max_context"] == pytest.approx(plain["max_context"] * 2 * 128 / 130, rel=0.02)
    assert plain["max_context"] == pytest.approx(2 * wide["max_context"], rel=0.02)
    assert plain["memory"]["kv"] == pytest.approx(wide["memory"]["kv"], rel=0.01)


def test_memory_is_shared_as_the_engine_shares_it(tmp_path):
    folder = write(tmp_path, {**SMALL, "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 4096})
    options = {"kv_cache_memory_bytes": 3_000_000, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    here = Device("this", "here", "cpu", 8 << 30, 1e10, {"bfloat16": 1e11}, 0.0, "measured here")
    found = make(folder, here, options=options)
    with LLM(folder, load_format="dummy", device="cpu", kernels="reference", **options) as llm:
        pool = llm.engine.executor.runner.pool
        facts = llm.built.facts
        assert found["memory"]["kv"] == sum(
            n * p for n, p in zip(facts.num_blocks, pool.layout.page_bytes, strict=True)
        )
        assert found["max_context"] == facts.max_model_len
        assert planning.read_model(llm.built.config, "cpu").sheet.weight_bytes >= facts.weight_bytes


def test_the_table_is_whole():
    for device in table().devices.values():
        assert device.memory_bytes > 8 << 30 and device.bytes_per_s > 1e10 and device.source
        assert device.usd_per_hour is None or device.price_date
        for dtype, rate in device.flops.items():
            assert dtype in ("bfloat16", "float16", "float32", "fp8", "int8") and rate > 1e11
    assert recognise("NVIDIA H200").name == "h200" and recognise("NVIDIA H100 80GB HBM3").name == "h100"
    assert recognise("NVIDIA A100-SXM4-40GB").name == "a100-40" and recognise("Voodoo 2") is None


def test_the_cheapest_setup_meets_the_objective(tmp_path, monkeypatch):
    read, known = planning.read_model, {}

    def read_once(asked, kind, ranks):
        key = asked.model.quantization, kind, ranks
        if key not in known:
            known[key] = read(asked, kind, ranks)
        return known[key]

    monkeypatch.setattr(planning, "read_model", read_once)  # four questions about one model
    folder = write(tmp_path, LLAMA_8B)
    config, here = make_config({}, model=folder), find_device("h200")
    setup = planning.Setup(here, 1, efficiency_of(here), contexts=(1024,), output=128)
    easy = cheapest(config, read_slo("ttft=5s,tpot=200ms"), 4, setup)
    hard = cheapest(config, read_slo("ttft=200ms,tpot=6ms"), 4, setup)
    for found, limit in ((easy, 200), (hard, 6)):
        assert found["tpot_ms"] <= limit and found["users"] >= 4
    assert easy["usd_per_hour"] < hard["usd_per_hour"]
    longest = cheapest(config, read_slo("ttft=5s,tpot=200ms"), 4, replace(setup, contexts=(1024, 32768)))
    assert (easy["context"], longest["context"]) == (1024, 32768) and longest["ttft_ms"] > easy["ttft_ms"]
    assert "4 users with prompts of 32768 tokens" in longest["sentences"][0]
    assert cheapest(config, read_slo("tpot=0.01ms"), 1, setup)["device"] is None
    for bad in ("", "ttft", "ttft=5", "tpot=-1ms", "speed=1ms"):
        with pytest.raises(ParameterError, match="--slo"):
            read_slo(bad)


@pytest.mark.parametrize("text", ["", "0", "1.5", "0.5,2", "a", "0.1,0.2,0.3", "nan"])
def test_bad_efficiency_is_refused(text):
    with pytest.raises(ParameterError, match="shares in"):
        efficiency_of(find_device("h200"), text)


def test_wrong_values_are_told_before_this_machine_is_measured(tmp_path, monkeypatch):
    def measure(*given, **more):
        raise AssertionError("measured")

    monkeypatch.setattr("tokenmill.cli.plan._device", measure)
    (tmp_path / "list.jsonl").write_text("[1, 2]")
    for arguments, says in (
        (["--efficiency", "nan"], "--efficiency takes one or two shares"),
        (["--workload", str(tmp_path / "list.jsonl")], "must be a JSON object"),
    ):
        done = CliRunner().invoke(app, ["plan", "demo", "--device", "cpu", *arguments])
        assert done.exit_code == 2 and says in done.output, done.output


def test_bad_input_is_told(tmp_path):
    with pytest.raises(ParameterError, match="Did you mean 'h200'"):
        find_device("h20")
    with pytest.raises(ParameterError, match="no known speed in bfloat16"):
        speeds(find_device("t4"), "bfloat16")
    folder = write(tmp_path / "m", LLAMA_8B)
    bad = tmp_path / "measured.json"
    bad.write_text('{"title": 1}')
    for arguments in (["--device", "h20"], ["--device", str(bad)], ["--users", "3"], ["--device", "t4"]):
        done = CliRunner().invoke(app, ["plan", folder, *arguments])
        assert done.exit_code not in (0, None) and "Traceback" not in done.output, arguments


def test_models_through_transformers_are_told_in_one_sentence(tmp_path):
    """Before anything is measured, and not as a list of what is built."""
    folder = write(tmp_path, {"architectures": ["FlintForCausalLM"], "model_type": "flint", "hidden_size": 64})
    for device in ("cpu", "h200"):
        done = CliRunner().invoke(app, ["plan", folder, "--device", device])
        assert done.exit_code and "Nothing is predicted for models that run through Transformers" in done.output
        assert "LlamaForCausalLM" not in done.output and len(done.output) < 400
    with pytest.raises(UserError, match="'flint'"):
        planning.check_counted(make_config({}, model=folder))


def test_short_contexts_leave_room_for_answers(tmp_path):
    folder = write(tmp_path, {**SMALL, "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 64})
    found = make(folder)
    assert found["max_context"] == 64 and found["load"]["output_tokens"] == 32
    assert {point["context"] for point in found["points"]} == {32}


def test_quantised_folders_are_counted_by_their_files(tmp_path):
    plain = make_tiny(tmp_path / "plain", hidden=128)
    done = CliRunner().invoke(app, ["quantize", str(plain), str(tmp_path / "small"), "--format", "int4"])
    assert done.exit_code == 0, done.output
    whole, small = (make(str(folder))["per_token"] for folder in (plain, tmp_path / "small"))
    assert small["flops"] == whole["flops"] and 0.2 < small["weight_bytes"] / whole["weight_bytes"] < 0.8
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_text((tmp_path / "small" / "config.json").read_text())
    with pytest.raises(UserError, match="no weight files that show how"):
        make(str(alone))


def test_float16_takes_the_same_room_on_a_cpu(tmp_path):
    """Of files, and of a configuration alone."""
    folder = tmp_path / "files"
    make_tiny(folder, hidden=128)
    file = folder / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file)
    said = {**json.loads((folder / "config.json").read_text()), "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(said))
    alone = write(tmp_path / "alone", said)

    def held(path, kind):
        return planning.read_model(make_config({}, model=str(path)), kind).sheet.weight_bytes

    assert held(folder, "gpu") == held(alone, "gpu")
    assert held(folder, "cpu") == held(alone, "cpu") < 1.02 * held(folder, "gpu"), "norms alone are in float32"


def test_what_is_not_counted_and_what_is_too_long_is_told(tmp_path):
    """Drafts, adapters, and a load that the longest context cannot hold; a context of nothing is refused."""
    call = ["plan", write(tmp_path / "m", LLAMA_8B), "--device", "h100", "--load-format", "dummy"]
    for more, said in (
        (["--speculative-config", '{"method": "ngram"}'], "speeds are those without drafts"),
        (["--enable-lora"], "adapters are not counted"),
        (["--context", "1024", "--context", "99999999"], "--context 99999999 is left out"),
        (["--output-len", "99999999"], "--output-len 99999999 is taken as"),
        (["--context", "0"], "it must be at least 1"),
    ):
        shown = " ".join(CliRunner().invoke(app, [*call, *more]).output.split())
        assert said in shown, shown
    plain = " ".join(CliRunner().invoke(app, [*call, "--context", "1024"]).output.split())
    assert not any(word in plain for word in ("drafts", "adapters", "left out", "taken as"))
