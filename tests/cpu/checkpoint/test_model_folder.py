"""Folders, configs and hub names: what is found, and what the errors say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import save_file

from tokenmill.checkpoint.dummy import DummyCheckpoint
from tokenmill.checkpoint.folder import open_checkpoint, read_config, read_generation_config
from tokenmill.checkpoint.hub import resolve_model
from tokenmill.core.errors import ModelError, UserError


def test_formats_in_order(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert open_checkpoint(tmp_path).tensor("a").item() == 0
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).tensor("a").item() == 1
    assert open_checkpoint(str(tmp_path), "pt").tensor("a").item() == 0
    assert isinstance(open_checkpoint(tmp_path, "dummy"), DummyCheckpoint)


def test_a_second_copy_of_everything_is_ignored(tmp_path: Path) -> None:
    for name in ("consolidated", "weights"):
        save_file({"a": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    assert list(open_checkpoint(tmp_path).names()) == ["a"]


@pytest.mark.parametrize(
    ("load_format", "hint"), [("auto", "dummy"), ("safetensors", r"\*\.safetensors"), ("pt", "bin")]
)
def test_no_weights(load_format: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"no weights found.*{hint}"):
        open_checkpoint(tmp_path, load_format)


def test_unknown_format_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="use one of auto"):
        open_checkpoint(tmp_path, "tarball")
    with pytest.raises(ModelError, match="no such folder"):
        open_checkpoint(tmp_path / "absent")


def test_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: there is no such file"):
        read_config(tmp_path)
    assert read_generation_config(tmp_path) == {}
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "generation_config.json").write_text('{"top_k": 3}')
    assert read_config(tmp_path) == {"hidden_size": 8}
    assert read_generation_config(tmp_path) == {"top_k": 3}


def test_a_name_with_two_values_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for text in ('{"a": 1, "b": {"a": 2}, "a": 1}', '{"a": 1, "b": 2}'):
        (tmp_path / "config.json").write_text(text)
        assert read_config(tmp_path)["a"] == 1 and not caplog.messages
    (tmp_path / "config.json").write_text('{"b": {"rope_theta": 1, "rope_theta": 2}}')
    assert read_config(tmp_path) == {"b": {"rope_theta": 2}}
    assert len(caplog.messages) == 1 and "config.json: 'rope_theta' is there twice" in caplog.messages[0]


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ("[1]", "JSON object"),
        ("{", "not valid JSON"),
        ('{"a":' * 100_000, "not valid JSON"),
        ('{"a":' * 70 + "1" + "}" * 70, "deeper"),
        (json.dumps({"a": "x" * (17 << 20)}), "over the limit"),
    ],
)
def test_broken_configs(content: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"config\.json: .*{hint}"):
        read_config(tmp_path)


def test_existing_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./x", "a/b/c", "../x", "x.gguf", "", "a b", "a/..", "http://x/y", "./" + "a" * 300]
)
def test_misspelt_paths_never_reach_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*args: Any, **options: Any) -> str:
        raise AssertionError("must not be called")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", reached)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match="neither an existing"):
        resolve_model(name)


def test_only_needed_files_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def download(name: str, **options: Any) -> str:
        asked.append(options["allow_patterns"])
        assert name == "mill/small" and options["revision"] == "v1"
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("tokenmill.checkpoint.hub.fetch_large", lambda *_: None)
    (tmp_path / "pytorch_model.bin").touch()
    assert resolve_model("mill/small", "v1") == tmp_path
    assert "*.safetensors" in asked[0] and not any(".bin" in pattern for pattern in asked[0])
    assert asked[1] == ["pytorch_model*.bin"]
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    resolve_model("mill/small", "v1")
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        (errors.GatedRepoError, "gated"),
        (errors.RevisionNotFoundError, "no revision"),
        (errors.RepositoryNotFoundError, "no model 'mill/small'"),
        (errors.LocalEntryNotFoundError, "give a folder"),
        (errors.OfflineModeIsEnabled, "give a folder"),
        (errors.HfHubHTTPError, "failed: because"),
        (OSError, "failed: because"),
    ],
)
def test_download_errors_say_what_to_do(kind: type[Exception], hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = kind.__new__(kind)
    Exception.__init__(error, "because")

    def fails(*args: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    monkeypatch.setattr("tokenmill.checkpoint.hub.fetch_large", lambda *_: None)
    with pytest.raises(UserError, match=hint):
        resolve_model("mill/small")


def test_offline_for_real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="give a folder, or download the model once"):
        resolve_model("mill/absent-model")
