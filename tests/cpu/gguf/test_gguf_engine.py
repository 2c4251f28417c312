"""GGUF files through the whole engine, and the files that cannot be used."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.cpu.gguf.writing import Writer
from tests.thinned import WHOLE
from typer.testing import CliRunner

from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.gguf_config import read_config
from tokenmill.checkpoint.gguf_file import TYPES, TensorInfo, parse_gguf
from tokenmill.checkpoint.gguf_model import GgufModel
from tokenmill.checkpoint.gguf_names import name_table
from tokenmill.cli.verbs import app
from tokenmill.core.errors import ModelError, UserError
from tokenmill.engine.load.model_source import find_source
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.models.registry import build_model
from tokenmill.testing.tiny import make_tiny
from tokenmill.text.gguf import tokenizer_from_gguf

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SMALL = {"kv_cache_memory_bytes": 4 << 20, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model folder, and the same model as F32 and as Q8_0 GGUF files with the same tokenizer."""
    made = make_tiny(tmp_path_factory.mktemp("tiny"), hidden=256, heads=4, kv_heads=2)
    config = json.loads((made / "config.json").read_text())
    inner = json.loads((made / "tokenizer.json").read_text())
    for kind in ("F32", "Q8_0"):
        target = made / "gguf" / kind
        target.mkdir(parents=True)
        writer = Writer(target / "m.gguf", config, load_file(made / "model.safetensors"), kind)
        add_tokenizer(writer.out, inner, json.loads((made / "tokenizer_config.json").read_text()))
        writer.write()
    return made


def add_tokenizer(out: gguf.GGUFWriter, state: dict[str, Any], settings: dict[str, Any]) -> None:
    tokens = {index: token for token, index in state["model"]["vocab"].items()}
    tokens |= {token["id"]: token["content"] for token in state["added_tokens"]}
    special = {token["content"] for token in state["added_tokens"]}
    listed = [tokens[i] for i in range(len(tokens))]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(listed)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    out.add_token_merges(merges)
    out.add_token_types([3 if token in special else 1 for token in listed])
    out.add_eos_token_id(listed.index(settings["eos_token"]))
    out.add_chat_template(settings["chat_template"])


def texts(model: Path, **options: Any) -> list[Any]:
    llm = LLM(model=str(model), dtype="float32", **{**SMALL, **options})
    try:
        outs = llm.generate(["Hello there", "the river"], GREEDY)
        chat = llm.chat([{"role": "user", "content": "Hi"}], GREEDY)
        return [(out.prompt_token_ids, out.outputs[0].token_ids, out.outputs[0].text) for out in [*outs, *chat]]
    finally:
        llm.close()


def test_same_words_as_the_folder(folder: Path) -> None:
    want = texts(folder)
    assert texts(folder / "gguf" / "F32" / "m.gguf") == want
    assert texts(folder / "gguf" / "F32") == want  # a folder that holds exactly one file
    rounded = texts(folder / "gguf" / "Q8_0")
    assert [ids for ids, _, _ in rounded] == [ids for ids, _, _ in want] and all(len(o) == 12 for _, o, _ in rounded)


@pytest.mark.parametrize("options", [{"quantization": "int4"}, {"load_format": "dummy"}, {"kernels": "reference"}])
def test_options(folder: Path, options: dict[str, Any]) -> None:
    assert len(texts(folder / "gguf" / "Q8_0", **options)) == 3


def test_command_line(folder: Path) -> None:
    path = str(folder / "gguf" / "Q8_0" / "m.gguf")
    args = ["generate", path, "--prompt", "Hello", "--max-tokens", "4", "--json", "--temperature", "0"]
    result = CliRunner().invoke(app, [*args, "--kv-cache-memory-bytes", "4194304"])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout.splitlines()[-1])["token_ids"]) in range(1, 5)


def test_several_files_are_ambiguous(folder: Path, tmp_path: Path) -> None:
    source = (folder / "gguf" / "Q8_0" / "m.gguf").read_bytes()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(source)
    with pytest.raises(UserError, match=r"several GGUF models \(a.gguf, b.gguf\)"):
        LLM(model=str(tmp_path), **SMALL)
    with pytest.raises(UserError, match="load-format"):
        LLM(model=str(tmp_path / "a.gguf"), load_format="safetensors", **SMALL)
    (tmp_path / "b.gguf").unlink()
    (tmp_path / "config.json").write_text("{}")  # repositories of GGUF files often have one
    assert find_source(str(tmp_path)).path == tmp_path / "a.gguf"
    (tmp_path / "c.txt").write_text("x")
    with pytest.raises(UserError, match="neither"):
        LLM(model=str(tmp_path / "c.txt"), **SMALL)


# ------------------------------------------------------------------ files


def plain_file(path: Path, arch: str = "llama", *, skip: str = "", change: dict[str, Any] | None = None) -> Path:
    """A tiny llama file with one key left out or changed."""
    out = gguf.GGUFWriter(str(path), arch)
    values: dict[str, Any] = {
        "block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32,
        "attention.head_count": 2, "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    for key, value in {**values, **(change or {})}.items():
        if key == skip:
            continue
        name = key if key.startswith("split.") else f"{arch}.{key}"
        if isinstance(value, list):
            out.add_array(name, value)
        elif isinstance(value, str):
            out.add_string(name, value)
        elif isinstance(value, float):
            out.add_float32(name, value)
        elif key.startswith("split."):
            out.add_uint16(name, value)
        else:
            out.add_int64(name, value)
    sizes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    sizes |= {"ffn_gate": (32, 32), "ffn_up": (32, 32), "ffn_down": (32, 32), "attn_norm": (32,), "ffn_norm": (32,)}
    rng = np.random.default_rng(0)
    shapes = {f"blk.0.{name}.weight": shape for name, shape in sizes.items()}
    shapes |= {"token_embd.weight": (40, 32), "output_norm.weight": (32,)}
    for name, shape in shapes.items():
        if name != skip:
            out.add_tensor(name, rng.normal(0, 0.1, shape).astype(np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"arch": "rwkv6"}, r"'rwkv6' is not supported; known: afmoe, .*gemma2, gemma3, .*qwen3moe"),
    "another program's": ({"arch": "bitnet-b1.58"}, "'bitnet-b1.58' is not supported: another program's name"),
    "key missing": ({"skip": "embedding_length"}, "llama.embedding_length must be a whole number .* not absent"),
    "key of text": ({"change": {"block_count": "two"}}, "block_count"),
    "negative": ({"change": {"block_count": -3}}, "block_count"),
    "huge": ({"change": {"embedding_length": 1 << 50}}, "embedding_length"),
    "no heads": ({"change": {"attention.head_count": 0}}, "head_count"),
    "layers differ": ({"change": {"attention.head_count_kv": [1, 2]}}, "differs from layer to layer"),
    "epsilon is not a number": ({"change": {"attention.layer_norm_rms_epsilon": float("nan")}}, "epsilon"),
    "value length": ({"change": {"attention.value_length": 3}}, "different lengths"),
    "rope scaling": ({"change": {"rope.scaling.type": "magic"}}, "magic"),
    "attention scale": ({"change": {"attention.scale": 3.0}}, "attention.scale"),
    "no embedding": ({"skip": "token_embd.weight"}, "token_embd.weight"),
    "split count": ({"change": {"split.count": 2}}, "00001-of-00002"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_files(name: str, tmp_path: Path) -> None:
    options, told = UNUSABLE[name]
    with pytest.raises(ModelError, match=told):
        GgufModel(plain_file(tmp_path / "m.gguf", **options)).open_checkpoint()


def test_missing_and_surplus_tensors(tmp_path: Path) -> None:
    for change, told in (({"skip": "blk.0.ffn_up.weight"}, "mlp.up_proj.weight"), ({}, "odd.weight")):
        path = plain_file(tmp_path / "m.gguf", **change)
        model = GgufModel(path)
        if not change:
            model.tensors["odd.weight"] = model.tensors["output_norm.weight"]
        options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "kernels": ReferenceKernels()}
        with pytest.raises(ModelError, match=told):
            build_model(model.config, model.open_checkpoint(), **options)


def test_split_files_load_together(tmp_path: Path) -> None:
    whole = plain_file(tmp_path / "whole.gguf")
    reader = gguf.GGUFReader(str(whole))
    for number in range(2):
        out = gguf.GGUFWriter(str(tmp_path / f"m-{number + 1:05}-of-00002.gguf"), "llama")
        if number == 0:
            for field in reader.fields.values():
                if field.name.startswith("llama."):
                    kind = field.types[0]
                    out.add_key_value(field.name, field.contents(), kind)
        out.add_uint16("split.no", number)
        out.add_uint16("split.count", 2)
        for tensor in reader.tensors[number::2]:
            out.add_tensor(tensor.name, np.array(tensor.data))
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_tensors_to_file()
        out.close()
    one, both = GgufModel(whole), GgufModel(tmp_path / "m-00001-of-00002.gguf")
    assert both.config == one.config
    a, b = one.open_checkpoint(), both.open_checkpoint()
    assert set(a.names()) == set(b.names())
    assert all(torch.equal(a.tensor(name), b.tensor(name)) for name in a.names())
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match=r"missing: m-00002-of-00002\.gguf"):
        GgufModel(tmp_path / "m-00001-of-00002.gguf")


def test_truncated_files(tmp_path: Path) -> None:
    data = plain_file(tmp_path / "m.gguf").read_bytes()
    for size in [*range(0, 1500, 7), len(data) - 1]:
        with pytest.raises(ModelError):
            parse_gguf(data[:size], "m.gguf")


def header(entries: bytes, count: int, tensors: bytes = b"", num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, count) + entries + tensors + b"\0" * 64


def key(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


LIES = {
    "entries that are not there": header(b"", 1 << 40),
    "a string longer than the file": header(key("a") + struct.pack("<IQ", 8, 1 << 60), 1),
    "an array longer than the file": header(key("a") + struct.pack("<IIQ", 9, 4, 1 << 23), 1),
    "an array of more than memory": header(key("a") + struct.pack("<IIQ", 9, 4, 1 << 62), 1),
    "arrays in arrays": header(key("a") + struct.pack("<IIQ", 9, 9, 1), 1),
    "strings that are not there": header(key("a") + struct.pack("<IIQ", 9, 8, 1 << 20), 1),
    "one key twice": header(2 * (key("a") + struct.pack("<II", 4, 1)), 2),
    "an alignment of zero": header(key("general.alignment") + struct.pack("<II", 4, 0), 1),
    "a tensor of more than memory": header(
        b"", 0, key("t") + struct.pack("<IQQQQIQ", 4, 1 << 40, 1 << 40, 1 << 40, 1 << 40, 0, 0), 1
    ),
    "a tensor without rows": header(b"", 0, key("t") + struct.pack("<IQIQ", 1, 0, 0, 0), 1),
    "half a block": header(b"", 0, key("t") + struct.pack("<IQIQ", 1, 33, 2, 0), 1),
    "an unknown type": header(b"", 0, key("t") + struct.pack("<IQIQ", 1, 32, 99, 0), 1),
    "two tensors in one place": header(
        b"", 0, key("t") + struct.pack("<IQIQ", 1, 8, 0, 0) + key("u") + struct.pack("<IQIQ", 1, 8, 0, 0), 2
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_lying_headers(name: str) -> None:
    with pytest.raises(ModelError):
        parse_gguf(LIES[name], "m.gguf")


def mutate(data: bytes, source: random.Random) -> bytes:
    """A few bytes changed, swapped for telling values, cut out or doubled."""
    changed = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 4))):
        at = source.randrange(4, len(changed))
        what = source.randrange(5)
        if what == 0:
            changed[at] = source.randrange(256)
        elif what == 1:
            value = source.choice((0, 1, 0xFF, 1 << 31, 1 << 32, (1 << 63) - 1, (1 << 64) - 1))
            changed[at : at + 8] = struct.pack("<Q", value)
        elif what == 2:
            del changed[at : at + source.randrange(1, 9)]
        elif what == 3:
            changed[at:at] = changed[at : at + source.randrange(1, 40)]
        else:
            changed[at] ^= 1 << source.randrange(8)
    return bytes(changed)


def survive(count: int, data: bytes, seed: int) -> int:
    """Read that many mutated files; -> how many were still readable. Anything but ModelError is a failure."""
    source, readable = random.Random(seed), 0
    for _ in range(count):
        changed = mutate(data, source)
        try:
            metadata, tensors = parse_gguf(changed, "m.gguf")
            for info in tensors.values():
                assert 0 <= info.start <= info.stop <= len(changed)
            config = read_config(metadata, tensors, lambda name: None, "m.gguf")
            name_table(str(metadata["general.architecture"]), tensors, config)
            if source.randrange(200) == 0:
                tokenizer_from_gguf(metadata, "m.gguf")
            readable += 1
        except ModelError:
            pass
    return readable


def fuzz_file(path: Path) -> bytes:
    """A file with every kind of metadata value, a tokenizer and tensors, kept small."""
    out = gguf.GGUFWriter(str(path), "llama")
    for name, value in (
        ("block_count", 1),
        ("context_length", 64),
        ("embedding_length", 8),
        ("feed_forward_length", 8),
    ):
        out.add_uint32(f"llama.{name}", value)
    out.add_uint32("llama.attention.head_count", 2)
    out.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    out.add_string("llama.rope.scaling.type", "linear")
    out.add_float32("llama.rope.scaling.factor", 2.0)
    out.add_tokenizer_model("gpt2")
    out.add_token_list(["a", "b", "ab", "<|end|>"])
    out.add_token_merges(["a b"])
    out.add_token_types([1, 1, 1, 3])
    out.add_eos_token_id(3)
    out.add_bool("tokenizer.ggml.add_bos_token", False)
    out.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    out.add_tensor("blk.0.attn_q.weight", np.zeros((8, 8), np.float16))
    out.add_tensor("output_norm.weight", np.zeros(8, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path.read_bytes()


def test_mutated_headers(tmp_path: Path) -> None:
    data = fuzz_file(tmp_path / "m.gguf")

    count = 100_000 if WHOLE else 20_000
    readable = survive(count, data, 1)
    assert count / 100 < readable < count * 0.9  # both outcomes were really met


def test_old_mixtral_files_list_experts_one_by_one() -> None:
    block = TYPES[0]
    infos = [
        TensorInfo(f"blk.3.ffn_{part}.{expert}.weight", block, (8, 4), 0, 128)
        for part in ("gate", "up", "down")
        for expert in range(2)
    ]
    found = name_table("llama", {info.name: info for info in infos}, {"model_type": "mixtral"})
    at = "model.layers.3.block_sparse_moe.experts"
    assert set(found) == {f"{at}.{expert}.{part}.weight" for expert in range(2) for part in ("w1", "w2", "w3")}
    assert found[f"{at}.1.w3.weight"].info.name == "blk.3.ffn_up.1.weight"


def test_two_names_for_one_weight() -> None:
    block = TYPES[0]
    stacked = TensorInfo("blk.0.ffn_up_exps.weight", block, (2, 8, 4), 0, 256)
    single = TensorInfo("blk.0.ffn_up.1.weight", block, (8, 4), 256, 384)
    with pytest.raises(ModelError, match="both mean"):
        name_table("llama", {t.name: t for t in (stacked, single)}, {"model_type": "mixtral"})
