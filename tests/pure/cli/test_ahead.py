"""What is seen of a model before it is loaded."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokenmill.cli.conversation import HELP
from tokenmill.cli.flags import resolve_options
from tokenmill.cli.unloaded_model import lacks_template, look_for, plain_name
from tokenmill.cli.verbs import app
from tokenmill.core.config import make_config
from tokenmill.core.errors import ModelError, UserError

ROOT = Path(__file__).parents[3]


def gguf(path: Path, *keys: str) -> Path:
    """A file with a header alone."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    entries = {"general.architecture": "llama", **dict.fromkeys(keys, "x")}
    said = b"".join(text(key) + struct.pack("<I", 8) + text(value) for key, value in entries.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + said + bytes(64))
    return path


def lacking(model: object) -> bool:
    return lacks_template(make_config({}, model=str(model)))


@pytest.mark.parametrize(
    ("key", "lacks"), [("tokenizer.chat_template", False), ("tokenizer.chat_template.tool_use", False), ("x.y", True)]
)
def test_gguf_files(tmp_path: Path, key: str, lacks: bool) -> None:
    file = gguf(tmp_path / "m.gguf", key)
    assert lacking(file) == lacking(tmp_path) == lacks
    result = CliRunner().invoke(app, ["chat", str(file)])
    assert result.exit_code == 2 and ("--chat-template FILE" in result.stderr) == lacks


def test_folders_and_the_demo(tmp_path: Path) -> None:
    assert not lacking("demo") and lacking(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x")
    assert not lacking(tmp_path)


def test_what_cannot_be_seen_is_left_to_the_load(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    assert not lacking(tmp_path / "broken.gguf") and not lacking("owner/model") and not lacking("owner/model:Q4_K_M")
    for name in ("owner/model", "owner/model:Q4_K_M", "demo"):
        look_for(name)


def test_what_cannot_be_a_model_is_told_before_an_engine_is_imported(tmp_path: Path) -> None:
    for name in ("/no/such", "./none", "none.gguf", "a/b/c"):
        with pytest.raises(UserError, match="neither an existing folder or file"):
            look_for(name)
    with pytest.raises(ModelError, match=r"config\.json: there is no such file"):
        look_for(str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ModelError, match="not valid JSON"):
        look_for(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    look_for(str(tmp_path))  # what it lacks is the load's to say
    for bad, said in ((b"GGUF", "middle of its header"), (b"", "empty"), (b"x" * 64, "does not begin with GGUF")):
        (tmp_path / "broken.gguf").write_bytes(bad)
        with pytest.raises(ModelError, match=said):
            look_for(str(tmp_path / "broken.gguf"))
        result = CliRunner().invoke(app, ["generate", str(tmp_path / "broken.gguf"), "-p", "hi"])
        assert result.exit_code == 2 and said in result.stderr


def test_the_page_names_every_command() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    for line in HELP.splitlines():
        if line.startswith("/"):
            assert f"`{line.split()[0]}" in page, line


def test_the_address_of_a_page_is_the_models_name() -> None:
    assert plain_name("https://huggingface.co/owner/model") == plain_name("http://hf.co/owner/model") == "owner/model"
    for name in ("owner/model", "hf.co/owner/model", "https://example.com/owner/model", "/no/such", "demo"):
        assert plain_name(name) == name
    assert resolve_options("https://huggingface.co/owner/model", {})[0].model.model == "owner/model"


def test_the_address_of_a_server_is_told_from_a_model() -> None:
    with pytest.raises(UserError, match="is an address, not a model"):
        resolve_options("http://localhost:8000", {})
