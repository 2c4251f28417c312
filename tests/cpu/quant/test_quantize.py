"""`tokenmill quantize`: files that the compressed-tensors package and we read back, errors told, nothing left half."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tokenmill import LLM, SamplingParams
from tokenmill.cli.verbs import app
from tokenmill.core.errors import ModelError, UserError
from tokenmill.quant import compressed, convert
from tokenmill.quant.convert import Recipe
from tokenmill.quant.rounding import round_best
from tokenmill.quantize.quantize_model import QuantizeJob, quantize_model
from tokenmill.quantize.recipes import Recipe as ByMethod
from tokenmill.quantize.recipes import complete_recipe

SMALL = {"kv_cache_memory_bytes": 4 << 20, "max_num_seqs": 4}


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_is_the_packages(bits: int) -> None:
    half = 1 << (bits - 1)
    q = torch.randint(-half, half, (6, 96), dtype=torch.int8)
    packed = compressed.pack(q, bits)
    assert torch.equal(packed, pack_to_int32(q, bits))
    assert torch.equal(compressed.unpack(packed, bits, 96), q)
    assert torch.equal(unpack_from_int32(packed, bits, torch.Size(q.shape)), q)


@pytest.mark.parametrize(("bits", "dtype"), [(4, torch.bfloat16), (8, torch.bfloat16), (4, torch.float32)])
def test_search_beats_the_largest_magnitude(bits: int, dtype: torch.dtype) -> None:
    weight = torch.randn(70, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    q, scales, error = round_best(weight, bits, 32, dtype)
    got = (q.view(70, 4, 32).float() * scales.float()[..., None]).view(70, 128)
    assert abs(float((got - weight.float()).norm() / weight.float().norm()) - error) < 1e-6
    top = weight.float().view(70, 4, 32).abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    plain = (weight.float().view(70, 4, 32) / top).round() * top
    assert error < float((plain.view(70, 128) - weight.float()).norm() / weight.float().norm())
    assert torch.equal(scales.half().to(dtype), scales)
    zeros = round_best(torch.zeros(3, 32), bits, 32, torch.float32)
    assert zeros[0].count_nonzero() == 0 and zeros[2] == 0.0


@pytest.mark.parametrize(("form", "group"), [("int4", 32), ("int8", 64)])
def test_files_are_read_back(form: str, group: int, tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["quantize", str(tiny), str(target), "--format", form, "--group", str(group), "--skip", "layers.0.*o_proj"]
    )
    assert result.exit_code == 0, result.output
    config, tensors = json.loads((target / "config.json").read_text()), load_file(target / "model.safetensors")
    scheme = QuantizationConfig.model_validate(config["quantization_config"])
    weights = scheme.config_groups["group_0"].weights
    bits = {"int4": 4, "int8": 8}[form]
    assert weights is not None and (weights.num_bits, weights.group_size, weights.symmetric) == (bits, group, True)
    assert scheme.ignore == ["lm_head", "model.layers.0.self_attn.o_proj"]
    source = load_file(tiny / "model.safetensors")
    report = {entry["name"]: entry["error"] for entry in json.loads((target / convert.REPORT).read_text())["weights"]}
    packed = [name.removesuffix("_packed") for name in tensors if name.endswith("_packed")]
    assert sorted(packed) == sorted(report) and "model.layers.1.mlp.down_proj.weight" in packed
    for name in packed:
        q = unpack_from_int32(tensors[f"{name}_packed"], bits, torch.Size(tensors[f"{name}_shape"].tolist()))
        dense = q.float() * tensors[f"{name}_scale"].float().repeat_interleave(group, 1)
        error = float((dense - source[name].float()).norm() / source[name].float().norm())
        assert abs(error - report[name]) < 1e-5 and error < (0.12 if bits == 4 else 0.008)
        source[name] = dense
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight", "model.norm.weight"):
        assert torch.equal(tensors[name], source[name])

    widened = tmp_path / "widened"
    widened.mkdir()
    for path in tiny.iterdir():
        (widened / path.name).write_bytes(path.read_bytes())
    save_file(source, widened / "model.safetensors", metadata={"format": "pt"})
    for kernels in ("auto", "reference"):
        ours, dense_ours = (logprobs(folder, kernels) for folder in (target, widened))
        assert max(abs(a - b) for a, b in zip(ours, dense_ours, strict=True)) < 0.15  # activations are rounded too
    with pytest.raises(ModelError, match="already quantised"):
        convert.convert(target, tmp_path / "again", Recipe(4))


def logprobs(folder: Path, kernels: str) -> list[float]:
    with LLM(model=str(folder), dtype="float32", kernels=kernels, **SMALL) as llm:
        ids = list(range(40, 80))
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (out,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        return [row[i].logprob for i, row in zip(ids, out.prompt_logprobs or [], strict=True) if row is not None]


def test_perplexity_is_told(tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("The river was quiet, and nobody spoke for a while. " * 5)
    result = CliRunner().invoke(
        app, ["quantize", str(tiny), str(tmp_path / "out"), "--format", "int8", "--perplexity", str(text)]
    )
    assert result.exit_code == 0, result.output
    found = re.search(r"perplexity over (\d+) tokens: ([\d.]+) before, ([\d.]+) after", result.output)
    assert found and int(found[1]) > 20 and abs(float(found[3]) / float(found[2]) - 1) < 0.1


def test_a_target_with_files_is_kept(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="exists already"):
        convert.convert(tiny, tmp_path, Recipe(4))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("method", [True, False])
def test_what_other_files_say_of_the_old_weights_is_not_copied(method: bool, tiny: Path, tmp_path: Path) -> None:
    """Another tool would believe ModelOpt's file before the config, and an earlier report is not the new one."""
    source = tmp_path / "source"
    shutil.copytree(tiny, source)
    for name in ("hf_quant_config.json", convert.REPORT, "generation_config.json"):
        (source / name).write_text('{"max_new_tokens": 5}')
    if method:
        quantize_model(QuantizeJob(source, tmp_path / "out", complete_recipe(ByMethod(method="rtn", group=32))))
    else:
        convert.convert(source, tmp_path / "out", Recipe(4))
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    assert json.loads((tmp_path / "out" / convert.REPORT).read_text())["weights"]
    assert "max_new_tokens" in (tmp_path / "out" / "generation_config.json").read_text()


@pytest.mark.parametrize("where", ["save_file", "copy", "interrupt"])
def test_nothing_is_left_when_writing_fails(where: str, tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*args: Any, **options: Any) -> None:
        if where == "interrupt":
            raise KeyboardInterrupt
        raise full

    monkeypatch.setattr(convert.shutil, "copyfile", fail) if where == "copy" else monkeypatch.setattr(
        convert, "save_file", fail
    )
    with pytest.raises(KeyboardInterrupt if where == "interrupt" else UserError, match=r"No space|^$"):
        convert.convert(tiny, tmp_path / "out", Recipe(4))
    assert list(tmp_path.iterdir()) == []


def test_a_really_full_disk(tiny: Path, tmp_path: Path) -> None:
    """The system's own refusal, by a limit on file sizes in a child process, becomes a sentence and leaves nothing."""
    script = (
        "import resource, signal, sys\n"
        "from tokenmill.quant.convert import Recipe, convert\n"
        "from tokenmill.core.errors import UserError\n"
        "from pathlib import Path\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try:\n"
        "    convert(Path(sys.argv[1]), Path(sys.argv[2]), Recipe(8))\n"
        "except UserError as error:\n"
        "    print('told:', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tiny), str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert "told:" in done.stdout and "nothing is left" in done.stdout, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def test_several_shards(tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(convert, "SHARD_BYTES", 40_000)
    convert.convert(tiny, tmp_path / "out", Recipe(8))
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(logprobs(tmp_path / "out", "auto")) == 39


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"format": "marlin-24"}, "marlin-24"),
    "bits": ({"config_groups": {"g": {"weights": {"num_bits": 1, "type": "int"}}}}, "1 bit"),
    "floats": ({"config_groups": {"g": {"weights": {"num_bits": 6, "type": "float"}}}}, "6 bit float"),
    "fine floats": (
        {"config_groups": {"g": {"weights": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 64}}}},
        "groups of 64",
    ),
    "blocks": (
        {
            "config_groups": {
                "g": {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]}}
            }
        },
        "blocks of [64, 64]",
    ),
    "tensor": ({"config_groups": {"g": {"weights": {"num_bits": 8, "strategy": "token"}}}}, "per token"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_configs_that_cannot_be_read(name: str) -> None:
    change, told = BAD_CONFIGS[name]
    good = compressed.quantization_config(4, 32, ["lm_head"])
    compressed.check(good)
    with pytest.raises(ModelError, match=re.escape(told)):
        compressed.check({**good, **change})


def test_torch_files_and_shared_tensors(tiny: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in tiny.glob("*.json"):
        (source / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tiny / "model.safetensors")
    both = torch.stack([tensors["model.layers.0.input_layernorm.weight"], tensors["model.norm.weight"]])
    tensors["model.layers.0.input_layernorm.weight"], tensors["model.norm.weight"] = both[0], both[1]
    torch.save(tensors, source / "pytorch_model.bin")
    convert.convert(source, tmp_path / "a", Recipe(8))
    convert.convert(tiny, tmp_path / "b", Recipe(8))
    ours, other = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert ours.keys() == other.keys() and all(torch.equal(ours[name], other[name]) for name in ours)


KEPT_NAMES = ("model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.wg.weight", "model.layers.0.mlp.router.weight",
              "model.layers.0.self_attn.q_norm.weight", "transformer.blocks.0.norm_attn_norm.norm_1.weight",
              "transformer.blocks.0.ffn.router.layer.weight", "model.layers.0.altup.correction_coefs.weight",
              "model.layers.0.self_attn.indexer.weights_proj.weight",
              "model.layers.0.altup.modality_router.weight", "lm_head.weight")  # fmt: skip
ROUNDED_NAMES = ("model.layers.0.mlp.gate_proj.weight", "transformer.blocks.0.norm_attn_norm.attn.Wqkv.weight",
                 "model.layers.0.per_layer_input_gate.weight", "model.layers.0.mlp.experts.3.w1.weight")  # fmt: skip


def test_routers_and_factors_of_every_family_are_kept_and_what_lies_below_a_norm_is_not():
    assert [name for name in KEPT_NAMES if not convert.KEPT.search(name)] == []
    assert [name for name in ROUNDED_NAMES if convert.KEPT.search(name)] == []


def test_matrices_that_lie_the_other_way_round_are_refused_by_methods_too(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}')
    job = QuantizeJob(tmp_path, tmp_path / "out", complete_recipe(ByMethod(method="int8")))
    with pytest.raises(ModelError, match="stores its matrices transposed"):
        quantize_model(job)
