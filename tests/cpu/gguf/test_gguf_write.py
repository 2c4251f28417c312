"""Models written as GGUF: read back by the format's own library and by us, whole or not at all."""

from __future__ import annotations

import errno
import json
import re
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants
from tests.thinned import WHOLE
from transformers import AutoModelForCausalLM, PretrainedConfig
from typer.testing import CliRunner

from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint import gguf_write
from tokenmill.checkpoint.gguf_blocks import Blocks
from tokenmill.checkpoint.gguf_file import TYPES, open_gguf
from tokenmill.cli.verbs import app
from tokenmill.core.errors import ModelError, UserError
from tokenmill.demo import demo_dir
from tokenmill.engine.load.model_source import find_source
from tokenmill.layers.rope import frequencies, rope_settings
from tokenmill.quant import importance
from tokenmill.quant.gguf_rounding import ENCODERS
from tokenmill.quantize.gguf_export import FILE_TYPES, export
from tokenmill.testing.tiny import make_tiny
from tokenmill.text.gguf import tokenizer_from_gguf
from tokenmill.text.tokenizer import load_tokenizer

SMALL = {"kv_cache_memory_bytes": 4 << 20, "max_num_seqs": 4, "max_model_len": 512}
TEXTS = [
    "Once upon a time, 1234 cats",
    "<|im_start|>user\nHé!  two  spaces<|im_end|>\n",
    "中文 and code: x = f(y[3])\n\n\t",
]


EVEN = ("q4_0", "q4_1", "q5_0", "q5_1")
"""Kinds of files whose blocks have 32 numbers."""
MOST = {"Q8_0": 0.006, "Q6_K": 0.02, "Q5_K": 0.042, "Q5_1": 0.042, "Q5_0": 0.048, "Q4_K": 0.083, "Q4_1": 0.082,
        "Q4_0": 0.088, "IQ4_NL": 0.082, "IQ4_XS": 0.082, "Q3_K": 0.165, "Q2_K": 0.31,
        "IQ3_S": 0.14, "IQ3_XXS": 0.2, "IQ2_S": 0.26, "IQ2_XS": 0.3, "IQ2_XXS": 0.36, "IQ1_M": 0.5, "IQ1_S": 0.55,
        "TQ1_0": 0.5, "TQ2_0": 0.5}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(ENCODERS))
@pytest.mark.parametrize("size", [1e-2, 1.0, 300.0])
def test_blocks_are_what_the_library_reads(kind: str, size: float) -> None:
    rows = torch.randn(7, 768, generator=torch.Generator().manual_seed(1)) * size
    rows[2] = 0.0
    rows[3, :256] = size
    rows[4] = rows[4].abs()
    back = torch.from_numpy(quants.dequantize(ENCODERS[kind](rows).numpy(), GGMLQuantizationType[kind]))
    error = (back - rows).norm(dim=1) / rows.norm(dim=1).clamp(min=1e-9)
    assert error.max() < MOST[kind]
    assert back[2].count_nonzero() == 0
    if kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"):  # at least as near as the library's own rounding
        theirs = quants.dequantize(
            quants.quantize(rows.numpy(), GGMLQuantizationType[kind]), GGMLQuantizationType[kind]
        )
        assert (back - rows).norm() <= (torch.from_numpy(theirs) - rows).norm() * 1.0001


def answer_of(model: str) -> list[int]:
    with LLM(model=model, **SMALL) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        return list(llm.generate(["Once upon a time"], params)[0].outputs[0].token_ids)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_k", "bf16"])
def test_the_demo_model_by_the_command(kind: str, tmp_path: Path) -> None:
    """Of the last two kinds the tokenizer is compared and a text is written, of the others at night too."""
    target = tmp_path / "demo.gguf"
    result = CliRunner().invoke(app, ["quantize", "demo", str(target), "--format", f"gguf-{kind}"])
    assert result.exit_code == 0, result.output
    assert "other readers use a similar one" in result.output
    reader = GGUFReader(target)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    inner = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_k": "Q4_K", "bf16": "BF16"}[kind]
    assert types["blk.3.attn_q.weight"] == inner and types["blk.3.attn_norm.weight"] == "F32"
    assert types["token_embd.weight"] == {"q8_0": "Q8_0", "bf16": "BF16"}.get(kind, "Q6_K")
    if kind == "q4_k":
        assert types["blk.0.ffn_down.weight"] == "Q6_K" and types["blk.1.ffn_down.weight"] == "Q4_K"
    if kind in EVEN + ("q8_0",) and not WHOLE:
        return
    source, ours = load_tokenizer(demo_dir("main")), find_source(str(target)).tokenizer()
    for text in TEXTS:
        assert ours.encode(text) == source.encode(text)
    assert ours.chat_template == source.chat_template and set(source.eos_ids) <= set(ours.eos_ids)
    said = answer_of(str(target))
    assert said and (kind != "bf16" or said == answer_of("demo"))


FAMILIES = {
    "llama": {"num_key_value_heads": 2, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": None},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 32, "norm_topk_prob": True},
    "gemma": {"num_key_value_heads": 2, "head_dim": 16},
    "arcee": {"num_key_value_heads": 2},
    "cohere": {"num_key_value_heads": 2, "logit_scale": 0.25},
    "cohere2": {"num_key_value_heads": 2, "logit_scale": 0.25, "sliding_window": 16, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16, "partial_rotary_factor": 0.5},
    "olmo3": {"num_key_value_heads": 2, "sliding_window": 16,
              "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "starcoder2": {"num_key_value_heads": 2, "sliding_window": 16},
    "ernie4_5": {"num_key_value_heads": 2, "head_dim": 16},
    "exaone4": {"num_key_value_heads": 2, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    "glm4": {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0},
    "granite": {"num_key_value_heads": 2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
                "attention_multiplier": 0.2, "logits_scaling": 2.0},
    "hunyuan_v1_dense": {"num_key_value_heads": 2, "head_dim": 16},
    "olmo2": {"num_key_value_heads": 2},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "seed_oss": {"num_key_value_heads": 2, "head_dim": 16},
    "smollm3": {"num_key_value_heads": 2, "pad_token_id": 0, "no_rope_layers": [1, 1]},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16},
}  # fmt: skip


def _unknown_names(path: Path) -> set[str]:
    """Names of tensors that llama.cpp does not look for in a file of this family. (Our reader takes more than one for
    a norm.)"""
    file = GGUFReader(path)
    said = bytes(file.fields["general.architecture"].parts[-1]).decode()
    arch = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == said)
    known = {gguf.TENSOR_NAMES[each].format(bid=0, xid=0) for each in gguf.MODEL_TENSORS[arch]}
    return {
        tensor.name
        for tensor in file.tensors
        if re.sub(r"^blk\.\d+", "blk.0", tensor.name.rpartition(".")[0]) not in known
    }


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_families_come_back_the_same(family: str, tmp_path: Path) -> None:
    """The same logits from the folder and from the file, in 16 bits that hold the weights exactly."""
    folder = _family(family, tmp_path)
    export(folder, tmp_path / "model.gguf", "f16")
    assert not _unknown_names(tmp_path / "model.gguf")
    prompts = [{"prompt_token_ids": [3, 9, 27, 81 % 90, 5] * 6}]
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3, prompt_logprobs=0)
    found = []
    for name in (folder, tmp_path / "model.gguf"):
        with LLM(model=str(name), dtype="float32", skip_tokenizer_init=True, **SMALL) as llm:
            (output,) = llm.generate(prompts, params)
            found.append((output.outputs[0].token_ids,
                          [next(iter(p.values())).logprob for p in output.prompt_logprobs[1:]]))  # fmt: skip
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][1], found[1][1], atol=2e-4)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
UNSAID = {
    "another activation": ("llama", {"hidden_act": "gelu"}, "'hidden_act' = 'gelu'"),
    "windows in other layers": ("gemma2", {"layer_types": ["full_attention"] * 2}, "'layer_types'"),
    "gates that do not add up to one": ("qwen3_moe", {"norm_topk_prob": False}, "'norm_topk_prob' = False"),
    "borders that are not rounded": ("mistral", {"rope_parameters": {**YARN, "truncate": False}}, ""),
    "two settings": ("qwen3_moe", {"norm_topk_prob": False, "hidden_act": "gelu"}, "'gelu', 'norm_topk_prob' = False"),
    "windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, "sliding_window"),
    "no caps": ("gemma2", {"attn_logit_softcapping": None}, "'attn_logit_softcapping' = None"),
}


@pytest.mark.parametrize("name", UNSAID)
def test_what_a_file_cannot_say_is_refused(name: str, tmp_path: Path) -> None:
    """It was left out, and the copy was another model."""
    family, more, told = UNSAID[name]
    folder = _family(family, tmp_path, **more)
    with pytest.raises(ModelError, match="GGUF files of the family") as error:
        export(folder, tmp_path / "model.gguf", "f16")
    assert told in str(error.value) and not (tmp_path / "model.gguf").exists()


_OLD = {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROTATIONS = {
    "a gain of its own": {"rope_parameters": {**YARN, "attention_factor": 1.1}},
    "a gain of two": {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}},
    "positions beside it": {"rope_parameters": _OLD, "original_max_position_embeddings": 32},
    "llama3 with positions beside it": {"rope_scaling": _LLAMA3, "original_max_position_embeddings": 32},
    "two spellings": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_parameters": YARN},
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations_come_back_the_same(name: str, tmp_path: Path) -> None:
    folder = _family("llama", tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    path = folder / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key != "rope_parameters"}
    path.write_text(json.dumps({**config, "rope_theta": 1e4, **ROTATIONS[name]}))
    export(folder, tmp_path / "model.gguf", "f16")
    made = [find_source(str(each)).config() for each in (folder, tmp_path / "model.gguf")]
    (first, gain), (second, other) = (frequencies(rope_settings(each, 16), 128) for each in made)
    assert gain == pytest.approx(other) and torch.allclose(first, second, rtol=1e-6)


@pytest.mark.parametrize("family", ["glm4", "nemotron"])
def test_the_part_of_a_head_that_rotates_may_lie_beside_the_settings(family: str, tmp_path: Path) -> None:
    folder = _family(family, tmp_path)
    path = folder / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key != "rope_parameters"}
    path.write_text(json.dumps({**config, "partial_rotary_factor": 0.5}))
    export(folder, tmp_path / "model.gguf", "f16")
    assert open_gguf(tmp_path / "model.gguf").metadata[f"{family}.rope.dimension_count"] == 8


def test_a_deep_model_enlarges_roundings(tmp_path: Path) -> None:
    """Which is no other model."""
    export(_family("llama", tmp_path, num_hidden_layers=40), tmp_path / "model.gguf", "f16")


def test_norms_that_llama_cpp_would_not_read_are_refused(tmp_path: Path) -> None:
    folder = _family("cohere", tmp_path, use_qk_norm=True)
    with pytest.raises(ModelError, match=r"'use_qk_norm'.*64 layers and more"):
        export(folder, tmp_path / "model.gguf", "f16")


def test_what_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*given: object) -> None:
        raise AssertionError("this takes minutes")

    monkeypatch.setattr("tokenmill.quantize.gguf_importance.measure", never)
    make_tiny(tmp_path / "llama", architecture="llama")
    path = tmp_path / "llama" / "config.json"
    config = json.loads(path.read_text())
    for said, told in ({"hidden_act": "gelu"}, "cannot be expressed"), ({"model_type": "phi"}, "cannot be written"):
        other = {"architectures": ["PhiForCausalLM"]} if "model_type" in said else {}
        path.write_text(json.dumps({**config, **said, **other}))
        words = ["quantize", str(tmp_path / "llama"), str(tmp_path / "out.gguf"), "--format", "gguf-iq2_xxs"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2 and "Error" not in result.output, result.output
        assert not (tmp_path / "out.gguf").exists(), told


def _family(family: str, tmp_path: Path, **more: object) -> Path:
    folder = tmp_path / family
    make_tiny(folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    for file in folder.glob("*.safetensors"):
        file.unlink()
    from transformers import AutoConfig

    config: PretrainedConfig = AutoConfig.for_model(
        family, hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=size,
        max_position_embeddings=512, tie_word_embeddings=family.startswith(("gemma", "cohere")),
        **{"num_hidden_layers": 4 if family in ("cohere2", "olmo3") else 2, **FAMILIES[family], **more},
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for value in model.parameters():  # numbers that half precision holds
            value.copy_((torch.randn_like(value) * 0.1 if value.ndim > 1 else value + 0.25).half().float())
    model.save_pretrained(folder)
    return folder


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, target = make_tiny(tmp_path / "tiny"), tmp_path / "out" / "model.gguf"

    def full(file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_write, "_flush", full)
    with pytest.raises(UserError, match=r"No space left on device.*nothing is left"):
        export(tiny, target, "q8_0")
    assert list(target.parent.iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setattr(gguf_write.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(UserError, match="are free there"):
        export(tiny, target, "q8_0")
    assert list(target.parent.iterdir()) == []


def test_a_mark_without_a_row_is_left_out(tmp_path: Path) -> None:
    """Settings may name marks that the model does not have."""
    tiny = make_tiny(tmp_path / "tiny")
    settings = json.loads((tiny / "tokenizer_config.json").read_text())
    (tiny / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "<nowhere>"}))
    export(tiny, tmp_path / "model.gguf", "q8_0")
    found = open_gguf(tmp_path / "model.gguf").metadata
    assert len(found["tokenizer.ggml.tokens"]) == 320 and "tokenizer.ggml.padding_token_id" not in found
    again = tokenizer_from_gguf(found, "model.gguf")
    assert again.token_to_id("<nowhere>") is None and again.encode("flour") == load_tokenizer(tiny).encode("flour")


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny")
    target = tmp_path / "model.gguf"
    export(tiny, target, "q8_0")
    with pytest.raises(UserError, match="exists already"):
        export(tiny, target, "q8_0")
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ModelError, match="GPT2LMHeadModel cannot be written"):
        export(tiny, tmp_path / "other.gguf", "q8_0")
    (tiny / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ModelError, match="already quantised"):
        export(tiny, tmp_path / "other.gguf", "q8_0")
    result = CliRunner().invoke(app, ["quantize", "demo", str(tmp_path / "folder"), "--format", "gguf-q8_0"])
    assert result.exit_code != 0
    result = CliRunner().invoke(app, ["quantize", str(target), str(tmp_path / "again"), "--format", "int8"])
    assert result.exit_code != 0


def write_importance(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    entries = [
        gguf_write.Entry(name, tuple(t.shape), "F32", partial(lambda raw: [raw], t.numpy().tobytes()))
        for name, t in tensors.items()
    ]
    gguf_write.write_gguf(path, {"general.type": "imatrix"}, entries)
    return path


@pytest.mark.parametrize("kind", sorted(set(ENCODERS) - {"Q8_0", "TQ1_0", "TQ2_0"}))
def test_columns_that_count_more_err_less(kind: str) -> None:
    random = torch.Generator().manual_seed(0)
    rows, counts = torch.randn(16, 512, generator=random), torch.rand(512, generator=random).pow(8) + 1e-3
    block = next(each for each in TYPES.values() if each.name == kind)
    lost = [
        float(((Blocks(block, ENCODERS[kind](rows, each)).dense() - rows).square() * counts).sum())
        for each in (None, counts)
    ]
    assert lost[1] < 0.8 * lost[0]
    even = ENCODERS[kind](rows[:4], torch.full((512,), 2.0))
    assert torch.equal(even, ENCODERS[kind](rows[:4]))


def test_importance_files(tmp_path: Path) -> None:
    tiny, name = make_tiny(tmp_path / "tiny"), "blk.0.attn_q.weight"
    columns = int(json.loads((tiny / "config.json").read_text())["hidden_size"])
    sums, counts = torch.rand(1, columns).pow(6) + 1e-6, torch.tensor([[7.0]])
    good = {f"{name}.in_sum2": sums, f"{name}.counts": counts}
    file = write_importance(tmp_path / "imatrix.gguf", good)
    assert torch.allclose(importance.read(file)[name], sums / 7.0)
    export(tiny, tmp_path / "plain.gguf", "q4_0")
    command = ["quantize", str(tiny), str(tmp_path / "counted.gguf"), "--format", "gguf-q4_0", "--imatrix", str(file)]
    assert CliRunner().invoke(app, command).exit_code == 0
    plain, counted = (open_gguf(tmp_path / f"{which}.gguf") for which in ("plain", "counted"))
    same = {n: bytes(plain.bytes_of(plain.tensors[n])) == bytes(counted.bytes_of(counted.tensors[n]))
            for n in plain.tensors}  # fmt: skip
    assert [n for n, equal in same.items() if not equal] == [name]
    lies: dict[str, tuple[dict[str, torch.Tensor], str]] = {
        "none": ({"a": sums}, "not an importance file"),
        "counts": ({f"{name}.in_sum2": sums}, "no counts"),
        "below": ({**good, f"{name}.in_sum2": -sums}, "cannot be sums of squares"),
        "nan": ({**good, f"{name}.counts": counts * float("nan")}, "cannot be sums of squares"),
        "several": ({**good, f"{name}.counts": torch.ones(3, 1)}, "3 counts"),
        "shape": ({**good, f"{name}.in_sum2": sums[:, 1:].contiguous()}, "another model"),
    }
    for which, (tensors, told) in lies.items():
        lying = write_importance(tmp_path / f"{which}.gguf", tensors)
        with pytest.raises(UserError, match=told):
            export(tiny, tmp_path / "out.gguf", "q4_0", importance=importance.read(lying))
    refused = CliRunner().invoke(app, ["quantize", str(tiny), str(tmp_path / "x"), "--imatrix", str(file)])
    assert refused.exit_code == 2 and "--imatrix goes with" in " ".join(refused.output.split())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _family("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("kind", sorted({*FILE_TYPES} - {"f16", "bf16", "q8_0", *EVEN}))
def test_rows_that_are_no_whole_blocks_take_the_next_type_and_it_is_said(
    kind: str, llama: Path, tmp_path: Path
) -> None:
    target = tmp_path / "model.gguf"
    _, note = export(llama, target, kind)
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(target).tensors}
    inner = [types[name] for name in types if name.endswith(("attn_q.weight", "ffn_up.weight"))]
    assert set(inner) == {
        {"q4_k": "Q5_0", "q5_k": "Q5_1", "q6_k": "Q8_0", "tq1_0": "Q4_0", "tq2_0": "Q4_0"}.get(kind, "IQ4_NL")
    }
    assert note is not None and "blocks of 256" in note
    assert (inner[0] in note) == (kind != "iq4_nl"), "what was asked for is no surprise"
