"""What is named instead of a model is told, with what to name: by the command line, the engine and a pull alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tokenmill.checkpoint.pull import measured
from tokenmill.cli.unloaded_model import look_for
from tokenmill.core.errors import ModelError, UserError
from tokenmill.demo import demo_model
from tokenmill.engine.load.model_source import find_source

WAYS: dict[str, Callable[[Path], Any]] = {
    "before the load": lambda path: look_for(str(path)),
    "the load": lambda path: find_source(str(path)).config(),
    "a pull": measured,
}


def write_gguf(path: Path, kind: str | None, architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    if kind is not None:
        writer.add_string("general.type", kind)
    writer.add_tensor("a.weight", np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("kind", "architecture", "words"),
    [
        ("mmproj", "clip", "sees or hears, not a model: name the GGUF file with its language model"),
        (None, "clip", "sees or hears, not a model"),
        ("model", "clip", "sees or hears, not a model"),
        ("adapter", "llama", "an adapter, not a model: load its model with --enable-lora"),
        ("imatrix", "llama", "the importance of a model's columns"),
    ],
)
def test_other_gguf_files(tmp_path: Path, way: str, kind: str | None, architecture: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        WAYS[way](write_gguf(tmp_path / "a.gguf", kind, architecture))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize("config", [False, True])
def test_a_folder_of_an_adapter(tmp_path: Path, way: str, weights: str, config: bool) -> None:
    settings = tmp_path / "adapter_config.json"
    settings.write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    (tmp_path / weights).write_bytes(b"x")
    if config:
        (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"an adapter, not a model: load owner/base with --enable-lora --lora-modules"):
        WAYS[way](tmp_path)
    for broken in (
        "{",
        "[]",
        json.dumps({"base_model_name_or_path": 5}),
        json.dumps({"base_model_name_or_path": "\n"}),
    ):
        settings.write_text(broken)
        with pytest.raises(ModelError, match="an adapter, not a model: load its model with"):
            WAYS[way](tmp_path)


def test_a_model_with_an_adapter_beside_it_is_a_model(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "config.json"):
        (tmp_path / name).write_text("{}")
    look_for(str(tmp_path))  # dummy weights need no more
    for name in ("adapter_model.safetensors", "model.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    look_for(str(tmp_path))
    assert find_source(str(tmp_path)).config() == {}


@pytest.mark.parametrize("way", WAYS)
def test_a_folder_of_the_hubs_cache(tmp_path: Path, way: str) -> None:
    version = tmp_path / "models--acme--tiny" / "snapshots" / "abc"
    version.mkdir(parents=True)
    with pytest.raises(UserError, match=rf"name it as on the hub, or name {version}\."):
        WAYS[way](version.parent.parent)


@pytest.mark.parametrize("way", WAYS)
def test_one_file_of_several(tmp_path: Path, way: str) -> None:
    demo = demo_model("demo")
    assert demo is not None
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        with pytest.raises(UserError, match=rf"{name}: it is one file of a model: name its folder, {demo}\."):
            WAYS[way](demo / name)
    for name in ("adapter_config.json", "adapter_model.safetensors", "notes.txt"):
        (tmp_path / name).write_text("{}")
        words = "a folder or a .gguf file" if name == "notes.txt" else "one file of an adapter: name its model"
        with pytest.raises(UserError, match=words):
            WAYS[way](tmp_path / name)
