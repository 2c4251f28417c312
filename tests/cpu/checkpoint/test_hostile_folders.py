"""Model folders that strangers made: pipes, devices, links to them, lies and floods end in one sentence, at once."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cpu_time import hanging_fails
from tests.thinned import WHOLE

from tokenmill import LLM
from tokenmill.core.errors import ModelError, UserError
from tokenmill.core.files import open_regular, read_object
from tokenmill.demo import demo_dir
from tokenmill.engine.load.model_source import find_source
from tokenmill.testing.tiny import make_tiny
from tokenmill.text import build
from tokenmill.text.patterns import KNOWN, check_patterns, try_patterns
from tokenmill.text.tokenizer import load_tokenizer

CPU_S = 5.0
WALL_S = 120


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"), hidden=32, heads=2, kv_heads=1)


@pytest.fixture
def folder(tiny, tmp_path):
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture(autouse=True)
def never_for_ever() -> Iterator[None]:
    """CPU time decides whether what ends was quick enough."""
    started = time.thread_time()
    with hanging_fails(WALL_S):
        yield
    assert time.thread_time() - started < CPU_S


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def terminal(path: Path) -> None:
    path.symlink_to("/dev/tty")


def link_to_pipe(path: Path) -> None:
    os.mkfifo(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def sock(path: Path) -> None:
    where = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(where)


def subfolder(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def nowhere(path: Path) -> None:
    path.symlink_to("/nonexistent/file")


def endless(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


KINDS: list[Callable[[Path], None]] = [
    pipe, device, terminal, link_to_pipe, sock, subfolder, loop, nowhere, endless
]  # fmt: skip
OTHERS = {
    "model.safetensors.index.json": ("model.safetensors",),
    "pytorch_model.bin": ("model.safetensors",),
    "pytorch_model.bin.index.json": ("model.safetensors",),
    "tokenizer.model": ("tokenizer.json",),
    "qwen.tiktoken": ("tokenizer.json",),
    "vocab.json": ("tokenizer.json",),
    "merges.txt": ("tokenizer.json",),
    "model.gguf": ("model.safetensors",),
}
"""What must go so that a file is read."""
NAMES = (
    *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"),
    *OTHERS,
)


def read_all(folder: Path) -> list[str]:
    """Read everything that an engine reads; -> what was refused."""
    said = []

    def read(act: Callable[[], object]) -> None:
        try:
            act()
        except UserError as error:
            said.append(str(error))

    read(lambda: find_source(str(folder)).config())
    read(lambda: find_source(str(folder)).generation())
    read(lambda: find_source(str(folder)).tokenizer())
    read(lambda: find_source(str(folder)).checkpoint("auto", seed=0, device="cpu").close())
    return said


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_name_that_is_no_file_is_told_in_one_sentence(kind, folder, tmp_path):
    for number, name in enumerate(NAMES):
        here = Path(shutil.copytree(folder, tmp_path / str(number)))
        for other in OTHERS.get(name, ()):
            (here / other).unlink()
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).unlink(missing_ok=True)
        if name == "merges.txt":
            (here / "vocab.json").write_text('{"a": 0}')
        if name == "added_tokens.json":
            (here / "tokenizer.json").unlink()
        kind(here / name)
        said = read_all(here)
        told = [one for one in said if Path(name).name in one]
        assert told, (name, said)
        assert all("\n" not in one and len(one) < 400 for one in told)


def test_shards_that_an_index_names_are_regular_files(folder):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    table = dict.fromkeys(load_file(folder / "a.safetensors"), "b.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    for kind in KINDS:
        kind(folder / "b.safetensors")
        assert any("b.safetensors" in said for said in read_all(folder)), kind
        shard = folder / "b.safetensors"
        shard.rmdir() if shard.is_dir() and not shard.is_symlink() else shard.unlink()
        (folder / "elsewhere").unlink(missing_ok=True)
    for name in ("../config.json", "/etc/passwd", "a/b", "", ".", "\0"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
        assert any("plain file name" in said for said in read_all(folder)), name


FLOODS = {
    "deep lists": b"[" * 100_000,
    "deep and closed": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep inside": b'{"a":' + b"[" * 70 + b"]" * 70 + b"}",
    "many lists": b'{"a":[' + b"[]," * 200_000 + b"1]}" + b" ",
    "a long number": b'{"hidden_size":' + b"9" * 100_000 + b"}",
    "no object": b"[1, 2]",
    "text": "{\u00e4".encode("latin-1"),
    "utf-16": '{"a": 1}'.encode("utf-16-be")[:-1],
    "nothing": b"",
    "zeros": bytes(1 << 20),
}


@pytest.mark.parametrize("what", FLOODS)
def test_json_of_any_shape_is_refused_or_read(what, folder):
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
                 "chat_template.json", "tokenizer.json", "model.safetensors.index.json"):  # fmt: skip
        before = (folder / name).read_bytes() if (folder / name).exists() else None
        (folder / name).write_bytes(FLOODS[what])
        said = read_all(folder)
        assert any(name in one for one in said) or what == "many lists", (name, said)
        assert all(len(one) < 600 for one in said)
        (folder / name).unlink() if before is None else (folder / name).write_bytes(before)


@pytest.mark.parametrize(
    "change",
    [
        {"text_config": 1.5},
        {"architectures": [["x"]]},
        {"architectures": 1e9, "model_type": -1},
        {"architectures": 2**31},
        {"quantization_config": "a" * 10_000},
        {"max_position_embeddings": [0] * 10_000},
        {"hidden_act": "a" * 10_000},
    ],
    ids=lambda change: "-".join(change),
)
def test_values_of_any_type_are_refused_in_a_short_sentence(change, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    try:
        LLM(str(folder), kv_cache_memory_bytes=1 << 20).close()
    except UserError as error:
        assert len(str(error)) < 4100


def test_a_file_that_grows_behind_its_size_is_cut(tmp_path):
    with pytest.raises(ModelError, match="limit"):
        read_object("/proc/kallsyms", 1000)
    with pytest.raises(ModelError, match="is a device"):
        open_regular("/dev/zero", 10)


HEADERS = {
    "longer than the file": struct.pack("<Q", 1 << 40),
    "longer than the limit": struct.pack("<Q", (16 << 20) + 1) + bytes(17 << 20),
    "deep": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "an offset beyond": struct.pack("<Q", 64) + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'.ljust(64),
    "shape that wraps": struct.pack("<Q", 96)
    + b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}'.ljust(96),
    "names without end": struct.pack("<Q", 1 << 20) + (b'{"' + b"a" * (1 << 20))[: 1 << 20],
}


@pytest.mark.parametrize("what", HEADERS)
def test_headers_that_lie(what, folder):
    (folder / "model.safetensors").write_bytes(HEADERS[what])
    said = read_all(folder)
    assert len(said) == 1 and "model.safetensors" in said[0] and len(said[0]) < 600


PATTERNS = [
    "(a+)+$",
    "(a|a)*b$",
    "((a*)*)*b",
    r"(\s*)*x$",
    "(x+x+)+y|(0+)+!x",
    "(",
    "[",
    "(?<=a+)b*(?P<",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_that_explode_or_do_not_compile(pattern, folder):
    state = json.loads((folder / "tokenizer.json").read_text())
    state["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(ModelError, match=r"tokenizer\.json: its pattern"):
        load_tokenizer(folder)
    state["pre_tokenizer"], state["normalizer"] = (
        None,
        {"type": "Replace", "pattern": {"Regex": pattern}, "content": "x"},
    )
    (folder / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(ModelError, match=r"tokenizer\.json: its pattern"):
        load_tokenizer(folder)


def test_a_pattern_whose_name_is_spelled_in_escapes_is_found():
    with pytest.raises(ModelError, match="its pattern"):
        check_patterns('{"pattern": {"\\u0052egex": "(a+)+$"}}')


def test_patterns_of_real_models_are_usable():
    rest = r"\s*[\r\n]+|\s+(?!\S)|\s+"
    known = [
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
        + rest,
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|" + rest,
    ]
    check_patterns(json.dumps([{"Regex": pattern} for pattern in known]))
    for name in ("main", "draft", "moe", "vlm"):
        data = json.loads((demo_dir(name) / "tokenizer.json").read_text())
        found = {step["pattern"]["Regex"] for step in data["pre_tokenizer"]["pretokenizers"] if "pattern" in step}
        assert found and found <= KNOWN, "the demonstration models start without a trial"
    for pattern in KNOWN if WHOLE else [build.WORDS_DEMO]:
        try_patterns([pattern])
    with pytest.raises(ModelError, match="more than"):
        check_patterns(json.dumps([{"Regex": f"a{i}"} for i in range(300)]))


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}},
        {"model": {"type": "Unigram", "vocab": [], "unk_id": 7}},
        {"model": {"type": "WordPiece", "vocab": {}, "unk_token": "[UNK]", "max_input_chars_per_word": 1,
                   "continuing_subword_prefix": "##"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}},
        {"decoder": {"type": "Strip", "content": "", "start": 1, "stop": 1}},
        {"post_processor": {"type": "BertProcessing", "sep": ["x", 10**9], "cls": ["y", -1]}},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_tokenizers_that_panic_are_refused_or_work(change, folder):
    state = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**state, **change}))
    try:
        load_tokenizer(folder).encode("Plain text \u0301 with é.")
    except UserError as error:
        assert "tokenizer" in str(error)


def test_pieces_that_would_be_taken_apart_for_ever(folder):
    (folder / "tokenizer.json").unlink()

    def record(number: int, data: bytes) -> bytes:
        size, length = b"", len(data)
        while True:
            size += bytes([(length & 127) | (128 if length > 127 else 0)])
            length >>= 7
            if not length:
                return bytes([number << 3 | 2]) + size + data

    piece = record(1, record(1, b"a" * 1_000_000))
    (folder / "tokenizer.model").write_bytes(piece + record(2, b"\x18\x02"))
    with pytest.raises(ModelError, match="too long to be a vocabulary"):
        load_tokenizer(folder)


OPTIONS = {"dtype": "float32", "kernels": "reference", "max_model_len": 64, "kv_cache_memory_bytes": 1 << 20}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_are_looked_at_where_asked(value, folder):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 5] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with LLM(str(folder), **OPTIONS) as llm:
        assert any(name in reason for reason in llm.built.facts.reasons)
    with pytest.raises(ModelError, match=f"{name} holds NaN or infinity"):
        LLM(str(folder), check_weights=True, **OPTIONS)
    tensors[name] = torch.nan_to_num(tensors[name], nan=0.0, posinf=0.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    LLM(str(folder), check_weights=True, **OPTIONS).close()
