"""`tokenmill serve`: flags, configuration file, environment, and what a person is told."""

from __future__ import annotations

import queue
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tokenmill.server.logs
import tokenmill.server.run
from tokenmill.cli.loading import show_waiting
from tokenmill.cli.serve import NAMES, _tell_end, banner, curl, open_doors
from tokenmill.cli.verbs import app
from tokenmill.core.config import EngineConfig, ServerConfig, make_server_config
from tokenmill.core.errors import UserError
from tokenmill.server.backend import ModelInfo
from tokenmill.server.many_models.entry import Spec
from tokenmill.testing.fake_generator import byte_tokenizer

INFO = ModelInfo(
    names=("tiny",),
    root="/m",
    vocab_size=10,
    max_model_len=1000,
    tokenizer=None,
    generation={},
    max_rows=8,
    details={
        "weight_bytes": 3 << 20,
        "dtype": "float32",
        "device": "cpu",
        "num_blocks": [500, 250],
        "block_size": 16,
        "kv_block_bytes": 2097.152,
        "reasons": ["short of memory"],
        "load_s": 1.25,
    },
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerConfig]]:
    """What the command would have served."""
    found: list[tuple[EngineConfig, ServerConfig]] = []

    def serve(engine: EngineConfig, server: ServerConfig, hooks: Any) -> int:
        found.append((engine, server))
        hooks.loading("m")
        hooks.serving("http://127.0.0.1:1", INFO)
        return 0

    monkeypatch.setattr(tokenmill.server.run, "serve", serve)
    monkeypatch.setattr(tokenmill.server.logs, "set_up_logs", lambda options: None)
    return found


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["serve", *words])


def test_flags_of_engine_and_server(asked: list[Any]) -> None:
    result = run("folder", "--port", "9", "--api-key", "a", "--api-key", "b", "--max-model-len", "64", "--engines", "2")
    assert result.exit_code == 0, result.output
    engine, server = asked[0]
    assert (engine.model.model, engine.model.max_model_len) == ("folder", 64)
    assert (server.listen.port, server.listen.api_key, server.serve.engines) == (9, ["a", "b"], 2)
    assert server.listen.host == "127.0.0.1" and server.listen.allowed_origins is None
    assert "listening on http://127.0.0.1:1/v1" in result.output and "curl " in result.output


def test_several_names_of_one_model(asked: list[Any]) -> None:
    for words in (("a", "b"), ("a,b",), ("a", NAMES, "b")):
        assert run("folder", NAMES, *words, "--port", "9").exit_code == 0
        engine, server = asked.pop()
        assert Spec(engine).names == ("a", "b") and engine.model.model == "folder" and server.listen.port == 9
    assert run(NAMES, "a", "folder").exit_code == 0
    assert Spec(asked[0][0]).names == ("a",) and asked[0][0].model.model == "folder"


def test_a_file_gives_defaults_that_flags_replace(asked: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: filed\nport: 7\nmax-model-len: 128\napi-key: one\nallowed_hosts: [a, b]\n")
    assert run("--config", str(file)).exit_code == 0
    assert run("typed", "--config", str(file), "--port", "8").exit_code == 0
    assert asked[0][0].model.model == "filed" and asked[0][1].listen.port == 7
    assert asked[0][1].listen.api_key == ["one"] and asked[0][1].listen.allowed_hosts == ["a", "b"]
    assert asked[1][0].model.model == "typed" and asked[1][1].listen.port == 8
    assert asked[1][0].model.max_model_len == 128


@pytest.mark.parametrize("text", ["port: [", "- 1", "prot: 5", "port: true", "port: x", "log_level: loud", "1: 2"])
def test_files_that_cannot_be_meant(asked: list[Any], tmp_path: Path, text: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    result = run("--config", str(file))
    assert result.exit_code == 2 and "tokenmill:" in result.output and not asked


def test_the_environment_mirrors_every_flag() -> None:
    server = make_server_config({"TOKENMILL_PORT": "5", "TOKENMILL_API_KEY": '["k"]', "TOKENMILL_LOG_JSON": "0"})
    assert (server.listen.port, server.listen.api_key, server.serve.log_json) == (5, ["k"], False)
    with pytest.raises(UserError, match="TOKENMILL_PORT"):
        make_server_config({"TOKENMILL_PORT": "five"})


def test_a_long_load_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr("tokenmill.cli.loading.say", said.put)
    with show_waiting("Loading", first=0.001):
        assert re.fullmatch(r"tokenmill: still loading \(\d+ s\)", said.get(timeout=60))


def test_the_banner_says_what_fits() -> None:
    text = "\n".join(banner("http://127.0.0.1:8000", INFO, keyed=True))
    assert "3.0 MiB of weights in float32 on cpu, loaded in 1.2 s" in text
    assert "context 1,000 tokens; K/V cache of 4,000 tokens (1.5 MiB): 4 full contexts at once, at most 8" in text
    assert "note: short of memory" in text and "Authorization: Bearer KEY" in text
    assert "--unix-socket /s" in curl("unix:/s", "m", keyed=False)


def test_a_model_without_template_is_asked_to_complete() -> None:
    reads = replace(INFO, tokenizer=byte_tokenizer())
    layers = replace(reads, details={**INFO.details, "headless": True})
    for info, path, asked in (
        (reads, "/v1/completions", '"prompt": "'),
        (INFO, "/v1/completions", '"prompt": ['),  # it reads token ids alone
        (layers, "/v1/embeddings", '"input": "'),
    ):
        last = banner("http://127.0.0.1:8000", info, keyed=False, chats=False)[-1]
        assert path in last and asked in last and "chat" not in last


@pytest.mark.parametrize("template", [True, False])
def test_what_is_missing_is_told_before_the_load(asked: list[Any], tmp_path: Path, template: bool) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}' if template else "{}")
    result = run(str(tmp_path))
    assert result.exit_code == 0 and ("--chat-template FILE" in result.stderr) != template
    if not template:
        assert result.stderr.index("--chat-template FILE") < result.stderr.index("loading")
        chosen = tmp_path / "t.jinja"
        chosen.write_text("x")
        assert "--chat-template FILE" not in run(str(tmp_path), "--chat-template", str(chosen)).stderr
        assert run("demo").stderr.count("note:") == 1  # short of memory


@pytest.mark.parametrize(("options", "warned"), [
    ({"host": "0.0.0.0"}, True), ({"host": "::"}, True), ({"host": "192.168.1.2"}, True),
    ({"host": "0.0.0.0", "api_key": ["k"]}, False), ({}, False), ({"host": "localhost"}, False),
    ({"host": "127.0.0.5"}, False), ({"host": "::1"}, False), ({"host": "0.0.0.0", "uds": "/s"}, False),
])  # fmt: skip
def test_a_door_without_a_key_is_told(options: dict[str, Any], warned: bool) -> None:
    lines = open_doors(make_server_config({}, **options).listen)
    assert bool(lines) == warned and all("--api-key" in line and "--host 127.0.0.1" in line for line in lines)


def test_addresses_are_ones_that_can_be_opened() -> None:
    for url in ("http://0.0.0.0:1", "http://[::]:1"):
        lines = banner(url, INFO, keyed=False)
        assert "http://localhost:1/v1/chat" in lines[-1] and "web page at http://localhost:1/" in lines[-2]


def test_the_end_says_what_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    for count, words in ((0, "no answer is open"), (1, "1 answer to end"), (3, "3 answers to end, 30 s at most")):
        _tell_end(count, 30.0)
        told = capsys.readouterr().err
        assert words in told and ("Ctrl-C again" in told) == (count > 0)
