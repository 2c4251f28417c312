"""What methods meet besides ordinary numbers: columns without inputs, inputs of any unit, ranges to one side of zero,
numbers that are not finite. And what engines that join matrices must find in files."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV2Config, Gemma3nTextConfig, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.folder import open_checkpoint, read_config
from tokenmill.cli.verbs import app
from tokenmill.core.errors import ModelError
from tokenmill.quant.convert import Recipe as PlainRecipe
from tokenmill.quant.convert import convert, kept_whole
from tokenmill.quant.detect import WeightRequest, check_config, load_weight
from tokenmill.quant.fused import joined
from tokenmill.quantize import recipes, sparse_methods
from tokenmill.quantize.codes import Spec, nearest
from tokenmill.quantize.gguf_export import _type, export
from tokenmill.quantize.gguf_importance import measure
from tokenmill.quantize.gptq import factor, gptq
from tokenmill.quantize.inputs import Inputs
from tokenmill.quantize.layer_stream import Stream
from tokenmill.quantize.quantize_model import QuantizeJob, quantize_model
from tokenmill.quantize.recipes import Recipe, complete_recipe
from tokenmill.testing.tiny import make_tiny

CPU = torch.device("cpu")
DEAD = range(0, 128, 2)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, 200, (4, 32), generator=torch.Generator().manual_seed(0))


def seen(unit: float = 1.0, dead: range = DEAD) -> Inputs:
    x = torch.randn(300, 128, generator=torch.Generator().manual_seed(2)) * unit
    x[:, list(dead)] = 0.0
    found = Inputs(128, CPU)
    found.add(x)
    return found


@pytest.mark.parametrize("method", recipes.INTEGERS)
@pytest.mark.parametrize(("form", "bits"), [("gptq", 2), ("gptq", 4), ("awq", 4), ("compressed-tensors", 2)])
def test_ranges_above_zero(method: str, form: str, bits: int) -> None:
    """GPTQ's files have no zero point of 0. Their scales grow by one code's share; nothing is moved by a whole step."""
    weight = torch.rand(16, 128, generator=torch.Generator().manual_seed(1)) + 0.2
    recipe = complete_recipe(Recipe(method, form, bits=bits, group=32))
    held = recipes.hold(recipe, weight, bits, seen(dead=range(0)))
    lost = float((held.dense - weight).norm() / weight.norm())
    steps = (1 << bits) - (2 if form == "gptq" else 1)
    assert lost < 0.5 / steps
    if form == "gptq":
        assert torch.equal(nearest(weight, recipes.spec_of(recipe, bits)).zeros, torch.ones(16, 4))


@pytest.mark.parametrize("unit", [2.0**-14, 2.0**10])
def test_the_unit_of_inputs_does_not_matter(unit: float) -> None:
    """Also if half of the columns have no inputs: those count least, and do not change the damping of the others."""
    weight, one, other = torch.randn(24, 128, generator=torch.Generator().manual_seed(3)), seen(), seen(unit)
    spec = Spec(3, 32, False)
    assert torch.equal(gptq(weight, spec, one).codes, gptq(weight, spec, other).codes)
    for sparsity in ("2:4", "0.5"):
        kept = [
            sparse_methods.sparsegpt(weight, sparse_methods.parse_sparsity(sparsity), each) != 0
            for each in (one, other)
        ]
        assert torch.equal(*kept)
        assert float(kept[0][:, 1::2].float().mean()) > 0.9  # those with inputs


@pytest.mark.parametrize("method", sparse_methods.METHODS)
@pytest.mark.parametrize("share", [0.003, 0.01, 0.37, 0.9])
def test_a_part_of_each_row_becomes_zero(method: str, share: float) -> None:
    """However few those are, and where columns are taken in blocks."""
    weight, inputs = torch.randn(8, 640), Inputs(640, CPU)
    inputs.add(torch.randn(64, 640))
    made = sparse_methods.METHODS[method](weight, sparse_methods.Sparsity(share, 0), inputs)
    assert (made == 0).sum(1).tolist() == [round(share * 640)] * 8


@pytest.mark.parametrize("place", [(3, 3), (3, 4)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_end(bad: float, place: tuple[int, int]) -> None:
    inputs = seen()
    inputs.hessian[place] = inputs.hessian[place[::-1]] = bad
    with pytest.raises(ModelError, match="not finite"):
        factor(inputs.hessian, 0.01)


def test_factors_are_of_the_inverse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of matrices that need more damping than asked for; a lack of memory is not taken for that."""
    hessian, alike = seen().hessian, 2 * torch.eye(128) - 1.0  # the latter wants a damping above 126
    for given, asked, damping in ((hessian, 0.01, 0.01), (alike, 0.01, 1000.0), (alike, 1e-39, 1000.0)):
        order, upper = factor(given, asked)
        wanted = given[order][:, order].double() + damping * float(given.diagonal().mean()) * torch.eye(128)
        assert torch.equal(upper, upper.triu()) and bool((upper.diagonal() > 0).all())
        assert torch.allclose(upper.T.double() @ upper.double() @ wanted, torch.eye(128).double(), atol=1e-4)

    def full(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.linalg, "cholesky", full)
    with pytest.raises(torch.OutOfMemoryError):
        factor(hessian, 0.01)


def test_matrices_that_models_absorb_are_seen(tmp_path: Path) -> None:
    """Latent attention never multiplies by kv_b_proj. Its inputs are what its norm gives, as Transformers says."""
    config = DeepseekV2Config(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=16, first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        n_group=1, topk_group=1, head_dim=8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    tokens, wanted = torch.arange(64).view(2, 32), []
    attention = model.model.layers[0].self_attn
    attention.kv_b_proj.register_forward_hook(lambda module, given, made: wanted.append(given[0].flatten(0, -2)))
    with torch.no_grad():
        model(tokens)
    ckpt = open_checkpoint(tmp_path)
    chosen = {name for name in ckpt.names() if name.endswith("_proj.weight")}
    layer = Stream(read_config(tmp_path), ckpt, "cpu", tokens).calibrate(0, chosen)
    found = layer.inputs["model.layers.0.self_attn.kv_b_proj.weight"]
    assert not layer.missed and found.count == 64
    assert torch.allclose(found.hessian, wanted[0].T @ wanted[0], atol=1e-3)
    assert ("model.layers.0.self_attn.kv_b_proj.weight",) in [fold.consumers for fold in layer.folds]


def test_layers_that_need_others_are_refused_as_such(tmp_path: Path, tokens: Tensor) -> None:
    config = Gemma3nTextConfig(
        vocab_size=96, vocab_size_per_layer_input=96, hidden_size=32, hidden_size_per_layer_input=8,
        intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_kv_shared_layers=2, laurel_rank=8, layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "in")
    job = QuantizeJob(tmp_path / "in", tmp_path / "out", complete_recipe(Recipe("smoothquant")), tokens=tokens % 96)
    with pytest.raises(ModelError, match="only methods without calibration take it"):
        quantize_model(job)
    quantize_model(replace(job, recipe=complete_recipe(Recipe("int8"))))


def damaged(source: Path, target: Path, name: str, bad: float) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    tensors[name].view(-1)[5] = bad
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("method", recipes.METHODS)
def test_weights_that_are_not_finite_are_refused(method: str, tiny: Path, tokens: Tensor, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    recipe = complete_recipe(Recipe(method, group=32, bits=4))
    job = QuantizeJob(damaged(tiny, tmp_path / "a", name, float("nan")), tmp_path / "out", recipe, tokens=tokens)
    with pytest.raises(ModelError, match=re.escape(name)):
        quantize_model(job)


def test_tensors_that_are_copied_are_looked_at_too(tiny: Path, tmp_path: Path) -> None:
    """Methods without calibration wrote a copy of a damaged model. Masks may hold infinite numbers."""
    for name in ("model.norm.weight", "model.embed_tokens.weight"):
        source = damaged(tiny, tmp_path / name, name, float("nan"))
        with pytest.raises(ModelError, match=f"{name} holds NaN"):
            convert(source, tmp_path / "out", PlainRecipe(4, 32))
        with pytest.raises(ModelError, match=f"{name} holds NaN"):
            quantize_model(QuantizeJob(source, tmp_path / "out", complete_recipe(Recipe("int8"))))
    assert not (tmp_path / "out").exists()


def test_other_writers_refuse_them_too(tiny: Path, tokens: Tensor, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    source = damaged(tiny, tmp_path / "a", name, float("inf"))
    for fp8 in (False, True):
        with pytest.raises(ModelError, match=re.escape(name)):
            convert(source, tmp_path / "out", PlainRecipe(4, 32, fp8=fp8))
    for kind in ("q8_0", "q4_k", "f16"):
        with pytest.raises(ModelError, match=re.escape(name)):
            export(source, tmp_path / "out.gguf", kind)
    norm = damaged(tiny, tmp_path / "b", "model.layers.0.input_layernorm.weight", float("inf"))
    with pytest.raises(ModelError, match="Layer 0 computes"):
        measure(norm, tokens)
    for method in sorted(recipes.CALIBRATED):
        job = QuantizeJob(norm, tmp_path / "out", complete_recipe(Recipe(method, group=32)), tokens=tokens)
        with pytest.raises(ModelError, match="Layer 0 computes"):
            quantize_model(job)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_numbers_beyond_scales_are_refused(tiny: Path, tmp_path: Path) -> None:
    """Half precision ends at 65504. float8, NF4, NVFP4 and bfloat16 hold such matrices."""
    name = "model.layers.1.mlp.up_proj.weight"
    source = damaged(tiny, tmp_path / "a", name, 3e7)
    for kind in ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "f16"):
        with pytest.raises(ModelError, match=re.escape(name)):
            export(source, tmp_path / "out.gguf", kind)
    with pytest.raises(ModelError, match=re.escape(name)):
        convert(source, tmp_path / "out", PlainRecipe(8, 32))
    with pytest.raises(ModelError, match=re.escape(name)):
        quantize_model(QuantizeJob(source, tmp_path / "out", complete_recipe(Recipe("int8"))))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    export(source, tmp_path / "out.gguf", "bf16")
    for method in ("fp8", "nf4", "nvfp4"):
        quantize_model(QuantizeJob(source, tmp_path / method, complete_recipe(Recipe(method))))


def written(source: Path, target: Path, tokens: Tensor, skip: str | None = None, **what: Any) -> tuple[Any, Any]:
    pattern = None if skip is None else re.compile(skip)
    made = quantize_model(QuantizeJob(source, target, complete_recipe(Recipe(group=32, **what)), pattern, tokens))
    return made, json.loads((target / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("unit", [1e-7, 1e7])
@pytest.mark.parametrize("form", ["rtn", "gptq", "squeezellm", "bitnet", "int4", "gguf q4_0", "gguf q4_k", "gguf f16"])
def test_matrices_whose_size_no_scale_has_are_refused(form: str, unit: float, tiny: Path, tmp_path: Path) -> None:
    """They became zeros, or were cut off, without a word."""
    name = "model.layers.1.mlp.up_proj.weight"
    source, target = tmp_path / "source", tmp_path / ("out.gguf" if "gguf" in form else "out")
    shutil.copytree(tiny, source)
    tensors = load_file(source / "model.safetensors")
    tensors[name] *= unit
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    tokens = torch.randint(0, 200, (2, 32), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ModelError, match=f"{name} holds {'smaller' if unit < 1 else 'larger'} numbers"):
        if "gguf" in form:
            export(source, target, form.removeprefix("gguf "))
        elif form == "int4":
            convert(source, target, PlainRecipe(4))
        else:
            recipe = complete_recipe(Recipe(form, group=32))
            quantize_model(QuantizeJob(source, target, recipe, tokens=tokens))
    assert not target.exists()


def test_gptq_files_name_what_they_leave_out(tiny: Path, tokens: Tensor, tmp_path: Path) -> None:
    """As GPTQModel's rules do; matrices that none matches are still held to what config.json says of all."""
    left = "model.layers.0.mlp.gate_proj"
    _, how = written(tiny, tmp_path / "out", tokens, re.escape(left), method="rtn", form="gptq", symmetric=True)
    assert list(how["dynamic"]) == ["-:^model\\.layers\\.0\\.mlp\\.gate_proj$"]
    assert "dynamic" not in written(tiny, tmp_path / "whole", tokens, method="rtn", form="gptq")[1]
    ckpt = open_checkpoint(tmp_path / "out")
    try:
        assert load_weight(ckpt, WeightRequest(left, (128, 64)), torch.float32, CPU, how=check_config(
            {"quantization_config": how})).dense().shape == (128, 64)  # fmt: skip
        request = WeightRequest("model.layers.0.mlp.up_proj", (128, 64))
        for shifted in ({"checkpoint_format": "gptq_v2"}, {"group_size": 64}):
            with pytest.raises(ModelError, match=r"up_proj\.(qzeros|scales)"):
                load_weight(ckpt, request, torch.float32, CPU, how={**how, **shifted})
    finally:
        ckpt.close()


def test_what_is_multiplied_as_one_is_known_by_name() -> None:
    names = [f"a.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj")] + ["w3.weight"]
    found = joined(names)
    assert found["a.v_proj.weight"] == ("a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight")
    assert found["a.o_proj.weight"] == ("a.o_proj.weight",) and found["a.up_proj.weight"] == ("a.up_proj.weight",)
    assert found["w3.weight"] == ("w3.weight",) and list(found) == sorted(names)


def test_joined_matrices_share_what_engines_need(tiny: Path, tokens: Tensor, tmp_path: Path) -> None:
    """Bits, and NVFP4's scale of the whole matrix."""
    made, how = written(tiny, tmp_path / "bits", tokens, method="rtn", bits=3.5)
    target_of = {name: group for group, one in how["config_groups"].items() for name in one["targets"]}
    scales = load_file(written_nvfp4(tiny, tmp_path / "fours") / "model.safetensors")
    for names in joined(made.bits).values():
        modules = [name.removesuffix(".weight") for name in names]
        assert len({made.bits[name] for name in names}) == 1
        assert len({target_of[module] for module in modules}) == 1
        assert len({float(scales[f"{module}.weight_global_scale"]) for module in modules}) == 1
    assert len(set(made.bits.values())) > 1


def written_nvfp4(source: Path, target: Path) -> Path:
    quantize_model(QuantizeJob(source, target, complete_recipe(Recipe("nvfp4"))))
    return target


@pytest.mark.parametrize("hidden", [64, 128])
def test_blocks_of_float8_say_how_activations_are_grouped(hidden: int, tokens: Tensor, tmp_path: Path) -> None:
    """In whole groups of 128, or token by token where that is impossible: Transformers refuses the former."""
    tiny = make_tiny(tmp_path / "tiny", hidden=hidden)
    _, how = written(tiny, tmp_path / "out", tokens, method="fp8-block")
    inputs = how["config_groups"]["group_0"]["input_activations"]
    wanted = ("token", None, True) if hidden == 64 else ("group", 128, True)
    assert (inputs["strategy"], inputs["group_size"], inputs["dynamic"]) == wanted
    copy = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.no_grad():
        found, kept = copy(tokens[:1, :16]).logits, whole(tokens[:1, :16]).logits
    assert float((found - kept).norm() / kept.norm()) < 0.3, "activations are rounded, too"


@pytest.mark.parametrize("layers", [1, 4, 16, 22, 28, 36, 61])
def test_layers_that_get_more_bits_are_those_of_llama_cpp(layers: int) -> None:
    def more(at: int) -> bool:
        return at < layers // 8 or at >= 7 * layers // 8 or (at - layers // 8) % 3 == 2

    for at in range(layers):
        kind = _type(f"blk.{at}.ffn_down.weight", (256, 256), "q4_k", layers, skipped=False)
        assert kind == ("Q6_K" if more(at) else "Q4_K")


@pytest.mark.parametrize("options", [["--format", "int4"], ["--method", "rtn", "--symmetric"], ["--method", "mxfp4"]])
def test_what_no_group_divides_keeps_its_precision(options: list[str], tmp_path: Path) -> None:
    """It is told, reported and left out in the config. Transformers then computes what we do."""
    source = tmp_path / "source"
    config = LlamaConfig(vocab_size=320, hidden_size=64, intermediate_size=80, num_hidden_layers=2, head_dim=16,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(source)
    result = CliRunner().invoke(app, ["quantize", str(source), str(tmp_path / "out"), *options])
    told = "2 matrices are not in whole groups and keep their precision: model.layers.0.mlp.down_proj.weight"
    assert result.exit_code == 0 and told in " ".join(result.output.split()), result.output
    report = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert report["kept"] == [f"model.layers.{n}.mlp.down_proj.weight" for n in range(2)]
    ignored = read_config(tmp_path / "out")["quantization_config"]["ignore"]
    assert set(ignored) == {"lm_head", *(name.removesuffix(".weight") for name in report["kept"])}
    ids, kind = list(range(40, 60)), torch.bfloat16
    copy = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=kind)
    with torch.no_grad():
        wanted = copy(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    with LLM(str(tmp_path / "out"), skip_tokenizer_init=True, max_model_len=64) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
        (found,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    assert found.prompt_logprobs is not None
    for at, token in enumerate(ids[1:]):
        assert (found.prompt_logprobs[at + 1] or {})[token].logprob == pytest.approx(float(wanted[at, token]), abs=0.05)


def test_what_is_multiplied_with_an_odd_matrix_is_kept_with_it(tmp_path: Path) -> None:
    """Engines join these, and want one form for all."""
    names = [f"m.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj")]
    save_file({name: torch.zeros(12 if "k_" in name else 16, 32) for name in names}, tmp_path / "model.safetensors")
    kept = kept_whole(open_checkpoint(tmp_path), set(names), 32, 8)
    assert kept == [f"m.{part}.weight" for part in ("k_proj", "q_proj", "v_proj")]
