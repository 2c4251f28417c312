"""A file that is something else than its name says is told as what it is, by every reader."""

from __future__ import annotations

import gzip
import json
import pickle

import pytest
import torch
from safetensors.torch import save

from tokenmill.checkpoint.folder import open_checkpoint, read_config
from tokenmill.checkpoint.gguf_file import open_gguf
from tokenmill.core.errors import ModelError
from tokenmill.core.files import told_by
from tokenmill.lora.store import read_adapter
from tokenmill.text.tokenizer import load_tokenizer

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
OTHERS = {
    "a Git LFS pointer.*git lfs pull": POINTER,
    "a web page": b"\n<!DOCTYPE html><html><body>Sign in</body></html>",
    r"compressed \(gzip\)": gzip.compress(b"x" * 99),
    "nothing but zeros": bytes(999),
}
KINDS = {
    "a GGUF file": b"GGUF\x03\x00\x00\x00" + bytes(40),
    "a zip archive, as torch.save": b"PK\x03\x04\x14\x00" + bytes(40),
    "a pickle": pickle.dumps({"a": [1] * 40}),
    "a safetensors file": save({"a": torch.ones(4)}),
}


@pytest.mark.parametrize("says", [*OTHERS, *KINDS])
def test_each_reader_says_what_a_file_is(says, tmp_path):
    data = {**OTHERS, **KINDS}[says]
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "target_modules": ["a"]}))
    readers = {
        "model.safetensors": lambda: open_checkpoint(tmp_path),
        "pytorch_model.bin": lambda: open_checkpoint(tmp_path),
        "model.gguf": lambda: open_gguf(tmp_path / "model.gguf"),
        "adapter_model.safetensors": lambda: read_adapter(tmp_path, {}),
        "adapter_model.bin": lambda: read_adapter(tmp_path, {}),
        "adapter.gguf": lambda: read_adapter(tmp_path / "adapter.gguf", {}),
        "config.json": lambda: read_config(tmp_path),
        "tokenizer.json": lambda: load_tokenizer(tmp_path),
        "tokenizer.model": lambda: load_tokenizer(tmp_path),
    }
    own = {"a GGUF file": ".gguf", "a zip archive, as torch.save": ".bin", "a pickle": ".bin",
           "a safetensors file": ".safetensors"}  # fmt: skip
    for name, read in readers.items():
        if name.endswith(own.get(says, "-")):
            continue
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ModelError, match=rf"{name}: is {says}") as raised:
            read()
        assert "\n" not in str(raised.value) and "header claims" not in str(raised.value)
        (tmp_path / name).unlink()


def test_short_and_plain_files_are_not_named():
    assert told_by(b"") is None and told_by(b"{}") is None and told_by(b"version 1") is None
    assert told_by(save({"a": torch.ones(4)})[:8]) is None


def test_an_adapter_that_is_not_there_is_told_as_such(tmp_path):
    for name in ("nofolder", "no.gguf"):
        with pytest.raises(ModelError, match=f"{name}: there is no such adapter"):
            read_adapter(tmp_path / name, {})
    with pytest.raises(ModelError, match=r"has no adapter_config\.json; an adapter is"):
        read_adapter(tmp_path, {})
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="is not a folder; an adapter is"):
        read_adapter(tmp_path / "file", {})
